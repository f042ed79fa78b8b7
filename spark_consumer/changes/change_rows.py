"""Changes of one table as rows: their columns, and the facts that the fold needs about them.

Columns that begin with an underscore are not of the table; they describe a change or a folded row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import pyarrow as pa

if TYPE_CHECKING:
    from spark_consumer.lake.table_definition import TableDefinition

COMMIT_LSN: Final = "_commit_lsn"
SEQ: Final = "_seq"
OPERATION: Final = "_operation"
OLD: Final = "_old"
UNCHANGED: Final = "_unchanged"

KEEP: Final = "_keep"
NET: Final = "_net"
GONE: Final = "_gone"

# At one position, a row first leaves its old key, then arrives at the new one.
STEP: Final = "_step"
LEAVES: Final = 0
ARRIVES: Final = 1


@dataclass(frozen=True)
class ChangeFacts:
    """Facts about a set of changes, so that the fold does only the work they need.

    `unchanged` names the columns that some UPDATE left out, `moved_unchanged` those left out by an
    UPDATE that changed the key; `moves` is true if any UPDATE changed the key.
    """

    count: int = 0
    truncated_at: tuple[int, int] | None = None
    moves: bool = False
    unchanged: frozenset[str] = field(default_factory=frozenset)
    moved_unchanged: frozenset[str] = field(default_factory=frozenset)

    def __or__(self, other: ChangeFacts) -> ChangeFacts:
        """The facts about the union of both sets."""
        truncates = [at for at in (self.truncated_at, other.truncated_at) if at is not None]
        return ChangeFacts(
            count=self.count + other.count,
            truncated_at=max(truncates, default=None),
            moves=self.moves or other.moves,
            unchanged=self.unchanged | other.unchanged,
            moved_unchanged=self.moved_unchanged | other.moved_unchanged,
        )


def changes_schema(definition: TableDefinition) -> pa.Schema:
    """The Arrow schema of a table's changes; the table's columns have plain names.

    `_operation` is insert, update, delete or truncate; `_old` holds the old identity columns of an
    UPDATE that changed one of them (of a table without key: of every UPDATE); `_unchanged` names
    the columns that the UPDATE does not carry. A DELETE carries its identity columns at least.
    """
    plain = definition.plain_names
    columns = {one.name: pa.field(plain[one.name], one.type) for one in definition.columns}
    old = pa.struct([columns[name] for name in definition.identity])
    return pa.schema(
        [
            pa.field(COMMIT_LSN, pa.int64()),
            pa.field(SEQ, pa.int64()),
            pa.field(OPERATION, pa.string()),
            pa.field(OLD, old),
            pa.field(UNCHANGED, pa.list_(pa.string())),
            *columns.values(),
        ]
    )

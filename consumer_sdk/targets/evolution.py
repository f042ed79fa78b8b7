"""Schema changes: which can be made to a loaded copy in place, and which need a new snapshot.

The log does not hold the rows that a schema change itself alters. So a change is made in place
only if PostgreSQL neither rewrites the table nor gives existing rows a value: nullable columns are
added without a default, columns are dropped, or types are widened without a rewrite.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from consumer_sdk.wire.oids import TEXT, TIME, TIMESTAMP, TIMESTAMPTZ, TIMETZ, VARCHAR

if TYPE_CHECKING:
    from consumer_sdk.wire.column_types import Column, TableSchema

_FRACTIONS: Final = frozenset({TIME, TIMETZ, TIMESTAMP, TIMESTAMPTZ})


class Effect(Enum):
    """What a new schema version requires of a copy."""

    NONE = "none"
    ALTER = "alter"
    REBUILD = "rebuild"


class Evolution(NamedTuple):
    """An effect and the reason for it, in words."""

    effect: Effect
    reason: str


def key_columns(schema: TableSchema) -> tuple[str, ...]:
    """The unique columns by which rows are found; () for a table without a key.

    Under REPLICA IDENTITY FULL, a table without a primary key may hold equal rows.
    """
    if schema.replica_identity == "full" and not schema.primary_key:
        return ()
    return schema.row_key


def compare(old: TableSchema, new: TableSchema) -> Evolution:
    """What a copy with the rows and structure of `old` needs to become one of `new`."""
    if key_columns(old) != key_columns(new):
        return Evolution(Effect.REBUILD, "its key changed")
    before = {column.name: column for column in old.columns}
    after = {column.name: column for column in new.columns}
    kept = [name for name in before if name in after]
    in_place = kept == [name for name in after if name in before]
    if not in_place or any(_is_replaced(before[name], after[name]) for name in kept):
        return Evolution(Effect.REBUILD, "a column was dropped and added again")
    added = [column for column in new.columns if column.name not in before]
    if added and len(kept) < len(before):
        # A rename looks like this in the schema, but keeps the values.
        return Evolution(Effect.REBUILD, "columns were added and dropped, or renamed")
    if added and (old.filenode is None or old.filenode != new.filenode):
        return Evolution(Effect.REBUILD, "a column was added and the table may be rewritten")
    for column in added:
        if column.backfilled is not False or column.column_default or not column.is_nullable:
            return Evolution(
                Effect.REBUILD, f"existing rows may have values in the new column {column.name}"
            )
    changed = [name for name in kept if not _same_type(before[name], after[name])]
    for name in changed:
        if not _is_wider(before[name], after[name]):
            return Evolution(Effect.REBUILD, f"the type of column {name} changed")
    if added or changed or len(kept) < len(before):
        return Evolution(Effect.ALTER, "columns were added, dropped or widened")
    return Evolution(Effect.NONE, "")


def _is_replaced(old: Column, new: Column) -> bool:
    """Whether the column was dropped and another one added under its name."""
    return None not in (old.number, new.number) and old.number != new.number


def _same_type(old: Column, new: Column) -> bool:
    return (old.type_oid, old.type_modifier) == (new.type_oid, new.type_modifier)


def _is_wider(old: Column, new: Column) -> bool:
    """Whether PostgreSQL changes to the new type without rewriting rows."""
    if old.type_oid == VARCHAR and new.type_oid == TEXT:
        return True
    if old.type_oid != new.type_oid:
        return False
    if old.family == "numeric" and old.numeric_precision is not None:
        return new.numeric_precision is None or (
            new.numeric_scale == old.numeric_scale
            and new.numeric_precision >= old.numeric_precision
        )
    if old.type_oid == VARCHAR or old.type_oid in _FRACTIONS:
        return new.type_modifier == -1 or -1 < old.type_modifier <= new.type_modifier
    return False

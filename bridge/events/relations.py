"""Relations as the assembler uses them: compiled readers and prepared parts of messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from bridge.events.encoder import STATIC_FIELDS
from bridge.events.fastpath import compile_row_reader, compile_update_reader
from bridge.events.row_writers import can_write, compile_row_writer, compile_update_writer
from bridge.events.rows import RowConverter
from consumer_sdk.wire.column_types import family
from consumer_sdk.wire.envelope import WIRE_VERSION, to_json_value
from consumer_sdk.wire.subjects import table_token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bridge.events.encoder import Encoder
    from bridge.events.fastpath import RowReader, UpdateReader
    from bridge.events.outgoing import SchemaNotice
    from bridge.events.row_writers import RowWriter
    from bridge.events.values import ColumnType
    from consumer_sdk.wire.subjects import Subjects

    Writer: TypeAlias = tuple[RowWriter, int, "MessageParts", "CompiledRelation"]
    """A writer, how many fields it gives, and what it is for."""

JSON_ADAPTED_FAMILIES = frozenset({"int", "float", "bytea", "array"})

REPLICA_IDENTITIES = {"d": "default", "n": "nothing", "f": "full", "i": "index"}

Fingerprint: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Structure:
    """What makes two versions differ, as a Relation message or the catalog tells it."""

    relation_id: int
    schema: str
    table: str
    replica_identity: str
    columns: tuple[tuple[str, int, int, bool], ...]
    """Name, type OID, type modifier, part of the identity."""

    @property
    def token(self) -> str:
        return table_token(self.schema, self.table)

    @property
    def fingerprint(self) -> Fingerprint:
        return (REPLICA_IDENTITIES[self.replica_identity], self.columns)


class MessageParts:
    """What all messages of one operation on one relation share, also within a transaction."""

    __slots__ = (
        "_id_middle",
        "_join",
        "_static",
        "commit_lsn",
        "id_head",
        "relation",
        "shared",
        "subject",
        "token",
    )

    def __init__(
        self, relation: CompiledRelation, operation: str, subject: str, static: bytes,
        encoder: Encoder,
    ) -> None:  # fmt: skip
        self.relation = relation
        self.token = relation.token
        self._join = encoder.join
        self.subject = subject.encode("ascii")
        self._static = static
        self._id_middle = f"-{relation.token}-{operation.lower()}-"
        self.commit_lsn = -1
        self.id_head = b""
        self.shared = b""

    def begin(self, commit_lsn: int, transaction: bytes) -> None:
        """Prepare for the messages of a transaction."""
        self.commit_lsn = commit_lsn
        self.id_head = f"{commit_lsn:x}{self._id_middle}".encode()
        self.shared = self._join(self._static, transaction)


class CompiledRelation:
    """One relation at one schema version.

    `notice`, while set, must go out before the relation's next row. The writers are there only if
    its text is known to be `utf8` and its rows can go out without being read.
    """

    __slots__ = (
        "adapt", "commit", "converter", "delete", "identity", "insert", "name", "names_bytes",
        "notice", "read_key", "read_row", "read_update", "read_update_key", "relation_id",
        "schema", "token", "truncate", "update", "version", "writers",
    )  # fmt: skip

    def __init__(
        self,
        structure: Structure,
        types: Sequence[ColumnType],
        version: int,
        notice: SchemaNotice | None,
        *,
        source: str,
        epoch: int,
        subjects: Subjects,
        encoder: Encoder,
        json_messages: bool,
        utf8: bool = True,
    ) -> None:
        columns = [(name, kind) for (name, *_), kind in zip(structure.columns, types, strict=True)]
        self.relation_id = structure.relation_id
        self.schema = structure.schema
        self.name = structure.table
        self.token = structure.token
        self.version = version
        self.notice = notice
        self.identity = frozenset(name for name, _, _, is_key in structure.columns if is_key)
        self.names_bytes = sum(len(name.encode()) + 2 for name, _ in columns)
        self.read_row = compile_row_reader(columns, json_messages=json_messages)
        only = self.identity
        self.read_key = compile_row_reader(columns, only=only, json_messages=json_messages)
        self.read_update = compile_update_reader(columns, json_messages=json_messages)
        self.read_update_key = compile_update_reader(
            columns, only=only, json_messages=json_messages
        )
        self.converter = RowConverter(columns, json_messages=json_messages)
        self.adapt: Callable[[dict[str, Any]], dict[str, Any]] | None = None
        """What the general path must do to converted rows before JSON can carry them."""
        if json_messages:
            self._adapt_to_json(columns)

        def parts(operation: str) -> MessageParts:
            subject = subjects.change(self.token, operation.lower())
            fields: dict[str, Any] = {
                "v": WIRE_VERSION,
                "source": source,
                "epoch": epoch,
                "table": self.name,
                "schema": self.schema,
                "operation": operation,
                "relation_id": self.relation_id,
                "schema_version": version,
                "subject": subject,
            }
            assert len(fields) == STATIC_FIELDS
            return MessageParts(self, operation, subject, encoder.fragment(fields), encoder)

        self.insert = parts("INSERT")
        self.update = parts("UPDATE")
        self.delete = parts("DELETE")
        self.truncate = parts("TRUNCATE")
        self.commit = parts("COMMIT")
        self.writers: dict[bytes, Writer] = {}
        """By the first bytes of a message: its kind, the relation, the kind of its first row."""
        if utf8 and not json_messages and can_write(columns):
            row, key = compile_row_writer(columns), compile_row_writer(columns, only=only)
            both = compile_update_writer(columns)
            key_and_row = compile_update_writer(columns, only=only)
            number = self.relation_id.to_bytes(4, "big")
            self.writers = {
                b"I%bN" % number: (row, 1, self.insert, self),
                b"U%bN" % number: (row, 1, self.update, self),
                b"U%bK" % number: (key_and_row, 2, self.update, self),
                b"U%bO" % number: (both, 2, self.update, self),
                b"D%bK" % number: (key, 1, self.delete, self),
                b"D%bO" % number: (row, 1, self.delete, self),
            }

    def is_same(self, other: CompiledRelation) -> bool:
        """Whether rows read the same by either, and neither has anything to announce."""
        return (
            self.version == other.version
            and self.token == other.token
            and self.notice is None
            and other.notice is None
        )

    def _adapt_to_json(self, columns: Sequence[tuple[str, ColumnType]]) -> None:
        """Have every reader give values that JSON can carry; most columns need nothing."""
        names = [
            name
            for name, kind in columns
            if family(kind.base_oid, kind.element_oid) in JSON_ADAPTED_FAMILIES
        ]
        if not names:
            return

        def adapted(row: dict[str, Any]) -> dict[str, Any]:
            for name in names:
                if name in row:
                    row[name] = to_json_value(row[name])
            return row

        def one(read: RowReader) -> RowReader:
            def reader(data: bytes, position: int) -> tuple[dict[str, Any], tuple[str, ...]] | None:
                found = read(data, position)
                return None if found is None else (adapted(found[0]), found[1])

            return reader

        def two(read: UpdateReader) -> UpdateReader:
            def reader(data: bytes, position: int) -> Any:
                found = read(data, position)
                if found is None:
                    return None
                return adapted(found[0]), adapted(found[1]), found[2]

            return reader

        self.read_row = one(self.read_row)
        self.read_key = one(self.read_key)
        self.read_update = two(self.read_update)
        self.read_update_key = two(self.read_update_key)
        self.adapt = adapted

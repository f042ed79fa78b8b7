"""Relations as the log describes them, compiled for reading and encoding their rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from bridge.events.encoders import STATIC_FIELDS
from bridge.events.row_code import (
    COLD_ROWS,
    GENERATED_COLUMNS,
    Deferred,
    can_write,
    compile_row_reader,
    compile_row_writer,
    compile_update_reader,
    compile_update_writer,
    never,
)
from bridge.events.rows import RowConverter
from consumer_sdk.wire.column_types import family
from consumer_sdk.wire.envelope import WIRE_VERSION
from consumer_sdk.wire.subjects import table_token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bridge.events.messages import Packaging, SchemaNotice, TransactionHeader
    from bridge.events.row_code import RowReader, RowWriter, UpdateReader
    from bridge.events.values import ColumnType

JSON_ADAPTED_FAMILIES = frozenset({"int", "float", "bytea", "array"})

REPLICA_IDENTITIES = {"d": "default", "n": "nothing", "f": "full", "i": "index"}

Fingerprint: TypeAlias = tuple[Any, ...]


class StructureColumn(NamedTuple):
    """A column as the log or the catalog describes it."""

    name: str
    type_oid: int
    type_modifier: int
    is_key: bool
    """Whether it belongs to the replica identity."""


@dataclass(frozen=True, slots=True)
class Structure:
    """A relation as the log or the catalog describes it; each structure is a schema version."""

    relation_id: int
    schema: str
    table: str
    replica_identity: str
    columns: tuple[StructureColumn, ...]

    @property
    def token(self) -> str:
        return table_token(self.schema, self.table)

    @property
    def fingerprint(self) -> Fingerprint:
        return (REPLICA_IDENTITIES[self.replica_identity], self.columns)


@dataclass(frozen=True, slots=True)
class VersionedStructure:
    """A structure with its schema version, and the notice due before the relation's next row."""

    structure: Structure
    types: Sequence[ColumnType]
    version: int
    notice: SchemaNotice | None = None


class MessageParts:
    """What all messages of one operation on one relation share, in general and per transaction."""

    __slots__ = (
        "_id_middle",
        "_join",
        "_static",
        "id_head",
        "id_tail",
        "relation",
        "shared",
        "subject",
        "token",
        "transaction",
    )

    def __init__(self, relation: CompiledRelation, operation: str, packaging: Packaging) -> None:
        source, encoder = packaging.source, packaging.encoder
        subject = source.subjects.change(relation.token, operation.lower())
        fields: dict[str, Any] = {
            "v": WIRE_VERSION,
            "source": source.name,
            "epoch": source.epoch,
            "table": relation.name,
            "schema": relation.schema,
            "operation": operation,
            "relation_id": relation.relation_id,
            "schema_version": relation.version,
            "subject": subject,
        }
        assert len(fields) == STATIC_FIELDS
        self.relation = relation
        self.token = relation.token
        self.subject = subject.encode("ascii")
        self._static = encoder.fragment(fields)
        self._join = encoder.join
        self._id_middle = f"-{relation.token}-{operation.lower()}-"
        self.id_tail = f"-{source.epoch:x}".encode()
        self.transaction: TransactionHeader | None = None
        """The transaction that `id_head` and `shared` are prepared for."""
        self.id_head = b""
        self.shared = b""

    def begin(self, transaction: TransactionHeader, fragment: bytes) -> None:
        """Prepare for the messages of a transaction; `fragment` holds its shared fields."""
        self.transaction = transaction
        self.id_head = f"{transaction.commit_lsn:x}{self._id_middle}".encode()
        self.shared = self._join(self._static, fragment)

    def message_id(self, seq: int) -> bytes:
        """The id of the message whose first ordinal is `seq`."""
        return b"%b%d%b" % (self.id_head, seq, self.id_tail)


class MessageWriter:
    """A writer, the number of fields that it writes, and the parts of its messages."""

    __slots__ = ("field_count", "parts", "relation", "write")

    def __init__(
        self, write: RowWriter, field_count: int, parts: MessageParts, relation: CompiledRelation
    ) -> None:
        self.write = write
        self.field_count = field_count
        self.parts = parts
        self.relation = relation

    def use(self, write: RowWriter) -> None:
        """Write with this function from now on."""
        self.write = write


class CompiledRelation:
    """One relation at one schema version.

    `notice`, if set, must be published before the relation's next row. There are writers only if
    its text is known to be `utf8` and its rows can be published without being read. Each reader
    and writer is generated after `cold_rows` rows.
    """

    __slots__ = (
        "commit", "converter", "delete", "identity", "insert", "json_adapted", "name",
        "names_bytes", "notice", "read_key", "read_row", "read_update", "read_update_key",
        "relation_id",
        "schema", "token", "truncate", "update", "version", "writers",
    )  # fmt: skip

    def __init__(
        self,
        versioned: VersionedStructure,
        packaging: Packaging,
        *,
        utf8: bool = True,
        cold_rows: int = COLD_ROWS,
    ) -> None:
        json_messages = packaging.source.as_json
        structure = versioned.structure
        columns = [
            (column.name, kind)
            for column, kind in zip(structure.columns, versioned.types, strict=True)
        ]
        self.relation_id = structure.relation_id
        self.schema = structure.schema
        self.name = structure.table
        self.token = structure.token
        self.version = versioned.version
        self.notice = versioned.notice
        self.identity = frozenset(column.name for column in structure.columns if column.is_key)
        self.names_bytes = sum(len(name.encode()) + 2 for name, _ in columns)
        only = self.identity
        self.read_row: RowReader = never
        self.read_key: RowReader = never
        self.read_update: UpdateReader = never
        self.read_update_key: UpdateReader = never
        if len(columns) <= GENERATED_COLUMNS:
            read, update = compile_row_reader, compile_update_reader
            as_json = json_messages
            self._defer("read_row", cold_rows, lambda: read(columns, json_messages=as_json))
            self._defer(
                "read_key", cold_rows, lambda: read(columns, only=only, json_messages=as_json)
            )
            self._defer("read_update", cold_rows, lambda: update(columns, json_messages=as_json))
            self._defer(
                "read_update_key",
                cold_rows,
                lambda: update(columns, only=only, json_messages=as_json),
            )
        self.converter = RowConverter(columns, json_messages=json_messages)
        self.json_adapted = tuple(
            name
            for name, kind in columns
            if json_messages and family(kind.base_oid, kind.element_oid) in JSON_ADAPTED_FAMILIES
        )
        """Columns whose values must be adapted for JSON."""
        self.insert = MessageParts(self, "INSERT", packaging)
        self.update = MessageParts(self, "UPDATE", packaging)
        self.delete = MessageParts(self, "DELETE", packaging)
        self.truncate = MessageParts(self, "TRUNCATE", packaging)
        self.commit = MessageParts(self, "COMMIT", packaging)
        self.writers: dict[bytes, MessageWriter] = {}
        """By the first bytes of a message: message kind, relation, kind of the first row."""
        if utf8 and not json_messages and can_write(columns):
            write, write_update = compile_row_writer, compile_update_writer
            number = self.relation_id.to_bytes(4, "big")
            for tag, parts, function, names in (
                (b"I%bN", self.insert, write, None),
                (b"U%bN", self.update, write, None),
                (b"U%bK", self.update, write_update, only),
                (b"U%bO", self.update, write_update, None),
                (b"D%bK", self.delete, write, only),
                (b"D%bO", self.delete, write, None),
            ):
                fields = 2 if function is write_update else 1
                deferred = Deferred(partial(function, columns, only=names), cold=cold_rows)
                writer = MessageWriter(deferred, fields, parts, self)
                deferred.replace = writer.use
                self.writers[tag % number] = writer

    def _defer(
        self, reader: str, cold_rows: int, generate: Callable[[], Callable[[bytes, int], Any]]
    ) -> None:
        """Let a reader be generated when it is needed."""
        deferred = Deferred(generate, cold=cold_rows)
        deferred.replace = partial(setattr, self, reader)
        setattr(self, reader, deferred)

    def take_notice(self) -> SchemaNotice:
        """Return the notice and clear it."""
        notice, self.notice = self.notice, None
        assert notice is not None
        return notice

    def is_same(self, other: CompiledRelation) -> bool:
        """Whether both read rows in the same way and neither has a notice."""
        return (
            self.version == other.version
            and self.token == other.token
            and self.notice is None
            and other.notice is None
        )

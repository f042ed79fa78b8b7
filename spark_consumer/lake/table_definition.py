"""The columns of a table in the lake, and how new schema versions change them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from consumer_sdk.targets.evolution import Effect, compare
from consumer_sdk.wire.subjects import format_table_name
from spark_consumer.errors import LakeOptionsError, SchemaChangeError, UnsuitableTableError
from spark_consumer.lake.column_mapping import arrow_type, can_be_unrepresentable, widened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from consumer_sdk.wire.column_types import Column, TableSchema
    from spark_consumer.lake.column_values import Unrepresentable

DELETED = "_deleted"
SYNCED_AT = "_synced_at"
TEXT_SUFFIX = "__text"
Change = Literal["none", "add", "rewrite", "rebuild"]


@dataclass(frozen=True)
class TableOptions:
    """The user's options for tables: the policy for unrepresentable values, and added columns."""

    unrepresentable: Unrepresentable = "error"
    soft_deletes: bool = False
    synced_at: bool = False


@dataclass(frozen=True)
class TableDefinition:
    """A table in the lake, without the columns that the job adds.

    `key` is empty for a table without a key, which may hold several equal rows.
    """

    schema: str
    table: str
    columns: pa.Schema
    key: tuple[str, ...]

    @property
    def name(self) -> str:
        """The table's name as written in SQL."""
        return format_table_name(self.schema, self.table)

    @property
    def is_bag(self) -> bool:
        """Whether only all values together identify a row, so that equal rows may occur."""
        return not self.key

    @property
    def identity(self) -> tuple[str, ...]:
        """The columns of the old row that an UPDATE must carry: the key, or all without a key."""
        return self.key or tuple(self.columns.names)

    @property
    def plain_names(self) -> dict[str, str]:
        """A plain name for each column, because Spark parses names in expressions."""
        return {name: f"c{index}" for index, name in enumerate(self.columns.names)}


@dataclass(frozen=True)
class SchemaEvolution:
    """The change that a new schema version needs in the lake.

    add: add columns. rewrite: rewrite the table with wider types. rebuild: bootstrap it again,
    because existing rows may hold values that no event carries; `reason` says why.
    """

    definition: TableDefinition
    change: Change
    reason: str = ""


def define(schema: TableSchema, policy: Unrepresentable = "error") -> TableDefinition:
    """The definition of a table that is new to the lake.

    UnsuitableTableError if changes do not identify rows, or if the lake cannot name its columns.
    """
    return TableDefinition(
        schema.schema, schema.table, pa.schema(_all_fields(schema, policy)), row_key(schema)
    )


def row_key(schema: TableSchema) -> tuple[str, ...]:
    """The columns that identify a row, () if only all values together do.

    With a deferrable key two rows may share a key for a moment; only all values identify them.
    """
    has_key = bool(schema.primary_key) and not schema.primary_key_deferrable
    if schema.replica_identity == "full" and not has_key:
        return ()
    key = schema.row_key
    if not key:
        name = format_table_name(schema.schema, schema.table)
        raise UnsuitableTableError(
            f"table {name} has no key that identifies the rows of its changes; "
            f"add a primary key, or run: ALTER TABLE {name} REPLICA IDENTITY FULL"
        )
    return key


def _all_fields(schema: TableSchema, policy: Unrepresentable) -> list[pa.Field]:
    """The fields of all columns; UnsuitableTableError if the lake cannot have their names."""
    name = format_table_name(schema.schema, schema.table)
    fields: list[pa.Field] = []
    for column in schema.columns:
        if column.name in (DELETED, SYNCED_AT):
            raise UnsuitableTableError(
                f"table {name}: column {column.name} has a name that the job needs for its own "
                "column; leave it out of the publication"
            )
        fields.extend(_fields(column, policy))
    _require_distinct(name, [field.name for field in fields])
    return fields


def _fields(column: Column, policy: Unrepresentable) -> list[pa.Field]:
    type_ = arrow_type(column)
    fields = [pa.field(column.name, type_)]
    if policy == "text" and can_be_unrepresentable(type_):
        fields.append(pa.field(column.name + TEXT_SUFFIX, pa.string()))
    return fields


def _require_distinct(name: str, columns: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    for column in columns:
        other = seen.setdefault(column.casefold(), column)
        if other != column or columns.count(column) > 1:
            raise UnsuitableTableError(
                f"table {name}: the lake cannot distinguish columns {other!r} and {column!r}; "
                "leave one out of the publication"
            )


def evolve(
    definition: TableDefinition,
    before: TableSchema,
    after: TableSchema,
    policy: Unrepresentable = "error",
) -> SchemaEvolution:
    """The change from one schema version of a table to another.

    SchemaChangeError if neither new columns, wider types nor nulls can represent it.
    """
    key = row_key(after)
    _all_fields(after, policy)
    if key != definition.key:
        raise _incompatible(definition, f"its key is now ({', '.join(key) or 'none'})")
    known_before = {column.name for column in before.columns}
    known_after = {column.name for column in after.columns}
    added = [column for column in after.columns if column.name not in known_before]
    if added and known_before - known_after:
        gone = ", ".join(sorted(known_before - known_after))
        new = ", ".join(column.name for column in added)
        raise _incompatible(definition, f"{gone} was replaced by {new}, perhaps renamed")
    fields = {field.name: field for field in definition.columns}
    change: Change = "none"
    for column in after.columns:
        for field in _fields(column, policy):
            current = fields.get(field.name)
            if current is None:
                fields[field.name] = field
                change = "add" if change == "none" else change
                continue
            wider = current.type
            if field.name == column.name:
                wider = widened(current.type, column)
            if wider is None:
                raise _incompatible(
                    definition,
                    f"column {column.name} changed from {current.type} to {column.data_type}",
                )
            if wider != current.type:
                fields[field.name] = pa.field(field.name, wider)
                change = "rewrite"
    _require_distinct(definition.name, list(fields))
    evolved = TableDefinition(
        definition.schema, definition.table, pa.schema(list(fields.values())), key
    )
    again = [column.name for column in added if column.name in definition.columns.names]
    if again:
        # The lake still holds the values of the dropped column.
        return SchemaEvolution(evolved, "rebuild", f"column {again[0]} was dropped and added again")
    found = compare(before, after)
    if found.effect is Effect.REBUILD:
        return SchemaEvolution(evolved, "rebuild", found.reason)
    return SchemaEvolution(evolved, change)


def _incompatible(definition: TableDefinition, what: str) -> SchemaChangeError:
    return SchemaChangeError(
        f"table {definition.name} changed in a way that cannot be followed: {what}; "
        "rebuild it with --rebootstrap"
    )


def lake_columns(definition: TableDefinition, options: TableOptions) -> pa.Schema:
    """The columns of the table and those that the job adds."""
    own = []
    if options.soft_deletes:
        own.append(pa.field(DELETED, pa.bool_()))
    if options.synced_at:
        own.append(pa.field(SYNCED_AT, pa.timestamp("us", tz="UTC")))
    return pa.schema([*definition.columns, *own])


def require_same_options(schema: TableSchema, columns: pa.Schema, options: TableOptions) -> None:
    """Raise LakeOptionsError unless a table with these columns was created with these options."""
    name = format_table_name(schema.schema, schema.table)
    own = (
        (DELETED, options.soft_deletes, "--soft-deletes"),
        (SYNCED_AT, options.synced_at, "--synced-at"),
    )
    for column, asked, flag in own:
        if (column in columns.names) != asked:
            made = "with" if column in columns.names else "without"
            raise LakeOptionsError(
                f"lake table {name} was made {made} {flag}; keep to that, "
                "or rebuild it with --rebootstrap"
            )
    policy = options.unrepresentable
    if row_key(schema) or policy == "error":
        return
    # Rows without a key are identified by all their values, texts of unrepresentable ones included.
    for one in schema.columns:
        text = one.name + TEXT_SUFFIX
        if one.name not in columns.names or not can_be_unrepresentable(arrow_type(one)):
            continue
        if (text in columns.names) != (policy == "text"):
            made = "with" if text in columns.names else "without"
            raise LakeOptionsError(
                f"lake table {name} has no key and was made {made} --unrepresentable=text; "
                "keep to that, or rebuild it with --rebootstrap"
            )

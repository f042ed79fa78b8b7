"""Describes a table to be copied: its columns, row filter and heaps, read from the catalog.

Two descriptions are compared to prove that no DDL ran between the consistent point and the copy. A
table that was rewritten meanwhile would be empty in the older snapshot, without an error, and new
names and columns would be visible in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bridge.errors import Refused
from bridge.events.values import ColumnType
from bridge.postgres.publication import read_entry
from bridge.snapshot.keys import KeyColumn, KeyRange, quote
from consumer_sdk.wire.subjects import format_table_name, quote_identifier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge.postgres.connection import CatalogConnection

PIECE_BYTES: Final = 32 * 1024 * 1024
FEWEST_BLOCKS: Final = 16
LONGEST_SHOWN: Final = 100

FIND_TABLE: Final = """
SELECT c.oid, c.relkind, c.relispartition,
       pg_catalog.has_table_privilege(c.oid, 'SELECT')
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relname = %s
"""

MAY_READ_COLUMNS: Final = """
SELECT coalesce(pg_catalog.bool_and(
    pg_catalog.has_column_privilege(%s::oid, c.name, 'SELECT')), false)
FROM pg_catalog.unnest(%s::text[]) AS c(name)
"""

COLUMNS: Final = """
WITH RECURSIVE base(attnum, typid, typtype, typbasetype) AS (
    SELECT a.attnum, t.oid, t.typtype, t.typbasetype
    FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
    WHERE a.attrelid = %(oid)s AND a.attnum > 0 AND NOT a.attisdropped
  UNION ALL
    SELECT b.attnum, t.oid, t.typtype, t.typbasetype
    FROM base b JOIN pg_catalog.pg_type t ON t.oid = b.typbasetype
    WHERE b.typtype = 'd'
), element(oid, typid, typtype, typbasetype) AS (
    SELECT e.oid, e.oid, e.typtype, e.typbasetype
    FROM base b JOIN pg_catalog.pg_type t ON t.oid = b.typid
    JOIN pg_catalog.pg_type e ON e.oid = t.typelem
    WHERE b.typtype <> 'd' AND t.typcategory = 'A'
  UNION
    SELECT e.oid, t.oid, t.typtype, t.typbasetype
    FROM element e JOIN pg_catalog.pg_type t ON t.oid = e.typbasetype
    WHERE e.typtype = 'd'
)
SELECT a.attnum, a.attname, a.atttypid, a.atttypmod, b.typid,
       coalesce(e.typid, 0), coalesce(el.typdelim, ','),
       pg_catalog.format_type(a.atttypid, a.atttypmod), NOT a.attnotnull
FROM pg_catalog.pg_attribute a
JOIN base b ON b.attnum = a.attnum AND b.typtype <> 'd'
JOIN pg_catalog.pg_type bt ON bt.oid = b.typid
LEFT JOIN element e ON bt.typcategory = 'A' AND e.oid = bt.typelem AND e.typtype <> 'd'
LEFT JOIN pg_catalog.pg_type el ON el.oid = bt.typelem AND bt.typcategory = 'A'
WHERE a.attrelid = %(oid)s AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum
"""

# pg_relation_filenode also supports mapped relations, and ignores this session's snapshot.
HEAPS: Final = """
SELECT n.nspname, c.relname, c.oid, pg_catalog.pg_relation_filenode(c.oid),
       pg_catalog.pg_relation_size(c.oid) / pg_catalog.current_setting('block_size')::int,
       pg_catalog.pg_table_size(c.oid), greatest(c.reltuples, 0)::bigint,
       pg_catalog.has_table_privilege(c.oid, 'SELECT')
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'r' AND c.oid IN (
    SELECT %(oid)s::oid
    UNION ALL SELECT relid FROM pg_catalog.pg_partition_tree(%(oid)s::oid) WHERE isleaf
)
ORDER BY c.oid
"""


# A key can be read in ranges if its order is the one that PostgreSQL itself defines for its types:
# a comparison then means the same here as in the index, and runs no function of a user. Base types
# of PostgreSQL and enums have no such functions either.
KEYS: Final = """
SELECT i.indisprimary, c.relreplident, a.attname, i.indimmediate AND i.indisvalid,
       i.indpred IS NULL AND i.indoption[k.place - 1] = 0 AND m.amname = 'btree'
       AND o.opcdefault AND o.opcnamespace = 'pg_catalog'::pg_catalog.regnamespace
       AND i.indcollation[k.place - 1] = a.attcollation
FROM pg_catalog.pg_index i
JOIN pg_catalog.pg_class c ON c.oid = i.indrelid
JOIN pg_catalog.pg_class x ON x.oid = i.indexrelid
JOIN pg_catalog.pg_am m ON m.oid = x.relam
CROSS JOIN LATERAL pg_catalog.unnest(i.indkey::int2[]) WITH ORDINALITY AS k(attnum, place)
JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
JOIN pg_catalog.pg_opclass o ON o.oid = i.indclass[k.place - 1]
WHERE i.indrelid = %s::oid AND (i.indisprimary OR i.indisreplident) AND k.place <= i.indnkeyatts
ORDER BY i.indisprimary DESC, k.place
"""

# With -1, and not null, the name of bpchar and bit has no length.
KEY_TYPES: Final = """
SELECT t.oid::int8, pg_catalog.format_type(t.oid, -1)
FROM pg_catalog.pg_type t
WHERE t.oid = ANY(%s::oid[]) AND (t.typtype = 'e' OR t.typtype = 'b' AND t.typcategory <> 'A'
      AND t.typnamespace = 'pg_catalog'::pg_catalog.regnamespace)
"""


@dataclass(frozen=True, slots=True)
class CopyColumn:
    """A column to copy; `position` numbers the published columns from 1."""

    number: int
    position: int
    name: str
    type: ColumnType
    data_type: str
    is_nullable: bool

    def to_document(self) -> dict[str, Any]:
        """Its type and position, in the fields of schema documents."""
        return {
            "name": self.name,
            "position": self.position,
            "data_type": self.data_type,
            "type_oid": self.type.oid,
            "type_modifier": self.type.typmod,
            "is_nullable": self.is_nullable,
            "base_type_oid": self.type.base_oid,
            "element_oid": self.type.element_oid,
        }


@dataclass(frozen=True, slots=True)
class Heap:
    """One heap that holds rows of the table: the table itself, or a leaf partition.

    If the bridge may read a leaf only through its root, the leaf is not `readable`.
    """

    schema: str
    table: str
    oid: int
    filenode: int
    readable: bool


@dataclass(frozen=True, slots=True)
class HeapSize:
    """The size of one heap, as the catalog estimates it."""

    blocks: int
    total_bytes: int
    rows_estimate: int


@dataclass(frozen=True, slots=True)
class TableDescription:
    """A table as the catalog describes it; with equal descriptions, its rows read the same."""

    schema: str
    table: str
    oid: int
    publication_oid: int
    partitioned: bool
    columns: tuple[CopyColumn, ...]
    row_filter: str | None
    heaps: tuple[Heap, ...]
    by_columns: bool = False
    """Whether the bridge may read the published columns only, so neither ctid nor LOCK TABLE."""
    key: tuple[KeyColumn, ...] = ()
    """The columns that identify a row; () if there is no key that can be read in ranges."""

    @property
    def name(self) -> str:
        """The table as SQL spells it."""
        return format_table_name(self.schema, self.table)

    def restricted_to(self, names: tuple[str, ...] | None) -> TableDescription:
        """The same table with fewer columns, in the table's own order."""
        if names is None:
            return self
        known = {column.name for column in self.columns}
        missing = [name for name in names if name not in known]
        if missing:
            shown = missing[0][:LONGEST_SHOWN]
            raise Refused(
                f"table {self.name} publishes no column {shown!r}; it publishes "
                + ", ".join(column.name for column in self.columns)
            )
        kept = tuple(column for column in self.columns if column.name in names)
        return replace(self, columns=kept)


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of blocks of one heap: without `end` up to its end; without `heap` the whole table.

    `heap` is an index of the table's `heaps`. With `keys` it is only rows with these keys; with
    `rows`, the worker ends it after about so many, and reports where.
    """

    heap: int | None
    start: int = 0
    end: int | None = None
    keys: KeyRange | None = None
    rows: int | None = None


class MeasuredTable(NamedTuple):
    """A table, and the sizes of its heaps, which do not belong to its description."""

    description: TableDescription
    sizes: tuple[HeapSize, ...]


async def describe_table(
    connection: CatalogConnection, publication: str, schema: str, table: str
) -> MeasuredTable:
    """Describe a table; Refused if it is unknown, not published or not readable."""
    name = format_table_name(schema, table)
    found = await (await connection.execute(FIND_TABLE, [schema, table])).fetchone()
    if found is None:
        raise Refused(f"table {name} does not exist")
    oid, kind, is_partition, readable = found
    kind = _text(kind)
    entry = await read_entry(connection, publication, schema, table)
    if entry is None:
        raise Refused(_why_not_published(name, kind, is_partition, publication))
    by_columns = not readable
    if by_columns:
        cursor = await connection.execute(MAY_READ_COLUMNS, [oid, sorted(entry.columns)])
        readable = (await cursor.fetchone() or [False])[0]
    if not readable:
        raise Refused(f"no permission to read {name}; GRANT SELECT ON {name} to the bridge's role")
    columns: list[CopyColumn] = []
    for (
        number,
        column,
        type_oid,
        modifier,
        base,
        element,
        delimiter,
        text,
        null,
    ) in await (await connection.execute(COLUMNS, {"oid": oid})).fetchall():
        if column in entry.columns:
            kind_of = ColumnType(type_oid, modifier, base, element, delimiter)
            columns.append(CopyColumn(number, len(columns) + 1, column, kind_of, text, null))
    heaps = []
    sizes = []
    for row in await (await connection.execute(HEAPS, {"oid": oid})).fetchall():
        heaps.append(Heap(row[0], row[1], row[2], row[3] or 0, row[7]))
        sizes.append(HeapSize(row[4] or 0, row[5] or 0, row[6]))
    description = TableDescription(
        schema,
        table,
        oid,
        entry.publication_oid,
        kind == "p",
        tuple(columns),
        entry.row_filter,
        tuple(heaps),
        by_columns,
        await _read_key(connection, oid, columns),
    )
    return MeasuredTable(description, tuple(sizes))


async def _read_key(
    connection: CatalogConnection, oid: int, columns: Sequence[CopyColumn]
) -> tuple[KeyColumn, ...]:
    """The key that identifies rows in events, () if it cannot be read in ranges."""
    primary: list[str] = []
    identity: list[str] = []
    unusable: set[str] = set()
    replica_identity = "n"
    for is_primary, kind, name, identifies, is_ordered in await (
        await connection.execute(KEYS, [oid])
    ).fetchall():
        replica_identity = _text(kind)
        (primary if is_primary else identity).append(name)
        if not identifies or not is_ordered:
            unusable.add(name)
    if replica_identity == "n" or (replica_identity == "i" and not set(primary) <= set(identity)):
        primary = []
    names = primary or (identity if replica_identity == "i" else [])
    known = {column.name: column for column in columns}
    if unusable.intersection(names) or not known.keys() >= set(names):
        return ()
    types = [known[name].type.base_oid for name in names]
    spelled: dict[int, str] = dict(await (await connection.execute(KEY_TYPES, [types])).fetchall())
    if not spelled.keys() >= set(types):
        return ()
    # Without a primary key, readers have the columns of the identity in the table's order.
    order = names if primary else sorted(names, key=lambda name: known[name].position)
    return tuple(
        KeyColumn(name, known[name].type, spelled[known[name].type.base_oid], order.index(name))
        for name in names
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _why_not_published(name: str, kind: str, is_partition: bool, publication: str) -> str:
    if kind not in ("r", "p"):
        return f"{name} is not a table; only tables are published"
    remedy = f"ALTER PUBLICATION {quote_identifier(publication)} ADD TABLE {name}"
    if is_partition:
        remedy = "ask for its partitioned root, or publish without publish_via_partition_root"
    elif kind == "p":
        remedy = "ask for its partitions, or set publish_via_partition_root"
    return f"table {name} is not in publication {publication}; {remedy}"


def cut(table: TableDescription, sizes: Sequence[HeapSize]) -> list[Piece]:
    """Divide a table into pieces that take about the same time to copy."""
    if table.by_columns and not table.partitioned:
        return [Piece(0)]
    if not all(heap.readable for heap in table.heaps):
        return [Piece(None)]
    pieces = []
    for index, size in enumerate(sizes):
        # TOASTed values are outside the heap, but are copied with its blocks.
        step = size.blocks
        if size.total_bytes > PIECE_BYTES:
            step = max(FEWEST_BLOCKS, size.blocks * PIECE_BYTES // size.total_bytes)
        start = 0
        while size.blocks - start > step:
            pieces.append(Piece(index, start, start + step))
            start += step
        pieces.append(Piece(index, start, None))
    return pieces


def useful_workers(sizes: Sequence[HeapSize], most: int) -> int:
    """How many workers are useful for a copy of this size."""
    total = sum(size.total_bytes for size in sizes)
    return max(1, min(most, total // PIECE_BYTES + 1))


def whole_table(table: TableDescription) -> str:
    """The table in a FROM clause, with all partitions of a root, but without children."""
    return f"{'' if table.partitioned else 'ONLY '}{quote(table.schema)}.{quote(table.table)}"


def copy_sql(table: TableDescription, piece: Piece) -> str:
    """COPY of one piece, with the publication's column list and row filter."""
    conditions = []
    if piece.keys is not None:
        source = whole_table(table)
        conditions += piece.keys.conditions()
    elif piece.heap is None:
        source = f"{quote(table.schema)}.{quote(table.table)}"
    else:
        heap = table.heaps[piece.heap]
        source = f"ONLY {quote(heap.schema)}.{quote(heap.table)}"
        if piece.start:
            conditions.append(f"ctid >= '({piece.start},0)'::pg_catalog.tid")
        if piece.end is not None:
            conditions.append(f"ctid < '({piece.end},0)'::pg_catalog.tid")
    if table.row_filter is not None:
        conditions.append(f"({table.row_filter})")
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    columns = ", ".join(quote(column.name) for column in table.columns)
    return f"COPY (SELECT {columns} FROM {source}{where}) TO STDOUT (FORMAT text)"  # noqa: S608


def lock_sql(table: TableDescription) -> str:
    """The lock that prevents ALTER and TRUNCATE; it includes all partitions of a root."""
    name = whole_table(table)
    if table.by_columns:
        # LOCK TABLE needs a right on the whole table; a query takes the same lock.
        return f"SELECT {quote(table.columns[0].name)} FROM {name} LIMIT 0"  # noqa: S608
    return f"LOCK TABLE {name} IN ACCESS SHARE MODE"

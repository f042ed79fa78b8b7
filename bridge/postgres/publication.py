"""A publication and its tables, read from the catalog."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg

from bridge.errors import Retryable
from consumer_sdk.wire.subjects import format_table_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge.postgres.catalog import Catalog
    from bridge.postgres.connection import CatalogConnection

LOCK_SECONDS = 2
FILTERS_VERSION = 150000
"""Since 15 a publication may have row filters and column lists."""
GENERATED_VERSION = 180000
"""Since 18 a publication may publish stored generated columns."""

# A publication for all tables lists none, except, since version 19, those that it leaves out.
_PUBLICATION = """
SELECT p.puballtables, p.pubviaroot,
       pg_catalog.array_remove(ARRAY[CASE WHEN NOT pubinsert THEN 'insert' END,
                          CASE WHEN NOT pubupdate THEN 'update' END,
                          CASE WHEN NOT pubdelete THEN 'delete' END,
                          CASE WHEN NOT pubtruncate THEN 'truncate' END], NULL),
       ARRAY(SELECT ARRAY[n.nspname::text, c.relname::text]
               FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
              WHERE c.relpersistence = 'u' AND c.relkind = 'r'
                AND NOT (p.puballtables AND EXISTS (
                    SELECT FROM pg_catalog.pg_publication_rel x
                     WHERE x.prpubid = p.oid AND x.prrelid = c.oid))
                AND (p.puballtables OR c.relispartition AND EXISTS (
                    SELECT FROM pg_catalog.pg_partition_ancestors(c.oid) AS a
                      JOIN pg_catalog.pg_class k ON k.oid = a.relid
                      JOIN pg_catalog.pg_namespace s ON s.oid = k.relnamespace
                      JOIN pg_catalog.pg_publication_tables t
                        ON t.schemaname = s.nspname AND t.tablename = k.relname
                     WHERE t.pubname = p.pubname))
                AND n.nspname NOT IN ('pg_catalog', 'information_schema')
              ORDER BY 1)
  FROM pg_catalog.pg_publication p WHERE p.pubname = %s
"""

_TABLES = """
SELECT c.oid::int8, n.nspname, c.relname, c.relkind = 'p',
       pg_catalog.has_schema_privilege(n.oid, 'USAGE'),
       pg_catalog.has_table_privilege(c.oid, 'SELECT') OR coalesce((
           SELECT pg_catalog.bool_and(pg_catalog.has_column_privilege(c.oid, a.attnum, 'SELECT'))
             FROM pg_catalog.pg_attribute a
            WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
              AND (a.attname::text = ANY ({published}) OR a.attnum IN (
                   SELECT m[1]::int
                     FROM pg_catalog.regexp_matches({filter_tree}, ':varattno ([0-9]+)', 'g') AS m)
              )), false),
       pg_catalog.row_security_active(c.oid),
       {filter},
       ARRAY(SELECT DISTINCT a.attname::text
               FROM pg_catalog.regexp_matches({filter_tree}, ':varattno ([0-9]+)', 'g') AS m
               JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum = m[1]::int
              ORDER BY 1),
       {listed},
       ARRAY(SELECT a.attname::text FROM pg_catalog.pg_attribute a
              WHERE a.attrelid = c.oid AND a.attgenerated = 's' AND NOT a.attisdropped
                AND NOT a.attname::text = ANY ({published})
              ORDER BY a.attnum)
  FROM pg_catalog.pg_publication p
  JOIN pg_catalog.pg_publication_tables t ON t.pubname = p.pubname
  JOIN pg_catalog.pg_namespace n ON n.nspname = t.schemaname
  JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
  LEFT JOIN pg_catalog.pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = c.oid
 WHERE p.pubname = %s
 ORDER BY n.nspname, c.relname
"""

# Version 14 has neither row filters nor column lists, and publishes no generated column.
_PARTS_14 = {
    "published": "ARRAY(SELECT x.attname::text FROM pg_catalog.pg_attribute x"
    " WHERE x.attrelid = c.oid AND x.attnum > 0 AND NOT x.attisdropped AND x.attgenerated = '')",
    "filter": "NULL::text",
    "filter_tree": "''",
    "listed": "NULL::text[]",
}
_PARTS_15 = {
    "published": "t.attnames::text[]",
    "filter": "t.rowfilter",
    "filter_tree": "coalesce(r.prqual::text, '')",
    "listed": "CASE WHEN r.prattrs IS NOT NULL THEN t.attnames::text[] END",
}

# For a partitioned table PostgreSQL uses the identity of each leaf.
_LEAVES = """
SELECT r.oid::int8, t.relid::oid::int8
  FROM pg_catalog.unnest(%s::oid[]) AS r(oid)
 CROSS JOIN LATERAL pg_catalog.pg_partition_tree(r.oid) AS t
 WHERE t.isleaf
"""

# An identity index must be valid and not deferrable. The relations are listed by number: joined to
# the tables of the publication, the planner reads pg_class once for each of them.
_IDENTITIES = """
SELECT l.oid::int8, n.nspname, l.relname, l.relreplident,
       CASE l.relreplident
       WHEN 'f' THEN ARRAY(SELECT a.attname::text FROM pg_catalog.pg_attribute a
                            WHERE a.attrelid = l.oid AND a.attnum > 0 AND NOT a.attisdropped)
       WHEN 'n' THEN ARRAY[]::text[]
       ELSE ARRAY(SELECT a.attname::text
                    FROM pg_catalog.pg_index i
                    JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid
                     AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
                   WHERE i.indrelid = l.oid AND i.indisvalid AND i.indimmediate
                     AND CASE l.relreplident WHEN 'd' THEN i.indisprimary
                         ELSE i.indisreplident END)
       END
  FROM pg_catalog.pg_class l JOIN pg_catalog.pg_namespace n ON n.oid = l.relnamespace
 WHERE l.oid = ANY (%s::oid[])
 ORDER BY n.nspname, l.relname
"""


_TABLE_NAMES = """
SELECT schemaname, tablename FROM pg_catalog.pg_publication_tables WHERE pubname = %s
ORDER BY schemaname, tablename
"""
_ENTRIES = """
SELECT p.oid::int8, {filter}, t.schemaname, t.tablename, c.oid::int8, c.relreplident, ARRAY(
    SELECT a.attname::text FROM pg_catalog.pg_attribute a
    WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND {published})
FROM pg_catalog.pg_publication_tables t
JOIN pg_catalog.pg_publication p ON p.pubname = t.pubname
JOIN pg_catalog.pg_namespace n ON n.nspname = t.schemaname
JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
WHERE t.pubname = %s
"""
_ENTRY = _ENTRIES + "AND t.schemaname = %s AND t.tablename = %s"

# Sessions that hold an ACCESS EXCLUSIVE lock, or wait for one ahead of us.
_LOCKERS = """
SELECT DISTINCT n.nspname, c.relname, l.pid,
       pg_catalog.concat_ws(', ', nullif(a.usename, ''), nullif(a.application_name, ''), a.state)
  FROM pg_catalog.pg_locks l
  JOIN pg_catalog.pg_class c ON c.oid = l.relation AND c.relkind IN ('r', 'p')
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace AND n.nspname NOT LIKE 'pg\\_%'
  LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
 WHERE l.locktype = 'relation' AND l.mode = 'AccessExclusiveLock'
   AND l.database = (SELECT oid FROM pg_catalog.pg_database
                      WHERE datname = pg_catalog.current_database())
 ORDER BY 1, 2, 3
 LIMIT 5
"""


class PublicationReader:
    """Reads one publication over a connection of its own.

    PostgreSQL opens every table of the publication for these queries and waits while one is
    locked. The connection is separate so that decoding the log does not wait behind them.
    """

    def __init__(self, catalog: Catalog, name: str, server_version: int) -> None:
        self.catalog = catalog
        self.name = name
        self.server_version = server_version

    async def tables(self) -> list[tuple[str, str]]:
        """Schema and name of every table that is published under its own name."""
        return [(row[0], row[1]) for row in await self.catalog.rows(_TABLE_NAMES, [self.name])]

    async def columns(self, schema: str, table: str) -> frozenset[str] | None:
        """Names of a table's published columns; None if it is not published."""
        query = _entry_sql(_ENTRY, self.server_version)
        found = await self.catalog.rows(query, [self.name, schema, table])
        return frozenset(found[0][-1]) if found else None

    async def published(self) -> list[PublishedRelation]:
        """Every table that is published under its own name, with its published columns."""
        query = _entry_sql(_ENTRIES, self.server_version)
        return [
            PublishedRelation(schema, table, relation_id, identity, frozenset(columns))
            for _, _, schema, table, relation_id, identity, columns in await self.catalog.rows(
                query, [self.name]
            )
        ]


@dataclass(frozen=True, slots=True)
class PublishedRelation:
    """A published table, as the schemas need it."""

    schema: str
    table: str
    relation_id: int
    replica_identity: str
    columns: frozenset[str]


@dataclass(frozen=True, slots=True)
class PublicationEntry:
    """How a publication publishes one table."""

    publication_oid: int
    row_filter: str | None
    columns: frozenset[str]


async def read_entry(
    connection: CatalogConnection, publication: str, schema: str, table: str
) -> PublicationEntry | None:
    """How a table is published; None if it is not."""
    query = _entry_sql(_ENTRY, connection.info.server_version)
    cursor = await connection.execute(query, [publication, schema, table])
    row = await cursor.fetchone()
    return None if row is None else PublicationEntry(row[0], row[1], frozenset(row[-1]))


def _entry_sql(query: str, server_version: int) -> str:
    # Version 14 publishes all columns that are not generated. Later ones list the columns; a
    # generated one is published since 18, though 15 may list it, and a virtual one never.
    if server_version < FILTERS_VERSION:
        return query.format(filter="NULL::text", published="a.attgenerated = ''")
    generated = "<> 'v'" if server_version >= GENERATED_VERSION else "= ''"
    return query.format(
        filter="t.rowfilter",
        published=f"a.attname = ANY (t.attnames) AND a.attgenerated {generated}",
    )


class TablesLocked(Retryable):
    """A table of the publication is locked, and PostgreSQL must open it to describe it."""

    def __init__(self, lockers: Sequence[tuple[str, str, int | None, str]]) -> None:
        said = [
            f"{format_table_name(schema, table)} is locked by "
            + (f"session {pid} ({who})" if pid else "a prepared transaction")
            for schema, table, pid, who in lockers
        ]
        super().__init__(f"table {'; '.join(said)}" if said else "a published table is locked")
        pids = dict.fromkeys(pid for _, _, pid, _ in lockers if pid)
        self.statements = [f"SELECT pg_catalog.pg_terminate_backend({pid});" for pid in pids]


@dataclass(frozen=True, slots=True)
class Identity:
    """The replica identity of a table, or of one leaf of a partitioned one."""

    schema: str
    table: str
    kind: str
    columns: tuple[str, ...]

    @property
    def name(self) -> str:
        return format_table_name(self.schema, self.table)


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table as the publication publishes it, and what our role may do with it."""

    oid: int
    schema: str
    table: str
    is_partitioned: bool
    schema_usable: bool
    selectable: bool
    row_security: bool
    row_filter: str | None
    filter_columns: Sequence[str]
    listed_columns: Sequence[str] | None
    unpublished_generated: Sequence[str]
    identities: list[Identity] = field(default_factory=list)

    @property
    def name(self) -> str:
        return format_table_name(self.schema, self.table)


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication with its tables; `left_out` are operations it does not publish."""

    name: str
    all_tables: bool
    via_root: bool
    left_out: tuple[str, ...]
    unlogged: tuple[tuple[str, str], ...]
    tables: tuple[PublishedTable, ...]


async def read_publication(
    connection: psycopg.AsyncConnection[Any], publication: str, server_version: int
) -> Publication | None:
    """The publication as it is now in the catalog; None if there is none of that name.

    PostgreSQL opens every table for this; TablesLocked if another session has locked one.
    """
    try:
        async with connection.transaction():
            await connection.execute(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'".encode())
            return await _read_publication(connection, publication, server_version)
    except psycopg.errors.LockNotAvailable as error:
        cursor = await connection.execute(_LOCKERS)
        raise TablesLocked(await cursor.fetchall()) from error


async def _read_publication(
    connection: psycopg.AsyncConnection[Any], publication: str, server_version: int
) -> Publication | None:
    cursor = await connection.execute(_PUBLICATION, [publication])
    row = await cursor.fetchone()
    if row is None:
        return None
    all_tables, via_root, left_out, unlogged = row
    parts = _PARTS_15 if server_version >= FILTERS_VERSION else _PARTS_14
    cursor = await connection.execute(_TABLES.format(**parts), [publication])
    tables = [PublishedTable(*row) for row in await cursor.fetchall()]
    await _read_identities(connection, tables)
    return Publication(
        publication,
        all_tables,
        via_root,
        tuple(left_out),
        tuple((schema, table) for schema, table in unlogged),
        tuple(tables),
    )


async def _read_identities(
    connection: psycopg.AsyncConnection[Any], tables: Sequence[PublishedTable]
) -> None:
    """Add to each table its replica identity, or those of its leaves."""
    by_oid = {table.oid: table for table in tables}
    published = {table.oid: [table] for table in tables if not table.is_partitioned}
    roots = [table.oid for table in tables if table.is_partitioned]
    if roots:
        cursor = await connection.execute(_LEAVES, [roots])
        for root, leaf in await cursor.fetchall():
            published.setdefault(leaf, []).append(by_oid[root])
    cursor = await connection.execute(_IDENTITIES, [list(published)])
    for oid, schema, name, kind, columns in await cursor.fetchall():
        for table in published[oid]:
            table.identities.append(Identity(schema, name, kind, tuple(columns)))

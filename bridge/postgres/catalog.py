"""Queries of PostgreSQL's catalog about tables and types."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg

from bridge.errors import Retryable
from bridge.events.values import ColumnType
from bridge.postgres.connection import connect_catalog
from bridge.postgres.errors import explain
from consumer_sdk.transport.cancellation import stay_cancelled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FIRST_USER_OID = 16384
ANSWER_SECONDS = 10.0

_TYPES = """
SELECT oid::int8, typtype, typbasetype::int8, typcategory, typelem::int8, typdelim
FROM pg_catalog.pg_type WHERE oid = ANY(%s::oid[])
"""

# Defaults are cut, because a schema document must fit into one message. pg_get_expr is not given
# the table: it would wait for the table's locks, and before version 18 its time grows with the
# square of the number of columns. It needs the table only for generated columns, left out here.
_ATTRIBUTES = """
SELECT c.oid::int8, c.relfilenode::int8, a.attname, a.attnotnull,
       CASE WHEN a.attgenerated = '' THEN pg_catalog.left(
           pg_catalog.pg_get_expr(d.adbin, 0),
           least(1000, 60000 / greatest(1, pg_catalog.count(d.oid) OVER (PARTITION BY c.oid)))::int)
       END,
       a.atttypid::int8, a.atttypmod, a.attgenerated <> '',
       a.atthasmissing OR a.attgenerated <> '',
       a.attnum
FROM pg_catalog.pg_class c
LEFT JOIN pg_catalog.pg_attribute a
    ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE c.oid = ANY (%s::oid[])
ORDER BY c.oid, a.attnum
"""

# A deferrable index cannot be a replica identity.
_PRIMARY_KEY = """
SELECT i.indrelid::int8, a.attname, i.indimmediate AND i.indisvalid, i.indimmediate
FROM pg_catalog.pg_index i
CROSS JOIN LATERAL pg_catalog.unnest(i.indkey::int2[]) WITH ORDINALITY AS k(attnum, place)
JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
WHERE i.indrelid = ANY (%s::oid[]) AND i.indisprimary AND k.place <= i.indnkeyatts
ORDER BY i.indrelid, k.place
"""

_IDENTITY_INDEX = _PRIMARY_KEY.replace("i.indisprimary", "i.indisreplident")

# The name of a type in schema public stands without it, as that of a table does, unless it would
# read as a type of PostgreSQL.
_FORMAT_TYPES = """
SELECT CASE WHEN n.nspname = 'public' AND NOT EXISTS (
           SELECT FROM pg_catalog.pg_type s
           WHERE s.typname = coalesce(e.typname, y.typname)
             AND s.typnamespace = 'pg_catalog'::pg_catalog.regnamespace)
       THEN pg_catalog.substr(f.name, 8) ELSE f.name END
FROM ROWS FROM (pg_catalog.unnest(%s::oid[]), pg_catalog.unnest(%s::int4[]))
    WITH ORDINALITY AS t(type_oid, type_modifier, place)
CROSS JOIN LATERAL pg_catalog.format_type(t.type_oid, t.type_modifier) AS f(name)
LEFT JOIN pg_catalog.pg_type y ON y.oid = t.type_oid
LEFT JOIN pg_catalog.pg_type e ON e.oid = y.typelem AND y.typcategory = 'A'
LEFT JOIN pg_catalog.pg_namespace n ON n.oid = coalesce(e.typnamespace, y.typnamespace)
    AND pg_catalog.starts_with(f.name, 'public.')
ORDER BY t.place
"""

_RELATION = """
SELECT c.oid::int8, c.relreplident
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relname = %s AND c.relkind IN ('r', 'p')
"""


@dataclass(frozen=True, slots=True)
class CatalogColumn:
    """A column as it is now in the catalog."""

    name: str
    is_nullable: bool
    default: str | None
    type_oid: int
    type_modifier: int
    is_generated: bool
    is_backfilled: bool
    """Whether older rows have a value in the column that the log never contained."""
    number: int
    """Its attnum, which is never used twice."""


@dataclass(frozen=True, slots=True)
class CatalogTable:
    """A table as it is now in the catalog."""

    relation_id: int
    replica_identity: str
    columns: tuple[CatalogColumn, ...]
    primary_key: tuple[str, ...]
    identity: tuple[str, ...]
    filenode: int | None
    is_key_deferrable: bool
    """Whether two rows may have the same primary key until their transaction ends."""


class Catalog:
    """Queries the catalog over one connection; Retryable if the connection is lost."""

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._connection: psycopg.AsyncConnection[tuple[Any, ...]] | None = None
        self._types: dict[int, ColumnType] = {}
        self._lock = asyncio.Lock()

    async def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one query; connect if necessary."""
        async with self._lock:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    if self._connection is None or self._connection.closed:
                        self._connection = await connect_catalog(self._conninfo)
                    cursor = await self._connection.execute(query, parameters)
                    fetched: list[tuple[Any, ...]] = (
                        await cursor.fetchall() if cursor.description else []
                    )
            except TimeoutError as error:
                await self._drop()
                raise Retryable("PostgreSQL does not answer") from error
            except psycopg.Error as error:
                await self._drop()
                await stay_cancelled()
                raise explain(error, "catalog query failed") from error
            return fetched

    async def _drop(self) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def close(self) -> None:
        await self._drop()

    async def column_types(self, columns: Sequence[tuple[int, int]]) -> list[ColumnType]:
        """Resolve (type OID, modifier) pairs: domains to their base, arrays to their element."""
        facts = await self._type_facts({oid for oid, _ in columns})
        return [
            ColumnType(
                oid,
                modifier,
                base_oid=facts[oid].base_oid,
                element_oid=facts[oid].element_oid,
                element_delimiter=facts[oid].element_delimiter,
            )
            for oid, modifier in columns
        ]

    async def _type_facts(self, wanted: set[int]) -> dict[int, ColumnType]:
        missing = wanted - self._types.keys()
        if missing:
            known: dict[int, tuple[Any, ...]] = {}
            queue = set(missing)
            while queue:
                found = await self.rows(_TYPES, [sorted(queue)])
                known.update({row[0]: row for row in found})
                for oid in queue - known.keys():
                    known[oid] = (oid, "b", 0, "U", 0, ",")
                queue = {
                    follow
                    for _, typtype, base, category, element, _ in found
                    for follow in (base if typtype == "d" else 0, element if category == "A" else 0)
                    if follow and follow not in known
                }
            for oid in missing:
                self._types[oid] = _resolve(oid, known)
        return {oid: self._types[oid] for oid in wanted}

    def forget_user_types(self) -> None:
        """Clear the cache of types that users can alter or drop."""
        self._types = {oid: kind for oid, kind in self._types.items() if oid < FIRST_USER_OID}

    async def format_types(self, columns: Sequence[tuple[int, int]]) -> list[str]:
        """Type names as SQL writes them; a type that is gone reads `???`."""
        oids = [oid for oid, _ in columns]
        modifiers = [modifier for _, modifier in columns]
        return [row[0] for row in await self.rows(_FORMAT_TYPES, [oids, modifiers])]

    async def table_by_id(self, relation_id: int, replica_identity: str) -> CatalogTable:
        """Columns and keys of a relation; both are empty if it no longer exists."""
        found = await self.tables_by_id({relation_id: replica_identity})
        gone = CatalogTable(relation_id, replica_identity, (), (), (), None, False)
        return found.get(relation_id, gone)

    async def tables_by_id(self, relations: Mapping[int, str]) -> dict[int, CatalogTable]:
        """Columns and keys of the relations that exist; the values are replica identities."""
        numbers = list(relations)
        columns: dict[int, list[CatalogColumn]] = {}
        files: dict[int, int] = {}
        for oid, filenode, name, not_null, *facts in await self.rows(_ATTRIBUTES, [numbers]):
            files[oid] = filenode
            described = columns.setdefault(oid, [])
            if name is not None:
                described.append(CatalogColumn(name, not not_null, *facts))
        keys = await self._indexes(_PRIMARY_KEY, numbers)
        indexed = [oid for oid, identity in relations.items() if identity == "i"]
        chosen = await self._indexes(_IDENTITY_INDEX, indexed) if indexed else {}
        tables = {}
        for oid, described in columns.items():
            key, replica_identity = keys.get(oid, []), relations[oid]
            identity: tuple[str, ...] = ()
            if replica_identity == "d":
                identity = _names(key)
            elif replica_identity == "f":
                identity = tuple(column.name for column in described)
            elif replica_identity == "i":
                identity = _names(chosen.get(oid, []))
            tables[oid] = CatalogTable(
                oid, replica_identity, tuple(described), tuple(row[0] for row in key), identity,
                # A partitioned table has no file of its own.
                files[oid] or None,
                is_key_deferrable=any(not is_immediate for *_, is_immediate in key),
            )  # fmt: skip
        return tables

    async def _indexes(
        self, query: str, relations: Sequence[int]
    ) -> dict[int, list[tuple[Any, ...]]]:
        found: dict[int, list[tuple[Any, ...]]] = {}
        for oid, *column in await self.rows(query, [relations]):
            found.setdefault(oid, []).append(tuple(column))
        return found

    async def table_by_name(self, schema: str, table: str) -> CatalogTable | None:
        """Columns and keys of a table; None if there is no such table."""
        found = await self.rows(_RELATION, [schema, table])
        if not found:
            return None
        relation_id, replica_identity = found[0]
        return await self.table_by_id(relation_id, replica_identity)


def _names(index: Sequence[tuple[Any, ...]]) -> tuple[str, ...]:
    """The columns of an index that identifies rows, else none."""
    return tuple(name for name, identifies, *_ in index if identifies)


def _resolve(oid: int, known: dict[int, tuple[Any, ...]]) -> ColumnType:
    base = _base(oid, known)
    _, _, _, category, element, _ = known[base]
    if category != "A" or not element:
        return ColumnType(oid, base_oid=base)
    delimiter = known[element][5]
    return ColumnType(
        oid, base_oid=base, element_oid=_base(element, known), element_delimiter=delimiter
    )


def _base(oid: int, known: dict[int, tuple[Any, ...]]) -> int:
    while known[oid][1] == "d":
        oid = known[oid][2]
    return oid

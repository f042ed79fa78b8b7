"""Schema versions of every table: the structure in the log, and the versions that were announced.

A version stands for one structure: names, types, modifiers, identity. `current` is the structure
at the log position; `newest` is the highest assigned version. They differ if a snapshot has read a
structure that the log has not reached yet.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from bridge.events.relations import (
    REPLICA_IDENTITIES,
    Fingerprint,
    Structure,
    StructureColumn,
)
from bridge.events.values import ColumnType
from consumer_sdk.wire.envelope import WIRE_VERSION

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from bridge.postgres.catalog import Catalog, CatalogTable
    from bridge.source import Source
    from consumer_sdk.wire.envelope import Document

VISIBLE_POLLS = 10
VISIBLE_POLL_SECONDS = 0.02


def fingerprint_of(document: Mapping[str, Any]) -> Fingerprint:
    """The fingerprint of the structure that a schema document describes."""
    return (
        document.get("replica_identity"),
        tuple(
            StructureColumn(c["name"], c["type_oid"], c["type_modifier"], c["is_key"])
            for c in document["columns"]
        ),
    )


def documented_types(document: Document, types: Sequence[ColumnType]) -> list[ColumnType]:
    """The types of a version's columns as its document resolved them.

    `types` are those of the catalog, where a type may have been dropped since: its values must
    stay what they are in the other rows of the version.
    """
    resolved = []
    for column, kind in zip(document["columns"], types, strict=True):
        base, element = column.get("base_type_oid"), column.get("element_oid")
        if type(base) is int and type(element) is int:
            delimiter = column.get("element_delimiter") or kind.element_delimiter
            kind = ColumnType(kind.oid, kind.typmod, base, element, str(delimiter))
        resolved.append(kind)
    return resolved


class DocumentVersion(NamedTuple):
    """Epoch and version of a schema document; the documents of one table are ordered by it."""

    epoch: int = 0
    version: int = 0

    @classmethod
    def of(cls, document: Document) -> Self:
        """The version of a document; numbers that are missing count as 0."""
        return cls(document.get("epoch", 0), document.get("schema_version", 0))


def _delimiter(kind: ColumnType) -> dict[str, str]:
    """The delimiter of an array's elements, if it is not the usual comma."""
    is_usual = kind.element_delimiter == ","
    return {} if is_usual else {"element_delimiter": kind.element_delimiter}


class Described(NamedTuple):
    """What the catalog says of a table, and its names of the types, by OID and modifier."""

    table: CatalogTable
    type_names: Mapping[tuple[int, int], str]


@dataclass(slots=True)
class _Versions:
    current: Document | None = None
    newest: Document | None = None
    announced: int = 0
    """Version of the last schema message in the stream, 0 for none."""
    stored: DocumentVersion | None = None
    """The document in KV, if there is one."""
    floor: int = 0
    """The highest assigned version whose document no longer exists."""

    @property
    def newest_version(self) -> int:
        documents = (self.newest, self.current)
        versions: list[int] = [one["schema_version"] for one in documents if one is not None]
        return max(self.floor, *versions, 0)


class SchemaRegistry:
    """Assigns a version to every structure and builds its document; the caller stores it."""

    def __init__(
        self,
        *,
        source: Source,
        catalog: Catalog,
        stored: Mapping[str, Document],
        announced: Mapping[str, Document],
        floors: Mapping[str, int],
    ) -> None:
        self._source = source
        self._catalog = catalog
        self._lock = asyncio.Lock()
        self._versions: dict[str, _Versions] = {}
        for token, document in stored.items():
            if document.get("source") == source.name:
                version = DocumentVersion.of(document)
                self._versions[token] = _Versions(newest=document, stored=version)
        for token, document in announced.items():
            entry = self._versions.setdefault(token, _Versions())
            entry.current = document
            entry.announced = document["schema_version"]
            if entry.newest is None or entry.newest["schema_version"] < entry.announced:
                entry.newest = document
        for token, floor in floors.items():
            self._versions.setdefault(token, _Versions()).floor = floor

    def stored_tokens(self) -> set[str]:
        """The tables with a document in KV."""
        return {token for token in self._versions if self.is_stored(token)}

    def newest_version(self, token: str) -> int:
        """The highest version assigned for a table, 0 for none."""
        return self._versions[token].newest_version if token in self._versions else 0

    def note_removed(self, token: str) -> None:
        """Note that KV no longer holds a document of the table."""
        self._versions[token].stored = None

    def needs_announcement(self, token: str, version: int) -> bool:
        """Whether the table's last schema message in the stream has another version."""
        return self._versions[token].announced != version

    def needs_storing(self, token: str, document: Document) -> bool:
        """Whether KV holds an older document than this, or none."""
        stored = self._versions[token].stored
        return stored is None or stored < DocumentVersion.of(document)

    def note_stored(self, token: str, document: Document) -> None:
        """Note that KV holds this document of the table, or a newer one."""
        if self.needs_storing(token, document):
            self._versions[token].stored = DocumentVersion.of(document)

    def note_announced(self, token: str, version: int) -> None:
        """Note that the table's last schema message in the stream has this version."""
        self._versions[token].announced = version

    def is_stored(self, token: str) -> bool:
        """Whether KV holds a document of the table."""
        return token in self._versions and self._versions[token].stored is not None

    async def version_for(
        self,
        structure: Structure,
        types: Sequence[ColumnType],
        *,
        lsn: int,
        from_log: bool,
        described: Described | None = None,
    ) -> Document:
        """The document for a structure; `needs_storing` tells whether it must be stored.

        `described` is what the catalog says of the table, if it was read already.
        """
        async with self._lock:
            return await self._version_for(
                structure, types, lsn=lsn, from_log=from_log, described=described
            )

    async def _version_for(
        self,
        structure: Structure,
        types: Sequence[ColumnType],
        *,
        lsn: int,
        from_log: bool,
        described: Described | None,
    ) -> Document:
        entry = self._versions.setdefault(structure.token, _Versions())
        wanted = structure.fingerprint
        candidates = (entry.current, entry.newest) if from_log else (entry.newest, entry.current)
        for document in candidates:
            if document is not None and fingerprint_of(document) == wanted:
                renewed = document["epoch"] != self._source.epoch
                if renewed:
                    now = time.time_ns() // 1000
                    document = {
                        **document,
                        "epoch": self._source.epoch,
                        "lsn": lsn,
                        "timestamp": now,
                    }
                    entry.announced = 0
                    if entry.newest is None or (
                        entry.newest["schema_version"] <= document["schema_version"]
                    ):
                        entry.newest = document
                if from_log:
                    entry.current = document
                return document
        version = 1 + entry.newest_version
        if described is None:
            described = await self._read_catalog(structure)
        document = self._describe(structure, types, described, version, lsn)
        entry.newest = document
        if from_log:
            entry.current = document
        return document

    async def _read_catalog(self, structure: Structure) -> Described:
        table = await self._catalog_table(structure)
        names = await self._catalog.format_types([_type_of(column) for column in structure.columns])
        return Described(table, dict(zip(map(_type_of, structure.columns), names, strict=True)))

    async def _catalog_table(self, structure: Structure) -> CatalogTable:
        """The table in the catalog, which may be older than the log for a moment.

        PostgreSQL sends a commit before other sessions can see it. If the catalog still differs
        after a wait, the table was changed again.
        """
        wanted = {column.name for column in structure.columns}
        for pause in (*[VISIBLE_POLL_SECONDS] * VISIBLE_POLLS, 0):
            table = await self._catalog.table_by_id(
                structure.relation_id, structure.replica_identity
            )
            if not pause or wanted <= {column.name for column in table.columns}:
                break
            await asyncio.sleep(pause)
        return table

    def _describe(
        self,
        structure: Structure,
        types: Sequence[ColumnType],
        described: Described,
        version: int,
        lsn: int,
    ) -> Document:
        table = described.table
        now = {column.name: column for column in table.columns}
        columns = []
        for place, (wanted, kind) in enumerate(zip(structure.columns, types, strict=True), start=1):
            column = now.get(wanted.name)
            columns.append(
                {
                    "name": wanted.name,
                    "position": place,
                    "data_type": described.type_names[_type_of(wanted)],
                    "type_oid": wanted.type_oid,
                    "type_modifier": wanted.type_modifier,
                    "is_nullable": column.is_nullable if column else True,
                    "column_default": column.default if column else None,
                    "is_key": wanted.is_key,
                    "base_type_oid": kind.base_oid,
                    "element_oid": kind.element_oid,
                    **_delimiter(kind),
                    "backfilled": column.is_backfilled if column else None,
                    "number": column.number if column else None,
                }
            )
        published = {column.name for column in structure.columns}
        if structure.replica_identity == "d":
            key = [column.name for column in structure.columns if column.is_key]
            if set(key) == set(table.primary_key):
                key = list(table.primary_key)
        else:
            key = list(table.primary_key) if published.issuperset(table.primary_key) else []
        deferrable = {"primary_key_deferrable": True} if key and table.is_key_deferrable else {}
        return {
            "v": WIRE_VERSION,
            "source": self._source.name,
            "epoch": self._source.epoch,
            "table": structure.table,
            "schema": structure.schema,
            "timestamp": time.time_ns() // 1000,
            "schema_version": version,
            "lsn": lsn,
            "primary_key": key,
            **deferrable,
            "replica_identity": REPLICA_IDENTITIES[structure.replica_identity],
            "columns": columns,
            "filenode": table.filenode,
        }

    async def from_catalog(
        self, schema: str, table: str, published: Collection[str] | None, lsn: int
    ) -> Document | None:
        """The document for the table as it is now in the catalog; None if it does not exist."""
        found = await self._catalog.table_by_name(schema, table)
        if found is None:
            return None
        (document,) = await self.from_catalog_tables([(schema, table, found, published)], lsn)
        return document

    async def from_catalog_tables(
        self,
        tables: Sequence[tuple[str, str, CatalogTable, Collection[str] | None]],
        lsn: int,
    ) -> list[Document]:
        """The documents of tables that were read from the catalog, with their published columns."""
        structures = []
        for schema, name, table, published in tables:
            columns = tuple(
                StructureColumn(c.name, c.type_oid, c.type_modifier, c.name in table.identity)
                for c in table.columns
                if (c.name in published if published is not None else not c.is_generated)
            )
            structures.append(
                Structure(table.relation_id, schema, name, table.replica_identity, columns)
            )
        pairs = list({_type_of(column): None for one in structures for column in one.columns})
        types = dict(zip(pairs, await self._catalog.column_types(pairs), strict=True))
        names = dict(zip(pairs, await self._catalog.format_types(pairs), strict=True))
        return [
            await self.version_for(
                structure,
                [types[_type_of(column)] for column in structure.columns],
                lsn=lsn,
                from_log=False,
                described=Described(table, names),
            )
            for structure, (_, _, table, _) in zip(structures, tables, strict=True)
        ]


def _type_of(column: StructureColumn) -> tuple[int, int]:
    return column.type_oid, column.type_modifier

"""Published tables and their schema versions, from the log or from the catalog."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import nats.errors
from nats.js.errors import APIError

from bridge.errors import Retryable, SchemaOvertaken, SourceError
from bridge.events.messages import SchemaNotice
from bridge.events.relations import Structure, StructureColumn, VersionedStructure
from bridge.schemas.registry import documented_types
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.transport.logfmt import event
from consumer_sdk.wire.subjects import table_token

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from bridge.postgres.catalog import Catalog
    from bridge.postgres.publication import PublicationReader, PublishedRelation
    from bridge.schemas.registry import SchemaRegistry
    from bridge.schemas.store import SchemaStore
    from bridge.wal.messages import Relation
    from consumer_sdk.wire.envelope import Document

log = logging.getLogger("bridge.tables")

TABLE_POLL_SECONDS = 5.0
RETRY_SECONDS = 1.0
TABLES_AT_ONCE = 200


class PublishedTables:
    """Assigns schema versions to the tables of a publication and stores their documents."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        publication: PublicationReader,
        registry: SchemaRegistry,
        store: SchemaStore,
        confirmed_lsn: Callable[[], int],
        known: Collection[str],
    ) -> None:
        """`known` are the tokens of the tables that were published at the last look."""
        self._catalog = catalog
        self._publication = publication
        self._registry = registry
        self._store = store
        self._confirmed_lsn = confirmed_lsn
        self._known = known
        self._overtaken: SchemaOvertaken | None = None
        self.all_stored = asyncio.Event()
        """Set when KV holds the schemas of all tables of the publication for the first time."""
        self.missing: str | None = None
        """Why KV does not hold them yet."""

    @property
    def has_stored_known(self) -> bool:
        """Whether KV holds the schemas of the tables that were published at the last look."""
        return all(map(self._registry.is_stored, self._known))

    async def from_log(self, message: Relation, commit_lsn: int) -> VersionedStructure:
        """The version of a relation as the log describes it."""
        structure = Structure(
            message.relation_id,
            message.namespace,
            message.name,
            message.replica_identity,
            tuple(
                StructureColumn(c.name, c.type_oid, c.type_modifier, c.is_key)
                for c in message.columns
            ),
        )
        self._catalog.forget_user_types()
        types = await self._catalog.column_types(
            [(column.type_oid, column.type_modifier) for column in structure.columns]
        )
        registry, token = self._registry, structure.token
        document = await registry.version_for(structure, types, lsn=commit_lsn, from_log=True)
        version = document["schema_version"]
        must_store = registry.needs_storing(token, document)
        notice = None
        if must_store or registry.needs_announcement(token, version):
            notice = SchemaNotice(token, document, must_store)
        return VersionedStructure(structure, documented_types(document, types), version, notice)

    async def ensure_schema(self, schema: str, table: str) -> Document:
        """Store and return the document of the table as it is now in the catalog."""
        published = await self._publication.columns(schema, table)
        document = await self._registry.from_catalog(
            schema, table, published, self._confirmed_lsn()
        )
        if document is None:
            raise SourceError(f"table {schema}.{table} does not exist")
        token = table_token(schema, table)
        if self._registry.needs_storing(token, document):
            try:
                await self._store.put(token, document)
            except SchemaOvertaken as error:
                self._overtaken = error
                raise
            self._registry.note_stored(token, document)
        return document

    async def store_new(self, interval: float) -> None:
        """Store the schema of every published table, even of tables without any change.

        New tables are looked up every `interval`, or more often if that is long.
        """
        while True:
            await stay_cancelled()
            pause = min(interval, TABLE_POLL_SECONDS)
            try:
                await self._store_missing()
                self.missing = None
                self.all_stored.set()
            except (Retryable, SourceError, nats.errors.Error, APIError, TimeoutError) as error:
                is_first = not self.all_stored.is_set()
                self.missing = str(error) if is_first else None
                level = logging.WARNING if is_first else logging.DEBUG
                event(log, "schemas not refreshed", level=level, reason=str(error))
                if is_first:
                    pause = min(pause, RETRY_SECONDS)
            if self._overtaken is not None:
                raise self._overtaken
            await asyncio.sleep(pause)

    async def _store_missing(self) -> None:
        """Store the schemas of tables that have none, some hundred tables at a time."""
        is_stored = self._registry.is_stored
        names = await self._publication.tables()
        if all(is_stored(table_token(schema, table)) for schema, table in names):
            return
        missing = [
            one
            for one in await self._publication.published()
            if not is_stored(table_token(one.schema, one.table))
        ]
        for start in range(0, len(missing), TABLES_AT_ONCE):
            self.missing = f"{len(missing) - start} are not stored yet"
            await self._store_tables(missing[start : start + TABLES_AT_ONCE])

    async def _store_tables(self, relations: Sequence[PublishedRelation]) -> None:
        found = await self._catalog.tables_by_id(
            {one.relation_id: one.replica_identity for one in relations}
        )
        documents = await self._registry.from_catalog_tables(
            [
                (one.schema, one.table, found[one.relation_id], one.columns)
                for one in relations
                if one.relation_id in found
            ],
            self._confirmed_lsn(),
        )
        try:
            await self._store.put_all(
                {table_token(one["schema"], one["table"]): one for one in documents},
                self._registry.note_stored,
            )
        except SchemaOvertaken as error:
            self._overtaken = error
            raise

    def stored_tokens(self) -> set[str]:
        """The tables with a document in KV."""
        return self._registry.stored_tokens()

    def newest_version(self, token: str) -> int:
        """The highest version assigned for a table, 0 for none."""
        return self._registry.newest_version(token)

    async def release(self, token: str) -> None:
        """Remove the document of a table that is no longer published, if there is one."""
        if self._registry.is_stored(token):
            event(log, "table is not published any more", table=token)
            await self._store.remove(token)
            self._registry.note_removed(token)

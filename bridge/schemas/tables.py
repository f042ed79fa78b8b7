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
    from collections.abc import Callable

    from bridge.postgres.catalog import Catalog
    from bridge.postgres.publication import PublicationReader
    from bridge.schemas.registry import SchemaRegistry
    from bridge.schemas.store import SchemaStore
    from bridge.wal.messages import Relation
    from consumer_sdk.wire.envelope import Document

log = logging.getLogger("bridge.tables")

TABLE_POLL_SECONDS = 5.0


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
    ) -> None:
        self._catalog = catalog
        self._publication = publication
        self._registry = registry
        self._store = store
        self._confirmed_lsn = confirmed_lsn
        self._overtaken: SchemaOvertaken | None = None
        self.first_pass_done = asyncio.Event()
        """Set after the first attempt to store the schemas of all tables."""

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
            try:
                for schema, table in await self._publication.tables():
                    if not self._registry.is_stored(table_token(schema, table)):
                        await self.ensure_schema(schema, table)
            except (Retryable, SourceError, nats.errors.Error, APIError, TimeoutError) as error:
                event(log, "schemas not refreshed", level=logging.DEBUG, reason=str(error))
            if self._overtaken is not None:
                raise self._overtaken
            self.first_pass_done.set()
            await asyncio.sleep(min(interval, TABLE_POLL_SECONDS))

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

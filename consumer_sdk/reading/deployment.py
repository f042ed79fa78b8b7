"""One deployment of tailrace, reached over one connection; all readers share it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from consumer_sdk.errors import UsageError
from consumer_sdk.reading.decoder import EventDecoder
from consumer_sdk.reading.references import References
from consumer_sdk.reading.schemas import Schemas, resolve_table
from consumer_sdk.transport.api import get_message, stream_bounds
from consumer_sdk.wire.subjects import table_token

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from consumer_sdk.reading.schemas import TableName
    from consumer_sdk.transport.api import Frame, StreamBounds
    from consumer_sdk.transport.connection import NatsConnection
    from consumer_sdk.transport.settings import NatsSettings


class Deployment:
    """The connection, the deployment's names, its schemas, and what its messages refer to."""

    def __init__(self, nc: NatsConnection, settings: NatsSettings) -> None:
        self.nc = nc
        self.settings = settings
        self.subjects = settings.subjects()
        self.references = References(nc, self.subjects)
        self.schemas = Schemas(nc, self.subjects, self.references)

    def decoder(self) -> EventDecoder:
        """A decoder of the change stream."""
        return EventDecoder(self.subjects, self.references, self.schemas)

    async def cdc_bounds(self) -> StreamBounds:
        """The first and last sequence of the change stream; NotAvailable if there is no stream."""
        return await stream_bounds(self.nc, self.subjects.cdc_stream)

    async def cdc_message(self, request: dict[str, Any]) -> Frame | None:
        """One message of the change stream, see `get_message`."""
        return await get_message(self.nc, self.subjects.cdc_stream, request)

    def filters(
        self, tables: Sequence[TableName] | None, extra_subjects: Sequence[str] = ()
    ) -> list[str]:
        """Subjects that cover the tables and do not overlap; None means all tables."""
        if tables is None:
            return [self.subjects.cdc_all]
        own = [self.subjects.table_filter(table_token(*resolve_table(table))) for table in tables]
        filters = list(dict.fromkeys([*own, *extra_subjects]))
        if not filters:
            raise UsageError("no table is named; pass None for all tables")
        return filters

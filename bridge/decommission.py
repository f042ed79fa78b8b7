"""`bridge drop`: takes a source out of service."""

from __future__ import annotations

from typing import TYPE_CHECKING

import nats.errors
from nats.js.errors import NotFoundError

from bridge.errors import BridgeError, Retryable, SourceError
from bridge.jetstream.connection import connect, probe
from bridge.postgres.connection import connect_catalog, conninfo_of
from bridge.postgres.errors import DriverError, one_line
from bridge.schemas.store import SchemaStore
from consumer_sdk.transport.logfmt import mask_secrets
from consumer_sdk.wire.escaping import printable

if TYPE_CHECKING:
    from bridge.config import Settings


async def drop(settings: Settings) -> int:
    """Drop the slot and release its tables on NATS; 0 also if the slot does not exist."""
    try:
        connection = await connect_catalog(conninfo_of(settings))
    except Retryable as error:
        raise SourceError(f"{error}; start PostgreSQL or correct its address") from error
    async with connection:
        cursor = await connection.execute(
            "SELECT active_pid, slot_type, plugin, database, pg_catalog.current_database() "
            "FROM pg_catalog.pg_replication_slots WHERE slot_name = %s",
            [settings.slot],
        )
        row = await cursor.fetchone()
        if row is None:
            print(f"slot {settings.slot} does not exist; nothing to drop")
        else:
            _refuse_foreign(settings.slot, *row[1:])
            if row[0] is not None:
                raise SourceError(
                    f"slot {settings.slot} is in use by process {row[0]}; stop that bridge first"
                )
            try:
                await connection.execute(
                    "SELECT pg_catalog.pg_drop_replication_slot(%s)", [settings.slot]
                )
            except DriverError as error:
                raise SourceError(
                    f"slot {settings.slot} cannot be dropped: {one_line(error)}"
                ) from error
            print(f"slot {settings.slot} dropped")
    await _release(settings)
    return 0


def _refuse_foreign(slot: str, kind: str, plugin: str, database: str, ours: str) -> None:
    """Raise SourceError if the slot cannot have been created by a bridge on this database."""
    if kind != "logical":
        what = f"a {kind} slot, such as a standby or a backup uses"
    elif plugin != "pgoutput":
        what = f"a slot of {plugin}, not of pgoutput"
    elif database != ours:
        what = f"a slot of database {database}, not of {ours}"
    else:
        return
    raise SourceError(
        f"slot {slot} is {what}: it belongs to no bridge here and is left alone; correct --slot "
        "or the database"
    )


def _report_unreleased(error: Exception) -> None:
    print(f"its tables were not released on NATS: {printable(mask_secrets(one_line(error)))}")


async def _release(settings: Settings) -> None:
    """Release the tables, so that other sources may publish them; a failure is only printed."""
    try:
        await probe(settings)
        client = await connect(
            settings,
            on_disconnect=lambda: None,
            on_reconnect=lambda: None,
            on_error=lambda _error: None,
        )
    except (BridgeError, Retryable, OSError, nats.errors.Error) as error:
        _report_unreleased(error)
        return
    try:
        js = client.jetstream()
        names = settings.subjects
        bucket = await js.key_value(names.schemas_bucket)
        store = SchemaStore(bucket, source=settings.slot, as_json=settings.json)
        released = await store.release()
        print(f"{released} tables released")
    except NotFoundError:
        print("no tables to release")
    except (TimeoutError, nats.errors.Error) as error:
        _report_unreleased(error)
    finally:
        await client.close()

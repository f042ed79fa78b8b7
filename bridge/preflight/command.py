"""`bridge check`: runs the preflight with the effective settings and prints the report."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

import nats.errors

from bridge.errors import BrokerError, Retryable
from bridge.jetstream.connection import open_connection, options_of, probe
from bridge.postgres.connection import conninfo_of, conninfo_parts
from bridge.postgres.errors import DriverError
from bridge.preflight.continuity import SlotPosition, check_continuity, read_slot_position
from bridge.preflight.findings import Finding, exit_code, format_json, format_text, problem
from bridge.preflight.nats import check_nats
from bridge.preflight.permissions import (
    check_permissions,
    nsc_commands,
    server_configuration,
)
from bridge.preflight.postgres import (
    LOCKED,
    check_postgres,
    check_replication_connection,
    connect_for_check,
    published_tables,
    unreadable,
)
from bridge.preflight.setup_sql import setup_sql
from bridge.preflight.transport import check_transport
from consumer_sdk.transport.api import ApiError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bridge.config import Settings
    from consumer_sdk.wire.subjects import Subjects


async def run_check(
    settings: Settings, *, as_json: bool = False, fix_sql: bool = False, out: TextIO | None = None
) -> int:
    """Print the report, or the set-up SQL, and return the exit code."""
    stream = out if out is not None else sys.stdout
    if fix_sql:
        print(await _setup(settings), end="", file=stream)
        return 0
    findings = await check(settings)
    if as_json:
        text = format_json(findings)
    else:
        colour = stream.isatty() and "NO_COLOR" not in os.environ
        width = max(min(shutil.get_terminal_size((100, 25)).columns, 120), 60)
        text = format_text(findings, colour=colour, width=width)
    # The exit code is valid even if the reader closes the pipe early.
    with suppress(BrokenPipeError):
        print(text, file=stream, flush=True)
    return exit_code(findings)


def print_permissions(settings: Settings, *, form: str) -> None:
    """Print the NATS accounts of bridge and readers: for the server's file, or for nsc."""
    make = nsc_commands if form == "nsc" else server_configuration
    with suppress(BrokenPipeError):
        print(make(settings.subjects, settings.nats_inbox_prefix), flush=True)


async def check(settings: Settings) -> list[Finding]:
    """All findings about PostgreSQL and NATS; an unreachable server is a finding too."""
    try:
        found, source = await _check_source(settings)
    except DriverError as error:
        found, source = [unreadable(error)], _Source()
    found += await _check_broker(settings, source)
    return found + check_transport(settings)


@dataclass(frozen=True, slots=True)
class _Source:
    """Facts of PostgreSQL for the checks of NATS; no position if streaming is impossible."""

    tables: list[tuple[str, str]] = field(default_factory=list)
    position: SlotPosition | None = None


async def _check_source(settings: Settings) -> tuple[list[Finding], _Source]:
    conninfo = conninfo_of(settings)
    connection = await connect_for_check(conninfo)
    if isinstance(connection, Finding):
        return [connection], _Source()
    async with connection:
        found = await check_postgres(
            connection,
            slot=settings.slot,
            publication=settings.pub,
            warn_bytes=settings.wal_warning,
        )
        described = None
        if not any(finding.code == LOCKED for finding in found):
            described = await published_tables(connection, settings.pub)
        position = await read_slot_position(connection, settings.slot)
    if not any(finding.blocks for finding in found):
        found += await check_replication_connection(conninfo)
    is_usable = not any(finding.blocks for finding in found)
    tables = described.tables if described is not None else ()
    pairs = [(table.schema, table.table) for table in tables]
    return found, _Source(pairs, position if is_usable else None)


async def _check_broker(settings: Settings, source: _Source) -> list[Finding]:
    try:
        await probe(settings)
        options = options_of(settings)
        return await _check_connected(settings, options, settings.subjects, source)
    except BrokerError as error:
        what, _, fix = str(error).partition("; ")
        return [_unusable(what, fix)]
    except (TimeoutError, Retryable, nats.errors.Error, OSError) as error:
        return [_unusable(str(error), "start nats-server, or set NATS_URL to where it is")]


async def _check_connected(
    settings: Settings,
    options: Mapping[str, Any],
    subjects: Subjects,
    source: _Source,
) -> list[Finding]:
    found = await check_permissions(options, subjects, settings.nats_inbox_prefix)
    if any(finding.blocks for finding in found):
        return found
    client = await open_connection(**{**options, "allow_reconnect": False})
    try:
        found += await check_nats(
            client,
            subjects=subjects,
            source=settings.slot,
            tables=source.tables,
            settings=settings,
        )
        has_jetstream = not any(finding.code == "jetstream" for finding in found)
        if source.position is not None and has_jetstream:
            found += await check_continuity(
                client,
                conninfo_of(settings),
                subjects=subjects,
                slot=settings.slot,
                publication=settings.pub,
                position=source.position,
                accepts_gap=settings.on_gap == "new-epoch",
            )
        return found
    except ApiError as error:
        return [*found, _unusable(f"JetStream answers: {error}", "see the log of nats-server")]
    finally:
        await client.close()


def _unusable(what: str, fix: str) -> Finding:
    return problem(
        "nats", "nats-unreachable", what, "nothing on it could be checked", fix, blocks=True
    )


async def _setup(settings: Settings) -> str:
    conninfo = conninfo_of(settings)
    parts = conninfo_parts(conninfo)
    publication = settings.pub or "tailrace"
    tables: list[tuple[str, str]] = []
    exists = False
    connection = await connect_for_check(conninfo)
    if not isinstance(connection, Finding):
        async with connection:
            described = await published_tables(connection, publication)
        if described is not None:
            exists = True
            tables = [(table.schema, table.table) for table in described.tables]
    user = str(parts.get("user") or "")
    return setup_sql(
        role=user if user not in ("", "postgres") else "bridge",
        database=str(parts.get("dbname") or "postgres"),
        publication=publication,
        tables=tables,
        creates_publication=not exists,
    )

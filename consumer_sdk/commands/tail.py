"""`cdc tail`: follow changes, one line each."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from consumer_sdk.commands.options import add_shared_options, count, open_client
from consumer_sdk.commands.terminal import Paint, reader_closed
from consumer_sdk.errors import CorruptData
from consumer_sdk.wire.envelope import to_json_value
from consumer_sdk.wire.errors import MISFITS
from consumer_sdk.wire.escaping import printable, printable_json
from consumer_sdk.wire.position import format_lsn
from consumer_sdk.wire.subjects import format_table_name

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from consumer_sdk.client import Client
    from consumer_sdk.reading.changes import ChangeFeed
    from consumer_sdk.reading.decoder import Stored
    from consumer_sdk.wire.envelope import Event

_COLOURS = {
    "INSERT": "green",
    "UPDATE": "yellow",
    "DELETE": "red",
    "TRUNCATE": "magenta",
    "SCHEMA": "cyan",
    "MESSAGE": "cyan",
    "GAP": "red",
}
_SHOWN_AS_DOCUMENT = frozenset({"SCHEMA", "PROGRESS"})
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def add_arguments(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "tail",
        description="Follow changes of some tables, or of all, until interrupted. "
        "TABLE is written as in SQL.",
    )
    parser.add_argument("tables", metavar="TABLE", nargs="*")
    parser.add_argument(
        "--from-start", action="store_true", help="begin with the oldest change still stored"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on each line")
    parser.add_argument(
        "-n", "--count", metavar="N", type=count, help="stop after N lines instead of following"
    )
    add_shared_options(parser)
    parser.set_defaults(run=follow)


async def follow(arguments: argparse.Namespace) -> int:
    """Print changes as they come, until the reader of standard output closes it."""
    printing = asyncio.ensure_future(_print_changes(arguments))
    leaving = asyncio.ensure_future(reader_closed(sys.stdout))
    try:
        await asyncio.wait([printing, leaving], return_when=asyncio.FIRST_COMPLETED)
        return printing.result() if printing.done() else 0
    finally:
        printing.cancel()
        leaving.cancel()
        await asyncio.wait([printing, leaving])


async def _print_changes(arguments: argparse.Namespace) -> int:
    write = _json_line if arguments.json else _text_line(Paint(sys.stdout))
    left: int | None = arguments.count
    async with open_client(arguments) as client:
        tables = [await _checked(client, table) for table in arguments.tables] or None
        async with aclosing(_batches(client, tables, arguments.from_start)) as batches:
            async for batch in batches:
                lines = [_line(write, stored) for stored in batch if _is_shown(stored.event)]
                if left is not None:
                    lines = lines[:left]
                    left -= len(lines)
                if lines:
                    sys.stdout.write("\n".join(lines) + "\n")
                    sys.stdout.flush()
                if left == 0:
                    return 0
    return 0


async def _checked(client: Client, table: str) -> tuple[str, str]:
    schema = await client.schema(table)
    return schema.schema, schema.table


async def _batches(client: Client, tables: list[tuple[str, str]] | None, from_start: bool) -> Any:
    bounds = await client.log().bounds()
    feed: ChangeFeed = client.feed(
        tables,
        bounds.first if from_start else bounds.last + 1,
        extra_subjects=[client.subjects.progress_all],
        created=bounds.created,
        lenient_start=from_start,
    )
    async with feed:
        async for batch in feed:
            yield batch


def _is_shown(event: Event) -> bool:
    """Whether an event is printed: all but COMMIT, and PROGRESS only with a gap."""
    if event.operation == "PROGRESS":
        return bool((event.document or {}).get("gap"))
    return event.operation != "COMMIT"


def _line(write: Callable[[Stored], str], stored: Stored) -> str:
    try:
        return write(stored)
    except MISFITS as error:
        raise CorruptData(
            f"message {stored.stream_seq} of the change stream holds a value that cannot be shown"
        ) from error


def _json_line(stored: Stored) -> str:
    event = stored.event
    document: dict[str, Any] = {
        "sequence": stored.stream_seq,
        "source": event.source,
        "epoch": event.epoch,
        "operation": "GAP" if event.operation == "PROGRESS" else event.operation,
        "lsn": format_lsn(event.commit_lsn),
        "seq": event.seq,
        "xid": event.xid,
        "ts": event.ts,
    }
    if event.table:
        document |= {"schema": event.schema, "table": event.table}
    if event.operation in _SHOWN_AS_DOCUMENT:
        document["document"] = event.document
    elif event.operation == "MESSAGE":
        document |= {"prefix": (event.document or {}).get("prefix"), "data": event.data}
    elif event.operation != "TRUNCATE":
        document["data"] = event.data
    if event.old is not None:
        document["old"] = event.old
    for key, names in (("unchanged", event.unchanged), ("raw", event.raw)):
        if names:
            document[key] = list(names)
    if event.last:
        document["last"] = True
    return printable_json(
        json.dumps(to_json_value(document), ensure_ascii=False, separators=(",", ":"))
    )


def _text_line(paint: Paint) -> Any:
    def write(stored: Stored) -> str:
        event = stored.event
        operation = "GAP" if event.operation == "PROGRESS" else event.operation
        cells = [
            paint("dim", _when(event.ts)),
            paint("dim", format_lsn(event.commit_lsn)),
            paint(_COLOURS.get(operation, "bold"), operation.ljust(8)),
            printable(_subject_of(event)),
            printable(_content_of(event)),
        ]
        return " ".join(cell for cell in cells if cell)

    return write


def _when(ts: int) -> str:
    """A commit time in ISO format; a time outside the calendar stays a number."""
    try:
        when = (_EPOCH + timedelta(microseconds=ts)).isoformat(timespec="microseconds")
    except OverflowError:
        return str(ts)
    return when.replace("+00:00", "Z")


def _subject_of(event: Event) -> str:
    if event.operation == "MESSAGE":
        return str((event.document or {}).get("prefix", ""))
    if event.operation == "PROGRESS":
        return event.source
    return format_table_name(event.schema, event.table)


def _content_of(event: Event) -> str:
    if event.operation == "TRUNCATE":
        return ""
    if event.operation == "PROGRESS":
        return _compact((event.document or {}).get("gap"))
    if event.operation == "SCHEMA":
        names = [column.get("name") for column in (event.document or {}).get("columns", [])]
        return f"version {event.schema_version}: {', '.join(map(str, names))}"
    text = _compact(event.data)
    if event.old is not None:
        text += " old " + _compact(event.old)
    if event.unchanged:
        text += " unchanged " + ", ".join(event.unchanged)
    return text


def _compact(value: Any) -> str:
    return json.dumps(to_json_value(value), ensure_ascii=False)

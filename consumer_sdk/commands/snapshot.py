"""`cdc snapshot`: write a whole table to a file or to standard output."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

from consumer_sdk.commands.files import open_row_file
from consumer_sdk.commands.options import add_shared_options, open_client, seconds
from consumer_sdk.commands.terminal import ProgressLine
from consumer_sdk.errors import UsageError
from consumer_sdk.wire.column_types import Column
from consumer_sdk.wire.escaping import printable, printable_json
from consumer_sdk.wire.position import format_lsn
from consumer_sdk.wire.subjects import format_table_name, table_token

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from consumer_sdk.client import Client
    from consumer_sdk.snapshot.request import SnapshotProgress
    from consumer_sdk.snapshot.snapshot import Snapshot


def add_arguments(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "snapshot",
        description="Request a snapshot of a table, or reuse a retained one that is still valid, "
        "and verify it. TABLE is written as in SQL.",
    )
    parser.add_argument("table", metavar="TABLE")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write the rows to FILE.jsonl, FILE.csv or FILE.parquet; - for lines on stdout",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="request a new one even if one is retained"
    )
    parser.add_argument("--columns", metavar="A,B", help="only these columns, separated by commas")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument(
        "--stall-timeout",
        metavar="TIME",
        type=seconds,
        default=60.0,
        help="give up after this time without progress, default 60",
    )
    add_shared_options(parser)
    parser.set_defaults(run=take)


async def take(arguments: argparse.Namespace) -> int:
    """Take a snapshot, write its rows, print a summary."""
    from consumer_sdk.snapshot.chunks import ArrowChunk

    wanted = _column_names(arguments.columns)
    writer = open_row_file(arguments.out)
    bar = ProgressLine(f"snapshot of {arguments.table}")

    def on_progress(progress: SnapshotProgress) -> None:
        waiting = "; ".join(progress.waiting_for)
        note = f"waits for {waiting}" if waiting else progress.state
        bar.show(progress.rows, progress.estimated_rows, note)

    try:
        async with open_client(arguments) as client:
            # The bridge copies meanwhile.
            preparing = asyncio.create_task(asyncio.to_thread(writer.prepare))
            snapshot = await _request(
                client, arguments, wanted, writer.snapshot_format, on_progress
            )
            meta = snapshot.meta
            await preparing
            writer.begin([Column.from_document(one) for one in meta.columns])
            rows = 0
            async for chunk in snapshot.chunks_as_written():
                if isinstance(chunk, ArrowChunk) and writer.write_arrow(chunk):
                    rows += chunk.batch.num_rows
                else:
                    written = snapshot.rows_of(chunk)
                    writer.write(written)
                    rows += len(written)
                bar.show(rows, meta.row_count, "reading")
        writer.finish()
    finally:
        bar.clear()
        writer.abandon()
    # If the rows are on standard output, the summary must not be there.
    stream = sys.stderr if arguments.out == "-" else sys.stdout
    print(_summary(snapshot, arguments), file=stream)
    return 0


async def _request(
    client: Client,
    arguments: argparse.Namespace,
    columns: list[str] | None,
    preferred: str | None,
    on_progress: Callable[[SnapshotProgress], None],
) -> Snapshot:
    """A snapshot in the preferred format, or a retained one in the bridge's own format."""
    from consumer_sdk.snapshot.request import RequestOptions, RequestRefused, find_retained

    async def request(form: str | None) -> Snapshot:
        return await client.snapshot(
            arguments.table,
            fresh=arguments.fresh,
            columns=columns,
            format=form,
            # A file shows one state of the table.
            pieces=arguments.out is None,
            progress=on_progress,
            stall_timeout=arguments.stall_timeout,
        )

    if preferred is None:
        return await request(None)
    if not arguments.fresh:
        schema = await client.schema(arguments.table)
        token = table_token(schema.schema, schema.table)
        document = RequestOptions(columns).to_document(schema)
        retained = await find_retained(client.deployment, token, document)
        if retained is not None:
            return retained
    try:
        return await request(preferred)
    except RequestRefused:
        # A bridge without pyarrow writes its own formats only.
        return await request(None)


def _column_names(listed: str | None) -> list[str] | None:
    if listed is None:
        return None
    names = listed.split(",")
    if not all(names):
        raise UsageError("--columns holds an empty name; write it as --columns id,name")
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise UsageError(f"--columns names {', '.join(twice)} twice; name each column once")
    return names


def _summary(snapshot: Snapshot, arguments: argparse.Namespace) -> str:
    meta = snapshot.meta
    if arguments.json:
        document = json.dumps(
            {
                "snapshot_id": meta.snapshot_id,
                "schema": meta.schema,
                "table": meta.table,
                "source": meta.source,
                "epoch": meta.epoch,
                "lsn": format_lsn(meta.snapshot_lsn),
                **({"exact_lsn": format_lsn(meta.exact_lsn)} if meta.exact_lsn else {}),
                "rows": meta.row_count,
                "chunks": meta.batch_count,
                "cdc_seq": meta.cdc_seq,
                "reused": snapshot.reused,
                "out": arguments.out,
            },
            ensure_ascii=False,
        )
        return printable_json(document)
    table = printable(format_table_name(meta.schema, meta.table))
    where = f" in {arguments.out}" if arguments.out not in (None, "-") else ""
    point = format_lsn(meta.snapshot_lsn)
    if meta.exact_lsn:
        point += f" to {format_lsn(meta.exact_lsn)}"
    return printable(
        f"{table}: {meta.row_count:,} rows{where}, verified; snapshot {meta.snapshot_id} at "
        f"{point}, {'reused' if snapshot.reused else 'new'}"
    )

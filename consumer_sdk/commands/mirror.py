"""`cdc mirror`: load tables into a database and keep them equal to the source."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from consumer_sdk.commands.options import CREDENTIALS_ADVICE, add_shared_options, open_client
from consumer_sdk.commands.terminal import is_terminal
from consumer_sdk.errors import UsageError
from consumer_sdk.launch.commands import INTERRUPTED
from consumer_sdk.transport.logfmt import quote_logfmt
from consumer_sdk.wire.escaping import printable
from consumer_sdk.wire.position import format_lsn

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator

    from consumer_sdk.mirror.notices import MirrorStatus, Notice
    from consumer_sdk.mirror.runner import Mirror

REDRAW_SECONDS = 0.5
REPORT_SECONDS = 10.0


def add_arguments(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "mirror",
        description="Load tables into a database and keep them equal to the source, transaction "
        "by transaction, until interrupted. TABLE is written as in SQL.",
    )
    parser.add_argument("tables", metavar="TABLE", nargs="*")
    parser.add_argument(
        "--all", action="store_true", help="every published table, also those published later"
    )
    parser.add_argument(
        "--into",
        metavar="URL",
        required=True,
        help=f"sqlite:///PATH or postgresql://…; {CREDENTIALS_ADVICE}",
    )
    parser.add_argument(
        "--once", action="store_true", help="end when everything stored at the start is applied"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="rebuild the tables from new snapshots"
    )
    add_shared_options(parser)
    parser.set_defaults(run=run_mirror)


async def run_mirror(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.tables and arguments.all:
        raise UsageError("--all includes every table; name some tables, or give --all, not both")
    if not arguments.tables and not arguments.all:
        raise UsageError("name the tables to mirror, or give --all; see cdc mirror --help")
    from consumer_sdk.mirror.runner import Mirror
    from consumer_sdk.targets.target_url import display_url, open_target

    target = open_target(arguments.into)
    display = MirrorDisplay(display_url(arguments.into))
    async with open_client(arguments) as client:
        mirror = Mirror(
            client,
            None if arguments.all else arguments.tables,
            target,
            fresh=arguments.fresh,
            on_notice=display.note,
        )
        async with _interruptible(mirror) as interrupted, display.showing(mirror.status):
            await mirror.run(once=arguments.once)
    display.conclude(mirror.status)
    return INTERRUPTED if arguments.once and interrupted.is_set() else 0


@contextlib.asynccontextmanager
async def _interruptible(mirror: Mirror) -> AsyncIterator[asyncio.Event]:
    """Stop the mirror after a transaction at the first SIGINT or SIGTERM, at once at the second."""
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()
    task = asyncio.current_task()
    assert task is not None

    def interrupt() -> None:
        if interrupted.is_set():
            task.cancel()
        interrupted.set()
        mirror.stop()

    signals = (signal.SIGINT, signal.SIGTERM)
    # On Windows event loops have no signal handlers; an interrupt ends the program at once.
    with contextlib.suppress(NotImplementedError):
        for number in signals:
            loop.add_signal_handler(number, interrupt)
    try:
        yield interrupted
    finally:
        with contextlib.suppress(NotImplementedError):
            for number in signals:
                loop.remove_signal_handler(number)


class MirrorDisplay:
    """Shows the status of a mirror: a line on a terminal, logfmt lines elsewhere."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._live = is_terminal(sys.stderr)
        self._began = time.monotonic()
        self._events_before = 0
        self._rate_since = self._began
        self._rate = 0.0

    def note(self, notice: Notice) -> None:
        """Print a notice of the mirror."""
        level = "warning" if notice.warning else "info"
        fields = {"level": level, "event": notice.event, **notice.fields}
        self._clear()
        print(logfmt(fields), file=sys.stderr, flush=True)

    @contextlib.asynccontextmanager
    async def showing(self, status: MirrorStatus) -> AsyncIterator[None]:
        """Report the status while the body runs."""
        task = asyncio.ensure_future(self._report(status))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            self._clear()

    async def _report(self, status: MirrorStatus) -> None:
        while True:
            await asyncio.sleep(REDRAW_SECONDS if self._live else REPORT_SECONDS)
            self._measure(status)
            if self._live:
                room = max(20, shutil.get_terminal_size().columns - 1)
                sys.stderr.write("\r\x1b[K" + printable(self._line(status))[:room])
                sys.stderr.flush()
            else:
                print(logfmt({"event": "status", **self._fields(status)}), file=sys.stderr)

    def conclude(self, status: MirrorStatus) -> None:
        """Print what the mirror did and its final positions."""
        tables = "1 table" if status.tables == 1 else f"{status.tables} tables"
        where = ", ".join(
            f"{printable(source)} at {format_lsn(position.commit_lsn)}"
            for source, position in sorted(status.positions.items())
        )
        print(
            f"{tables} in {self._target}: {status.rows_loaded:,} rows loaded, "
            f"{status.events_applied:,} changes applied; {where}"
        )

    def _measure(self, status: MirrorStatus) -> None:
        now = time.monotonic()
        self._rate = (status.events_applied - self._events_before) / (now - self._rate_since)
        self._events_before, self._rate_since = status.events_applied, now

    def _fields(self, status: MirrorStatus) -> dict[str, Any]:
        return {
            "state": status.state,
            "tables": status.tables,
            "rows_loaded": status.rows_loaded,
            "events": status.events_applied,
            "events_per_second": round(self._rate),
            "lag_seconds": round(_lag_seconds(status), 1),
            "repairs": status.repairs,
        }

    def _line(self, status: MirrorStatus) -> str:
        loaded = f"{status.rows_loaded:,} rows loaded"
        if status.tables_loading:
            loaded += f" of {status.rows_expected:,}, {status.tables_loading} tables to go"
        return (
            f"{status.state}: {loaded}, {status.events_applied:,} changes, "
            f"{self._rate:,.0f}/s, lag {_lag_seconds(status):.1f} s"
        )

    def _clear(self) -> None:
        if self._live:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _lag_seconds(status: MirrorStatus) -> float:
    if status.caught_up or not status.last_event_us:
        return 0.0
    return max(0.0, time.time() - status.last_event_us / 1e6)


def logfmt(fields: dict[str, Any]) -> str:
    """One line of `key=value`, without control characters."""
    return " ".join(
        f"{key}={quote_logfmt(printable(value) if isinstance(value, str) else value)}"
        for key, value in fields.items()
    )

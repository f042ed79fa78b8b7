"""The public names of the SDK: what is listed here is promised, nothing else is."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from importlib.resources import files

import pytest

import consumer_sdk
from consumer_sdk import errors, sync, wire

PUBLIC = {
    "AccessDenied",
    "CdcError",
    "ChangeFeed",
    "ChunkRows",
    "Client",
    "Column",
    "CorruptData",
    "Event",
    "Frame",
    "GapError",
    "LogBounds",
    "LogReader",
    "NatsSettings",
    "NotAvailable",
    "Position",
    "Progress",
    "Snapshot",
    "SnapshotFailed",
    "SnapshotMeta",
    "SnapshotProgress",
    "SourcePosition",
    "Stored",
    "TableSchema",
    "TargetError",
    "Transaction",
    "UnknownTable",
    "UsageError",
    "VersionTooNew",
    "__version__",
    "connect",
    "format_lsn",
    "parse_lsn",
    "read_log_blocking",
    "read_log_blocking_raw",
}
CLIENT = {
    "changes",
    "decoder",
    "dictionary",
    "feed",
    "fetch_object",
    "filters",
    "find_schema",
    "log",
    "messages",
    "progress",
    "schema",
    "snapshot",
    "tables",
    "watch_schemas",
}
SYNC_CLIENT = {
    "changes",
    "log_bounds",
    "messages",
    "progress",
    "read_log",
    "schema",
    "snapshot",
    "tables",
    "watch_schemas",
}
EXIT_CODES = {
    "AccessDenied": 3,
    "CdcError": 1,
    "CorruptData": 4,
    "GapError": 4,
    "NotAvailable": 3,
    "SnapshotFailed": 3,
    "TargetError": 3,
    "UnknownTable": 1,
    "UsageError": 2,
    "VersionTooNew": 4,
}


def methods(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_")}


def test_the_package_exports_exactly_what_is_promised() -> None:
    assert set(consumer_sdk.__all__) == PUBLIC
    assert all(hasattr(consumer_sdk, name) for name in PUBLIC)


def test_every_promised_name_is_listed_and_every_part_is_reached() -> None:
    """Also before anything was imported by its own name."""
    program = (
        "import consumer_sdk as sdk; print(*dir(sdk)); "
        "sdk.errors.GapError, sdk.client.connect, sdk.wire.Event"
    )
    listed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {*PUBLIC, "client", "errors", "wire"} <= set(listed)


def test_a_name_that_is_not_promised_is_not_there() -> None:
    assert not hasattr(consumer_sdk, "PullConsumer")


def test_the_wire_loads_without_nats() -> None:
    """So that the bridge and the commands start quickly."""
    program = "import sys, consumer_sdk.wire; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"nats", "aiohttp", "consumer_sdk.client"} & set(loaded)


def test_the_help_of_cdc_loads_nothing_that_only_its_commands_need() -> None:
    program = (
        "import sys; from consumer_sdk.commands.cli import build_parser; "
        "help = build_parser(['--help', 'tail']).format_help(); print(*sys.modules)\n"
        "assert 'follow changes, one line each' in help and 'keep a replica' in help, help"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = {"nats", "aiohttp", "psycopg", "pyarrow", "msgspec", "consumer_sdk.client"}
    assert not heavy & set(loaded)


def test_the_client_has_exactly_the_promised_methods() -> None:
    assert methods(consumer_sdk.Client) == CLIENT
    assert methods(sync.BlockingClient) == SYNC_CLIENT


def test_the_package_is_typed() -> None:
    assert files(consumer_sdk).joinpath("py.typed").is_file()


def test_every_public_name_says_what_it_promises() -> None:
    for name in PUBLIC - {"__version__"}:
        assert inspect.getdoc(getattr(consumer_sdk, name)), name
    for kind in (consumer_sdk.Client, sync.BlockingClient):
        for name in methods(kind):
            assert inspect.getdoc(getattr(kind, name)), name


def test_the_wire_package_exports_what_it_lists() -> None:
    assert all(hasattr(wire, name) for name in wire.__all__)


def test_every_error_is_in_the_tree_with_its_exit_code() -> None:
    found = {
        name: kind
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, Exception)
    }
    assert {name: kind.exit_code for name, kind in found.items()} == EXIT_CODES
    assert errors.__doc__ is not None
    assert all(name in errors.__doc__ for name in found)
    assert all(issubclass(kind, errors.CdcError) for kind in found.values())


@pytest.mark.parametrize(
    "error",
    [
        errors.GapError("trimmed", 5, 9),
        errors.UnknownTable("user", ["users"]),
        errors.CdcError("x"),
    ],
)
def test_errors_cross_process_boundaries(error: errors.CdcError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))

"""The command `bridge`: its flags are derived from the settings; an error is one line."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from bridge import config
from bridge.errors import BridgeError, SettingsError
from consumer_sdk.transport.version import ShowVersion
from consumer_sdk.wire.escaping import printable

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

LARGE_BYTES = 1024 * 1024
_M_MMAP_THRESHOLD = -3

COMMANDS = ("run", "check", "config", "drop", "demo")

DESCRIPTION = """\
Stream PostgreSQL changes to NATS JetStream: complete, in commit order, exactly once.

  bridge --slot S --pub P        run until stopped
  bridge check --slot S --pub P  check PostgreSQL and NATS before running
  bridge config                  show the effective settings and their origin
  bridge drop --slot S --yes     drop the slot; this cannot be undone
  bridge demo                    run a demonstration with embedded servers
"""

EPILOG = """\
Every setting can also be given as BRIDGE_{NAME} in the environment or in a TOML file (--config);
flags override the environment, and the environment overrides the file. Passwords and tokens are
read from the environment or the file only; a password also from a file or a command of its own.

Exit codes: 0 fine, 1 the answer is no, 2 bad settings, 3 PostgreSQL or NATS not usable as
configured, 4 data at risk.
"""

ALL_SETTINGS = "All other settings of the bridge are accepted too; see bridge --help."
CHECK_LISTS = (
    "slot", "pub", "prefix", "on_gap", "PostgreSQL", "NATS", "cdc_stream", "init_stream",
    "wal_warning",
)  # fmt: skip
PERMISSION_FORMS = ("server", "nsc")
DROP_LISTS = ("slot", "prefix", "PostgreSQL", "NATS")


class _Parser(argparse.ArgumentParser):
    """Reports a wrong flag in one line; abbreviated flags are refused, as new flags break them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> Any:
        raise SettingsError(f"{message}; see {self.prog} --help")


def _add_settings(
    parser: argparse.ArgumentParser, listed: Container[str] | None = None, skip: Container[str] = ()
) -> None:
    """Add a flag for every setting except those in `skip`, which the command adds itself.

    Every command accepts all settings. Its help shows those whose name or group is in `listed`.
    """
    groups: dict[str, Any] = {}
    for item in config.definitions():
        meta = item.metadata
        if not meta["flag"] or item.name in skip:
            continue
        group = groups.get(meta["group"])
        if group is None:
            group = groups[meta["group"]] = parser.add_argument_group(meta["group"])
        variables = ", ".join(config.environment_names(item))
        default = "" if item.default in ("", False, ()) else f", default {_shown(item)}"
        text = f"{meta['help']} [{variables}{default}]".replace("%", "%%")
        if listed is not None and item.name not in listed and meta["group"] not in listed:
            text = argparse.SUPPRESS
        if meta["kind"] == "flag":
            group.add_argument(
                config.flag_name(item),
                dest=item.name,
                action=argparse.BooleanOptionalAction,
                default=None,
                help=text,
            )
        else:
            group.add_argument(
                config.flag_name(item),
                dest=item.name,
                default=None,
                metavar="{{{}}}".format(",".join(meta["choices"])) if meta["choices"] else "VALUE",
                help=text,
            )
    parser.add_argument("--config", metavar="FILE", help="settings file in TOML [BRIDGE_CONFIG]")


def _shown(item: Any) -> str:
    kind, value = item.metadata["kind"], item.default
    if kind == "seconds":
        for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
            if value >= size and value % size == 0:
                return f"{value / size:g}{unit}"
        return f"{value:g}s"
    if kind == "bytes":
        for unit, size in (("GB", 1024**3), ("MB", 1024**2), ("KB", 1024)):
            if value and value % size == 0:
                return f"{value // size}{unit}"
    return str(value)


def _parser(command: str) -> argparse.ArgumentParser:
    if command == "run":
        parser = _Parser(
            prog="bridge",
            description=DESCRIPTION,
            epilog=EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _add_settings(parser)
    elif command == "check":
        parser = _Parser(
            prog="bridge check",
            usage="bridge check --slot NAME --pub NAME [--json | --fix-sql | --permissions [FORM]] "
            "[SETTINGS]",
            description="Check PostgreSQL and NATS and print every finding with its exact fix. "
            "Exit code 0 only if the bridge can run safely.",
            epilog=ALL_SETTINGS,
        )
        own = parser.add_argument_group("check")
        own.add_argument(
            "--json",
            action=argparse.BooleanOptionalAction,
            default=None,
            help="print the report as JSON, for scripts",
        )
        own.add_argument(
            "--fix-sql", action="store_true", help="print the SQL of a least-privilege set-up"
        )
        own.add_argument(
            "--permissions",
            nargs="?",
            choices=PERMISSION_FORMS,
            const=PERMISSION_FORMS[0],
            help="print NATS accounts for bridge and readers: for nats-server.conf (server), or as "
            "commands of nsc",
        )
        _add_settings(parser, listed=CHECK_LISTS, skip=("json",))
    elif command == "config":
        parser = _Parser(
            prog="bridge config",
            description="Show the effective settings and where each came from; secrets are masked.",
        )
        _add_settings(parser)
        parser.add_argument("--as-json", action="store_true", help="print JSON")
    elif command == "drop":
        parser = _Parser(
            prog="bridge drop",
            usage="bridge drop --slot NAME --yes [SETTINGS]",
            description="Drop the replication slot, so that it does not fill the disk, and release "
            "its tables. Consumers need a new bootstrap if the source is ever used again.",
            epilog=ALL_SETTINGS,
        )
        own = parser.add_argument_group("drop")
        own.add_argument("--yes", action="store_true", help="confirm the drop")
        _add_settings(parser, listed=DROP_LISTS)
    else:
        parser = _Parser(
            prog="bridge demo",
            description="Run PostgreSQL, NATS, the bridge, a live workload and a mirror, all "
            "embedded, and check at the end that the results are equal.",
        )
        parser.add_argument(
            "--seconds",
            type=float,
            default=None,
            metavar="N",
            help="stop by itself after N seconds",
        )
        parser.add_argument("--no-spark", action="store_true", help="leave out the Spark part")
        parser.add_argument(
            "--port", type=int, default=9090, help="port of the dashboard, default 9090"
        )
    parser.add_argument("--version", action=ShowVersion, const="tailrace")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the result is the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = "run"
    if arguments and arguments[0] in COMMANDS:
        command = arguments.pop(0)
    try:
        options = _parser(command).parse_args(arguments)
        return _COMMANDS[command](options)
    except BridgeError as error:
        from consumer_sdk.transport.logfmt import mask_secrets

        # What follows the name of a variable, such as PGPASSWORD, is not its value.
        where, colon, text = " ".join(str(error).split()).partition(": ")
        text = mask_secrets(where) + colon + mask_secrets(text)
        print(f"bridge: {printable(text)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0


def return_large_blocks() -> bool:
    """Make malloc return large blocks to the system when they are freed; False if it cannot.

    By default, glibc raises its threshold to the largest freed block (up to 32 MB) and keeps up to
    twice as much freed memory: after one large row the process would stay several times larger.
    https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES))


def _settings(options: argparse.Namespace) -> config.Settings:
    return config.load(vars(options), config_file=options.config)


def _require_addresses(settings: config.Settings) -> None:
    """Raise SettingsError for an invalid address of PostgreSQL or NATS before anything is done."""
    from bridge.jetstream.connection import options_of
    from bridge.postgres.connection import conninfo_of

    conninfo_of(settings)
    options_of(settings)


def _run(options: argparse.Namespace) -> int:
    settings = _settings(options)
    config.require(settings, "slot", "pub")
    config.refuse_example_secrets(settings)
    _require_addresses(settings)
    # Wrong settings are reported without waiting for these.
    import asyncio
    import logging

    from bridge.service import Service
    from bridge.telemetry.logs import configure_logging
    from consumer_sdk.transport.logfmt import event

    log = logging.getLogger("bridge")
    configure_logging(settings.log_level, settings.log_format)  # type: ignore[arg-type]
    for name, meant in config.misspelled():
        event(log, "unknown variable", level=logging.WARNING, variable=name, meant=meant)

    async def serve() -> None:
        await Service(settings).run()

    return_large_blocks()
    asyncio.run(serve())
    return 0


def _config(options: argparse.Namespace) -> int:
    for name, meant in config.misspelled():
        print(f"bridge: {printable(name)} is not a setting; {meant} is", file=sys.stderr)
    rows = config.masked(_settings(options))
    if options.as_json:
        import json

        print(json.dumps({name: {"value": v, "origin": o} for name, v, o in rows}, indent=2))
        return 0
    rows = [(name, printable(value), printable(origin)) for name, value, origin in rows]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, origin in rows:
        print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}")
    return 0


def _drop(options: argparse.Namespace) -> int:
    settings = _settings(options)
    config.require(settings, "slot")
    if not options.yes:
        raise SettingsError(
            f"drop would remove slot {settings.slot} and its place in the log; add --yes to do it"
        )
    _require_addresses(settings)
    import asyncio

    from bridge.decommission import drop

    return asyncio.run(drop(settings))


def _check(options: argparse.Namespace) -> int:
    settings = _settings(options)
    if options.permissions:
        from bridge.preflight.command import print_permissions

        print_permissions(settings, form=options.permissions)
        return 0
    config.require(settings, "slot", "pub")
    _require_addresses(settings)
    import asyncio

    from bridge.preflight.command import run_check

    return asyncio.run(run_check(settings, as_json=bool(options.json), fix_sql=options.fix_sql))


def _demo(options: argparse.Namespace) -> int:
    from bridge.demo.command import run_demo

    return run_demo(seconds=options.seconds, spark=not options.no_spark, port=options.port)


_COMMANDS = {"run": _run, "check": _check, "config": _config, "drop": _drop, "demo": _demo}

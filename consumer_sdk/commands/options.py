"""Options that every command of `cdc` shares."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, NoReturn

from consumer_sdk.errors import UsageError
from consumer_sdk.transport.version import ShowVersion

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from consumer_sdk.client import Client
    from consumer_sdk.transport.settings import NatsSettings

CREDENTIALS_ADVICE = "put its password into PGPASSWORD or ~/.pgpass"
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def add_shared_options(parser: argparse.ArgumentParser) -> None:
    """Add --version, --nats, --prefix and --timeout; the environment gives their defaults."""
    parser.add_argument("--version", action=ShowVersion, const="cdc")
    group = parser.add_argument_group("NATS")
    group.add_argument(
        "--nats",
        metavar="URL",
        help="address, several separated by commas; put an address with a password into the "
        "environment [NATS_URL]",
    )
    group.add_argument(
        "--prefix", metavar="NAME", help="prefix of subjects, streams and buckets [BRIDGE_PREFIX]"
    )
    group.add_argument(
        "--timeout",
        metavar="TIME",
        type=seconds,
        default=10.0,
        help="how long to wait for NATS, default 10",
    )


def nats_settings(arguments: argparse.Namespace) -> NatsSettings:
    """The settings from the options and the environment."""
    from consumer_sdk.transport.settings import NatsSettings

    return NatsSettings.resolve(arguments.nats, prefix=arguments.prefix, name="cdc")


def open_client(arguments: argparse.Namespace) -> AbstractAsyncContextManager[Client]:
    """Connect with the settings from the options."""
    from consumer_sdk.client import connect

    return connect(settings=nats_settings(arguments), timeout=arguments.timeout)


def seconds(text: str) -> float:
    """The argument type of a time: seconds, or a number with a unit, as `500ms`, `10s`, `2m`."""
    match = _TIME.fullmatch(text.strip())
    value = float(match[1]) * _UNITS[match[2] or "s"] if match else 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(
            f"not a time: {text!r}; write a positive number of seconds, or 500ms, 10s, 2m"
        )
    return value


def count(text: str) -> int:
    """The argument type of a positive integer."""
    if not text.isdecimal() or not 0 < int(text) < 1 << 63:
        raise argparse.ArgumentTypeError(f"not a positive number: {text!r}")
    return int(text)


class Parser(argparse.ArgumentParser):
    """Raises UsageError, in one line, for wrong arguments."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

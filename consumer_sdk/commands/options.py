"""Options that every command of `cdc` shares."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from consumer_sdk.client import connect
from consumer_sdk.errors import UsageError
from consumer_sdk.settings import NatsSettings
from consumer_sdk.version import __version__

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from consumer_sdk.client import Client


def add_shared_options(parser: argparse.ArgumentParser) -> None:
    """Add --version, and --nats, --prefix and --timeout; else NATS comes from the environment."""
    parser.add_argument("--version", action="version", version=f"cdc {__version__}")
    group = parser.add_argument_group("NATS")
    group.add_argument(
        "--nats",
        metavar="URL",
        help="address, several separated by commas; one with a password is better kept in the "
        "environment [NATS_URL]",
    )
    group.add_argument(
        "--prefix", metavar="NAME", help="prefix of subjects, streams and buckets [BRIDGE_PREFIX]"
    )
    group.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=seconds,
        default=10.0,
        help="how long to wait for NATS, default 10",
    )


def nats_settings(arguments: argparse.Namespace) -> NatsSettings:
    """The settings that the options and the environment give."""
    return NatsSettings.resolve(arguments.nats, prefix=arguments.prefix, name="cdc")


def open_client(arguments: argparse.Namespace) -> AbstractAsyncContextManager[Client]:
    """Connect as the options say."""
    return connect(settings=nats_settings(arguments), timeout=arguments.timeout)


def seconds(text: str) -> float:
    """A positive number of seconds, as an argument type."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"not a number of seconds: {text!r}")
    return value


def count(text: str) -> int:
    """A positive integer, as an argument type."""
    if not text.isdecimal() or not 0 < int(text) < 1 << 63:
        raise argparse.ArgumentTypeError(f"not a positive number: {text!r}")
    return int(text)


class Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(f"{message}; see {self.prog} --help")

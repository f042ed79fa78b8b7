"""Entry points of `bridge`, `cdc` and `spark-consumer`.

This package imports nothing of ours until a command runs, so that an interrupt during the imports
ends quietly. A password among the arguments is warned of, and every failure of standard output
ends in the same way.
"""

from __future__ import annotations

import re
import signal
import sys
from importlib import import_module
from os import _exit
from typing import TYPE_CHECKING, Final, NoReturn

from consumer_sdk.launch.output import OutputLost, close_output, open_output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

INTERRUPTED = 130
NOT_USABLE = 3

_NATS: Final = "NATS_URL or NATS_CREDS"
_POSTGRES: Final = "PGPASSWORD or ~/.pgpass"
_ADDRESS_FLAGS: Final = {
    "--nats": _NATS,
    "--nats-url": _NATS,
    "--database-url": "DATABASE_URL, PGPASSWORD or ~/.pgpass",
    "--source": _POSTGRES,
    "--replica": _POSTGRES,
    "--into": _POSTGRES,
}
"""Flags that take an address, and where its password can stand instead."""
# NATS takes a user without a password for a token.
_NATS_SECRET: Final = re.compile(r"(?:\A|,|//)\s*[^/?#,]+@")
_POSTGRES_SECRET: Final = re.compile(r"(?i)\Apostgres\w*://[^/?#]*:[^/?#]+@|password\s*=")


def bridge() -> NoReturn:
    """The command `bridge`."""
    _launch("bridge", "bridge.cli")


def cdc() -> NoReturn:
    """The command `cdc`."""
    _launch("cdc", "consumer_sdk.commands.cli")


def spark_consumer() -> NoReturn:
    """The command `spark-consumer`."""
    _launch("spark-consumer", "spark_consumer.cli")


def _launch(name: str, module: str) -> NoReturn:
    open_output()
    remedies = places_for_secrets(sys.argv[1:])
    if remedies:
        print(
            f"{name}: warning: a password on the command line can be seen by others on this "
            f"machine; use {', '.join(remedies)} instead",
            file=sys.stderr,
        )
    code: str | int | None
    try:
        try:
            code = _load(module)()
        except SystemExit as end:
            code = end.code
        except BrokenPipeError:
            # Whoever read our output has seen enough.
            code = 0
        close_output()
    except OutputLost as lost:
        print(f"{name}: {lost}", file=sys.stderr)
        code = NOT_USABLE
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


def places_for_secrets(arguments: Sequence[str]) -> list[str]:
    """Where passwords found among the arguments can stand instead; empty if there is none."""
    remedies = []
    for flag, value in _options(arguments):
        # argparse takes a beginning of a flag for the flag.
        whole = flag if flag in _ADDRESS_FLAGS else None
        if whole is None and len(flag) > len("--"):
            whole = next((known for known in _ADDRESS_FLAGS if known.startswith(flag)), None)
        if whole is None:
            continue
        secret = _NATS_SECRET if _ADDRESS_FLAGS[whole] == _NATS else _POSTGRES_SECRET
        if secret.search(value):
            remedies.append(_ADDRESS_FLAGS[whole])
    return list(dict.fromkeys(remedies))


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each flag with its value, written as `--flag value` or `--flag=value`."""
    for place, argument in enumerate(arguments):
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            yield flag, value if equals else "".join(arguments[place + 1 : place + 2])


def _load(module: str) -> Callable[[], int]:
    """Import a command; until that is done there is nothing to tidy up after an interrupt."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, _end)
    main: Callable[[], int] = import_module(module).main
    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return main


def _end(_signal: int, _frame: FrameType | None) -> NoReturn:
    _exit(INTERRUPTED)

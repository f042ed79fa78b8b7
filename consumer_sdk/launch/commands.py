"""Entry points of `bridge`, `cdc` and `spark-consumer`.

This package imports no other module of tailrace before a command runs, so that an interrupt during
the imports prints no traceback. All commands warn of a password among the arguments, and handle a
failure of standard output in the same way.
"""

from __future__ import annotations

import re
import signal
import sys
from contextlib import contextmanager
from importlib import import_module, util
from os import _exit
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from consumer_sdk.launch.output import OutputLost, close_output, open_output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

INTERRUPTED = 130
NOT_USABLE = 3

_RARELY_USED: Final = ("aiohttp",)
"""Packages that take long to import: nats-py imports them, but needs them for WebSockets alone."""

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
"""Flags that take an address, and where to put its password instead."""
# To NATS, a user without a password is a token, which is a secret too.
_NATS_SECRET: Final = re.compile(r"(?:\A|,|//)\s*[^/?#,]+@")
_NATS_ADDRESS: Final = re.compile(r"(?i)(?:nats|tls|wss?)://")
_POSTGRES_ADDRESS: Final = re.compile(r"(?i)postgres\w*://|\w+\s*=")
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
            code = load(module)()
        except SystemExit as end:
            code = end.code
        except BrokenPipeError:
            # The reader of standard output closed it; that is not an error.
            code = 0
        close_output()
    except OutputLost as lost:
        print(f"{name}: {lost}", file=sys.stderr)
        code = NOT_USABLE
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


def places_for_secrets(arguments: Sequence[str]) -> list[str]:
    """Where to put the passwords found among the arguments; empty if there are none."""
    remedies = []
    for flag, value in _values(arguments):
        remedy = _remedy_of(flag) or _remedy_for(value)
        secret = _NATS_SECRET if remedy == _NATS else _POSTGRES_SECRET
        if remedy is not None and secret.search(value):
            remedies.append(remedy)
    return list(dict.fromkeys(remedies))


def _remedy_of(flag: str) -> str | None:
    """The place for a flag that takes an address; argparse accepts abbreviated flags."""
    if flag in _ADDRESS_FLAGS or len(flag) <= len("--"):
        return _ADDRESS_FLAGS.get(flag)
    return next((place for one, place in _ADDRESS_FLAGS.items() if one.startswith(flag)), None)


def _remedy_for(value: str) -> str | None:
    """The place for an address that is given without one of these flags."""
    if _NATS_ADDRESS.match(value):
        return _NATS
    return _POSTGRES if _POSTGRES_ADDRESS.match(value) else None


def _values(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each value with the flag before it, written as `--flag value` or `--flag=value`, if any."""
    flag = ""
    for argument in arguments:
        if not argument.startswith("--"):
            yield flag, argument
            flag = ""
            continue
        flag, equals, value = argument.partition("=")
        if equals:
            yield flag, value
            flag = ""


def load(module: str) -> Callable[[], int]:
    """The function `main` of a module of ours, with what it rarely needs left for later."""
    _defer_rarely_used()
    with quiet_interrupts():
        main: Callable[[], int] = import_module(module).main
    return main


class DeferredModule(ModuleType):
    """Stands for a package until a name in it is used, which imports the package.

    An import statement alone would already load a module of importlib's LazyLoader.
    """

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def _defer_rarely_used() -> None:
    for name in _RARELY_USED:
        spec = None if name in sys.modules else util.find_spec(name)
        if spec is not None:
            sys.modules[name] = DeferredModule(name)
            sys.modules[name].__spec__ = spec


@contextmanager
def quiet_interrupts() -> Iterator[None]:
    """During imports, let an interrupt end the process at once: there is nothing to clean up."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(_signal: int, _frame: FrameType | None) -> NoReturn:
    _exit(INTERRUPTED)

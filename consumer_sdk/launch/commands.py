"""Entry points of `bridge`, `cdc` and `spark-consumer`.

Everything else is imported from here, so that an interrupt at any moment ends quietly, passwords
leave the process list at once, and whatever becomes of standard output has one ending.
"""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from os import _exit
from typing import TYPE_CHECKING, NoReturn

from consumer_sdk.launch.output import OutputLost, close_output, open_output
from consumer_sdk.launch.process_list import hide_secrets

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

INTERRUPTED = 130
NOT_USABLE = 3


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
    hide_secrets()
    open_output()
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


def _load(module: str) -> Callable[[], int]:
    """Import a command; until that is done there is nothing to tidy up after an interrupt."""
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, _end)
    main: Callable[[], int] = import_module(module).main
    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return main


def _end(_signal: int, _frame: FrameType | None) -> NoReturn:
    _exit(INTERRUPTED)

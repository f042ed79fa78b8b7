"""The version of this distribution, which is read at its first use."""

from __future__ import annotations

import argparse
from typing import Any, Final

__version__: str


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Reading the metadata takes longer than all else that a command does for its help.
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("tailrace")
    except PackageNotFoundError:  # run from a tree that is not installed
        found = "0"
    globals()[name] = found
    return found


class ShowVersion(argparse.Action):
    """The flag --version: prints the name of the program, which is its `const`, and its version."""

    def __init__(self, option_strings: Any, dest: str, const: str) -> None:  # noqa: ARG002
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, const=const, help=_HELP)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from consumer_sdk.transport.version import __version__ as found

        print(f"{self.const} {found}")
        parser.exit()


_HELP: Final = "show program's version number and exit"

"""How each example begins and ends: with its arguments or a line of usage, and with Ctrl-C."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def arguments(documentation: str | None, least: int = 0) -> Iterator[list[str]]:
    """The arguments; with fewer than needed, print the usage that the documentation ends with."""
    given = sys.argv[1:]
    if len(given) < least:
        print(f"usage: {(documentation or '').partition(': ')[2]}", file=sys.stderr)
        sys.exit(2)
    with suppress(KeyboardInterrupt):
        yield given

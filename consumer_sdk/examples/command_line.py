"""The arguments of the examples; Ctrl-C ends an example without a traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def arguments(documentation: str | None, least: int = 0) -> Iterator[list[str]]:
    """The arguments; if there are too few, print the usage at the end of the documentation."""
    given = sys.argv[1:]
    if len(given) < least:
        print(f"usage: {(documentation or '').partition(': ')[2]}", file=sys.stderr)
        sys.exit(2)
    with suppress(KeyboardInterrupt):
        yield given

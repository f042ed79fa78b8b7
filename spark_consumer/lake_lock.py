"""One job for a lake at a time: two would clear away what the other has staged."""

from __future__ import annotations

import fcntl
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from spark_consumer.errors import LakeBusyError
from spark_consumer.lake_directory import unwritable

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def sole_job(lake_directory: str) -> Iterator[None]:
    """Hold the lake while a block runs; the lock ends with the process, however that ends."""
    own = Path(lake_directory, "_tailrace")
    try:
        own.mkdir(parents=True, exist_ok=True)
        file = (own / "lock").open("a")
    except OSError as error:
        raise unwritable(lake_directory, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LakeBusyError(
                f"another spark-consumer keeps the lake {lake_directory}; give all tables to one, "
                "or choose another --lake directory"
            ) from error
        yield

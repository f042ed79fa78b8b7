"""The directory of a lake: local or mounted, since the driver commits and merges through files."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from spark_consumer.errors import LakeBusyError, SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator


def own_directory(lake_directory: str) -> Path:
    """Where the job keeps what belongs to no table."""
    return Path(lake_directory, "_tailrace")


def staging_directory(lake_directory: str) -> str:
    """Where rows wait for the commit that takes them in."""
    return str(own_directory(lake_directory) / "staging")


@contextmanager
def sole_job(lake_directory: str) -> Iterator[None]:
    """Hold the lake while a block runs; the lock ends with the process, however that ends."""
    own = own_directory(lake_directory)
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


_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_FILE: Final = re.compile(r"file:(?://(?:localhost)?)?(/(?!/).*)", re.IGNORECASE | re.DOTALL)
# Spark takes the first for patterns of paths, Delta the second for a character.
_PATTERN: Final = re.compile(r"[\[\]{}*?\\]|%[0-9A-Fa-f]{2}")
_EFFECTIVE: Final = os.access in os.supports_effective_ids


def lake_directory(text: str) -> str:
    """The directory that `--lake` names, a path or file:///path; SetupError for anything else."""
    if not text.strip():
        raise SetupError("--lake is empty; give the directory of the Delta tables")
    url = _URL.match(text)
    if url is None:
        return text
    file = _FILE.fullmatch(text)
    if file is None:
        raise SetupError(
            f"--lake is a local or mounted directory, not a URL such as {url[1]}://…; "
            "mount the storage and give its path, /path or file:///path"
        )
    return unquote(file[1])


def require_place(directory: str) -> None:
    """Raise SetupError where a lake can neither be written nor made; nothing is written."""
    # Links are followed, `..` means what it says: as the tables' paths are made.
    place = Path(directory).resolve()
    odd = _PATTERN.search(str(place))
    if odd is not None:
        raise SetupError(
            f"lake directory {place} has {odd[0]} in its path, which Spark or Delta would take for "
            "something else; choose another"
        )
    for path in (place, *place.parents):
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            continue
        except OSError as error:
            raise unwritable(directory, error) from error
        if not stat.S_ISDIR(mode):
            number = errno.ENOTDIR
        elif not _writable(path):
            number = errno.EACCES
        else:
            return
        where = "" if path == place else f" ({path})"
        raise SetupError(
            f"lake directory {directory} cannot be written: {os.strerror(number)}{where}"
        )


def require_table_place(root: str) -> None:
    """Raise SetupError where a table's directory is there and cannot be written."""
    path = Path(root)
    if path.exists() and not (path.is_dir() and _writable(path)):
        number = errno.EACCES if path.is_dir() else errno.ENOTDIR
        raise SetupError(f"lake table {root} cannot be written: {os.strerror(number)}")


def unwritable(directory: str, error: OSError) -> SetupError:
    """What to raise where the system refuses a lake's directory."""
    return SetupError(f"lake directory {directory} cannot be written: {error.strerror}")


def _writable(path: Path) -> bool:
    return os.access(path, os.W_OK | os.X_OK, effective_ids=_EFFECTIVE)

"""The directory of a lake: local or mounted, because the driver commits through file calls."""

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

from consumer_sdk.transport.private_files import (
    open_private,
    require_own,
    resolve_own,
    umask_for,
)
from spark_consumer.errors import LakeBusyError, SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator


def own_directory(lake_directory: str) -> Path:
    """The directory of the job's own files."""
    return Path(lake_directory, "_tailrace")


def staging_directory(lake_directory: str) -> str:
    """The directory of rows that are not yet committed."""
    return str(own_directory(lake_directory) / "staging")


@contextmanager
def lake_lock(lake_directory: str) -> Iterator[None]:
    """Hold the lock of the lake while a block runs; the system releases it if the process dies."""
    own = own_directory(lake_directory)
    try:
        require_own(own)
        own.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(open_private(own / "lock"), "a")
    except OSError as error:
        raise unwritable(lake_directory, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LakeBusyError(
                f"another spark-consumer keeps the lake {lake_directory}; run one job for all "
                "tables, or choose another --lake directory"
            ) from error
        yield


_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_FILE: Final = re.compile(r"file:(?://(?:localhost)?)?(/(?!/).*)", re.IGNORECASE | re.DOTALL)
# Spark reads the first as a glob pattern, Delta the second as an escaped character.
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


def require_usable_directory(directory: str) -> None:
    """Raise SetupError if the lake can be neither written nor created; writes nothing."""
    # Resolved as the tables' paths are: links are followed, and `..` is the parent directory.
    try:
        place = resolve_own(Path(directory))
    except OSError as error:
        raise unwritable(directory, error) from error
    odd = _PATTERN.search(str(place))
    if odd is not None:
        raise SetupError(
            f"lake directory {place} has {odd[0]} in its path, which Spark or Delta would misread; "
            "choose another directory"
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


def keep_private(directory: str) -> None:
    """Let this process and its children write files as open as the lake is, a new one for us alone.

    An existing directory that its group or all may read keeps being readable for them.
    """
    os.umask(umask_for(Path(directory)))


def require_usable_table_root(root: str) -> None:
    """Raise SetupError if a table's directory exists and cannot be written."""
    path = Path(root)
    if path.exists() and not (path.is_dir() and _writable(path)):
        number = errno.EACCES if path.is_dir() else errno.ENOTDIR
        raise SetupError(f"lake table {root} cannot be written: {os.strerror(number)}")


def unwritable(directory: str, error: OSError) -> SetupError:
    """The error for a lake directory that the system refuses to write."""
    return SetupError(f"lake directory {directory} cannot be written: {error.strerror}")


def _writable(path: Path) -> bool:
    return os.access(path, os.W_OK | os.X_OK, effective_ids=_EFFECTIVE)

"""Files that only their owner may read, and that nobody else has put in our way.

A symbolic link is followed if it belongs to root or to the user of this process: whoever may write
to a shared directory such as /tmp could otherwise choose which of our files is overwritten.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections import deque
from pathlib import Path
from typing import Final

MOST_LINKS: Final = 40
FILE_MODE: Final = 0o600
_NOFOLLOW: Final = getattr(os, "O_NOFOLLOW", 0)


def resolve_own(path: Path) -> Path:
    """The path without symbolic links; PermissionError if one of them is another user's."""
    if sys.platform == "win32":
        return path.resolve()
    place = path.absolute()
    found, parts = Path(place.anchor), deque(place.parts[1:])
    links = 0
    while parts:
        part = parts.popleft()
        if part == "..":
            found = found.parent
            continue
        one = found / part
        try:
            info = one.lstat()
        except (FileNotFoundError, NotADirectoryError):
            found = one
            continue
        if not stat.S_ISLNK(info.st_mode):
            found = one
            continue
        links += 1
        if links > MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        if not _is_trusted(info):
            raise _refused(one, "is a link that belongs to another user")
        target = one.readlink()
        if target.is_absolute():
            found = Path(target.anchor)
        parts.extendleft(reversed([part for part in target.parts if part != target.anchor]))
    return found


def require_own(path: Path) -> None:
    """Raise PermissionError if others may have put this file here for us to write to.

    In a directory that all may write to, a file must belong to root or to this user.
    """
    try:
        info = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISLNK(info.st_mode):
        raise _refused(path, "is a link")
    if path.parent.stat().st_mode & stat.S_IWOTH and not _is_trusted(info):
        raise _refused(path, "belongs to another user")


def open_private(path: Path, flags: int = os.O_RDWR) -> int:
    """Open a file, created with mode 0600 if it is missing; an existing one keeps its mode.

    PermissionError if the name is a link.
    """
    require_own(path)
    if path.exists() and not path.is_file():
        raise _refused(path, "is not a file")
    try:
        return os.open(path, flags | os.O_CREAT | _NOFOLLOW, FILE_MODE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refused(path, "is a link") from error
        raise


def create_private(path: Path, mode: int = FILE_MODE) -> int:
    """Create a file that nobody else may read; FileExistsError if there is a file or link."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NOFOLLOW, FILE_MODE)
    if mode != FILE_MODE:
        path.chmod(mode)
    return descriptor


def write_private(path: Path, content: str, owner: int | None = None) -> None:
    """Write a file that only its owner may read; an existing one keeps owner and mode.

    PermissionError if the name is a link, or another name of a file of somebody else. `owner` is
    a user who may write to the directory besides us.
    """
    with os.fdopen(open_private(path, os.O_WRONLY), "w") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
            raise _refused(path, "is another name of a file")
        if not _is_trusted(info) and info.st_uid != owner:
            raise _refused(path, "belongs to another user")
        file.truncate()
        file.write(content)


def mode_of(path: Path) -> int:
    """The mode that a file keeps when it is replaced; 0600 if there is none yet."""
    try:
        return stat.S_IMODE(path.lstat().st_mode) & 0o777
    except (FileNotFoundError, NotADirectoryError):
        return FILE_MODE


def umask_for(directory: Path) -> int:
    """The umask for what is written below a directory: as open as it is, 077 if it is new."""
    try:
        mode = directory.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = 0
    return 0o077 & ~mode | 0o022


def _is_trusted(info: os.stat_result) -> bool:
    return sys.platform == "win32" or info.st_uid in (0, os.geteuid())


def _refused(path: Path, why: str) -> PermissionError:
    return PermissionError(errno.EPERM, f"{path} {why}; choose another place")

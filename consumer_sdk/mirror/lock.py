"""One writer at a time: a lock on a file that ends with the process, however that ends."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


class FileLock:
    """An exclusive lock held from `acquire` to `release`; the file itself may stay."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        """Whether the lock is ours."""
        return self._descriptor is not None

    def acquire(self) -> bool:
        """Take the lock; False if another process, or another lock of this one, has it."""
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                _lock(descriptor)
            except OSError:
                os.close(descriptor)
                return False
            if self._is_file(descriptor):
                self._descriptor = descriptor
                return True
            # Its last holder has removed it in between: a lock on it keeps nobody out.
            os.close(descriptor)

    def release(self, *, remove: bool = False) -> None:
        """Let go of the lock, and of its file if that is to leave no trace; idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        if sys.platform == "win32":  # where an open file cannot be removed
            os.close(descriptor)
        if remove:
            with suppress(OSError):
                self._path.unlink()
        if sys.platform != "win32":
            os.close(descriptor)

    def _is_file(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        except FileNotFoundError:
            return False

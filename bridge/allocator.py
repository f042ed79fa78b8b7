"""How freed memory goes back to the system."""

from __future__ import annotations

import ctypes
from typing import Final

LARGE_BYTES: Final = 1024 * 1024
_M_MMAP_THRESHOLD: Final = -3


def return_large_blocks() -> bool:
    """Give every block of a large row back as soon as it is freed; False where that is unknown.

    Left alone, glibc raises its threshold to the largest block it has seen (up to 32 MB) and keeps
    twice as much of what was freed: after one large row the process stays several times larger.
    https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES))

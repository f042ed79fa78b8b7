"""Named points at which a test can stop or kill a consumer.

`TAILRACE_HOLD` names a directory. A point acts only if the test has put a file there:
`{point}.hold` makes it wait until the file is gone, `{point}.kill` ends the process as SIGKILL
does. Reaching it leaves `{point}.reached`. Without the variable a point costs one comparison.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Final

_DIRECTORY: Final = os.environ.get("TAILRACE_HOLD") or None
_POLL_SECONDS: Final = 0.02


def hold(point: str) -> None:
    """Block here for as long as the point is held, or die here."""
    if _DIRECTORY is None:
        return
    held, fatal = Path(_DIRECTORY, f"{point}.hold"), Path(_DIRECTORY, f"{point}.kill")
    if not held.exists() and not fatal.exists():
        return
    Path(_DIRECTORY, f"{point}.reached").touch()
    if fatal.exists():
        os.kill(os.getpid(), signal.SIGKILL)
    while held.exists():
        time.sleep(_POLL_SECONDS)

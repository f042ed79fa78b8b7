"""What programs that we start inherit: the variables they need, and no modules from where we are.

Python looks for modules in the working directory first when it is started with `-m`. Anybody may
have put a file there that is called like one of our dependencies.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAMES: Final = frozenset(
    {
        "DYLD_FALLBACK_LIBRARY_PATH",
        "DYLD_LIBRARY_PATH",
        "GLIBC_TUNABLES",
        "HOME",
        "LANG",
        "LANGUAGE",
        "LD_LIBRARY_PATH",
        "LOGNAME",
        "NO_COLOR",
        "OPENSSL_CONF",
        "PATH",
        "SSL_CERT_DIR",
        "SSL_CERT_FILE",
        "SYSTEMROOT",
        "TAILRACE_HOLD",
        "TEMP",
        "TERM",
        "TMP",
        "TMPDIR",
        "TZ",
        "USER",
        "VIRTUAL_ENV",
    }
)
_BEGINNINGS: Final = ("ARROW_", "LC_", "MALLOC_", "OMP_", "PYTHON")
# libpq reads these itself; a connection string without them may mean another server or password.
LIBPQ_VARIABLES: Final = ("PG", "KRB5")


def child_environment(*more: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that a Python program needs which we start, none of which is a secret of ours.

    `more` are the beginnings of the names of further ones that it may have.
    """
    given = os.environ if environment is None else environment
    chosen = {
        name: value
        for name, value in given.items()
        if name in _NAMES or name.startswith((*_BEGINNINGS, *more))
    }
    return {**chosen, **module_search(given)}


def module_search(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables by which a Python child finds our modules, and none in its directory."""
    # An empty entry means the working directory.
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    places = [str(Path(place).absolute()) for place in given if place]
    root = str(Path(__file__).parents[2])
    if root not in {*places, *map(sysconfig.get_path, ("purelib", "platlib"))}:
        places.append(root)
    found = {"PYTHONSAFEPATH": "1"}
    if places:
        found["PYTHONPATH"] = os.pathsep.join(places)
    return found

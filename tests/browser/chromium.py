"""Where Chromium is, and how to get it: `python -m tests.browser.chromium`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """Path of an installed Chromium; the variable CHROMIUM overrides the search."""
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, PROGRAMS)), None)


def install_chromium() -> None:
    """Install Chromium from Debian's packages as root, else the one of playwright."""
    if hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends"]
        subprocess.run(["apt-get", "update", "-qq"], check=False, env=environment)
        subprocess.run([*install, "chromium", "fonts-dejavu-core"], check=False, env=environment)
    if find_chromium() is None:
        subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"], check=True)


def main() -> int:
    """Make sure that there is a Chromium."""
    if find_chromium() is not None:
        return 0
    try:
        install_chromium()
    except subprocess.CalledProcessError:
        sys.exit("no Chromium to be had: install it, or set CHROMIUM to its path")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The version of this distribution."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("tailrace")
except PackageNotFoundError:  # run from a tree that is not installed
    __version__ = "0"

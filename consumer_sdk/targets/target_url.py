"""Opens the target that an address names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from consumer_sdk.errors import UsageError
from consumer_sdk.transport.options import without_secrets

if TYPE_CHECKING:
    from consumer_sdk.targets.target import Target

_EXPECTED = "expected sqlite:///file.db, sqlite:////absolute/file.db or postgresql://…"


def open_target(url: str) -> Target:
    """The target that an address names; a connection is made only when the mirror runs."""
    kind, path = split_url(url)
    if kind == "sqlite":
        from consumer_sdk.targets.sqlite import SqliteTarget

        return SqliteTarget(Path(path))
    from consumer_sdk.targets.postgres import PostgresTarget

    return PostgresTarget(url)


def split_url(url: str) -> tuple[str, str]:
    """("sqlite", path) or ("postgresql", url); an error never shows the address."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"not the address of a target; {_EXPECTED}") from error
    if parts.scheme in ("postgresql", "postgres"):
        return "postgresql", url
    if parts.scheme != "sqlite":
        raise UsageError(f"no target of kind {parts.scheme!r}; {_EXPECTED}")
    path = unquote(parts.path.removeprefix("/"))
    if parts.netloc or not path:
        raise UsageError(f"sqlite needs three slashes and a file; {_EXPECTED}")
    if path == ":memory:":
        raise UsageError(f"a mirror in memory would end with the command; {_EXPECTED}")
    return "sqlite", path


def display_url(url: str) -> str:
    """An address without user and password, for log lines."""
    return url if url.startswith("sqlite:") else without_secrets(url)

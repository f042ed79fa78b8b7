"""Errors of the SDK, grouped by what the caller must do.

CdcError
    UsageError            fix the call or the settings
        UnknownTable      no schema of that table is published; `near` holds similar names
        AccessDenied      NATS refuses the credentials or certificates
    NotAvailable          retry later: no NATS, no bridge answers, or nothing published yet
    SnapshotFailed        the snapshot failed or never completed: request it again
    CorruptData           stop: what was read is not what was written
        VersionTooNew     written by a newer tailrace: upgrade this reader
    GapError              the log no longer holds what follows the stored position: bootstrap again
    TargetError           the target cannot be written: repair it

Each has an `exit_code`, with which `cdc` exits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class CdcError(Exception):
    """The base of all errors of the SDK; the message is one line."""

    exit_code = 1


class UsageError(CdcError):
    """The call or the settings are not valid."""

    exit_code = 2


class UnknownTable(UsageError):
    """No schema of this table is published."""

    exit_code = 1

    def __init__(self, table: str, near: Sequence[str] = ()) -> None:
        hint = f"; did you mean {' or '.join(near)}?" if near else "; `cdc tables` lists them"
        super().__init__(f"table {table} is not published here{hint}")
        self.table = table
        self.near = tuple(near)

    def __reduce__(self) -> tuple[type[UnknownTable], tuple[str, tuple[str, ...]]]:
        return type(self), (self.table, self.near)


class AccessDenied(UsageError):
    """NATS refuses the credentials, or the account lacks a permission."""

    exit_code = 3


class NotAvailable(CdcError):
    """A needed service does not answer; the same call may succeed later."""

    exit_code = 3


class SnapshotFailed(CdcError):
    """The snapshot was refused, failed, or stopped making progress."""

    exit_code = 3


class CorruptData(CdcError):
    """A message, chunk or object is damaged or foreign; no part of it was applied."""

    exit_code = 4


class VersionTooNew(CorruptData):
    """The data carries a wire version larger than this reader understands."""


class GapError(CdcError):
    """The stream no longer holds what follows the wanted sequence.

    `wanted` is the first sequence requested, `first_available` the oldest one still stored (0 if
    the stream is gone).
    """

    exit_code = 4

    def __init__(self, reason: str, wanted: int, first_available: int) -> None:
        super().__init__(
            f"gap in the change stream: {reason} (wanted sequence {wanted}, "
            f"oldest available {first_available}); bootstrap again"
        )
        self.reason = reason
        self.wanted = wanted
        self.first_available = first_available

    def __reduce__(self) -> tuple[type[GapError], tuple[str, int, int]]:
        return type(self), (self.reason, self.wanted, self.first_available)


class TargetError(CdcError):
    """The target cannot be opened or written."""

    exit_code = 3

"""Where a change stands: its LSN, its position in the source, and its message id."""

from __future__ import annotations

import re
from typing import NamedTuple

from consumer_sdk.wire.errors import WireError

_LSN = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})\Z")
_MESSAGE_ID = re.compile(r"([0-9a-f]+)-(.+)-([a-z]+)-([0-9]+)-([0-9a-f]+)\Z")


class Position(NamedTuple):
    """Commit LSN and ordinal in the transaction; comparable only within one source and epoch."""

    commit_lsn: int
    seq: int


class MessageId(NamedTuple):
    """The parts of a message id; in a message of packed rows, `seq` is that of the first row."""

    commit_lsn: int
    token: str
    operation: str
    seq: int
    epoch: int


def parse_lsn(text: str) -> int:
    """Turn an LSN in PostgreSQL's notation, such as `16/B374D848`, into an integer."""
    match = _LSN.match(text)
    if match is None:
        raise WireError(f"not an LSN: {text!r}; expected a form like 16/B374D848")
    return (int(match[1], 16) << 32) | int(match[2], 16)


def format_lsn(value: int) -> str:
    """Turn an integer into an LSN in PostgreSQL's notation, such as `16/B374D848`."""
    return f"{value >> 32:X}/{value & 0xFFFFFFFF:X}"


def message_id(commit_lsn: int, token: str, operation: str, seq: int, epoch: int) -> str:
    """Build `{lsn}-{table}-{operation}-{seq}-{epoch}`: LSN and epoch in hexadecimal, seq in
    decimal, operation in lower case."""
    return f"{commit_lsn:x}-{token}-{operation.lower()}-{seq}-{epoch:x}"


def parse_message_id(text: str) -> MessageId:
    """Split a message id into the parts that `message_id` joined."""
    match = _MESSAGE_ID.match(text)
    if match is None:
        raise WireError(f"not a message id: {text!r}")
    return MessageId(int(match[1], 16), match[2], match[3], int(match[4]), int(match[5], 16))

"""Identity of a message in the stream: `{lsn}-{table}-{operation}-{seq}-{epoch}`."""

from __future__ import annotations

import re
from typing import NamedTuple

from consumer_sdk.wire.errors import WireError

_ID = re.compile(r"([0-9a-f]+)-(.+)-([a-z]+)-([0-9]+)-([0-9a-f]+)\Z")


class MessageId(NamedTuple):
    """The parts of a message id; `seq` is the first ordinal where rows are packed."""

    commit_lsn: int
    token: str
    operation: str
    seq: int
    epoch: int


def message_id(commit_lsn: int, token: str, operation: str, seq: int, epoch: int) -> str:
    """Build the id; LSN and epoch in hexadecimal, seq in decimal, operation in lower case."""
    return f"{commit_lsn:x}-{token}-{operation.lower()}-{seq}-{epoch:x}"


def parse_message_id(text: str) -> MessageId:
    """Undo `message_id`."""
    match = _ID.match(text)
    if match is None:
        raise WireError(f"not a message id: {text!r}")
    return MessageId(int(match[1], 16), match[2], match[3], int(match[4]), int(match[5], 16))

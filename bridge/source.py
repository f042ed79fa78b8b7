"""The source of a streaming session: one frozen value that all its parts share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from consumer_sdk.wire.envelope import JSON, MSGPACK

if TYPE_CHECKING:
    from consumer_sdk.wire.subjects import Subjects


@dataclass(frozen=True, slots=True)
class Source:
    """Name, epoch, publication, subjects and encoding of one streaming session."""

    name: str
    """The slot's name."""
    epoch: int
    publication: str
    subjects: Subjects
    as_json: bool

    @property
    def content_type(self) -> str:
        """MIME type of the messages and documents of this source."""
        return JSON if self.as_json else MSGPACK

"""How far a source has got, as it says itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from consumer_sdk.errors import CorruptData, VersionTooNew
from consumer_sdk.reading.decoder import parse_headers
from consumer_sdk.wire.envelope import JSON, decode_payload, unsigned
from consumer_sdk.wire.errors import MISFITS, WireError, WireVersionError
from consumer_sdk.wire.subjects import table_token

if TYPE_CHECKING:
    from consumer_sdk.reading.stream import Frame


@dataclass(frozen=True, slots=True)
class Progress:
    """Every change with end LSN at or below `lsn` is stored at a sequence up to `stream_seq`.

    `source_lsn` is how far the source itself had got when it was written; `gap` tells what was
    lost, None where nothing was.
    """

    source: str
    epoch: int
    lsn: int
    stream_seq: int
    source_lsn: int
    stream_created: int
    ts: int
    gap: Any
    document: dict[str, Any]

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Progress:
        """Read a progress document; CorruptData if it is not one."""
        try:
            return cls(
                source=str(document["source"]),
                epoch=unsigned(document, "epoch"),
                lsn=unsigned(document, "lsn"),
                stream_seq=unsigned(document, "stream_seq"),
                source_lsn=int(document.get("source_lsn") or 0),
                stream_created=int(document.get("stream_created") or 0),
                ts=int(document.get("ts") or 0),
                gap=document.get("gap") or None,
                document=document,
            )
        except (WireError, *MISFITS) as error:
            raise CorruptData(f"damaged progress message: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Gap:
    """What a source says of changes that the stream does not hold."""

    reason: str
    tables: frozenset[str] | None
    """Tokens of the tables concerned; None stands for all of them."""

    def concerns(self, schema: str, table: str) -> bool:
        """Whether readers of a table need a new snapshot."""
        return self.tables is None or table_token(schema, table) in self.tables


def gap_of(document: dict[str, Any]) -> Gap | None:
    """The gap that a progress document announces."""
    gap = document.get("gap")
    if not gap:
        return None
    fields = gap if isinstance(gap, dict) else {"reason": gap}
    tables = fields.get("tables")
    return Gap(
        reason=str(fields.get("reason") or "no reason given"),
        tables=frozenset(map(str, tables)) if isinstance(tables, list) else None,
    )


def decode_progress(frame: Frame) -> Progress:
    """The progress in a stored message, of the stream or of the bucket."""
    headers = parse_headers(frame.headers) or {}
    if "Content-Type" not in headers and frame.payload[:1] == b"{":
        headers["Content-Type"] = JSON
    try:
        return Progress.from_document(decode_payload(headers, frame.payload))
    except WireVersionError as error:
        raise VersionTooNew(f"progress message: {error}") from error
    except WireError as error:
        raise CorruptData(f"progress message: {error}") from error

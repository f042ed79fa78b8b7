"""How far the stream has got with a source, from progress messages and from stored events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from consumer_sdk.errors import CorruptData, VersionTooNew
from consumer_sdk.transport.api import get_message, parse_headers
from consumer_sdk.wire.envelope import JSON, decode_payload, unsigned
from consumer_sdk.wire.errors import MISFITS, WireError, WireVersionError
from consumer_sdk.wire.subjects import table_token

if TYPE_CHECKING:
    from consumer_sdk.reading.deployment import Deployment
    from consumer_sdk.transport.api import Frame


@dataclass(frozen=True, slots=True)
class Progress:
    """Every change with an end LSN up to `lsn` is stored at a sequence up to `stream_seq`.

    `source_lsn` is how far PostgreSQL's own log had got at the time of writing. `gap` describes
    lost changes, None if there are none.
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
    """Changes that the stream does not hold, as the bridge announces them."""

    reason: str
    tables: frozenset[str] | None
    """Tokens of the affected tables; None means all tables of the source."""

    def concerns(self, schema: str, table: str) -> bool:
        """Whether readers of a table need a new snapshot."""
        return self.tables is None or table_token(schema, table) in self.tables


def gap_of(document: dict[str, Any]) -> Gap | None:
    """The gap that a progress document announces, None if it announces none."""
    gap = document.get("gap")
    if not gap:
        return None
    fields = gap if isinstance(gap, dict) else {"reason": gap}
    tables = fields.get("tables")
    return Gap(
        reason=str(fields.get("reason") or "no reason given"),
        tables=frozenset(map(str, tables)) if isinstance(tables, list) else None,
    )


async def find_progress(deployment: Deployment, source: str) -> Progress | None:
    """The newest progress of a source; None if it never wrote any."""
    subjects = deployment.subjects
    bucket = subjects.bridge_bucket
    # The bucket keeps the newest one, because retention removes it from the stream.
    kept = {"last_by_subj": f"$KV.{bucket}.progress.{source}"}
    frames = [
        await deployment.cdc_message({"last_by_subj": subjects.progress(source)}),
        await get_message(deployment.nc, f"KV_{bucket}", kept),
    ]
    found = [decode_progress(frame) for frame in frames if frame is not None and frame.payload]
    if any(one.source != source for one in found):
        raise CorruptData(f"progress message of source {source}: it belongs to another source")
    return max(found, key=lambda one: (one.epoch, one.lsn), default=None)


async def newest_lsn(deployment: Deployment, source: str, epoch: int, wanted_lsn: int) -> int:
    """The largest commit LSN of a source known to be stored; stops searching at `wanted_lsn`.

    Every transaction of the epoch with a smaller commit LSN is stored before it. LSNs of other
    epochs are ignored: after a restore from a backup they may be larger than the current ones.
    """
    progress = await find_progress(deployment, source)
    newest = progress.lsn if progress is not None and progress.epoch == epoch else 0
    if newest >= wanted_lsn:
        return newest
    bounds = await deployment.cdc_bounds()
    requests: list[dict[str, Any]] = [{"seq": bounds.last}] if bounds.last >= bounds.first else []
    subjects = deployment.subjects
    requests += [
        {"last_by_subj": subjects.table_filter(table_token(schema.schema, schema.table))}
        for schema in await deployment.schemas.all()
        if schema.source == source
    ]
    decoder = deployment.decoder()
    for request in requests:
        frame = await deployment.cdc_message(request)
        if frame is None:
            continue
        for stored in await decoder.decode([frame]):
            event = stored.event
            ours = event.source == source and event.epoch == epoch
            if ours and event.operation not in ("SCHEMA", "MESSAGE"):
                newest = max(newest, event.commit_lsn)
        if newest >= wanted_lsn:
            break
    return newest


def decode_progress(frame: Frame) -> Progress:
    """Decode a progress message of the stream, or a value of the bucket."""
    headers = parse_headers(frame.headers) or {}
    if "Content-Type" not in headers and frame.payload[:1] == b"{":
        headers["Content-Type"] = JSON
    try:
        return Progress.from_document(decode_payload(headers, frame.payload))
    except WireVersionError as error:
        raise VersionTooNew(f"progress message: {error}") from error
    except WireError as error:
        raise CorruptData(f"progress message: {error}") from error

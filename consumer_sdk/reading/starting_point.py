"""Where to start reading: now, the start, a sequence, a time, or a position of each source."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Literal, NamedTuple

from consumer_sdk.errors import CorruptData, GapError, UsageError
from consumer_sdk.reading.proof import Selection, Trimming
from consumer_sdk.reading.pull import PullConsumer
from consumer_sdk.reading.transactions import COUNTED
from consumer_sdk.transport.api import probe_consumer
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.wire.position import Position

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from consumer_sdk.reading.decoder import Stored
    from consumer_sdk.reading.deployment import Deployment
    from consumer_sdk.reading.schemas import TableName
    from consumer_sdk.transport.api import Frame, StreamBounds


class SourcePosition(NamedTuple):
    """A position together with the epoch in which it is comparable."""

    epoch: int
    commit_lsn: int
    seq: int


if TYPE_CHECKING:
    After = Literal["now", "start"] | int | datetime | Mapping[str, SourcePosition]
else:
    After = object

_NEARBY = 64
_WINDOW = 1024


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """The stream sequence to start at, and the events to drop after it.

    `after` holds a position for each source and epoch: events up to it are dropped. `cut` holds
    transactions, as (source, commit LSN), that began before the sequence: they are dropped too.
    """

    sequence: int
    created: int
    lenient: bool = False
    after: Mapping[tuple[str, int], Position] = field(default_factory=dict)
    cut: frozenset[tuple[str, int]] = frozenset()


async def find_starting_point(
    deployment: Deployment, after: After, tables: Sequence[TableName] | None = ()
) -> StartingPoint:
    """Turn what the caller asks for into a sequence of the stream.

    For `tables`, transactions that would begin in the middle are found. A position older than the
    stream raises GapError.
    """
    bounds = await deployment.cdc_bounds()
    if tables is None and after == "now":
        tables = [(schema.schema, schema.table) for schema in await deployment.schemas.all()]
    probe = _Probe(deployment, bounds, deployment.filters(tables) if tables else ())
    if isinstance(after, str):
        if after == "start":
            cut = await probe.cut_at(bounds.first)
            return StartingPoint(bounds.first, bounds.created, lenient=True, cut=cut)
        if after == "now":
            return await probe.end()
    elif isinstance(after, bool):
        pass
    elif isinstance(after, int):
        if after < 0:
            raise UsageError(f"not a stream sequence: {after}")
        return StartingPoint(after + 1, bounds.created, cut=await probe.cut_at(after + 1))
    elif isinstance(after, datetime):
        sequence = await probe.sequence_at(after)
        return StartingPoint(sequence, bounds.created, True, cut=await probe.cut_at(sequence))
    elif isinstance(after, Mapping):
        positions = {source: SourcePosition(*position) for source, position in after.items()}
        sequence = await probe.sequence_after(positions)
        dropped = {
            (source, position.epoch): Position(position.commit_lsn, position.seq)
            for source, position in positions.items()
        }
        return StartingPoint(sequence, bounds.created, after=dropped)
    raise UsageError(
        'start after "now", "start", a sequence, a datetime or {source: SourcePosition}'
    )


class _Probe:
    """Reads single messages of the stream to find sequences."""

    def __init__(
        self, deployment: Deployment, bounds: StreamBounds, filters: Sequence[str]
    ) -> None:
        self._deployment = deployment
        self._nc = deployment.nc
        self._subjects = deployment.subjects
        self._decoder = deployment.decoder()
        self._bounds = bounds
        self._filters = filters

    async def cut_at(self, sequence: int) -> frozenset[tuple[str, int]]:
        """The transactions that begin before a sequence and end after it."""
        before = [one[-1] for one in await self._readable(sequence - _NEARBY, sequence)]
        if sequence > self._bounds.last:
            newest = await self._newest()
            before += [stored for stored in newest if stored.stream_seq < sequence]
        cut, settled = _open_after(before)
        # Older messages may be trimmed: an ordinal above 0 in the first event shows that.
        for message in await self._readable(sequence, sequence + _NEARBY):
            event = message[0].event
            if event.operation in COUNTED and event.source not in settled:
                settled.add(event.source)
                if event.seq > 0:
                    cut.add((event.source, event.commit_lsn))
        return frozenset(cut)

    async def end(self) -> StartingPoint:
        """The end of the stream, and the transactions that are open there.

        The last messages may all be of another source, so each table's last one is asked for. Its
        successors may arrive meanwhile: the end is looked up afterwards, and what came is read.
        """
        since = self._bounds.last + 1
        before = await self._newest()
        self._bounds = bounds = await self._deployment.cdc_bounds()
        sequence = bounds.last + 1
        start = min(since, sequence - _NEARBY)
        before += [one[-1] for one in await self._readable(start, sequence)]
        cut, _ = _open_after(before)
        return StartingPoint(sequence, bounds.created, cut=frozenset(cut))

    async def _readable(self, start: int, end: int) -> list[list[Stored]]:
        """The events of each message stored in [start, end); damaged messages are skipped."""
        async with aclosing(self._messages(start, end, lenient=True)) as messages:
            return [message async for message in messages]

    async def _messages(
        self, start: int, end: int, *, lenient: bool = False
    ) -> AsyncGenerator[list[Stored], None]:
        """The events of each message stored in [start, end) and within the stream's bounds."""
        start = max(self._bounds.first, start)
        end = min(end, self._bounds.last + 1)
        if start >= end:
            return
        everything = Selection(
            self._subjects.cdc_stream,
            [self._subjects.cdc_all],
            start,
            trimming=Trimming.ALLOWED,
        )
        consumer = PullConsumer(self._nc, everything, window=min(_WINDOW, 2 * (end - start)))
        try:
            while consumer.next_sequence < end:
                frames = await consumer.take(_NEARBY, wait=1.0)
                for frame in frames:
                    if frame.stream_seq < end:
                        # The caller did not ask for these messages, so damage in them is no error.
                        with suppress(CorruptData) if lenient else nullcontext():
                            if stored := await self._decoder.decode([frame]):
                                yield stored
                if not frames and consumer.caught_up and await consumer.is_through(end):
                    break
        finally:
            await consumer.close()

    async def _newest(self) -> list[Stored]:
        """The last event of each table to be read."""
        found: list[Stored] = []
        for subject in self._filters:
            frame = await self._deployment.cdc_message({"last_by_subj": subject})
            if frame is not None:
                with suppress(CorruptData):
                    found += (await self._decoder.decode([frame]))[-1:]
        return found

    async def sequence_at(self, when: datetime) -> int:
        """The first sequence stored at or after a time."""
        if when.tzinfo is None:
            raise UsageError("a time to start at needs a time zone")
        start = {"deliver_policy": "by_start_time", "opt_start_time": when.isoformat()}
        info = await probe_consumer(self._nc, self._subjects.cdc_stream, start)
        found = int(info["delivered"]["stream_seq"]) + 1
        return max(self._bounds.first, min(found, self._bounds.last + 1))

    async def sequence_after(self, positions: Mapping[str, SourcePosition]) -> int:
        """A sequence such that all events of these sources before it are up to their positions.

        The positions of a source grow along the stream, so bisection finds it.
        """
        if not positions:
            raise UsageError("no position is given to start after")
        return min([await self._sequence_after(*item) for item in positions.items()])

    async def _sequence_after(self, source: str, position: SourcePosition) -> int:
        low, high = self._bounds.first, self._bounds.last + 1
        # Invariant: every event of the source stored before `low` is at or before `position`. The
        # check of the first event makes it true at the start.
        first = await self._next_of(source, low, high)
        if first is None:
            raise GapError(f"nothing of source {source} is stored", low, low)
        if _position_of(first) > position:
            raise GapError(
                f"the position of source {source} was trimmed or purged", low, first.stream_seq
            )
        while low < high:
            middle = (low + high) // 2
            found = await self._next_of(source, middle, high)
            if found is None or _position_of(found) > position:
                high = middle
            else:
                low = found.stream_seq + 1
        newer = await self._next_of(source, low, self._bounds.last + 1)
        if newer is not None and newer.event.epoch != position.epoch:
            raise GapError(
                f"source {source} began a new epoch after the position", low, newer.stream_seq
            )
        return low

    async def _next_of(self, source: str, start: int, end: int) -> Stored | None:
        """The last event of the first message of counted events of a source in [start, end)."""
        at = start
        # The next message is mostly of this source. If not, a consumer is faster than requests.
        if start < end and (frame := await self._message_at(start)) is not None:
            at = frame.stream_seq + 1
            found = await self._decoder.decode([frame]) if at <= end else []
            if found and _is_counted(found[-1], source):
                return found[-1]
        async with aclosing(self._messages(at, end)) as messages:
            async for message in messages:
                if _is_counted(message[-1], source):
                    return message[-1]
        return None

    async def _message_at(self, sequence: int) -> Frame | None:
        """The first message stored at or after a sequence."""
        await stay_cancelled()
        return await self._deployment.cdc_message(
            {"seq": sequence, "next_by_subj": self._subjects.cdc_all}
        )


def _open_after(stored: list[Stored]) -> tuple[set[tuple[str, int]], set[str]]:
    """The transactions that the last event of each source leaves open; and the sources seen."""
    cut: set[tuple[str, int]] = set()
    settled: set[str] = set()
    for one in sorted(stored, key=_sequence, reverse=True):
        event = one.event
        if event.operation in COUNTED and event.source not in settled:
            settled.add(event.source)
            if not event.last and event.operation != "COMMIT":
                cut.add((event.source, event.commit_lsn))
    return cut, settled


def _is_counted(stored: Stored, source: str) -> bool:
    return stored.event.source == source and stored.event.operation in COUNTED


def _sequence(stored: Stored) -> int:
    return stored.stream_seq


def _position_of(stored: Stored) -> SourcePosition:
    event = stored.event
    return SourcePosition(event.epoch, event.commit_lsn, event.seq)

"""Where to begin reading: now, the start, a sequence, a time, or a position of each source."""

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
    """A stream sequence, and what must be dropped after it.

    `cut` names transactions, as (source, commit LSN), that began before the sequence.
    """

    sequence: int
    created: int
    lenient: bool = False
    after: Mapping[tuple[str, int], Position] = field(default_factory=dict)
    cut: frozenset[tuple[str, int]] = frozenset()


async def find_starting_point(
    deployment: Deployment, after: After, tables: Sequence[TableName] | None = ()
) -> StartingPoint:
    """Turn what the caller asks for into a sequence of the stream as it stands.

    `tables` are those whose transactions must not begin half way. A position that the stream does
    not reach back to raises GapError.
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
            sequence = bounds.last + 1
            return StartingPoint(sequence, bounds.created, cut=await probe.cut_at(sequence))
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
        positions = {source: SourcePosition(*place) for source, place in after.items()}
        sequence = await probe.sequence_after(positions)
        dropped = {
            (source, place.epoch): Position(place.commit_lsn, place.seq)
            for source, place in positions.items()
        }
        return StartingPoint(sequence, bounds.created, after=dropped)
    raise UsageError(
        'start after "now", "start", a sequence, a datetime or {source: SourcePosition}'
    )


class _Probe:
    """Looks at single messages of the stream."""

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
        """The transactions that are under way at a sequence: begun before it, not yet ended."""
        cut: set[tuple[str, int]] = set()
        settled: set[str] = set()
        before = [one[-1] for one in await self._near(sequence - _NEARBY, sequence)]
        if sequence > self._bounds.last:
            # Another source may have filled the last messages, so the tables' own are read too.
            before += await self._newest()
            before.sort(key=_sequence)
        for stored in reversed(before):
            event = stored.event
            if event.operation in COUNTED and event.source not in settled:
                settled.add(event.source)
                if not event.last and event.operation != "COMMIT":
                    cut.add((event.source, event.commit_lsn))
        # Older messages may be trimmed: a first event with an ordinal above 0 lacks its beginning.
        for message in await self._near(sequence, sequence + _NEARBY):
            event = message[0].event
            if event.operation in COUNTED and event.source not in settled:
                settled.add(event.source)
                if event.seq > 0:
                    cut.add((event.source, event.commit_lsn))
        return frozenset(cut)

    async def _near(self, start: int, end: int) -> list[list[Stored]]:
        """The events of each message stored in [start, end), without those that are damaged."""
        async with aclosing(self._messages(start, end, lenient=True)) as messages:
            return [message async for message in messages]

    async def _messages(
        self, start: int, end: int, *, lenient: bool = False
    ) -> AsyncGenerator[list[Stored], None]:
        """The events of each message stored in [start, end), as far as the stream goes."""
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
                        # Damage outside what the caller asked for is no reason to fail.
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
            if frame is not None and frame.stream_seq <= self._bounds.last:
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
        """A sequence before which nothing of these sources lies after its position.

        Positions of a source grow along the stream, so bisection finds it.
        """
        if not positions:
            raise UsageError("no position is given to start after")
        return min([await self._sequence_after(*item) for item in positions.items()])

    async def _sequence_after(self, source: str, place: SourcePosition) -> int:
        low, high = self._bounds.first, self._bounds.last + 1
        # Invariant: everything of the source stored below `low` is at or before `place`, provided
        # that this holds at the first sequence, which is checked first.
        first = await self._next_of(source, low, high)
        if first is None:
            raise GapError(f"nothing of source {source} is stored", low, low)
        if _place(first) > place:
            raise GapError(
                f"the position of source {source} was trimmed or purged", low, first.stream_seq
            )
        while low < high:
            middle = (low + high) // 2
            found = await self._next_of(source, middle, high)
            if found is None or _place(found) > place:
                high = middle
            else:
                low = found.stream_seq + 1
        newer = await self._next_of(source, low, self._bounds.last + 1)
        if newer is not None and newer.event.epoch != place.epoch:
            raise GapError(
                f"source {source} began a new epoch after the position", low, newer.stream_seq
            )
        return low

    async def _next_of(self, source: str, start: int, end: int) -> Stored | None:
        """The last event of the first message of counted events of a source in [start, end)."""
        at = start
        # The next message is mostly one. If not, reading a run is quicker than single requests.
        if start < end and (frame := await self._message_at(start)) is not None:
            at = frame.stream_seq + 1
            found = await self._decoder.decode([frame]) if at <= end else []
            if found and _counts(found[-1], source):
                return found[-1]
        async with aclosing(self._messages(at, end)) as messages:
            async for message in messages:
                if _counts(message[-1], source):
                    return message[-1]
        return None

    async def _message_at(self, sequence: int) -> Frame | None:
        """The first message stored at or after a sequence."""
        await stay_cancelled()
        return await self._deployment.cdc_message(
            {"seq": sequence, "next_by_subj": self._subjects.cdc_all}
        )


def _counts(stored: Stored, source: str) -> bool:
    return stored.event.source == source and stored.event.operation in COUNTED


def _sequence(stored: Stored) -> int:
    return stored.stream_seq


def _place(stored: Stored) -> SourcePosition:
    event = stored.event
    return SourcePosition(event.epoch, event.commit_lsn, event.seq)

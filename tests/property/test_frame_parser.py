"""The fast lane delivers what nats-py's own parser would, however the bytes are cut."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from nats.protocol.parser import Parser

from consumer_sdk.transport.frame_parser import FrameParser

TAPPED, OTHER = 7, 8
words = st.text("abc.$_-019", min_size=1, max_size=30).map(str.encode)
bodies = st.binary(max_size=300) | st.just(b"x" * 200_000)


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """One protocol message as a server sends it."""
    kind = draw(st.sampled_from(["HMSG", "HMSG", "HMSG", "bare HMSG", "MSG", "PING", "PONG"]))
    if kind in ("PING", "PONG"):
        return kind.encode() + b"\r\n"
    sid = draw(st.sampled_from([TAPPED, TAPPED, TAPPED, OTHER]))
    body = draw(bodies)
    subject, reply = draw(words), draw(words)
    if kind == "MSG":
        return b"MSG %b %d %b %d\r\n%b\r\n" % (subject, sid, reply, len(body), body)
    header = b"NATS/1.0\r\nA: %b\r\n\r\n" % draw(words)
    total = len(header) + len(body)
    if kind == "bare HMSG":
        return b"HMSG %b %d %d %d\r\n%b%b\r\n" % (subject, sid, len(header), total, header, body)
    return b"HMSG %b %d %b %d %d\r\n%b%b\r\n" % (
        subject, sid, reply, len(header), total, header, body,
    )  # fmt: skip


class Recorder:
    """Notes what a parser hands over."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None
    ) -> None:
        self.seen.append((sid, bytes(subject), bytes(reply), data, headers))

    async def _process_ping(self) -> None:
        self.seen.append("PING")

    async def _process_pong(self) -> None:
        self.seen.append("PONG")

    def tap(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        self.seen.append((TAPPED, subject, reply, payload, headers))


async def parse(parser: Parser, wire: bytes, cuts: list[int]) -> None:
    places = sorted({0, len(wire), *(cut % (len(wire) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(places):
        await parser.parse(wire[start:end])


@given(st.lists(frames(), max_size=8), st.lists(st.integers(0, 2**20), max_size=8))
def test_the_fast_lane_hands_over_what_the_parser_would(
    parts: list[bytes], cuts: list[int]
) -> None:
    wire = b"".join(parts)
    usual, fast = Recorder(), Recorder()
    asyncio.run(parse(Parser(usual), wire, cuts))
    asyncio.run(parse(FrameParser(fast, {TAPPED: fast.tap}), wire, cuts))  # type: ignore[arg-type]
    assert fast.seen == usual.seen
    assert len(fast.seen) == len(parts)

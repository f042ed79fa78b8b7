"""The result: what was committed is what is stored, what is mirrored, what is in the lake."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from bridge.demo import shop
from bridge.demo.console import pad
from bridge.demo.ledger import Ledger, differences
from bridge.demo.programs import Programs, completed, output

if TYPE_CHECKING:
    from collections import Counter

    from bridge.demo.console import Console
    from bridge.demo.stream_watch import StreamWatch
    from bridge.demo.survey import Surveyor
    from bridge.embedded import GuardedProcess

ARRIVAL_SECONDS: Final = 60.0
MIRROR_SECONDS: Final = 120.0
VERIFY_SECONDS: Final = 120.0
_POLL_SECONDS: Final = 0.1

_OPERATIONS: Final = ("insert", "update", "delete", "truncate")


async def check_stream(console: Console, ledger: Ledger, stream: StreamWatch) -> list[str]:
    """Wait for the last change, then compare the server's own counts; what differs is returned."""
    with console.step("waiting for the last change to arrive") as step:
        if await stream.holds_end_mark(ARRIVAL_SECONDS):
            step.done("the last change has arrived in the stream")
        else:
            step.failed(f"the last change has not arrived in {ARRIVAL_SECONDS:g} s")
    stored = await stream.counts()
    console.line()
    for line in count_table(ledger.changes, stored):
        console.line(line)
    console.line()
    problems = differences(ledger.changes, stored)
    with console.step("") as step:
        if problems:
            step.failed(f"{ledger.total:,} changes committed, {stored.total():,} events stored")
        else:
            step.done(f"{ledger.total:,} changes committed = {stored.total():,} events stored")
    return problems


def count_table(made: Counter[tuple[str, str]], stored: Counter[tuple[str, str]]) -> list[str]:
    """What was committed, by table and operation, beside what is stored."""
    headings = ("inserts", "updates", "deletes", "truncates", "committed", "stored")
    lines = [f" {pad('table', 16)}" + "".join(pad(h, 10, right=True) for h in headings)]
    for token in shop.tokens():
        counts = [made[token, operation] for operation in _OPERATIONS]
        cells = [*counts, sum(counts), sum(stored[token, op] for op in _OPERATIONS)]
        lines.append(f" {pad(token, 16)}" + "".join(pad(f"{c:,}", 10, right=True) for c in cells))
    return lines


async def check_mirror(
    console: Console,
    programs: Programs,
    mirror: GuardedProcess,
    surveyor: Surveyor,
    *,
    source: str,
    replica: str,
) -> list[str]:
    """Let the mirror show its tables, then compare it with the source by `cdc verify`."""
    with console.step("waiting for the mirror") as step:
        deadline = time.monotonic() + MIRROR_SECONDS
        while len((await asyncio.to_thread(surveyor.look)).mirror_rows) < len(shop.TABLES):
            if not mirror.running:
                step.failed("the mirror has ended")
                said = (output(mirror) or ["without a word"])[-1]
                return [f"cdc mirror ended with exit code {mirror.exit_code}: {said}"]
            if time.monotonic() > deadline:
                step.failed(f"the mirror has not shown its tables in {MIRROR_SECONDS:g} s")
                return ["the mirror has no tables to compare"]
            step.show()
            await asyncio.sleep(_POLL_SECONDS)
        step.done("the mirror has all tables")
    with console.step("cdc verify") as step:
        process = programs.start(
            "cdc", "verify", *shop.names(), "--source", source, "--replica", replica
        )
        problem = await completed(process, VERIFY_SECONDS, step.show)
        if problem is None:
            step.done("cdc verify: the mirror equals the source, row by row")
            return []
        step.failed("cdc verify: the mirror does not equal the source")
    for line in output(process)[-20:]:
        console.line(f"     {line}")
    return [problem]

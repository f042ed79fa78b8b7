"""A short run of the campaign; `make prove` runs a long one."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from tests.fault.campaign import applicable, draw, run_world
from tests.fault.campaign_report import Results, Round
from tests.fault.judge import INVARIANTS
from tests.fault.scenario import chosen_seed
from tests.fault.world import World

# The faults that take only seconds; other tests cover the slow ones.
QUICK = ("bridge", "mirror", "network", "postgres", "nats")


@pytest.mark.timeout(300)
def test_every_invariant_holds_through_a_handful_of_faults(tmp_path):
    results = Results(tmp_path / "faults.jsonl", "")
    assert asyncio.run(run_world(chosen_seed(), 5, results, only=QUICK))
    (entry,) = results.rounds()
    assert entry["invariants"] == [name for name in INVARIANTS if "Delta" not in name]
    assert "5 faults, 1 rounds, 0 of them failed" in results.table()


async def test_a_failed_round_leaves_what_explains_it(tmp_path):
    async with World(chosen_seed(), mirror=False) as world:
        await world.until_growing(50)
        await world.keep_evidence(tmp_path / "kept")
    logs = {path.name: path.read_text() for path in (tmp_path / "kept").iterdir()}
    (bridge,) = (text for name, text in logs.items() if name.endswith("bridge-1.log"))
    assert "in report" in bridge
    assert "tasks printed" in bridge
    stream = [json.loads(line) for line in logs["stream.jsonl"].splitlines()]
    assert {"sequence", "subject", "Nats-Msg-Id", "epoch", "lsn"} <= set(stream[-1])
    assert any("schema_version" in one for one in stream)
    assert not any("data" in one for one in stream)


def test_the_same_seed_draws_the_same_faults():
    kinds = applicable({"single", "mirror"}, ())
    one, other = (draw(kinds, random.Random(7), 50) for _ in range(2))
    assert one == other
    assert draw(kinds, random.Random(8), 50) != one


def test_the_page_keeps_what_was_written_by_hand(tmp_path):
    results = Results(tmp_path / "faults.jsonl", "abc")
    page = tmp_path / "page.md"
    results.write_page(page)
    page.write_text(f"before\n{page.read_text()}\nafter")
    results.append(Round(7, ["single"], [], [("bridge: kill -9", 1.5)], 2.0, ["order"], 1, "lost"))
    results.write_page(page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter")
    assert "| bridge: kill -9 | 1 | held 0, failed 1 | 1.5 s | 7 |" in text
    assert "| 7 (single) | lost |" in text

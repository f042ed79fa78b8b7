"""A reproducible proof: a seeded campaign of faults against a world under load.

    python -m tests.fault.campaign --seed 7 --faults 50
    python -m tests.fault.campaign --cluster --add 200
    python -m tests.fault.campaign --with-spark --faults 20
    python -m tests.fault.campaign --report

The seed determines the faults and all their random choices. After a few faults the writers stop and
every invariant is checked. The outcome of each round is appended to the results file with its seed
and commit; the table of all results is printed and written as Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from tests.fault.campaign_report import Results, Round
from tests.fault.faults import FAULTS, Fault
from tests.fault.world import World

if TYPE_CHECKING:
    from collections.abc import Sequence

ROUND = 5
FAULTS_PER_WORLD = 25
HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "faults.jsonl", HERE / "FAULTS.md"


class Campaign:
    """One world and the faults that its seed determines."""

    def __init__(self, world: World, seed: int, results: Results, only: Sequence[str] = ()) -> None:
        self._world = world
        self._seed = seed
        self._results = results
        self._kinds = applicable(world.features, only)
        self._drawing = random.Random(seed)
        self._injected = 0

    async def run(self, faults: int, per_round: int = ROUND) -> bool:
        """Inject a number of faults; True if every invariant held."""
        world = self._world
        print(f"seed {self._seed}: PostgreSQL {world.postgres.version}, {' '.join(world.flags)}")
        await world.until_growing(50)
        await world.judge.barrier()
        world.load.resume()
        while self._injected < faults:
            count = min(per_round, faults - self._injected)
            if not await self._round(draw(self._kinds, self._drawing, count)):
                return False
        return True

    async def _round(self, drawn: Sequence[Fault]) -> bool:
        world = self._world
        began = time.monotonic()
        done: list[tuple[str, float]] = []
        invariants: list[str] = []
        problem = ""
        try:
            for kind in drawn:
                at = time.monotonic()
                print(f"{time.strftime('%H:%M:%S')}  {kind.name}", flush=True)
                self._injected += 1
                await self._inject(kind, random.Random(f"{self._seed}-{self._injected}"))
                world.judge.check_memory()
                done.append((kind.name, time.monotonic() - at))
            invariants = await world.judge.barrier()
            world.load.resume()
        except Exception:  # noqa: BLE001 - any error is a result
            problem = traceback.format_exc()
            print(f"{problem}\n{world.bridge_log()}", flush=True)
            kept = self._results.evidence / f"{self._seed}-{time.time_ns():x}"
            try:
                await world.keep_evidence(kept)
            except Exception:  # noqa: BLE001 - the failure itself must still be recorded
                traceback.print_exc()
            print(f"evidence: {kept}", flush=True)
            if len(done) < len(drawn):
                done.append((drawn[len(done)].name, 0.0))
        self._results.append(
            Round(
                seed=self._seed,
                features=sorted(world.features),
                flags=world.flags,
                faults=done,
                seconds=time.monotonic() - began,
                invariants=invariants,
                memory=world.judge.memory_seen,
                problem=_gist(problem),
            )
        )
        return not problem

    async def _inject(self, kind: Fault, rng: random.Random) -> None:
        world = self._world
        if not kind.at_rest:
            await world.until_all_run()
            with world.scenario.sampling():
                await kind.act(world, rng)
                await world.until_ready()
                await world.until_growing(10)
            return
        await world.judge.barrier()
        await kind.act(world, rng)
        if kind.gap:
            world.judge.gaps_expected += 1
            await world.scenario.drained()
            await world.judge.catch_up()
            world.judge.rebase()
        world.load.resume()


def draw(kinds: Sequence[Fault], rng: random.Random, count: int) -> list[Fault]:
    """The next faults of a seed."""
    return rng.choices(kinds, [kind.weight for kind in kinds], k=count)


def _gist(problem: str) -> str:
    """The line of a traceback that names the error."""
    lines = problem.strip().splitlines()
    named = [line for line in lines if line and not line.startswith((" ", "Traceback"))]
    return named[0] if named else ""


def applicable(features: set[str], only: Sequence[str]) -> list[Fault]:
    """The faults that a world can have."""
    kinds = [kind for kind in FAULTS if kind.fits(features)]
    if only:
        kinds = [kind for kind in kinds if kind.name in only or kind.name.split(":")[0] in only]
    if not kinds:
        names = "\n  ".join(kind.name for kind in FAULTS)
        raise SystemExit(f"no such fault; there are\n  {names}")
    return kinds


async def run_world(
    seed: int,
    faults: int,
    results: Results,
    *,
    mirror: bool = True,
    spark: bool = False,
    cluster: bool = False,
    only: Sequence[str] = (),
    per_round: int = ROUND,
) -> bool:
    """One world with one seed; True if every invariant held."""
    async with World(seed, mirror=mirror, spark=spark, cluster=cluster) as world:
        return await Campaign(world, seed, results, only).run(faults, per_round)


def commit() -> str:
    """The commit under test, with a + if other files than the results have changes."""
    results = [f":!{name}" for name in (RESULTS.name, PAGE.name)]
    commands = (
        ["git", "rev-parse", "--short", "HEAD"],
        ["git", "status", "--porcelain", "-uno", "--", ":/", *results],
    )
    head, changes = (
        subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE).stdout
        for command in commands
    )
    return (head.strip() or "unknown") + ("+" if changes.strip() else "")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fault.campaign", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--seed", type=int, help="repeat this world; default: a new seed each time")
    parser.add_argument("--faults", type=int, default=FAULTS_PER_WORLD, help="in each world")
    parser.add_argument(
        "--add", type=int, metavar="N", help="N further faults, in as many worlds as needed"
    )
    parser.add_argument("--per-round", type=int, default=ROUND, help="faults between two barriers")
    parser.add_argument("--cluster", action="store_true", help="three nats-servers, R3 streams")
    parser.add_argument("--with-spark", action="store_true", help="a Delta table too")
    parser.add_argument("--no-mirror", action="store_true")
    parser.add_argument(
        "--only", action="append", default=[], metavar="FAULT", help="a name, or what is before :"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--markdown", type=Path, default=PAGE)
    parser.add_argument("--report", action="store_true", help="only print the results so far")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign with the given arguments."""
    options = _options(arguments)
    results = Results(options.results, commit())
    held, left = True, 0 if options.report else options.add or options.faults
    while left > 0:
        # Only the first world has the given seed.
        seed, options.seed = options.seed, None
        faults = min(left, options.faults)
        left -= faults
        held &= asyncio.run(
            run_world(
                random.SystemRandom().randrange(1 << 31) if seed is None else seed,
                faults,
                results,
                mirror=not options.no_mirror,
                spark=options.with_spark,
                cluster=options.cluster,
                only=options.only,
                per_round=options.per_round,
            )
        )
        results.write_page(options.markdown)
    print(results.table())
    results.write_page(options.markdown)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())

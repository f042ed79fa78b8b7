"""Results of campaigns: one line of JSON for each round, and their summary in FAULTS.md."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SHOWN_SEEDS = 4
BEGIN, END = "<!-- results: written by the campaign -->", "<!-- end of results -->"


@dataclass(frozen=True)
class Round:
    """The faults of one round, and the invariants that held after them."""

    seed: int
    features: Sequence[str]
    flags: Sequence[str]
    faults: Sequence[tuple[str, float]]
    seconds: float
    invariants: Sequence[str]
    memory: int
    problem: str


class Results:
    """The results file; rounds are only appended."""

    def __init__(self, path: Path, commit: str) -> None:
        self._path = path
        self.evidence = path.parent / "artifacts"
        """Where the logs of failed rounds are kept."""
        self._commit = commit

    def append(self, entry: Round) -> None:
        """Add a round."""
        line = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "commit": self._commit,
            **asdict(entry),
            "faults": [[name, round(took, 2)] for name, took in entry.faults],
            "seconds": round(entry.seconds, 2),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def rounds(self) -> list[dict[str, Any]]:
        """All rounds recorded so far."""
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text().splitlines() if line]

    def count(self) -> int:
        """How many faults have been injected so far."""
        return sum(len(entry["faults"]) for entry in self.rounds())

    def _rows(self) -> list[tuple[str, ...]]:
        times: dict[str, list[float]] = defaultdict(list)
        failed: Counter[str] = Counter()
        seeds: dict[str, list[int]] = defaultdict(list)
        for entry in self.rounds():
            for name, took in entry["faults"]:
                times[name].append(took)
                failed[name] += bool(entry["problem"])
                if entry["seed"] not in seeds[name]:
                    seeds[name].append(entry["seed"])
        rows = []
        for name in sorted(times):
            median = sorted(times[name])[len(times[name]) // 2]
            count = len(times[name])
            held = f"held {count - failed[name]}, failed {failed[name]}"
            newest = ", ".join(map(str, seeds[name][-SHOWN_SEEDS:]))
            rows.append((name, str(count), held, f"{median:.1f} s", newest))
        return rows

    def table(self) -> str:
        """The table for the terminal."""
        head = ("fault", "injected", "all invariants", "median", "seeds")
        rows = [head, *self._rows()]
        widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        rounds = self.rounds()
        bad = sum(bool(entry["problem"]) for entry in rounds)
        return "\n".join(
            [*lines, f"{self.count()} faults, {len(rounds)} rounds, {bad} of them failed"]
        )

    def markdown(self) -> str:
        """The results as the generated part of the page."""
        rounds = self.rounds()
        checked = Counter(name for entry in rounds for name in entry["invariants"])
        kinds = Counter(kind for kind, _ in {(_world(entry), entry["seed"]) for entry in rounds})
        memory = max((entry["memory"] for entry in rounds), default=0)
        lines = [
            f"{self.count()} faults in {len(rounds)} rounds of "
            + ", ".join(f"{count} worlds ({kind})" for kind, count in sorted(kinds.items()))
            + f"; the largest bridge or mirror took {memory / 2**20:.0f} MB.",
            "",
            "| fault | injected | all invariants | median until healthy | seeds |",
            "|---|---:|---|---:|---|",
            *(f"| {' | '.join(row)} |" for row in self._rows()),
            "",
            "| invariant | held after rounds |",
            "|---|---:|",
            *(f"| {name} | {count} |" for name, count in checked.items()),
            "",
        ]
        failed = [entry for entry in rounds if entry["problem"]]
        if failed:
            lines += ["| failed round | commit | seed | what |", "|---|---|---|---|"]
            lines += [
                f"| {entry['at']} | {entry['commit']} | {entry['seed']} ({_world(entry)})"
                f" | {_cell(entry['problem'])} |"
                for entry in failed
            ]
            lines.append("")
        return "\n".join(lines)

    def write_page(self, path: Path) -> None:
        """Write the results into the page between their markers; the rest stays unchanged."""
        text = path.read_text() if path.exists() else f"# Fault campaign\n\n{BEGIN}\n{END}\n"
        before, _, rest = text.partition(BEGIN)
        after = rest.partition(END)[2]
        path.write_text(f"{before}{BEGIN}\n\n{self.markdown()}\n{END}{after}")


def _world(entry: dict[str, Any]) -> str:
    return " + ".join(entry["features"])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")[:200]

"""Results as a table on the terminal, JSON in a file, and a plot."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as their widest cell, numbers to the right."""
    texts = [[_cell(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(header), *texts]) for i in range(len(header))]
    print(f"\n{title}")
    print("  ".join(name.ljust(width) for name, width in zip(header, widths, strict=True)))
    for row, cells in zip(rows, texts, strict=True):
        print(
            "  ".join(
                cell.rjust(width) if isinstance(value, int | float) else cell.ljust(width)
                for value, cell, width in zip(row, cells, widths, strict=True)
            )
        )


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def write_json(path: Path, sections: dict[str, Any]) -> None:
    """Everything that was measured, for comparison with another run."""

    def plain(value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            return asdict(value)
        raise TypeError(type(value).__name__)

    path.write_text(json.dumps(sections, default=plain, indent=2) + "\n")


def plot(path: Path, throughput: Sequence[Any]) -> None:
    """Ratios to pg_recvlogical, by workload and mode."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(result.workload for result in throughput))
    modes = list(dict.fromkeys(result.mode for result in throughput))
    figure, axes = plt.subplots(figsize=(9, 1 + 0.8 * len(names)))
    height = 0.8 / len(modes)
    for place, mode in enumerate(modes):
        ratios = {r.workload: r.ratio for r in throughput if r.mode == mode}
        spreads = {r.workload: r.spread / 2 for r in throughput if r.mode == mode}
        axes.barh(
            [i + place * height for i in range(len(names))],
            [ratios.get(name, 0.0) for name in names],
            height,
            xerr=[spreads.get(name, 0.0) for name in names],
            label=mode,
        )
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(names))], names)
    axes.invert_yaxis()
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_xlabel("events per second, as a fraction of pg_recvlogical -f /dev/null")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)

"""A fuzzer that watches which lines it reaches, for each target of `targets.py` in turn.

    python -m tests.property.coverage_guided --seconds 60
    python -m tests.property.coverage_guided --only wire --seconds 600

Inputs that reached something new are kept under `.hypothesis/corpus` and tried first next time. An
input that raises what it must not is written to `.hypothesis/crashes` and ends with exit code 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

HOME = Path(".hypothesis")
NAMES = (
    "pgoutput", "wire", "snapshot_meta", "copy_reader", "snapshot_request", "stream_record", "http",
)  # fmt: skip
LONGEST = 4096


def _fuzz(name: str, seconds: int) -> None:
    """Fuzz one target in this process, which libFuzzer ends."""
    import atheris

    with atheris.instrument_imports(include=["bridge", "consumer_sdk"]):
        from tests.property import targets

    corpus, crashes = HOME / "corpus" / name, HOME / "crashes"
    for directory in (corpus, crashes):
        directory.mkdir(parents=True, exist_ok=True)
    if name == "http":
        target = targets.HttpTarget()
        for number, seed in enumerate(targets.HTTP_SEEDS):
            (corpus / f"seed-{number}").write_bytes(seed)
    else:
        target = getattr(targets, name)
        for number, seed in enumerate(targets.seeds(name)):
            (corpus / f"seed-{number}").write_bytes(seed)
    arguments = [
        sys.argv[0], str(corpus), f"-max_total_time={seconds}", f"-max_len={LONGEST}",
        f"-artifact_prefix={crashes}/{name}-", "-print_final_stats=1", "-verbosity=0",
    ]  # fmt: skip
    atheris.Setup(arguments, target)
    atheris.Fuzz()


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz the chosen targets one after the other; 1 if one of them found something."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.property.coverage_guided",
        description=(__doc__ or "").split("\n", 1)[0],
    )
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--only", action="append", choices=NAMES, default=[])
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    chosen = options.only or NAMES
    if options.in_process:
        _fuzz(chosen[0], options.seconds)
        return 0
    failed = []
    for name in chosen:
        print(f"{name}: {options.seconds} s", flush=True)
        command = [sys.executable, "-m", "tests.property.coverage_guided", "--in-process"]
        command += ["--only", name, "--seconds", str(options.seconds)]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    print(f"found something: {', '.join(failed)}" if failed else "nothing found")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The final checks: the stream, the mirror and the lake hold exactly what was committed."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import psycopg

from bridge.demo import shop
from bridge.demo.programs import command_line, complete, exit_report, output
from bridge.demo.view import pad

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence
    from pathlib import Path

    from bridge.demo.observer import Observer, StreamReader
    from bridge.demo.programs import Programs
    from bridge.demo.view import Console
    from bridge.demo.workload import CommittedChanges
    from bridge.embedded import GuardedProcess

ARRIVAL_SECONDS: Final = 60.0
MIRROR_SECONDS: Final = 120.0
VERIFY_SECONDS: Final = 120.0
SPARK_SECONDS: Final = 900.0
POLL_SECONDS: Final = 0.1

_OPERATIONS: Final = ("insert", "update", "delete", "truncate")

# A sum over each table that is exact in all three engines.
_SUMS: Final = {
    "customers": "sum(balance)",
    "orders": "sum(total)",
    "items": "sum(quantity * price)",
    "products": "sum(price)",
    "visits": "sum(seconds)",
    "sales.invoices": "sum(amount)",
}


async def check_stream(
    console: Console, committed: CommittedChanges, stream: StreamReader
) -> list[str]:
    """Wait for the last change, then compare with the stream's counts; return the differences."""
    with console.step("waiting for the last change to arrive") as step:
        if await stream.holds_end_mark(ARRIVAL_SECONDS):
            step.done("the last change has arrived in the stream")
        else:
            step.failed(f"the last change has not arrived in {ARRIVAL_SECONDS:g} s")
    stored = await stream.counts()
    console.block(count_table(committed.changes, stored))
    problems = differences(committed.changes, stored)
    with console.step("comparing") as step:
        if problems:
            step.failed(f"{committed.total:,} changes committed, {stored.total():,} events stored")
        else:
            step.done(f"{committed.total:,} changes committed = {stored.total():,} events stored")
    return problems


def count_table(made: Counter[tuple[str, str]], stored: Counter[tuple[str, str]]) -> list[str]:
    """A table of the committed and the stored changes, by table and operation."""
    rows = []
    for token in shop.tokens():
        counts = [made[token, operation] for operation in _OPERATIONS]
        cells = [*counts, sum(counts), sum(stored[token, op] for op in _OPERATIONS)]
        rows.append([token, *(f"{cell:,}" for cell in cells)])
    headings = ["table", "inserts", "updates", "deletes", "truncates", "committed", "stored"]
    return _table([headings, *rows], 10)


def differences(made: Counter[tuple[str, str]], stored: Counter[tuple[str, str]]) -> list[str]:
    """A description of each table and operation whose counts differ."""
    return [
        f"{token} {operation}: {made[token, operation]:,} committed,"
        f" {stored[token, operation]:,} stored"
        for token, operation in sorted({*made, *stored})
        if made[token, operation] != stored[token, operation]
    ]


async def wait_for_mirror(
    console: Console, mirror: GuardedProcess, observer: Observer
) -> list[str]:
    """Wait until the mirror shows all tables."""
    with console.step("waiting for the mirror") as step:
        deadline = time.monotonic() + MIRROR_SECONDS
        while len(observer.mirror_rows) < len(shop.TABLES):
            if not mirror.running:
                step.failed("the mirror has ended")
                return [exit_report(mirror)]
            if time.monotonic() > deadline:
                step.failed(f"the mirror has not shown its tables in {MIRROR_SECONDS:g} s")
                return ["the mirror has no tables to compare"]
            step.show()
            await asyncio.sleep(POLL_SECONDS)
            await asyncio.to_thread(observer.refresh)
        step.done("the mirror has all tables")
    return []


async def verify_mirror(
    console: Console, programs: Programs, *, source: str, replica: str
) -> list[str]:
    """Compare the mirror with the source by `cdc verify`."""
    with console.step("cdc verify") as step:
        process = programs.start(
            "cdc", "verify", *shop.names(), "--source", source, "--replica", replica
        )
        problem = await complete(process, VERIFY_SECONDS, step.show)
        if problem is None:
            step.done("cdc verify: the mirror equals the source, row by row")
            return []
        step.failed("cdc verify: the mirror does not equal the source")
    for line in output(process)[-20:]:
        console.line(f"     {line}")
    return [problem]


@dataclass(frozen=True)
class TableSummary:
    """Row count and checksum of one table in one engine."""

    rows: int
    total: str

    def __str__(self) -> str:
        return f"{self.rows:,} / {self.total}"


async def check_lake(console: Console, programs: Programs, dsn: str, directory: Path) -> list[str]:
    """Run `spark-consumer --once` and read every table by Spark SQL and by DuckDB."""
    lake = directory / "lake"
    arguments = ["--tables", ",".join(shop.names()), "--lake", str(lake), "--once"]
    shown = command_line("spark-consumer", *arguments[:3], lake.name, "--once")
    with console.step(shown) as step:
        process = programs.start("spark-consumer", *arguments)
        problem = await complete(process, SPARK_SECONDS, step.show)
        if problem is not None:
            step.failed(shown)
            return [problem]
    with console.step("reading the lake by Spark SQL and DuckDB") as step:
        query = " UNION ALL ".join(_query(token, token.replace(".", "_")) for token in _SUMS)
        process = programs.start_module("spark_consumer.lake.query", "--lake", str(lake), query)
        source = await asyncio.to_thread(_read_source, dsn)
        duck = await asyncio.to_thread(_read_by_duckdb, lake)
        problem = await complete(process, SPARK_SECONDS, step.show)
        if problem is not None:
            step.failed("the lake cannot be read by Spark SQL")
            return [problem]
        rows = [json.loads(line) for line in output(process) if line.startswith("{")]
        spark = _summaries((row["name"], row["found"], row["total"]) for row in rows)
        step.done("the lake read by Spark SQL and DuckDB")
    engines = {"PostgreSQL": source, "Spark SQL": spark, "DuckDB": duck}
    headings = ["rows / sum", *engines]
    console.block(
        _table(
            [
                headings,
                *(
                    [token, *(str(found.get(token)) for found in engines.values())]
                    for token in _SUMS
                ),
            ],
            20,
        )
    )
    return disagreements(engines)


def disagreements(engines: dict[str, dict[str, TableSummary]]) -> list[str]:
    """A sentence for every table that differs between the engines."""
    found = []
    for token in shop.tokens():
        answers = {engine: tables.get(token) for engine, tables in engines.items()}
        if len(set(answers.values())) > 1:
            listed = ", ".join(f"{engine} {answer}" for engine, answer in answers.items())
            found.append(f"the lake's {token} is not the source's: {listed}")
    return found


def _query(token: str, name: str) -> str:
    return (
        f"SELECT '{token}' AS name, count(*) AS found, CAST({_SUMS[token]} AS varchar(40)) AS total"
        f" FROM {name}"
    )


def _summaries(rows: Any) -> dict[str, TableSummary]:
    return {name: TableSummary(int(found), str(total or "0")) for name, found, total in rows}


def _read_source(dsn: str) -> dict[str, TableSummary]:
    query = " UNION ALL ".join(_query(token, token) for token in _SUMS)
    with psycopg.connect(dsn) as connection:
        return _summaries(connection.execute(query.encode()))


def _read_by_duckdb(lake: Path) -> dict[str, TableSummary]:
    """Read the lake with DuckDB through Arrow; DuckDB would have to download its Delta reader."""
    import duckdb
    from deltalake import DeltaTable

    rows: list[Any] = []
    with duckdb.connect() as connection:
        for token in shop.tokens():
            table = DeltaTable(str(lake / token)).to_pyarrow_dataset()
            connection.register("lake_table", table)
            rows += connection.execute(_query(token, "lake_table")).fetchall()
    return _summaries(rows)


def _table(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Lines of a table: names to the left, numbers to the right."""
    return [
        f" {pad(name, 16)}" + "".join(pad(cell, width, right=True) for cell in cells)
        for name, *cells in rows
    ]

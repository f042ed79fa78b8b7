"""The last act: Spark rebuilds the tables in a lake, and two engines read them back."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import psycopg

from bridge.demo import shop
from bridge.demo.console import pad
from bridge.demo.programs import Programs, completed, output, typed

if TYPE_CHECKING:
    from pathlib import Path

    from bridge.demo.console import Console

SPARK_SECONDS: Final = 900.0

# One sum of each table that is exact in all three engines.
SUMS: Final = {
    "customers": "sum(balance)",
    "orders": "sum(total)",
    "items": "sum(quantity * price)",
    "products": "sum(price)",
    "visits": "sum(seconds)",
    "sales.invoices": "sum(amount)",
}


@dataclass(frozen=True)
class Reading:
    """What one engine says about one table."""

    rows: int
    total: str

    def __str__(self) -> str:
        return f"{self.rows:,} / {self.total}"


async def check_lake(console: Console, programs: Programs, dsn: str, directory: Path) -> list[str]:
    """Run `spark-consumer --once` and read every table by Spark SQL and by DuckDB."""
    lake = directory / "lake"
    arguments = ["--tables", ",".join(shop.names()), "--lake", str(lake), "--once"]
    shown = typed("spark-consumer", *arguments[:3], lake.name, "--once")
    with console.step(shown) as step:
        process = programs.start("spark-consumer", *arguments)
        problem = await completed(process, SPARK_SECONDS, step.show)
        if problem is not None:
            step.failed(shown)
            return [problem]
    with console.step("reading the lake by Spark SQL and DuckDB") as step:
        process = programs.start_python(
            "query", "-m", "spark_consumer.lake.query", "--lake", str(lake),
            " UNION ALL ".join(_query(token, token.replace(".", "_")) for token in shop.tokens()),
        )  # fmt: skip
        source = await asyncio.to_thread(_read_source, dsn)
        duck = await asyncio.to_thread(_read_by_duckdb, lake)
        problem = await completed(process, SPARK_SECONDS, step.show)
        if problem is not None:
            step.failed("the lake cannot be read by Spark SQL")
            return [problem]
        spark = _readings(output(process))
        step.done("the lake read by Spark SQL and DuckDB")
    readings = {"PostgreSQL": source, "Spark SQL": spark, "DuckDB": duck}
    console.line()
    for line in comparison(readings):
        console.line(line)
    console.line()
    return disagreements(readings)


def comparison(readings: dict[str, dict[str, Reading]]) -> list[str]:
    """Rows and sums of every table, an engine to a column."""
    lines = [
        f" {pad('rows / sum', 16)}" + "".join(pad(engine, 20, right=True) for engine in readings)
    ]
    for token in shop.tokens():
        cells = [str(reading.get(token, "nothing")) for reading in readings.values()]
        lines.append(f" {pad(token, 16)}" + "".join(pad(cell, 20, right=True) for cell in cells))
    return lines


def disagreements(readings: dict[str, dict[str, Reading]]) -> list[str]:
    """A sentence for every table that is not the same everywhere."""
    found = []
    for token in shop.tokens():
        answers = {engine: reading.get(token) for engine, reading in readings.items()}
        if len(set(answers.values())) > 1:
            said = ", ".join(f"{engine} {answer}" for engine, answer in answers.items())
            found.append(f"the lake's {token} is not the source's: {said}")
    return found


def _query(token: str, name: str) -> str:
    return (
        f"SELECT '{token}' AS name, count(*) AS found, CAST({SUMS[token]} AS varchar(40)) AS total"
        f" FROM {name}"
    )


def _reading(rows: Any, total: Any) -> Reading:
    return Reading(int(rows), "0" if total is None else str(total))


def _readings(lines: list[str]) -> dict[str, Reading]:
    documents = [json.loads(line) for line in lines if line.startswith("{")]
    return {one["name"]: _reading(one["found"], one["total"]) for one in documents}


def _read_source(dsn: str) -> dict[str, Reading]:
    with psycopg.connect(dsn) as connection:
        rows = [connection.execute(_query(token, token)).fetchone() for token in shop.tokens()]
    return {name: _reading(found, total) for name, found, total in filter(None, rows)}


def _read_by_duckdb(lake: Path) -> dict[str, Reading]:
    """Through Arrow: DuckDB's own reader of Delta tables is an extension it has to download."""
    import duckdb
    from deltalake import DeltaTable

    readings: dict[str, Reading] = {}
    with duckdb.connect() as connection:
        for token in shop.tokens():
            table = DeltaTable(str(lake / token)).to_pyarrow_dataset()
            connection.register("lake_table", table)
            ((_, found, total),) = connection.execute(_query(token, "lake_table")).fetchall()
            readings[token] = _reading(found, total)
    return readings

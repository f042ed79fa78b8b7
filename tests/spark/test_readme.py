"""What spark_consumer/README.md shows does run."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from consumer_sdk.transport.version import ShowVersion
from spark_consumer import __file__ as package
from spark_consumer import cli
from spark_consumer.lake import query
from tests.spark.lake_oracle import lake_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.embedded import NatsServer
    from tests.fixtures.postgres import Database
    from tests.spark.conftest import Jobs

README = Path(package).with_name("README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(600)
def test_the_examples_run_and_the_lake_looks_as_described(
    database: Database,
    bridge_process: Callable[..., object],
    nats_server: NatsServer,
    prefix: str,
    jobs: Jobs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, amount numeric(9, 2))")
    database.execute('CREATE SCHEMA sales; CREATE TABLE sales."Odd Table.1" (id int PRIMARY KEY)')
    database.execute("INSERT INTO orders VALUES (1, 10), (2, 20), (3, 30), (4, 40)")
    database.publish("orders", 'sales."Odd Table.1"')
    bridge_process()
    options: dict[str, Any] = {"soft_deletes": True, "synced_at": True}
    jobs.once("orders", 'sales."Odd Table.1"', **options)
    database.execute("DELETE FROM orders WHERE id = 4")
    jobs.once("orders", 'sales."Odd Table.1"', **options)
    entries = {one.name for one in jobs.lake.iterdir()}
    assert entries == {"orders", "sales.Odd~20Table~2E1", "_tailrace"}
    own = {one.name for one in (jobs.lake / "_tailrace").iterdir()}
    assert (
        {"lock", "schemas", "manifest"}
        <= own
        <= {"lock", "schemas", "manifest"}
        | {
            "staging",
            "checkpoint",
        }
    )
    rows = lake_table(jobs.lake, "orders").to_pyarrow_table().to_pylist()
    assert sorted((row["id"], row["_deleted"]) for row in rows) == [
        (1, False),
        (2, False),
        (3, False),
        (4, True),
    ]
    assert all(row["_synced_at"] is not None for row in rows)
    monkeypatch.chdir(jobs.lake.parent)
    # Spark has started before this test's prefix was known to anybody.
    where = f'.option("servers", "{nats_server.url}").option("prefix", "{prefix}").load()'
    assert len(BLOCKS) == 4
    for block in BLOCKS:
        names: dict[str, Any] = {}
        exec(compile(block.replace(".load()", where), "README.md", "exec"), names)
        if "entry" in names:
            assert sorted(names["orders"]["id"]) == [1, 2, 3, 4]
        if "changes" in names:
            assert names["orders"].count() >= 3
            assert names["changes"].where("operation = 'DELETE'").count() == 1
    assert "DELETE" in capsys.readouterr().out
    assert query.register_views(jobs.spark, str(jobs.lake)) == ["orders", "sales_Odd~20Table~2E1"]


def test_every_option_of_the_command_is_named() -> None:
    parser = cli.build_parser()
    flags = [
        flag
        for action in parser._actions
        if not isinstance(action, argparse._HelpAction | ShowVersion)
        for flag in action.option_strings
    ]
    assert [flag for flag in flags if f"`{flag}" not in README] == []

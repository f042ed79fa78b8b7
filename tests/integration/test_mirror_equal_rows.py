"""Rows without a key are found by all of their values, exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.fixtures.waiting import wait_until
from tests.integration.test_verify import verify

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["verify"]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_values_that_only_look_different_find_their_row(
    database: Any,
    bridge_process: Any,
    mirror_process: Any,
    verify: Any,
    replica_database: str,
    tmp_path: Path,
    kind: str,
) -> None:
    database.execute("CREATE TABLE bag (ip inet, j jsonb, js jsonb[])")
    database.execute("ALTER TABLE bag REPLICA IDENTITY FULL")
    database.execute(
        "INSERT INTO bag VALUES ('10.0.0.1', '{\"a\": 1.0}', '{1.0}'), "
        "('10.0.0.1', '{\"a\": 1.00}', '{1.0}'), ('::1', '1', '{1.0}'), ('::1', '1', '{1.00}'), "
        "('::2', '{\"a\": [0.00001, 1e-7, -0.0000000000001], \"é\": \"1e-9\"}', '{}')"
    )
    database.publish("bag")
    bridge_process()
    into = f"sqlite:///{tmp_path}/replica.db" if kind == "sqlite" else replica_database
    mirror = mirror_process("bag", "--into", into)
    mirror.wait_logged("event=following")
    for statement in (
        "DELETE FROM bag WHERE j::text LIKE '%1.00}'",
        "DELETE FROM bag WHERE js::text = '{1.00}'",
        # The new value travels as text, and so does the old one then.
        "UPDATE bag SET j = '{\"a\": 1.10}' WHERE ip = '::2'",
        "DELETE FROM bag WHERE ip = '::2'",
    ):
        database.execute(statement)
    wait_until(
        lambda: "equal, 2 rows, 0 changes" in verify("bag", replica=into)[1], 30, mirror.describe
    )

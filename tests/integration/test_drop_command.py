"""`bridge drop` drops what a bridge on this database can have created, and nothing else."""

from __future__ import annotations

import pytest

CREATE = {
    "physical": "SELECT pg_create_physical_replication_slot(%s)",
    # Another spelling counts as another plugin; the embedded servers have no second one.
    "other": "SELECT pg_create_logical_replication_slot(%s, '$libdir/pgoutput')",
    "pgoutput": "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')",
}


@pytest.fixture
def drop(database, run_command, prefix):
    def run(slot, **environment):
        return run_command(
            "bridge", "drop", "--slot", slot, "--yes", "--prefix", prefix, environment=environment
        )

    return run


@pytest.mark.parametrize(
    ("kind", "text"),
    [("physical", "is a physical slot"), ("other", "is a slot of $libdir/pgoutput")],
)
def test_a_slot_that_no_bridge_made_is_left_alone(database, drop, kind, text):
    slot = f"slot_{database.name}"
    database.execute(CREATE[kind], [slot])
    try:
        answer = drop(slot)
        assert answer.returncode == 3
        assert answer.stderr.count("\n") == 1
        assert f"slot {slot} {text}" in answer.stderr
        assert "correct --slot" in answer.stderr
        assert answer.stdout == ""
        assert database.slot(slot) is not None
    finally:
        database.execute("SELECT pg_drop_replication_slot(%s)", [slot])


def test_a_slot_of_another_database_is_left_alone(database, pg, drop):
    slot = f"slot_{database.name}"
    database.execute(CREATE["pgoutput"], [slot])
    answer = drop(slot, DATABASE_URL=pg.dsn())
    assert answer.returncode == 3
    assert f"slot {slot} is a slot of database {database.name}, not of" in answer.stderr
    assert database.slot(slot) is not None
    assert drop(slot).returncode == 0
    assert database.slot(slot) is None


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("NATS_URL", "http://127.0.0.1:4222", "NATS_URL is not a NATS address"),
        ("DATABASE_URL", "postgresql://u@h:abc/db", "DATABASE_URL: its port is not a number"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_dropped(database, drop, name, value, text):
    slot = f"slot_{database.name}"
    database.execute(CREATE["pgoutput"], [slot])
    answer = drop(slot, **{name: value})
    assert answer.returncode == 2
    assert answer.stderr.startswith(f"bridge: {text}")
    assert answer.stderr.count("\n") == 1
    assert database.slot(slot) is not None

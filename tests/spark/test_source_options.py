"""Options of the data sources."""

from __future__ import annotations

import pytest

from consumer_sdk.errors import UsageError
from spark_consumer.source.options import CdcOptions, SnapshotOptions, split_tables

SERVERS = {"servers": "nats://127.0.0.1:4999"}


def test_tables_are_spelled_as_in_sql_even_with_commas() -> None:
    assert split_tables('users, sales.orders,"Odd, ""one""", users') == (
        ("public", "users"),
        ("sales", "orders"),
        ("public", 'Odd, "one"'),
    )


def test_defaults_are_safe() -> None:
    options = CdcOptions.parse({**SERVERS, "tables": "users"})
    assert (options.form, options.range.fail_on_data_loss, options.range.start.word) == (
        "envelope",
        True,
        "earliest",
    )


def test_the_stream_may_be_named_instead_of_the_prefix() -> None:
    assert CdcOptions.parse({**SERVERS, "stream": "shop_CDC"}).settings.prefix == "shop"
    assert CdcOptions.parse({**SERVERS, "stream": "CDC"}).settings.prefix == ""
    with pytest.raises(UsageError, match="with prefix 'a' the stream is called 'a_CDC'"):
        CdcOptions.parse({**SERVERS, "stream": "b_CDC", "prefix": "a"})


def test_positions_may_differ_by_source() -> None:
    start = CdcOptions.parse({**SERVERS, "startingPosition": '{"a": 5}'}).range.start
    assert (start.sequence("a"), start.sequence("b")) == (5, None)
    assert CdcOptions.parse({**SERVERS, "startingPosition": "17"}).range.start.sequence("b") == 17


@pytest.mark.parametrize(
    "option",
    [
        {"form": "typed"},
        {"form": "typed", "tables": "a, b"},
        {"form": "odd"},
        {"startingPosition": "soon"},
        {"startingPosition": "[1]"},
        {"startingPosition": '{"a": "x"}'},
        {"rowsPerBatch": "0"},
        {"rowsPerBatch": "many"},
        {"partitions": "-1"},
        {"failOnDataLoss": "perhaps"},
        {"unrepresentable": "guess"},
        {"tables": "not a table!"},
        {"creds": "/nowhere/at/all.creds"},
    ],
)
def test_what_cannot_work_is_named(option: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        CdcOptions.parse({**SERVERS, **option})


def test_a_snapshot_is_of_one_table() -> None:
    assert SnapshotOptions.parse({**SERVERS, "table": "sales.orders"}).table == ("sales", "orders")
    with pytest.raises(UsageError, match="exactly one table"):
        SnapshotOptions.parse({**SERVERS, "table": "a, b"})

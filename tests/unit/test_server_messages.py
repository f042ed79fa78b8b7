"""Messages of PostgreSQL are shown unless they may quote a value."""

from __future__ import annotations

import pytest

from consumer_sdk.wire.server_messages import without_values

ROW = "Failing row contains (1, secret)."


def test_a_message_about_names_and_states_is_shown_with_its_details() -> None:
    shown = without_values(
        "ConfigurationLimitExceeded", "53400", "all replication slots are in use", None, "Free one."
    )
    assert shown == "all replication slots are in use; Free one."


def test_a_violated_constraint_is_named_without_the_row() -> None:
    message = 'new row for relation "t" violates check constraint "c"'
    assert without_values("CheckViolation", "23514", message, ROW) == message


@pytest.mark.parametrize(
    "sqlstate", ["22P02", "22003", "22007", "22023", "42601", "P0001", "HV000", "XY123"]
)
def test_a_message_that_may_quote_a_value_is_replaced_by_its_kind(sqlstate: str) -> None:
    shown = without_values("InvalidTextRepresentation", sqlstate, 'invalid: "secret"', ROW)
    assert shown.startswith(f"invalid text representation (SQLSTATE {sqlstate})")
    assert "secret" not in shown


def test_a_message_of_the_driver_is_its_first_line() -> None:
    text = "connection failed: no route\nsecond line"
    shown = without_values("OperationalError", None, None, text=text)
    assert shown == "connection failed: no route"
    assert without_values("OperationalError", None, None) == "OperationalError"

"""Errors of PostgreSQL are recognised by SQLSTATE, whatever language the server speaks."""

from __future__ import annotations

from typing import Any

import psycopg.errors
import pytest

from bridge.errors import PublicationTooNew, Retryable, SourceError
from bridge.postgres.errors import ReplicationRefused, explain, sqlstate_of
from bridge.postgres.slot import Slot

NOBODY: Any = None


def test_an_error_in_another_language_has_the_same_remedy() -> None:
    german = psycopg.errors.InsufficientPrivilege("keine Berechtigung für Tabelle users")
    told = explain(german, "catalog query failed")
    assert isinstance(told, SourceError)
    assert "bridge check --fix-sql" in str(told)


def test_what_no_operator_must_repair_is_tried_again() -> None:
    told = explain(psycopg.errors.AdminShutdown("terminating connection"), "catalog query failed")
    assert isinstance(told, Retryable)


def test_words_of_a_statement_that_failed_are_not_taken_for_its_reason() -> None:
    error = psycopg.errors.QueryCanceled('role "x" does not exist')
    assert sqlstate_of(error) == "57014"


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ('FATAL:  password authentication failed for user "cdc"', "28P01"),
        ('FATAL:  no pg_hba.conf entry for host "10.0.0.1"', "28000"),
        ('FATAL:  role "cdc" does not exist', "28000"),
        ('FATAL:  database "shop" does not exist', "3D000"),
        ("Connection refused", ""),
    ],
)
def test_a_refused_connection_is_told_apart_as_far_as_libpq_tells(text: str, state: str) -> None:
    assert sqlstate_of(psycopg.OperationalError(text)) == state


def test_a_publication_that_the_log_does_not_know_is_told_by_its_code() -> None:
    slot = Slot(NOBODY, name="main", publication="pub")
    german = ReplicationRefused("streaming", "42704", "Publikation »pub« existiert nicht")
    assert isinstance(slot.explain(german), PublicationTooNew)
    assert isinstance(slot.explain(ReplicationRefused("streaming", "57P01", "ended")), Retryable)

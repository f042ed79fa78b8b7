"""A refused login is recognised by its SQLSTATE, whatever language the server speaks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from bridge.errors import SourceError
from bridge.postgres import errors
from bridge.postgres.login import log_in, log_in_blocking, refusal_code
from tests.fixtures.postgres import both_versions

if TYPE_CHECKING:
    from tests.fixtures.postgres import Database


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    """No words of the server are known, as if it spoke another language."""
    monkeypatch.setattr(errors, "_REFUSED_CONNECTIONS", ())


@both_versions
async def test_what_is_refused_is_told_by_its_code(foreign: None, database: Database) -> None:
    dsn = database.role("LOGIN")
    role, address = database.roles[-1], dsn.rpartition("@")[2]
    logins = {
        f"postgresql://{role}:wrong@{address}": errors.INVALID_PASSWORD,
        f"{dsn}_absent": errors.UNDEFINED_DATABASE,
    }
    for conninfo, code in logins.items():
        with pytest.raises(psycopg.OperationalError) as caught:
            await log_in(conninfo)
        assert errors.sqlstate_of(caught.value) == code
        told = errors.explain(caught.value, "cannot connect")
        assert isinstance(told, SourceError)
    database.execute(f"ALTER ROLE {role} NOLOGIN")
    assert refusal_code(dsn) == errors.INVALID_AUTHORIZATION
    database.execute(f"ALTER ROLE {role} LOGIN")
    assert refusal_code(dsn) is None
    log_in_blocking(dsn).close()


async def test_without_a_server_there_is_no_code(foreign: None) -> None:
    with pytest.raises(psycopg.OperationalError) as caught:
        await log_in("host=127.0.0.1 port=1 user=x dbname=x")
    assert errors.sqlstate_of(caught.value) == ""

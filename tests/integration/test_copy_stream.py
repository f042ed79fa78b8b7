"""Reading COPY from the socket and through libpq, against a real server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from bridge.postgres.catalog import Catalog
from bridge.postgres.copy_stream import _rows_from_socket, _rows_through_libpq
from bridge.postgres.errors import StatementFailed
from bridge.postgres.sessions import set_session
from bridge.snapshot.tables import describe_table
from tests.fixtures.postgres import both_versions

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from tests.fixtures.postgres import Database

    Reader = Callable[[psycopg.Connection[Any], str], Generator[list[bytes], None, None]]

ways = pytest.mark.parametrize(
    "read", [_rows_from_socket, _rows_through_libpq], ids=["socket", "libpq"]
)
MANY = "COPY (SELECT g, repeat('x', g % 500) FROM generate_series(1, 20000) g) TO STDOUT"


@both_versions
def test_both_ways_give_the_same_rows(database: Database) -> None:
    statement = (
        "COPY (SELECT g, CASE WHEN g % 7 = 0 THEN NULL ELSE repeat(E'd\\n\\t\\\\', g % 50) END,"
        " CASE WHEN g = 500 THEN repeat('w', 3000000) END FROM generate_series(1, 5000) g)"
        " TO STDOUT (FORMAT text)"
    )
    with database.connect() as connection:
        through = [row for rows in _rows_through_libpq(connection, statement) for row in rows]
        direct = [row for rows in _rows_from_socket(connection, statement) for row in rows]
    assert direct == through
    assert len(direct) == 5000


@ways
def test_an_error_of_the_server_leaves_the_session_usable(database: Database, read: Reader) -> None:
    statement = "COPY (SELECT 1 / (g - 5000) FROM generate_series(1, 6000) g) TO STDOUT"
    with database.connect() as connection:
        connection.execute("BEGIN")
        connection.execute("SAVEPOINT piece")
        with pytest.raises(StatementFailed, match=r"^division by zero$"):
            list(read(connection, statement))
        connection.execute("ROLLBACK TO SAVEPOINT piece")
        assert sum(map(len, read(connection, MANY))) == 20000
        connection.execute("COMMIT")


@ways
def test_a_copy_given_up_half_way_leaves_the_session_usable(
    database: Database, read: Reader
) -> None:
    with database.connect() as connection:
        connection.execute("BEGIN")
        connection.execute("SAVEPOINT piece")
        rows = read(connection, MANY)
        assert next(rows)
        rows.close()
        connection.execute("ROLLBACK TO SAVEPOINT piece")
        assert connection.execute("SELECT 42").fetchone() == (42,)
        assert sum(map(len, read(connection, MANY))) == 20000
        connection.execute("COMMIT")


@ways
def test_a_lost_server_is_an_error_not_an_end(database: Database, read: Reader) -> None:
    with database.connect() as connection, database.connect() as killer:
        rows = read(connection, MANY)
        next(rows)
        killer.execute("SELECT pg_terminate_backend(%s)", [connection.info.backend_pid])
        with pytest.raises(StatementFailed):
            list(rows)


@both_versions
async def test_column_types_are_those_of_events(database: Database) -> None:
    database.execute(
        "CREATE TYPE mood AS ENUM ('sad'); CREATE DOMAIN cents AS numeric(9,2);"
        "CREATE DOMAIN deep AS cents; CREATE DOMAIN numbers AS int[];"
        "CREATE TYPE pair AS (a int, b text);"
        "CREATE TABLE t (a int, b numeric(5,1), c cents, d deep, e cents[], f numbers, g mood[],"
        " h box[], i pair, j pair[], k int2vector, l varchar(7)[], m deep[], n oidvector, o name,"
        " p char, q bit(3), r int4range[], s interval(2), t timestamptz(3)[])"
    )
    database.publish("t")
    catalog = Catalog(database.dsn)
    async with await psycopg.AsyncConnection.connect(database.dsn, autocommit=True) as connection:
        await set_session(connection)
        shape = (await describe_table(connection, "pub", "public", "t")).description
    try:
        expected = await catalog.column_types([(c.type.oid, c.type.typmod) for c in shape.columns])
    finally:
        await catalog.close()
    assert [column.type for column in shape.columns] == expected

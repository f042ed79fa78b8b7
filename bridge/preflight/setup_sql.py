"""The SQL of a least-privilege set-up: a role that may stream and read, and nothing more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from consumer_sdk.wire.escaping import sql_block, sql_literal
from consumer_sdk.wire.escaping import sql_identifier as quoted

if TYPE_CHECKING:
    from collections.abc import Sequence


def setup_sql(
    *,
    role: str,
    database: str,
    publication: str,
    tables: Sequence[tuple[str, str]] = (),
    creates_publication: bool = True,
) -> str:
    """Statements to run in psql as a superuser; running them again changes nothing.

    `tables` are (schema, name) pairs to publish and read. If there are none, the publication is for
    all tables, and the role may read all present and future tables of the schema public.
    """
    lines = [
        "-- Run by a superuser in psql, connected to the database that is to be streamed.",
        f"-- Then give the role its password:  \\password {quoted(role)}",
        "",
        "-- so that nothing planted in another schema is called here",
        "SET search_path = '';",
        "",
        "-- needs a restart if it was not logical before",
        "ALTER SYSTEM SET wal_level = 'logical';",
        "",
        "-- a role that may open replication connections; no superuser, no ownership",
        *_create_role(role),
        f"GRANT CONNECT ON DATABASE {quoted(database)} TO {quoted(role)};",
        "-- to name the transactions that hold the slot back",
        f"GRANT pg_read_all_stats TO {quoted(role)};",
        "",
        "-- reading is needed for snapshots only",
        *_grants(role, tables),
    ]
    if creates_publication:
        lines += ["", "-- what is streamed", *_create_publication(publication, tables)]
    lines += ["", "RESET search_path;"]
    return "\n".join(lines) + "\n"


def _create_role(role: str) -> list[str]:
    known = f"SELECT FROM pg_catalog.pg_roles WHERE rolname = {sql_literal(role)}"
    return [
        *sql_block(
            [
                f"  IF NOT EXISTS ({known}) THEN",
                f"    CREATE ROLE {quoted(role)} LOGIN;",
                "  END IF;",
            ]
        ),
        f"ALTER ROLE {quoted(role)} LOGIN REPLICATION;",
    ]


def _grants(role: str, tables: Sequence[tuple[str, str]]) -> list[str]:
    if not tables:
        return [
            f"GRANT USAGE ON SCHEMA public TO {quoted(role)};",
            f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {quoted(role)};",
            "-- tables created later by the role that runs this",
            f"ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT ON TABLES TO {quoted(role)};",
        ]
    schemas = sorted({schema for schema, _ in tables})
    return [
        *(f"GRANT USAGE ON SCHEMA {quoted(schema)} TO {quoted(role)};" for schema in schemas),
        *(f"GRANT SELECT ON TABLE {quoted(*table)} TO {quoted(role)};" for table in tables),
    ]


def _create_publication(publication: str, tables: Sequence[tuple[str, str]]) -> list[str]:
    scope = f"TABLE {', '.join(quoted(*table) for table in tables)}" if tables else "ALL TABLES"
    known = f"SELECT FROM pg_catalog.pg_publication WHERE pubname = {sql_literal(publication)}"
    return sql_block(
        [
            f"  IF NOT EXISTS ({known}) THEN",
            f"    CREATE PUBLICATION {quoted(publication)} FOR {scope};",
            "  END IF;",
        ]
    )

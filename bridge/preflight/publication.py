"""Checks the publication: contents, grants, identities, filters, partitions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.preflight.findings import Finding, ok, problem, warning
from consumer_sdk.wire.escaping import sql_identifier as quoted
from consumer_sdk.wire.subjects import format_table_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from bridge.postgres.publication import Publication, PublishedTable
    from bridge.preflight.server import ServerFacts


def check_publication(
    publication: Publication | None, name: str, facts: ServerFacts
) -> list[Finding]:
    """Everything about the publication and each of its tables."""
    if publication is None:
        return [
            problem(
                "postgres",
                "publication-missing",
                f"publication {name} does not exist in database {facts.database}",
                "there is nothing to stream",
                f"CREATE PUBLICATION {quoted(name)} FOR ALL TABLES;\n"
                "-- or name them: FOR TABLE users, sales.orders",
                blocks=True,
            )
        ]
    found = [*_contents(publication), *_operations(publication), *_unlogged(publication)]
    for table in publication.tables:
        found += [
            *_grants(table, facts.role),
            *_row_security(table, facts.role),
            *_identity(publication, table),
            *_row_filter(publication, table),
            *_column_list(publication, table),
            *_generated(publication, table, facts),
            *_partitions(publication, table),
        ]
    return found


def _contents(publication: Publication) -> Iterator[Finding]:
    if publication.tables:
        count = len(publication.tables)
        scope = "all tables" if publication.all_tables else "listed tables"
        text = f"publication {publication.name} publishes {count} tables ({scope})"
        yield ok("postgres", "publication-contents", text)
    else:
        yield warning(
            "postgres",
            "publication-empty",
            f"publication {publication.name} publishes no table",
            "nothing will be streamed",
            f"ALTER PUBLICATION {quoted(publication.name)} ADD TABLE users;\n"
            "-- name your own tables",
        )


def _operations(publication: Publication) -> Iterator[Finding]:
    if publication.left_out:
        yield warning(
            "postgres",
            "publication-operations",
            f"publication {publication.name} leaves out {', '.join(publication.left_out)}",
            "replicas will differ from the source after such a change",
            f"ALTER PUBLICATION {quoted(publication.name)} "
            "SET (publish = 'insert, update, delete, truncate');",
        )


def _unlogged(publication: Publication) -> Iterator[Finding]:
    for table in publication.unlogged:
        yield warning(
            "postgres",
            "unlogged-table",
            f"table {format_table_name(*table)} is unlogged",
            "PostgreSQL writes no WAL for it, so its changes are never published",
            f"ALTER TABLE {quoted(*table)} SET LOGGED;",
        )


def _grants(table: PublishedTable, role: str) -> Iterator[Finding]:
    statements = []
    if not table.schema_usable:
        statements.append(f"GRANT USAGE ON SCHEMA {quoted(table.schema)} TO {quoted(role)};")
    if not table.selectable:
        statements.append(
            f"GRANT SELECT ON TABLE {quoted(table.schema, table.table)} TO {quoted(role)};"
        )
    if statements:
        yield problem(
            "postgres",
            "select-missing",
            f"role {role} may not read table {table.name}",
            "its changes stream, but every snapshot of it fails",
            "\n".join(statements),
        )


def _row_security(table: PublishedTable, role: str) -> Iterator[Finding]:
    if table.row_security:
        yield problem(
            "postgres",
            "row-security",
            f"row-level security on table {table.name} applies to role {role}",
            "its changes stream without regard to policies, but a snapshot would miss rows and "
            "is refused",
            f"ALTER ROLE {quoted(role)} BYPASSRLS;",
        )


def _identity(publication: Publication, table: PublishedTable) -> Iterator[Finding]:
    if not _changes_rows(publication):
        return
    for identity in table.identities:
        if not identity.columns:
            yield problem(
                "postgres",
                "replica-identity",
                f"table {identity.name} has no replica identity",
                "PostgreSQL refuses every UPDATE and DELETE on it while it is published",
                f"ALTER TABLE {quoted(identity.schema, identity.table)} REPLICA IDENTITY FULL;\n"
                "-- better where the data allows it: a primary key and REPLICA IDENTITY DEFAULT",
            )


def _row_filter(publication: Publication, table: PublishedTable) -> Iterator[Finding]:
    if table.row_filter is None:
        return
    for identity in table.identities:
        missing = _missing(table.filter_columns, identity.columns)
        if missing and _changes_rows(publication):
            yield problem(
                "postgres",
                "row-filter-identity",
                f"the row filter of table {table.name} uses {missing}, "
                f"outside the replica identity of {identity.name}",
                "PostgreSQL refuses every UPDATE and DELETE on it while it is published",
                f"ALTER TABLE {quoted(identity.schema, identity.table)} REPLICA IDENTITY FULL;",
            )
            return
    text = f"table {table.name} has a row filter: streams and snapshots hold only rows it lets in"
    yield ok("postgres", "row-filter", text)


def _column_list(publication: Publication, table: PublishedTable) -> Iterator[Finding]:
    if table.listed_columns is None or not _changes_rows(publication):
        return
    for identity in table.identities:
        missing = _missing(identity.columns, table.listed_columns)
        if not missing:
            continue
        wanted = [*table.listed_columns]
        wanted += [column for column in identity.columns if column not in wanted]
        columns = ", ".join(quoted(column) for column in wanted)
        clause = f" WHERE ({table.row_filter})" if table.row_filter else ""
        name, target = quoted(publication.name), quoted(table.schema, table.table)
        yield problem(
            "postgres",
            "column-list-identity",
            f"the column list of table {table.name} leaves out {missing} of its replica identity",
            "PostgreSQL refuses every UPDATE and DELETE on it while it is published",
            f"ALTER PUBLICATION {name} DROP TABLE {target};\n"
            f"ALTER PUBLICATION {name} ADD TABLE {target} ({columns}){clause};",
        )
        return


def _generated(
    publication: Publication, table: PublishedTable, facts: ServerFacts
) -> Iterator[Finding]:
    if not table.unpublished_generated or table.listed_columns is not None:
        return
    names = ", ".join(table.unpublished_generated)
    what = f"generated column {names} of table {table.name} is not published"
    if facts.major < 18:
        yield ok("postgres", "generated-columns", f"{what}: possible from PostgreSQL 18")
        return
    yield warning(
        "postgres",
        "generated-columns",
        what,
        "consumers see the table without it",
        f"ALTER PUBLICATION {quoted(publication.name)} SET (publish_generated_columns = stored);",
    )


def _partitions(publication: Publication, table: PublishedTable) -> Iterator[Finding]:
    if table.is_partitioned and publication.via_root:
        yield warning(
            "postgres",
            "partition-root",
            f"table {table.name} is published under the name of its partitioned root",
            "TRUNCATE of a single partition is not published, and ATTACH or DETACH moves rows "
            "unseen: the bridge announces a gap and the table needs a new snapshot",
            f"ALTER PUBLICATION {quoted(publication.name)} "
            "SET (publish_via_partition_root = false);\n"
            "-- or keep it, and take a new snapshot after such a change",
        )


def _changes_rows(publication: Publication) -> bool:
    return not {"update", "delete"} <= set(publication.left_out)


def _missing(wanted: Iterable[str], present: Iterable[str]) -> str:
    there = set(present)
    return ", ".join(column for column in wanted if column not in there)

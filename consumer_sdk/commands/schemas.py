"""`cdc schema` and `cdc tables`: the published schemas."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from consumer_sdk.commands.options import add_shared_options, open_client
from consumer_sdk.commands.terminal import Paint, columns
from consumer_sdk.wire.escaping import printable, printable_json
from consumer_sdk.wire.position import format_lsn
from consumer_sdk.wire.subjects import format_table_name

if TYPE_CHECKING:
    import argparse

    from consumer_sdk.wire.column_types import TableSchema


def add_arguments(subparsers: Any) -> None:
    """Declare both commands."""
    schema = subparsers.add_parser(
        "schema",
        description="Show the newest schema of a table. TABLE is written as in SQL.",
    )
    schema.add_argument("table", metavar="TABLE")
    schema.add_argument("--json", action="store_true", help="print the schema document")
    add_shared_options(schema)
    schema.set_defaults(run=show_schema)
    tables = subparsers.add_parser("tables", description="List the published tables.")
    tables.add_argument("--json", action="store_true", help="print one document on each line")
    add_shared_options(tables)
    tables.set_defaults(run=show_tables)


async def show_schema(arguments: argparse.Namespace) -> int:
    """Print one schema."""
    async with open_client(arguments) as client:
        schema = await client.schema(arguments.table)
    if arguments.json:
        print(printable_json(json.dumps(schema.to_document(), ensure_ascii=False)))
        return 0
    paint = Paint(sys.stdout)
    name = printable(format_table_name(schema.schema, schema.table))
    source = printable(schema.source)
    print(f"{paint('bold', name)}  version {schema.schema_version}  source {source}")
    key = ", ".join(map(printable, schema.primary_key)) or "none"
    print(f"primary key {key}; replica identity {printable(schema.replica_identity)}; "
          f"as of {format_lsn(schema.lsn)}")  # fmt: skip
    rows = [("column", "type", "null", "default", "identity")]
    rows += [
        (
            printable(column.name),
            printable(column.data_type),
            "yes" if column.is_nullable else "no",
            printable(column.column_default or ""),
            "yes" if column.is_key else "",
        )
        for column in schema.columns
    ]
    _print_table(rows, paint)
    return 0


async def show_tables(arguments: argparse.Namespace) -> int:
    """Print all tables; exit code 1 if there are none."""
    async with open_client(arguments) as client:
        schemas = await client.tables()
    if arguments.json:
        for schema in schemas:
            print(printable_json(json.dumps(schema.to_document(), ensure_ascii=False)))
    elif schemas:
        rows = [("table", "version", "columns", "row key", "source")]
        rows += [_row(schema) for schema in schemas]
        _print_table(rows, Paint(sys.stdout))
    if not schemas:
        print("no table is published yet", file=sys.stderr)
        return 1
    return 0


def _row(schema: TableSchema) -> tuple[str, str, str, str, str]:
    keyless = schema.replica_identity == "full" and not schema.primary_key
    return (
        printable(format_table_name(schema.schema, schema.table)),
        str(schema.schema_version),
        str(len(schema.columns)),
        "all columns" if keyless else ", ".join(map(printable, schema.row_key)) or "none",
        printable(schema.source),
    )


def _print_table(
    rows: list[tuple[str, ...]] | list[tuple[str, str, str, str, str]], paint: Paint
) -> None:
    head, *lines = columns(rows)
    print(paint("dim", head))
    for line in lines:
        print(line)

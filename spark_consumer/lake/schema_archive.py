"""Schema versions beside the lake, since the bucket keeps only the newest of each table.

A version is written before the first commit that needs it; what it says never changes.
"""

from __future__ import annotations

import json
from pathlib import Path

from consumer_sdk.wire.column_types import TableSchema
from consumer_sdk.wire.subjects import table_token


class SchemaArchive:
    """The versions of each table and epoch, one small file each."""

    def __init__(self, lake_directory: str) -> None:
        self._directory = Path(lake_directory, "_tailrace", "schemas")

    def keep(self, schema: TableSchema) -> None:
        """Remember a version."""
        target = self._file(schema, schema.epoch, schema.schema_version)
        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix(".tmp")
        temporary.write_text(json.dumps(schema.to_document()))
        temporary.replace(target)

    def versions(self, schema: str, table: str, epoch: int) -> dict[int, TableSchema]:
        """Every version of a table that is remembered."""
        directory = self._directory / table_token(schema, table)
        found = {}
        for file in directory.glob(f"{epoch}-*.json"):
            one = TableSchema.from_document(json.loads(file.read_text()))
            found[one.schema_version] = one
        return found

    def _file(self, schema: TableSchema, epoch: int, version: int) -> Path:
        token = table_token(schema.schema, schema.table)
        return self._directory / token / f"{epoch}-{version}.json"

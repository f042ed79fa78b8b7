"""The records of the job in the lake's `_tailrace` directory.

The manifest lists consistent versions of the tables: tables are committed one after another, so
their newest versions may be some transactions apart. An entry names one version of each table, all
at the same position of each source.

The schema archive holds every schema version, because the KV bucket has only the newest of each
table. A version is written before the first commit that needs it, and never changes.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from consumer_sdk.wire.column_types import TableSchema
from consumer_sdk.wire.subjects import table_token
from spark_consumer.lake.directory import own_directory, staging_directory

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

KEPT_ENTRIES: Final = 500
_DIGITS: Final = 12


@dataclass(frozen=True)
class ManifestPosition:
    """The position of a source: all changes up to this commit LSN and none after it."""

    epoch: int
    stream_seq: int
    commit_lsn: int


@dataclass(frozen=True)
class ManifestEntry:
    """Consistent versions of the tables; `written_at` is in microseconds since 1970."""

    written_at: int
    sources: Mapping[str, ManifestPosition]
    tables: Mapping[str, int]


class Manifest:
    """The manifest of one lake: one file per entry, appended atomically."""

    def __init__(self, lake_directory: str) -> None:
        self._directory = own_directory(lake_directory) / "manifest"

    def append(self, entry: ManifestEntry) -> None:
        """Append an entry, which readers see as a whole, and delete the oldest ones."""
        self._directory.mkdir(parents=True, exist_ok=True)
        files = self._files()
        number = int(files[-1].stem) + 1 if files else 1
        target = self._directory / f"{number:0{_DIGITS}}.json"
        temporary = target.with_suffix(".tmp")
        with temporary.open("w") as file:
            json.dump(asdict(entry), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        for old in files[: max(0, len(files) + 1 - KEPT_ENTRIES)]:
            old.unlink(missing_ok=True)

    def entries(self) -> list[ManifestEntry]:
        """All entries, oldest first."""
        return [_read(file) for file in self._files()]

    def latest(self) -> ManifestEntry | None:
        """The newest entry."""
        files = self._files()
        return _read(files[-1]) if files else None

    def _files(self) -> list[Path]:
        return sorted(file for file in self._directory.glob("*.json") if file.stem.isdecimal())


def _read(file: Path) -> ManifestEntry:
    document: dict[str, Any] = json.loads(file.read_text())
    return ManifestEntry(
        written_at=int(document["written_at"]),
        sources={name: ManifestPosition(**mark) for name, mark in document["sources"].items()},
        tables={name: int(version) for name, version in document["tables"].items()},
    )


class SchemaArchive:
    """The schema versions of each table and epoch, one file each."""

    def __init__(self, lake_directory: str) -> None:
        self._directory = own_directory(lake_directory) / "schemas"

    def keep(self, schema: TableSchema) -> None:
        """Store a version unless it is stored already."""
        target = self._file(schema, schema.epoch, schema.schema_version)
        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix(".tmp")
        temporary.write_text(json.dumps(schema.to_document()))
        temporary.replace(target)

    def versions(self, schema: str, table: str, epoch: int) -> dict[int, TableSchema]:
        """All stored versions of a table."""
        directory = self._directory / table_token(schema, table)
        found = {}
        for file in directory.glob(f"{epoch}-*.json"):
            one = TableSchema.from_document(json.loads(file.read_text()))
            found[one.schema_version] = one
        return found

    def _file(self, schema: TableSchema, epoch: int, version: int) -> Path:
        token = table_token(schema.schema, schema.table)
        return self._directory / token / f"{epoch}-{version}.json"


class LakeRecords:
    """All files of the job in the `_tailrace` directory of a lake."""

    def __init__(self, lake_directory: str) -> None:
        self.manifest = Manifest(lake_directory)
        self.schemas = SchemaArchive(lake_directory)
        self.staging = staging_directory(lake_directory)
        self.checkpoints = str(own_directory(lake_directory) / "checkpoint")

    def clear_leftovers(self) -> None:
        """Remove the staged files and checkpoints of earlier runs; no commit refers to them."""
        for leftover in (self.staging, self.checkpoints):
            shutil.rmtree(leftover, ignore_errors=True)

"""What the lake keeps beside its tables: the manifest and the schema versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from consumer_sdk.wire.column_types import TableSchema
from spark_consumer.lake import records
from spark_consumer.lake.records import Manifest, ManifestEntry, ManifestPosition, SchemaArchive

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def entry(version: int) -> ManifestEntry:
    return ManifestEntry(version, {"slot": ManifestPosition(1, version, 2)}, {"users": version})


def test_the_newest_entry_names_versions_that_belong_together(tmp_path: Path) -> None:
    manifest = Manifest(str(tmp_path))
    assert manifest.latest() is None
    manifest.append(entry(1))
    manifest.append(entry(2))
    assert Manifest(str(tmp_path)).latest() == entry(2)
    assert manifest.entries() == [entry(1), entry(2)]


def test_old_entries_go_and_half_written_ones_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "KEPT_ENTRIES", 3)
    manifest = Manifest(str(tmp_path))
    for version in range(1, 7):
        manifest.append(entry(version))
    directory = tmp_path / "_tailrace" / "manifest"
    (directory / "000000000099.tmp").write_text('{"written_at": ')
    assert [one.written_at for one in manifest.entries()] == [4, 5, 6]


def test_schema_versions_come_back_by_epoch(tmp_path: Path) -> None:
    document = {
        "v": 1,
        "source": "slot",
        "epoch": 5,
        "table": "Odd Table.1",
        "schema": "sales",
        "timestamp": 0,
        "schema_version": 3,
        "lsn": 9,
        "primary_key": ["id"],
        "replica_identity": "default",
        "columns": [{"name": "id", "position": 1, "data_type": "int", "type_oid": 23}],
    }
    schema = TableSchema.from_document(document)
    archive = SchemaArchive(str(tmp_path))
    archive.keep(schema)
    archive.keep(schema)
    assert archive.versions("sales", "Odd Table.1", 5) == {3: schema}
    assert archive.versions("sales", "Odd Table.1", 6) == {}

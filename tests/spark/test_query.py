"""Spark SQL over the tables of a lake."""

from __future__ import annotations

import base64
import json
import struct
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from spark_consumer.errors import LakeError
from spark_consumer.lake.delta_commits import deletion_vectors
from spark_consumer.lake.query import register_views

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


def test_no_table_hides_behind_the_name_of_another(spark: SparkSession, tmp_path: Path) -> None:
    for number, name in enumerate(("sales.invoices", "sales_invoices", "sales.orders")):
        write_deltalake(str(tmp_path / name), pa.table({"n": [number]}))
    names = register_views(spark, str(tmp_path))
    assert names == ["sales.invoices", "sales_orders", "sales_invoices"]
    found = [spark.sql(f"SELECT n FROM `{name}`").collect()[0]["n"] for name in names]
    assert found == [0, 2, 1]


def delete_by_vector(root: Path, *rows: int) -> None:
    """Delete rows as Delta on Spark does: the file stays, and a vector names the deleted rows."""
    table = DeltaTable(str(root))
    log = root / "_delta_log"
    adds = [json.loads(line) for line in (log / f"{0:020}.json").read_text().splitlines()]
    (added,) = [line["add"] for line in adds if "add" in line]
    # A 64-bit Roaring array of one bitmap, which is one array container.
    bitmap = struct.pack("<IIHHI", 12346, 1, 0, len(rows) - 1, 16)
    bitmap += struct.pack(f"<{len(rows)}H", *rows)
    vector = struct.pack("<IQI", 1681511377, 1, 0) + bitmap
    vector += bytes(-len(vector) % 4)
    described = {
        "storageType": "i",
        "pathOrInlineDv": z85(vector),
        "sizeInBytes": len(vector),
        "cardinality": len(rows),
    }
    features = ["deletionVectors"]
    actions = [
        {
            "protocol": {
                "minReaderVersion": 3,
                "minWriterVersion": 7,
                "readerFeatures": features,
                "writerFeatures": features,
            }
        },
        {"remove": {"path": added["path"], "dataChange": True, "deletionTimestamp": 1}},
        {"add": {**added, "deletionVector": described}},
    ]
    commit = log / f"{table.version() + 1:020}.json"
    commit.write_text("".join(json.dumps(action) + "\n" for action in actions))


def z85(data: bytes) -> str:
    """Base85 with the alphabet of ZeroMQ."""
    alphabets = (
        b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~",
        b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#",
    )
    return base64.b85encode(data).translate(bytes.maketrans(*alphabets)).decode()


def test_deleted_rows_in_the_files_are_not_shown(spark: SparkSession, tmp_path: Path) -> None:
    root = tmp_path / "users"
    write_deltalake(str(root), pa.table({"n": [10, 11, 12, 13]}))
    delete_by_vector(root, 1, 3)
    assert len(deletion_vectors(DeltaTable(str(root)))) == 1
    with pytest.raises(LakeError, match=r"users has deletion vectors, .* Delta's own reader"):
        register_views(spark, str(tmp_path))


def test_tables_whose_files_lack_columns_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "users"), pa.table({"n": [1], "p": [2]}), partition_by=["p"])
    with pytest.raises(LakeError, match="users has partitions"):
        register_views(spark, str(tmp_path))

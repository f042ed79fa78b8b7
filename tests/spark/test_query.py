"""Spark SQL over the tables of a lake."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import write_deltalake

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

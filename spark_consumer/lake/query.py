"""Spark SQL over the tables of a lake: `python -m spark_consumer.lake.query --lake DIR 'SELECT …'`.

Every table is a view over the Parquet files of its newest version, so that no Delta jars are
needed. `sales.invoices` is called `sales_invoices`, unless another table has that name. Each row of
a result is one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spark_consumer.errors import LakeError, SparkConsumerError
from spark_consumer.lake.delta_commits import deletion_vectors
from spark_consumer.runtime.session import open_session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

_COLUMN_MAPPING: Final = "delta.columnMapping.mode"


def register_views(spark: SparkSession, lake: str) -> list[str]:
    """Create a view for every Delta table of the lake, and return the names of the views.

    LakeError if the files of a table do not hold exactly its rows.
    """
    from deltalake import DeltaTable
    from pyspark.sql.types import StructType

    names = []
    roots = [one for one in sorted(Path(lake).iterdir()) if DeltaTable.is_deltatable(str(one))]
    wanted = Counter(root.name.replace(".", "_") for root in roots)
    for root in roots:
        table = DeltaTable(str(root))
        _require_plain_files(table, root)
        # Delta stores its schemas in Spark's JSON format.
        columns = StructType.fromJson(json.loads(table.schema().to_json()))
        files = table.file_uris()
        rows = (
            spark.read.schema(columns).parquet(*files)
            if files
            else spark.createDataFrame([], columns)
        )
        name = root.name.replace(".", "_")
        if wanted[name] > 1:
            name = root.name
        # Quoted, because special characters of a table's name are written ~XX.
        rows.createOrReplaceTempView(f"`{name}`")
        names.append(name)
    return names


def _require_plain_files(table: DeltaTable, root: Path) -> None:
    metadata = table.metadata()
    features = {
        "deletion vectors": bool(deletion_vectors(table)),
        "partitions": bool(metadata.partition_columns),
        "column mapping": metadata.configuration.get(_COLUMN_MAPPING, "none") != "none",
    }
    for feature, used in features.items():
        if used:
            raise LakeError(
                f"table {root} has {feature}, so its files alone do not tell its rows; "
                "read it with Delta's own reader"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the statements one after another."""
    parser = argparse.ArgumentParser(prog="spark_consumer.lake.query", description=__doc__)
    parser.add_argument("--lake", required=True, metavar="DIR", help="directory of the tables")
    parser.add_argument("--master", help="where Spark runs; default as of spark-consumer")
    parser.add_argument("statement", nargs="+", help="a query in Spark SQL")
    options = parser.parse_args(argv)
    if not Path(options.lake).is_dir():
        parser.error(f"no directory {options.lake}")
    try:
        spark = open_session(options.master, name="tailrace query")
    except SparkConsumerError as error:
        print(f"query: {error}", file=sys.stderr)
        return 3
    try:
        try:
            register_views(spark, options.lake)
        except SparkConsumerError as error:
            print(f"query: {error}", file=sys.stderr)
            return error.exit_code
        for statement in options.statement:
            for row in spark.sql(statement).collect():
                print(json.dumps(row.asDict(), default=str))
    finally:
        spark.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

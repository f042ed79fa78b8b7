"""The MERGE of one batch into a Delta table: its expressions, and its rows, which are counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spark_consumer.lake.lake_table import MergePlan

INCOMPLETE: Final = "tailrace:incomplete:"
"""In the text of the error that ends a MERGE because the table lacks an incomplete row."""


class MergeStatement:
    """The expressions of a MERGE of rows `s` into the table `t`."""

    def __init__(self, plan: MergePlan) -> None:
        staged = {name: f"s.{_quoted(source)}" for name, source in plan.columns.items()}
        self.on = " AND ".join(f"t.{_quoted(name)} = {staged[name]}" for name in plan.key)
        # The key as well: 0.0 and -0.0 are equal, and the newest of them stays.
        self.updates = {_quoted(name): value for name, value in staged.items()}
        for name, flag in plan.keepable.items():
            keep = f"CASE WHEN s.{_quoted(flag)} THEN t.{_quoted(name)} ELSE {staged[name]} END"
            self.updates[_quoted(name)] = keep
        self.inserts = {_quoted(name): value for name, value in staged.items()}
        if plan.incomplete is not None:
            # An incomplete row has no values to insert: the cast fails, and with it the MERGE.
            flag = f"s.{_quoted(plan.incomplete)}"
            fails = f"CAST(concat('{INCOMPLETE}', CAST({flag} AS VARCHAR)) AS BIGINT) IS NULL"
            first = plan.key[0]
            self.inserts[_quoted(first)] = (
                f"CASE WHEN {flag} THEN CASE WHEN {fails} THEN {staged[first]} END "
                f"ELSE {staged[first]} END"
            )
        self.deleted = None if plan.deleted is None else f"s.{_quoted(plan.deleted)}"


class CountedRows:
    """The rows of a reader, which fails at its end unless they are as many as expected."""

    def __init__(self, rows: pa.RecordBatchReader, expected: int) -> None:
        self._rows = rows
        self._expected = expected
        self.count: int | None = None
        """The number of rows, None until all have been read."""

    def reader(self) -> pa.RecordBatchReader:
        """The rows as deltalake reads them."""
        return pa.RecordBatchReader.from_batches(self._rows.schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        count = 0
        for batch in self._rows:
            count += batch.num_rows
            yield batch
        self.count = count
        if count != self._expected:
            raise ValueError("rows are missing")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'

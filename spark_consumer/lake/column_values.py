"""Converts values of the wire format to Arrow arrays, a column at a time.

The fast path converts a whole column in Arrow. If that fails, values are converted one by one, and
the policy decides about values that the type cannot represent.
"""

from __future__ import annotations

import re
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa

from consumer_sdk.errors import CorruptData
from consumer_sdk.wire.errors import MISFITS
from consumer_sdk.wire.jsonb import jsonb_text
from spark_consumer.errors import SchemaChangeError, UnrepresentableError
from spark_consumer.lake.column_mapping import arrow_type, is_text, widened
from spark_consumer.lake.table_definition import TEXT_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    from consumer_sdk.wire.column_types import TableSchema
    from spark_consumer.lake.table_definition import TableDefinition

Row = dict[str, Any]

Unrepresentable = Literal["error", "null", "text"]
"""The policy for a value its column cannot represent: stop, write null, or null and its text."""

_REMEDY: Final = "choose --unrepresentable=null or --unrepresentable=text"
_KEY_REMEDY: Final = (
    "this column identifies rows: give the table another REPLICA IDENTITY, or exclude the row"
)
_TIMESTAMP: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z?\Z")


class _UnrepresentableValueError(ValueError):
    """The type cannot represent the value."""


def wire_text(value: object) -> str:
    """A value as text: as PostgreSQL prints it if the wire format has it as text."""
    return value if isinstance(value, str) else jsonb_text(value)


class ColumnWriter:
    """Converts the wire values of one column to an Arrow array of the lake's type.

    Values of json and jsonb must already be text. `describe(index)` names a row in errors. A key
    column raises an error whatever the policy, because it identifies rows.
    """

    def __init__(
        self,
        table: str,
        name: str,
        type_: pa.DataType,
        *,
        policy: Unrepresentable = "error",
        is_key: bool = False,
    ) -> None:
        self._table = table
        self._name = name
        self.type = type_
        self.policy: Unrepresentable = "error" if is_key else policy
        self._remedy = _KEY_REMEDY if is_key else _REMEDY
        self._one = _converter(type_)

    def write(
        self, values: Sequence[Any], describe: Callable[[int], str]
    ) -> tuple[pa.Array, pa.Array | None]:
        """The array, and with policy `text` the texts of the values that it cannot represent."""
        try:
            quick = _quick(values, self.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
            quick = None
        if quick is not None:
            return quick, None
        try:
            return self._slow(values, describe)
        except (pa.ArrowException, *MISFITS):
            # Its cause may quote the value, and Spark logs the causes of errors in executors.
            raise CorruptData(
                f"table {self._table}, column {self._name}: a value is not of type {self.type}"
            ) from None

    def _slow(
        self, values: Sequence[Any], describe: Callable[[int], str]
    ) -> tuple[pa.Array, pa.Array | None]:
        converted: list[Any] = []
        texts: list[str | None] | None = None
        for index, value in enumerate(values):
            try:
                converted.append(None if value is None else self._one(value))
            except _UnrepresentableValueError:
                if self.policy == "error":
                    raise self.refused(describe(index)) from None
                if self.policy == "text":
                    texts = texts if texts is not None else [None] * len(values)
                    texts[index] = wire_text(value)
                converted.append(None)
            except (TypeError, ValueError):
                raise CorruptData(
                    f"table {self._table}, column {self._name}, row {describe(index)}: "
                    f"a {type(value).__name__} instead of {self.type}"
                ) from None
        array = pa.array(converted, self.type)
        return array, None if texts is None else pa.array(texts, pa.string())

    def refused(self, row: str) -> UnrepresentableError:
        """The error for a value that the type cannot represent."""
        return UnrepresentableError(
            f"table {self._table}, column {self._name}, row {row}: "
            f"the value does not fit {self.type}; {self._remedy}"
        )


class RowWriter:
    """Converts rows of one schema version to arrays of the table's columns in the lake.

    `key` names the columns that identify rows in the lake; () if nothing looks rows up there.
    SchemaChangeError if the lake's columns cannot represent those of the version.
    """

    def __init__(
        self,
        definition: TableDefinition,
        schema: TableSchema,
        policy: Unrepresentable,
        key: Container[str] = (),
    ) -> None:
        self.schema = schema
        self._definition = definition
        self._json_columns = tuple(
            column.name for column in schema.columns if column.family in ("json", "jsonb")
        )
        self.writers: dict[str, ColumnWriter] = {}
        for column in schema.columns:
            index = definition.columns.get_field_index(column.name)
            type_ = definition.columns.field(index).type if index >= 0 else None
            if type_ is None or widened(type_, column) != type_:
                raise SchemaChangeError(
                    f"table {definition.name}: the lake has no place for column {column.name} of "
                    f"schema version {schema.schema_version}; rebuild it with --rebootstrap"
                )
            self.writers[column.name] = ColumnWriter(
                definition.name,
                column.name,
                # Text stays as PostgreSQL prints it: Arrow would use exponents for small decimals.
                type_ if is_text(type_) else arrow_type(column),
                policy=policy,
                is_key=column.name in key,
            )

    def write_json_as_text(self, row: Row, raw: Container[str]) -> None:
        """Replace JSON documents in the row by their text; columns in `raw` are text already."""
        for name in self._json_columns:
            if name not in raw and row.get(name) is not None:
                row[name] = jsonb_text(row[name])

    def arrays(
        self, rows: Sequence[Row], names: Iterable[str], describe: Callable[[int], str]
    ) -> dict[str, pa.Array]:
        """Arrays for the named columns of the lake; columns that the version lacks are null."""
        arrays: dict[str, pa.Array] = {}
        for name in names:
            if name in arrays:
                continue
            type_ = self._definition.columns.field(name).type
            writer = self.writers.get(name)
            if writer is None:
                arrays[name] = pa.nulls(len(rows), type_)
                continue
            array, texts = writer.write([row.get(name) for row in rows], describe)
            arrays[name] = array if array.type == type_ else array.cast(type_)
            if texts is not None:
                arrays[name + TEXT_SUFFIX] = texts
        return arrays


def _quick(values: Sequence[Any], type_: pa.DataType) -> pa.Array | None:
    """Convert a whole column at once; None if its values must be converted one by one."""
    if pa.types.is_list(type_) and not all(
        value is None or isinstance(value, list) for value in values
    ):
        return None
    inferred = pa.array(values)
    if inferred.type == type_:
        return inferred
    return inferred.cast(type_) if _reads_as(inferred.type, type_) else None


def _reads_as(inferred: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether Arrow's checked cast converts every value correctly or fails."""
    if pa.types.is_null(inferred) or inferred == wanted:
        return True
    if pa.types.is_string(inferred):
        return bool(pa.types.is_temporal(wanted) or pa.types.is_decimal(wanted))
    if pa.types.is_integer(inferred):
        return bool(pa.types.is_integer(wanted) or pa.types.is_floating(wanted))
    if pa.types.is_list(inferred) and pa.types.is_list(wanted):
        return _reads_as(inferred.value_type, wanted.value_type)
    return bool(pa.types.is_floating(inferred) and pa.types.is_floating(wanted))


def _converter(type_: pa.DataType) -> Callable[[Any], Any]:
    if pa.types.is_list(type_):
        one = _converter(type_.value_type)

        def to_list(value: Any) -> list[Any]:
            # Arrays with unusual bounds arrive as text; nested lists are further dimensions.
            if isinstance(value, str) or any(isinstance(item, list) for item in value):
                raise _UnrepresentableValueError
            return [None if item is None else one(item) for item in value]

        return to_list
    if pa.types.is_timestamp(type_):
        return _to_zoned if type_.tz else _to_zoneless
    if pa.types.is_date(type_):
        return _to_date
    if pa.types.is_decimal(type_):
        return _to_decimal(type_.precision, type_.scale)
    if pa.types.is_boolean(type_):
        return _instance_of(bool)
    if pa.types.is_integer(type_):
        return _instance_of(int)
    if pa.types.is_floating(type_):
        return _to_float
    if pa.types.is_binary(type_):
        return _instance_of(bytes)
    return _instance_of(str)


def _instance_of(kind: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise TypeError(f"not a {kind.__name__}")
        return value

    return check


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError("not a number")
    return float(value)


def _to_timestamp(value: Any) -> datetime:
    if not isinstance(value, str):
        raise TypeError("not text")
    if _TIMESTAMP.match(value) is None:
        raise _UnrepresentableValueError
    return datetime.fromisoformat(value)


def _to_zoned(value: Any) -> datetime:
    moment = _to_timestamp(value)
    if moment.tzinfo is None:
        raise _UnrepresentableValueError
    return moment


def _to_zoneless(value: Any) -> datetime:
    moment = _to_timestamp(value)
    if moment.tzinfo is not None:
        raise _UnrepresentableValueError
    return moment


def _to_date(value: Any) -> date:
    if not isinstance(value, str):
        raise TypeError("not text")
    try:
        return date.fromisoformat(value)
    except ValueError:
        raise _UnrepresentableValueError from None


def _to_decimal(precision: int, scale: int) -> Callable[[Any], Decimal]:
    def convert(value: Any) -> Decimal:
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise TypeError("not a number")
        try:
            number = Decimal(value)
        except InvalidOperation:
            raise TypeError("not a number") from None
        if not number.is_finite():
            raise _UnrepresentableValueError
        _, digits, exponent = number.as_tuple()
        assert isinstance(exponent, int)
        if any(digits) and (-exponent > scale or len(digits) + exponent > precision - scale):
            raise _UnrepresentableValueError
        return number

    return convert

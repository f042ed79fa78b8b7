from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import ProtocolError
from bridge.events.values import ColumnType, converter_for, is_raw
from consumer_sdk.wire import oids

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
elements = texts | st.sampled_from(
    ["NULL", "null", "{}", ",", '"', "\\", " ", "", ";", "[1:1]={x}"]
)


def literal(value: Any, delimiter: str = ",") -> str:
    """An array literal, quoted where PostgreSQL quotes."""
    if value is None:
        return "NULL"
    if isinstance(value, list):
        return "{" + delimiter.join(literal(item, delimiter) for item in value) + "}"
    quoted = set('{}"\\ \t\n\r\v\f') | {delimiter}
    if value and value.upper() != "NULL" and not quoted & set(value):
        return str(value)
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def nested(depth: int) -> st.SearchStrategy[list[Any]]:
    inner: st.SearchStrategy[Any] = elements | st.none() if depth == 1 else nested(depth - 1)
    return st.lists(inner, min_size=1, max_size=3)


arrays = st.just([]) | st.integers(1, 6).flatmap(nested)


@given(arrays, st.sampled_from(",;|^"))
def test_arrays_of_text_round_trip(value: list[Any], delimiter: str) -> None:
    column_type = ColumnType(16_500, element_oid=oids.TEXT, element_delimiter=delimiter)
    assert converter_for(column_type).convert(literal(value, delimiter).encode()) == value


@given(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), max_size=8))
def test_arrays_of_integers_round_trip(value: list[int | None]) -> None:
    text = literal([None if item is None else str(item) for item in value])
    assert converter_for(ColumnType(1016)).convert(text.encode()) == value


@given(st.text('{}",\\ aN1;', max_size=14))
def test_any_array_text_is_a_list_or_refused(text: str) -> None:
    try:
        value = converter_for(ColumnType(1009)).convert(text.encode())
    except ProtocolError:
        return
    assert isinstance(value, list)
    assert converter_for(ColumnType(1009)).convert(literal(value).encode()) == value


@given(st.floats())
def test_floats_round_trip(value: float) -> None:
    text = "NaN" if math.isnan(value) else repr(value).replace("inf", "Infinity")
    assert repr(converter_for(ColumnType(oids.FLOAT8)).convert(text.encode())) == repr(value)


numbers = st.one_of(
    st.integers(),
    st.integers(-(10**40), 10**40),
    st.decimals(allow_nan=False, allow_infinity=False),
    st.floats(allow_nan=False, allow_infinity=False).map(lambda value: Decimal(repr(value))),
).map(lambda number: format(Decimal(number), "f"))


@st.composite
def jsonb_texts(draw: st.DrawFn) -> str:
    """jsonb as PostgreSQL prints it, its numbers with any digits."""
    leaf = st.one_of(
        numbers,
        texts.map(lambda text: json.dumps(text, ensure_ascii=False)),
        st.sampled_from(["null", "true", "false"]),
    )
    return draw(
        st.recursive(
            leaf,
            lambda inner: st.one_of(
                st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
                st.dictionaries(texts, inner, max_size=3).map(
                    lambda items: (
                        "{"
                        + ", ".join(
                            f"{json.dumps(key, ensure_ascii=False)}: {item}"
                            for key, item in items.items()
                        )
                        + "}"
                    )
                ),
            ),
            max_leaves=6,
        )
    )


def exactly(text: str) -> Any:
    """Every number as its text, so that equality is that of digits."""
    return json.loads(text, parse_float=lambda digits: ("n", digits), parse_int=lambda d: ("n", d))


def spelled(value: Any) -> Any:
    """A decoded value with its numbers spelled as jsonb spells them."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return ("n", str(value))
    if isinstance(value, float):
        return ("n", format(Decimal(repr(value)), "f"))
    if isinstance(value, list):
        return [spelled(item) for item in value]
    return {key: spelled(item) for key, item in value.items()}


@given(jsonb_texts(), st.booleans())
def test_decoded_jsonb_encodes_to_the_same_digits_and_the_rest_is_raw(
    text: str, json_messages: bool
) -> None:
    convert = converter_for(ColumnType(oids.JSONB), json_messages=json_messages).convert
    value = convert(text.encode())
    if is_raw(value):
        assert value == text
    else:
        carried = msgpack.unpackb(msgpack.packb(value))
        assert spelled(carried) == exactly(text)


@given(st.integers(-(2**63), 2**64 - 1) | st.floats(-1e15, 1e15).filter(lambda f: f != 0))
def test_numbers_that_fit_are_decoded(number: float) -> None:
    text = format(Decimal(repr(number)), "f")
    assert converter_for(ColumnType(oids.JSONB)).convert(text.encode()) == number

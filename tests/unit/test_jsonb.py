"""Decoded jsonb as text."""

from __future__ import annotations

import json

import pytest

from consumer_sdk.wire.jsonb import jsonb_text


@pytest.mark.parametrize(
    "text",
    ['{"a": 0.00001, "1e-5": ["1e-5", -0.0000025, 1.5, 7]}', "0.0000001", '"1e-5"', "[true, {}]"],
)
def test_jsonb_is_spelled_as_postgresql_does(text: str) -> None:
    assert jsonb_text(json.loads(text)) == text

"""What a snapshot request may say."""

from __future__ import annotations

import json

import msgpack
import pytest

from bridge.errors import Refused
from bridge.snapshot.coordinator.requests import CopyOptions, body_is_json, parse_request


def parse(body: bytes, headers: dict[str, str] | None = None) -> CopyOptions:
    return parse_request(body, headers, as_json=False, zstd=True).options


def test_an_empty_request_takes_the_defaults_of_the_bridge() -> None:
    for body in (b"", b"  ", msgpack.packb({}), b"{}"):
        assert parse(body) == CopyOptions(None, "msgpack", True)
    request = parse_request(b"", None, as_json=True, zstd=False)
    assert request.options == CopyOptions(None, "json", False)
    assert (request.asked, request.fresh) == ({}, False)


@pytest.mark.parametrize("pack", [msgpack.packb, lambda options: json.dumps(options).encode()])
def test_options_are_read_in_either_encoding(pack: object) -> None:
    assert callable(pack)
    body = pack({"columns": ["b", "a"], "format": "json", "zstd": False, "fresh": True})
    request = parse_request(body, None, as_json=False, zstd=True)
    assert request.options == CopyOptions(("a", "b"), "json", False)
    assert request.asked == {"columns": ["a", "b"], "format": "json", "zstd": False}
    assert request.fresh is True


@pytest.mark.parametrize("allowed", [True, False])
def test_a_request_says_whether_it_takes_several_points_and_its_meta_does_not_repeat_it(
    allowed: bool,
) -> None:
    request = parse_request(msgpack.packb({"pieces": allowed}), None, as_json=False, zstd=True)
    options = CopyOptions(None, "msgpack", True, pieces=allowed)
    assert (request.options, request.asked) == (options, {})


def test_null_means_not_said() -> None:
    body = json.dumps({"columns": None, "format": None, "zstd": None, "fresh": None}).encode()
    request = parse_request(body, None, as_json=False, zstd=True)
    assert (request.options, request.asked) == (CopyOptions(None, "msgpack", True), {})


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1", b"[1]", b"7", b'"text"', b"null", b"{", b"\xff" * 30, msgpack.packb({1: 2}),
        b'{"columns": []}', b'{"columns": [1]}', b'{"columns": {"a": 1}}', b'{"zstd": 1}',
        b'{"format": 5}', b'{"format": ["arrow"]}', b'{"fresh": "true"}', b'{"nope": 1}',
        b'{"pieces": 0}', b"[" * 5000, b"{" + b" " * 140_000 + b"}",
    ],
)  # fmt: skip
def test_junk_is_refused_never_a_crash(body: bytes) -> None:
    with pytest.raises(Refused):
        parse(body)


def test_the_content_type_decides_and_else_the_first_byte() -> None:
    assert body_is_json(b"{}", None, default=False)
    assert not body_is_json(msgpack.packb({"a": 1}), None, default=True)
    assert not body_is_json(msgpack.packb(dict.fromkeys(range(16))), None, default=True)
    for body in (b"", b"hello", b"[]", b"\xff\x00"):
        assert body_is_json(body, None, default=True)
        assert not body_is_json(body, None, default=False)
    assert not body_is_json(b"{", {"Content-Type": "application/msgpack"}, default=True)

"""Large rows leave no large buffers behind."""

from __future__ import annotations

import sys

import msgpack
import pytest

from bridge.cli import return_large_blocks
from bridge.events.encoders import JsonEncoder, MsgpackEncoder

LARGE = {"data": {"id": 1, "body": "tailrace" * 1_000_000}}


@pytest.mark.parametrize("encoder", [MsgpackEncoder(), JsonEncoder()], ids=["msgpack", "json"])
def test_a_large_row_is_encoded_like_a_small_one(encoder: MsgpackEncoder | JsonEncoder) -> None:
    large = encoder.row(encoder.body(LARGE), len(LARGE))
    small = encoder.row(encoder.body({"data": {"id": 1, "body": "tailrace"}}), 1)
    if isinstance(encoder, MsgpackEncoder):
        assert msgpack.unpackb(large) == LARGE
        assert msgpack.unpackb(small)["data"]["body"] == "tailrace"
    else:
        assert large == small.replace(b'"tailrace"', b'"%b"' % (b"tailrace" * 1_000_000))


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's setting")
def test_glibc_takes_the_setting() -> None:
    assert return_large_blocks()

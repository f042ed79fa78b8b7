"""A damaged message is refused before anything that it refers to is fetched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from consumer_sdk.errors import CorruptData
from consumer_sdk.reading.decoder import EventDecoder
from consumer_sdk.reading.references import References
from consumer_sdk.transport.api import Frame
from consumer_sdk.wire.envelope import JSON, MSGPACK, encode
from consumer_sdk.wire.subjects import Subjects

if TYPE_CHECKING:
    from consumer_sdk.wire.column_types import TableSchema

REF = {"bucket": "cdc_objects", "name": "wide", "size": 1 << 20, "sha256": "00" * 32}
GOOD: dict[str, Any] = {
    "v": 1, "source": "s", "epoch": 1, "table": "users", "schema": "public", "operation": "INSERT",
    "lsn": 16, "seq": 0, "xid": 1, "ts": 0, "schema_version": 1, "relation_id": 1, "msg_id": "m",
    "subject": "cdc.users.insert", "last": True, "ref": REF,
}  # fmt: skip


class Fetching(References):
    """References that give the same row for everything, and count."""

    nc: Any = None

    def __init__(self, as_json: bool) -> None:
        super().__init__(self.nc, Subjects(""))
        self.fetched = 0
        self._row = encode({"data": {"id": 1}}, as_json=as_json)

    async def fetch_object(self, _reference: dict[str, Any]) -> bytes:
        self.fetched += 1
        return self._row

    async def of_version(self, _token: str, _version: int) -> TableSchema | None:
        return None


def frame(document: dict[str, Any], as_json: bool) -> Frame:
    kind = JSON if as_json else MSGPACK
    headers = f"NATS/1.0\r\nContent-Type: {kind}\r\n\r\n".encode()
    return Frame(7, b"cdc.users.insert", headers, encode(document, as_json=as_json))


@pytest.mark.parametrize("as_json", [False, True])
async def test_a_row_kept_as_an_object_is_filled_in(as_json: bool) -> None:
    store = Fetching(as_json)
    decoder = EventDecoder(Subjects(""), store, store)
    [stored] = await decoder.decode([frame(GOOD, as_json)])
    assert (stored.event.data, stored.event.ref, store.fetched) == ({"id": 1}, None, 1)
    [(_, payload)] = await store.self_contained([frame(GOOD, as_json)])
    assert b"wide" not in payload
    assert store.fetched == 2


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    "damage",
    [
        {"operation": "EXPLODE"},
        {"lsn": -1},
        {"source": 5},
        {"old": 7},
        {"rows": [{"ref": REF}, 5]},
        {"rows": [{"ref": REF}, {"ref": 5}]},
    ],
)
async def test_nothing_is_fetched_for_a_damaged_message(
    damage: dict[str, Any], as_json: bool
) -> None:
    store = Fetching(as_json)
    damaged = frame({**GOOD, **damage}, as_json)
    with pytest.raises(CorruptData, match="message 7 of the change stream"):
        await EventDecoder(Subjects(""), store, store).decode([damaged])
    with pytest.raises(CorruptData, match="message 7 of the change stream"):
        await store.self_contained([damaged])
    assert not store.fetched

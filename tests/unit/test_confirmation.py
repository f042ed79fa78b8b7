"""What may be confirmed to PostgreSQL follows from what the stream has acknowledged."""

from __future__ import annotations

import asyncio
from typing import Any

from bridge.postgres.connection import Server
from bridge.publish.progress import Confirmation, ProgressLog, StoredUpTo
from bridge.source import Source
from consumer_sdk.wire.subjects import Subjects

SERVER = Server("7300000000000000000", 1, "shop", 0x5000)
SOURCE = Source("main", 7, "pub", Subjects(), as_json=True)


class Bucket:
    """Takes every update, or none."""

    def __init__(self, *, works: bool = True) -> None:
        self.works = works

    async def update(self, _key: str, _value: bytes, last: int) -> int:
        if not self.works:
            raise TimeoutError
        return last + 1


def confirmation(bucket: Any = None) -> Confirmation:
    log = ProgressLog(bucket or Bucket(), SOURCE, SERVER, 1)
    return Confirmation(log, StoredUpTo(1, "fence"), 0x100)


def test_only_the_end_of_a_transaction_moves_the_confirmed_position() -> None:
    one = confirmation()
    one.acknowledge([], 0)
    assert one.lsn == 0x100
    one.acknowledge([], 0x200)
    assert one.lsn == 0x200


def test_the_confirmed_position_never_goes_back() -> None:
    one = confirmation()
    one.acknowledge([], 0x300)
    one.acknowledge([], 0x200)
    one.confirm(0x150)
    assert one.lsn == 0x300


def test_a_stored_transaction_needs_no_progress_record() -> None:
    one = confirmation()
    assert not one.is_recorded(0x200)
    one.acknowledge([], 0x200)
    assert one.is_recorded(0x200)
    assert not one.is_recorded(0x201)


def test_a_record_that_kv_did_not_take_is_still_to_be_kept() -> None:
    one = confirmation(Bucket(works=False))
    asyncio.run(one.keep(one.record(one.lsn)))
    assert not one.is_kept
    one = confirmation()
    asyncio.run(one.keep(one.record(one.lsn)))
    assert one.is_kept


def test_a_record_names_the_newest_message_of_the_source() -> None:
    one = confirmation()
    one.note_end(9, "200-public.users-insert-0-7")
    record = one.record(0x200)
    assert (record["stream_seq"], record["stream_msg_id"]) == (9, "200-public.users-insert-0-7")
    assert (record["source"], record["epoch"], record["database"]) == ("main", 7, "shop")

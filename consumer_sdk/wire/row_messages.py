"""HOT PATH: decodes MessagePack row changes directly into events, without maps in between.

Only ordinary messages are decoded here. `envelope.events_of` handles all others, damaged ones and
for example rows stored as objects, and raises the errors. `make bench reading` measures the gain.
"""

from __future__ import annotations

from typing import Any

import msgspec

from consumer_sdk.wire.envelope import ROW_OPERATIONS, WIRE_VERSION, Event, may_hold_times


class _Row(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    data: dict[str, Any] | None = None
    old: dict[str, Any] | None = None
    unchanged: tuple[str, ...] = ()
    raw: tuple[str, ...] = ()


class _RowMessage(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    v: int
    source: str
    epoch: int
    table: str
    schema: str
    operation: str
    relation_id: int
    schema_version: int
    msg_id: str
    subject: str
    lsn: int
    xid: int
    seq: int
    ts: int
    data: dict[str, Any] | None = None
    old: dict[str, Any] | None = None
    unchanged: tuple[str, ...] = ()
    raw: tuple[str, ...] = ()
    rows: list[_Row] | None = None
    last: bool = False
    end_lsn: int = 0


class _Extension(Exception):
    """A MessagePack extension type, which the wire format does not use."""


def _refuse_extension(_code: int, _data: memoryview) -> Any:
    raise _Extension


_decode = msgspec.msgpack.Decoder(_RowMessage, ext_hook=_refuse_extension).decode


def read_row_message(payload: bytes) -> list[Event] | None:
    """The events of a plain MessagePack row message, None for anything else."""
    try:
        m = _decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, _Extension):
        return None
    if (
        m.v != WIRE_VERSION
        or may_hold_times(payload)
        or m.operation not in ROW_OPERATIONS
        # Not zero if any of them is negative.
        or (m.epoch | m.lsn | m.seq | m.xid | m.schema_version | m.relation_id | m.end_lsn) >> 64
    ):
        return None
    rows = m.rows
    if rows is None:
        if m.data is None:
            return None
        return [
            Event(
                m.source, m.epoch, m.table, m.schema, m.operation, m.lsn, m.seq, m.xid, m.ts,
                m.schema_version, m.relation_id, m.msg_id, m.subject, m.data, m.old, m.unchanged,
                m.raw, None, m.last, m.end_lsn,
            )
        ]  # fmt: skip
    if not rows:
        return None
    events = []
    seq = m.seq
    for row in rows:
        if row.data is None:
            return None
        events.append(
            Event(
                m.source, m.epoch, m.table, m.schema, m.operation, m.lsn, seq, m.xid, m.ts,
                m.schema_version, m.relation_id, m.msg_id, m.subject, row.data, row.old,
                row.unchanged, row.raw,
            )
        )  # fmt: skip
        seq += 1
    events[-1].last = m.last
    events[-1].end_lsn = m.end_lsn
    return events

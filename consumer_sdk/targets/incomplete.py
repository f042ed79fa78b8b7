"""Rows that lack values, in a copy loaded from a snapshot of several consistent points.

An event below the exact LSN may move a row to another key and leave out an unchanged TOASTed value.
The copy may have read the row's old key later than that, when it was gone or was another row's. So
the value is not known, and the row is incomplete until an event sends the value, moves or deletes
the row, or the bridge is asked for it. No I/O.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from consumer_sdk.targets.evolution import key_columns
from consumer_sdk.wire.column_types import restore_json
from consumer_sdk.wire.envelope import Event, to_json_value

if TYPE_CHECKING:
    from consumer_sdk.targets.target import MirrorCopy, SnapshotRow
    from consumer_sdk.wire.column_types import TableSchema


class Missing(NamedTuple):
    """Columns of a row whose values are not known; the row is at its key since commit LSN `since`.

    No event after `since` has changed these columns.
    """

    columns: frozenset[str]
    since: int


Incomplete = Mapping[str, Missing]
"""The incomplete rows of a copy, by the text of their key."""


def takes_pieces(schema: TableSchema) -> bool:
    """Whether a copy of the table can be loaded from a snapshot of several consistent points.

    Rows are found by their key alone. That needs a key that no two rows share even within a
    transaction, and whose values can be sent in a request, which JSON documents cannot.
    """
    columns = [schema.column(name) for name in key_columns(schema)]
    json_types = ("json", "jsonb")
    return (
        bool(columns)
        and not schema.primary_key_deferrable
        and all(
            column is not None
            and column.family not in json_types
            and column.element_family not in json_types
            for column in columns
        )
    )


def key_text(key: Sequence[str], row: Mapping[str, Any]) -> str:
    """The key of a row as a text; rows with equal wire values have equal texts."""
    return json.dumps(to_json_value([row[name] for name in key]), ensure_ascii=False)


def key_values(schema: TableSchema, text: str) -> list[Any]:
    """The wire values of a key, from its text."""
    values = []
    for name, value in zip(key_columns(schema), json.loads(text), strict=True):
        column = schema.column(name)
        values.append(value if column is None else restore_json(value, column))
    return values


def keys_of(event: Event, key: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The key columns of a row before and after an UPDATE."""
    data, old = event.data, event.old or {}
    before, after = {**data, **old}, {**old, **data}
    return {name: before[name] for name in key}, {name: after[name] for name in key}


def same_key(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether an UPDATE leaves its row at its key."""
    # To PostgreSQL NaN equals NaN.
    return all(
        one == after[name] or (one != one and after[name] != after[name])
        for name, one in before.items()
    )


def known_values(event: Event) -> dict[str, Any]:
    """The new row of an UPDATE as far as the event has it.

    Under REPLICA IDENTITY FULL the old row has the values that did not change.
    """
    if not event.unchanged or not event.old:
        return event.data  # type: ignore[no-any-return]
    kept = {name: event.old[name] for name in event.unchanged if name in event.old}
    return {**event.data, **kept}


def follow(
    incomplete: Incomplete, events: Iterable[Event], schema: TableSchema, exact_lsn: int
) -> dict[str, Missing]:
    """The incomplete rows after these events, some of which may be below the exact LSN."""
    key = key_columns(schema)
    found = dict(incomplete)
    for event in events:
        operation = event.operation
        if operation == "UPDATE":
            if event.unchanged or found:
                _update(found, event, key, event.commit_lsn < exact_lsn)
        elif not found:
            continue
        elif operation == "TRUNCATE":
            found.clear()
        else:
            found.pop(key_text(key, event.data), None)
    return found


def _update(found: dict[str, Missing], event: Event, key: Sequence[str], is_replay: bool) -> None:
    old, new = keys_of(event, key)
    after = key_text(key, new)
    unchanged = frozenset(event.unchanged) - frozenset(event.old or ())
    missing = found.pop(key_text(key, old), None)
    if same_key(old, new):
        left = frozenset() if missing is None else missing.columns & unchanged
        since = 0 if missing is None else missing.since
    else:
        known = frozenset() if missing is None else missing.columns
        # The row at the old key may be one that took this key later.
        left = unchanged if is_replay else unchanged & known
        since = event.commit_lsn
        found.pop(after, None)
    if left:
        found[after] = Missing(left, since)


class RowNotFound(Exception):
    """The source does not have a row that the copy has."""


def complete(
    copy: MirrorCopy, lsn: int, keys: Container[str], rows: Mapping[str, SnapshotRow]
) -> tuple[list[Event], dict[str, Missing]]:
    """Events that set missing values, and the rows that are still incomplete afterwards.

    `rows` are those of the source with these keys as of `lsn`; the copy holds every transaction
    below `lsn`, and maybe later ones. A row that is at its key since before `lsn` has the same
    missing values now, because no event has changed them.
    """
    key = key_columns(copy.schema)
    left: dict[str, Missing] = {}
    events = []
    for text, missing in copy.incomplete.items():
        row = rows.get(text)
        if missing.since >= lsn or (row is None and text not in keys):
            left[text] = missing
        elif row is None:
            raise RowNotFound("the source does not have a row that the mirror has")
        else:
            wanted = missing.columns.union(key)
            data = {name: value for name, value in row.data.items() if name in wanted}
            events.append(_completion(copy, lsn, data, row.raw))
    return events, left


def _completion(copy: MirrorCopy, lsn: int, data: dict[str, Any], raw: Sequence[str]) -> Event:
    """An UPDATE that sets these columns of a row and leaves the others."""
    schema = copy.schema
    return Event(
        source=schema.source,
        epoch=copy.epoch,
        table=schema.table,
        schema=schema.schema,
        operation="UPDATE",
        commit_lsn=lsn,
        seq=0,
        xid=0,
        ts=0,
        schema_version=schema.schema_version,
        relation_id=copy.relation_id,
        msg_id="",
        subject="",
        data=data,
        unchanged=tuple(column.name for column in schema.columns if column.name not in data),
        raw=tuple(raw),
    )


def to_document(incomplete: Incomplete) -> list[list[Any]]:
    """The incomplete rows as JSON."""
    return [[key, sorted(missing.columns), missing.since] for key, missing in incomplete.items()]


def from_document(document: Iterable[Sequence[Any]]) -> dict[str, Missing]:
    """The incomplete rows from JSON."""
    return {key: Missing(frozenset(columns), int(since)) for key, columns, since in document}

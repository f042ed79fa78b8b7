"""Finds changes of a publication's coverage that the log does not contain.

The log contains only row changes. Rows can begin or cease to be published without any row change:
a table leaves the publication and returns, its row filter changes, or a partition below a published
root is truncated, attached, detached or dropped. A column that is dropped and added again, or
rewritten to its old type, has new values and the same description.

The bridge therefore saves what was covered, compares it with the catalog every few seconds and
after a start, and writes a `gap` to the stream, so that readers take a new snapshot of the table. A
table may also change and change back between two comparisons; the transactions that last wrote the
catalog's rows show that.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from bridge.postgres.coverage import Coverage, Covered

ABSENT = "it was out of the publication for a while"


async def unlogged_changes(
    known: Coverage,
    found: Coverage,
    *,
    is_filled: Callable[[str], Awaitable[bool]],
    has_truncated: Callable[[str, int], bool],
) -> dict[str, str]:
    """The tables with changes that the log does not contain: a reason for each token.

    `is_filled` tells whether a new partition had rows when it was attached. `has_truncated` tells
    whether the log contained a TRUNCATE of the whole table by a transaction.
    """
    changes = {}
    for token, now in found.items():
        before = known.get(token)
        if before is None:
            continue
        reason = next(_differences(before, now), None)
        if reason is None:
            reason = await _moved_partitions(before, now, is_filled, partial(has_truncated, token))
        if reason is not None:
            changes[token] = reason
    return changes


def _differences(before: Covered, now: Covered) -> Iterator[str]:
    if before.is_gone:
        yield ABSENT
    if before.publication not in (0, now.publication):
        yield "the publication was dropped and created again"
    if before.relation_id != now.relation_id:
        yield "another table has its name now"
    if before.operations != now.operations:
        yield "the publication publishes other operations now"
    elif _is_touched(before.altered, now.altered):
        yield "the publication's options were set, and may have been others for a while"
    if before.row_filter != now.row_filter:
        yield "its row filter was changed"
    if before.columns != now.columns:
        yield "its list of columns was changed"
    if _is_touched(before.named, now.named):
        yield "it had another name or schema for a while"
    is_left = before.entries != now.entries and not set(before.entries) & set(now.entries)
    if before.publication and is_left:
        yield ABSENT
    if before.toast and now.toast not in (0, before.toast) and _last(before) == _last(now):
        yield "it was rewritten, and may have been unlogged for a while"
    # New columns get a new schema version, which readers see. Columns that return do not.
    for shape, (numbers, touched, filenode) in now.shapes.items():
        were = before.shapes.get(shape, [numbers, touched, filenode])
        if were[0] != numbers:
            yield "a column was dropped and added again"
        if were[1] != touched and were[2] != filenode:
            yield "a column was rewritten"


def _is_touched(before: list[int], now: list[int]) -> bool:
    """Whether a transaction has written a catalog row that has the same contents as before."""
    return before[:1] != now[:1] and before[1:] == now[1:]


def _last(covered: Covered) -> str | None:
    """Digest of the newest names and types of a table's columns."""
    return next(reversed(covered.shapes), None)


def rewritten(before: Covered, now: Covered) -> list[str]:
    """The partitions whose rows are in other files than before."""
    return [
        leaf
        for leaf, filenode in before.leaves.items()
        if now.leaves.get(leaf, filenode) != filenode
    ]


async def _moved_partitions(
    before: Covered,
    now: Covered,
    is_filled: Callable[[str], Awaitable[bool]],
    has_truncated: Callable[[int], bool],
) -> str | None:
    if before.leaves.keys() - now.leaves.keys():
        return "a partition was detached or dropped"
    if any(before.attached.get(part, xid) != xid for part, xid in now.attached.items()):
        return "a partition was detached for a while"
    if not all(has_truncated(now.changed_by.get(leaf, 0)) for leaf in rewritten(before, now)):
        return "a partition was truncated or rewritten"
    for leaf in now.leaves.keys() - before.leaves.keys():
        if await is_filled(leaf):
            return "a partition was attached with rows in it"
    return None

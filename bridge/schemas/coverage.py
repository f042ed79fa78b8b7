"""Finds changes of a publication's coverage that the log does not contain.

The log contains only row changes. Rows can begin or cease to be published without any row change:
a table leaves the publication and returns, its row filter changes, or a partition below a published
root is truncated, attached, detached or dropped. A column that is dropped and added again, or
rewritten to its old type, has new values and the same description.

The bridge therefore saves what was covered, compares it with the catalog every few seconds and
after a start, and writes a `gap` to the stream, so that readers take a new snapshot of the table. A
table may also change and change back between two comparisons; the transactions that last wrote the
catalog's rows show that. What is seen and what is not is a table in OPERATIONS.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from bridge.postgres.coverage import Coverage, Covered

ABSENT = "it was out of the publication for a while"


class Evidence(Protocol):
    """What is known of partitions beside the coverage."""

    async def is_filled(self, leaves: Collection[str], parts: Collection[str]) -> bool:
        """Whether one of the new leaves may have had rows when a new partition was attached."""
        ...

    async def is_copied(self, before: Covered, leaf: str) -> bool:
        """Whether a leaf is proven to have rows from before, so that they were only copied."""
        ...

    def has_truncated(self, token: str, xid: int) -> bool:
        """Whether the log contained a TRUNCATE of the whole table by this transaction."""
        ...


async def unlogged_changes(known: Coverage, found: Coverage, evidence: Evidence) -> dict[str, str]:
    """The tables with changes that the log does not contain: a reason for each token."""
    changes = {}
    for token, now in found.items():
        before = known.get(token)
        if before is None:
            continue
        reason = next(_differences(before, now), None)
        if reason is None:
            reason = await _moved_partitions(token, before, now, evidence)
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
    """The partitions whose rows are in other files than before.

    A new partition is in the file that it was created with, which has its number.
    """
    return [
        leaf
        for leaf, filenode in now.leaves.items()
        if before.leaves.get(leaf, int(leaf)) != filenode
    ]


async def _moved_partitions(
    token: str, before: Covered, now: Covered, evidence: Evidence
) -> str | None:
    if before.leaves.keys() - now.leaves.keys():
        return "a partition was detached or dropped"
    if any(before.attached.get(part, xid) != xid for part, xid in now.attached.items()):
        return "a partition was detached for a while"
    for leaf in rewritten(before, now):
        if evidence.has_truncated(token, now.changed_by.get(leaf, 0)):
            continue
        if not await evidence.is_copied(before, leaf):
            return "a partition was truncated or rewritten"
    leaves = now.leaves.keys() - before.leaves.keys()
    if leaves and await evidence.is_filled(leaves, now.attached.keys() - before.attached.keys()):
        return "a partition was attached with rows in it"
    return None

"""What the commits of other writers do to a Delta table, by the actions that they log.

Names of operations differ between writers, so they appear in messages only. The protocol defines
what counts: `dataChange` is false if a commit only rearranges rows, as OPTIMIZE does.
https://github.com/delta-io/delta/blob/master/PROTOCOL.md#actions
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deltalake import DeltaTable, Schema
from deltalake.exceptions import DeltaError

if TYPE_CHECKING:
    from collections.abc import Iterator

APP_PREFIX: Final = "tailrace/"
"""How the identifiers of this job's `txn` actions begin."""

_HARMLESS: Final = frozenset({"commitInfo", "protocol", "domainMetadata"})
_LONGEST_NAME: Final = 60


@dataclass(frozen=True)
class ForeignChange:
    """A commit that changes the rows or the columns of a table, or of which that is not known."""

    version: int
    operation: str


def find_change(root: str, after: int, until: int) -> ForeignChange | None:
    """The first change in the versions after `after` up to `until`, None if there is none.

    A later commit may take it back: then the table is as it was, and there is no change.
    """
    versions = range(after + 1, until + 1)
    changes = (_change(root, after, version) for version in versions)
    found = next((change for change in changes if change is not None), None)
    if found is None:
        return None
    # Between both there are only commits that rearrange rows, so both hold what the job wrote.
    unchanged = {after, found.version - 1}
    return None if any(_same_table(root, one, until) for one in unchanged) else found


def deletion_vectors(table: DeltaTable) -> set[str]:
    """The data files of a table that still contain deleted rows."""
    if "deletionVectors" not in (table.protocol().reader_features or ()):
        return set()
    return {
        str(path) for batch in table.deletion_vectors() for path in batch["filepath"].to_pylist()
    }


def _change(root: str, after: int, version: int) -> ForeignChange | None:
    operation = "unknown"
    changed = False
    try:
        for kind, action in _actions(root, version):
            if kind == "commitInfo":
                operation = str(action.get("operation", operation))[:_LONGEST_NAME]
            changed = changed or _changes_table(root, after, kind, action)
    except (DeltaError, OSError, ValueError, AttributeError, TypeError, KeyError):
        # Log cleanup has removed the commit, or it is damaged: what it did is not known.
        return ForeignChange(version, operation)
    return ForeignChange(version, operation) if changed else None


def _actions(root: str, version: int) -> Iterator[tuple[str, dict[str, Any]]]:
    with Path(root, "_delta_log", f"{version:020}.json").open() as lines:
        for line in lines:
            if line.strip():
                yield from json.loads(line).items()


def _changes_table(root: str, after: int, kind: str, action: dict[str, Any]) -> bool:
    if kind in ("add", "remove"):
        return action["dataChange"] is not False
    if kind == "metaData":
        return not _keeps_columns(_columns(root, after), Schema.from_json(action["schemaString"]))
    if kind == "txn":
        return str(action["appId"]).startswith(APP_PREFIX)
    return kind not in _HARMLESS


def _columns(root: str, version: int) -> Schema:
    return DeltaTable(root, version=version).schema()


def _keeps_columns(before: Schema, after: Schema) -> bool:
    """Whether all columns are the same, except for comments and for new ones that may be null."""
    types = {field.name: field.type for field in before.fields}
    new = {field.name: field.type for field in after.fields}
    added = [field for field in after.fields if field.name not in types]
    same = all(new.get(name) == type_ for name, type_ in types.items())
    return same and all(field.nullable for field in added)


def _same_table(root: str, before: int, after: int) -> bool:
    """Whether two versions have the same data files and columns."""
    try:
        old, new = (DeltaTable(root, version=version) for version in (before, after))
        return (
            set(old.file_uris()) == set(new.file_uris())
            and not deletion_vectors(old)
            and not deletion_vectors(new)
            and _keeps_columns(old.schema(), new.schema())
        )
    except (DeltaError, OSError):
        return False

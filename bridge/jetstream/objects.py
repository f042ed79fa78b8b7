"""Rows too large for a message, in the object store."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from nats.js.errors import ObjectNotFoundError

if TYPE_CHECKING:
    from nats.js.object_store import ObjectStore


NEW_SECONDS: Final = 3600.0
"""Objects outlive their messages by a day; one from before a longer stop would not."""


class ObjectWriter:
    """Stores contents under names that are their message's id; storing twice changes nothing."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def put(self, name: str, content: bytes) -> None:
        """Store the content unless exactly it is there already, and new enough to last."""
        digest = hashlib.sha256(content).digest()
        try:
            info = await self._store.get_info(name)
            is_same = info.size == len(content) and info.digest and _same(info.digest, digest)
            if is_same and _is_new(info.mtime):
                return
        except ObjectNotFoundError:
            pass
        await self._store.put(name, content)


def _is_new(stored_at: str | None) -> bool:
    try:
        age = datetime.now(UTC) - datetime.fromisoformat(stored_at or "")
    except (TypeError, ValueError):
        return False
    return age.total_seconds() < NEW_SECONDS


def _same(stated: str, digest: bytes) -> bool:
    import base64

    _, _, text = stated.partition("=")
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)) == digest
    except ValueError:
        return False

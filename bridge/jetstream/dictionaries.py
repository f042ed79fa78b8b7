"""zstd dictionaries: trained for each table from sampled rows, stored in KV, read by id.

zstd compresses text that resembles earlier text, and a small message has little earlier text: a
dictionary supplies it. It helps for single events and small chunks, not for full chunks.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple

import nats.errors
import nats.js.errors
import zstandard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nats.js.kv import KeyValue

DICTIONARY_BYTES: Final = 16 * 1024
FEWEST_SAMPLES: Final = 200


def train(samples: Sequence[bytes], size: int = DICTIONARY_BYTES) -> bytes | None:
    """A dictionary for messages like the samples; None if they are too few or too different."""
    if len(samples) < FEWEST_SAMPLES:
        return None
    try:
        return zstandard.train_dictionary(size, list(samples)).as_bytes()
    except zstandard.ZstdError:
        return None


def dictionary_id(content: bytes) -> str:
    """The id of a dictionary: a checksum of its content."""
    return hashlib.sha256(content).hexdigest()[:16]


class ZstdDictionary(NamedTuple):
    """A dictionary, and the id by which readers find it."""

    id: str
    content: bytes


class DictionaryStore:
    """The dictionaries of all tables, in the bucket `zstd_dicts`.

    The key of a dictionary's content is its id. The key `table.{token}.{format}` holds the id of
    the table's newest dictionary.
    """

    def __init__(self, bucket: KeyValue) -> None:
        self._bucket = bucket
        self._known: dict[str, ZstdDictionary] = {}

    async def current(self, token: str, form: str) -> ZstdDictionary | None:
        """The table's newest dictionary, if it has one."""
        key = f"table.{token}.{form}"
        if key not in self._known:
            try:
                pointer = await self._bucket.get(key)
                name = (pointer.value or b"").decode("ascii", errors="replace")
                content = (await self._bucket.get(name)).value
            except (nats.js.errors.KeyNotFoundError, nats.js.errors.KeyDeletedError):
                return None
            if not content or dictionary_id(content) != name:
                return None
            self._known[key] = ZstdDictionary(name, content)
        return self._known[key]

    async def add(self, token: str, form: str, content: bytes) -> ZstdDictionary:
        """Store a table's dictionary; it can be used once this returns."""
        dictionary = ZstdDictionary(dictionary_id(content), content)
        await self._bucket.put(dictionary.id, content)
        key = f"table.{token}.{form}"
        await self._bucket.put(key, dictionary.id.encode())
        self._known[key] = dictionary
        return dictionary

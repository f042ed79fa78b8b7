"""zstd on the wire: frames with or without a dictionary, which readers fetch by its id."""

from __future__ import annotations

from typing import Final, Protocol

import zstandard

from consumer_sdk.wire.errors import DictionaryMissing, WireError

# The largest max_payload that nats-server takes. Frames never hold more, compressed or not.
LARGEST_PLAIN_BYTES: Final = 64 * 1024 * 1024
LARGEST_DICTIONARY_BYTES: Final = 1024 * 1024
MAX_DECOMPRESSORS = 32
MAX_DICTIONARIES: Final = 256


class Dictionaries(Protocol):
    """Dictionaries by id; `get` returns None for one that is not loaded."""

    def get(self, dictionary_id: str, /) -> bytes | None: ...


def compress(data: bytes, *, level: int = 3, dictionary: bytes | None = None) -> bytes:
    """One zstd frame that states its content size."""
    if dictionary is None:
        return zstandard.ZstdCompressor(level=level).compress(data)
    shared = zstandard.ZstdCompressionDict(dictionary)
    return zstandard.ZstdCompressor(level=level, dict_data=shared).compress(data)


class LoadedDictionaries(dict[str, bytes]):
    """Dictionaries by id, and their decompressors, which cost as much to set up as 20 uses.

    It holds a limited number of them; those beyond must be fetched again. Only one thread at a
    time may use it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ready: dict[str, zstandard.ZstdDecompressor] = {}

    def add(self, dictionary_id: str, content: bytes) -> None:
        """Add a dictionary that was fetched; WireError if it is too large to be one."""
        if len(content) > LARGEST_DICTIONARY_BYTES:
            raise WireError(f"zstd dictionary of more than {LARGEST_DICTIONARY_BYTES} bytes")
        if len(self) >= MAX_DICTIONARIES:
            self.clear()
        self[dictionary_id] = content

    def decompressor(self, dictionary_id: str) -> zstandard.ZstdDecompressor:
        """The decompressor for a loaded dictionary; for an empty id, one without a dictionary."""
        found = self._ready.get(dictionary_id)
        if found is None:
            if len(self._ready) >= MAX_DECOMPRESSORS:
                self._ready.clear()
            content = self[dictionary_id] if dictionary_id else None
            found = self._ready[dictionary_id] = _decompressor(content)
        return found


def decompress(
    data: bytes, *, dictionary_id: str | None = None, dictionaries: Dictionaries | None = None
) -> bytes:
    """Undo `compress`; DictionaryMissing names the dictionary to fetch first.

    Never returns more bytes than the frame states, and never more than LARGEST_PLAIN_BYTES.
    """
    content: bytes | None = None
    if dictionary_id:
        content = dictionaries.get(dictionary_id) if dictionaries is not None else None
        if content is None:
            raise DictionaryMissing(dictionary_id)
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= LARGEST_PLAIN_BYTES:
            raise WireError(
                "zstd frame without a content size"
                if size < 0
                else f"zstd frame of more than {LARGEST_PLAIN_BYTES} bytes"
            )
        if isinstance(dictionaries, LoadedDictionaries):
            decompressor = dictionaries.decompressor(dictionary_id or "")
        else:
            decompressor = _decompressor(content)
        return decompressor.decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"damaged zstd frame: {error}") from error


def _decompressor(dictionary: bytes | None) -> zstandard.ZstdDecompressor:
    shared = None if dictionary is None else zstandard.ZstdCompressionDict(dictionary)
    return zstandard.ZstdDecompressor(dict_data=shared)

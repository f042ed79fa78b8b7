"""Checksums on the wire: of a chunk, of a whole snapshot, and of an object named by a `ref`."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def sha256_hex(content: bytes) -> str:
    """The sha256 of a payload as stored, in the header `Cdc-Sha256` and in a `ref`."""
    return hashlib.sha256(content).hexdigest()


def snapshot_checksum(chunk_digests: Mapping[int, str], chunk_count: int) -> str:
    """The `checksum` of a meta: sha256 over the chunks' own sha256, in the order of their numbers.

    A chunk without a digest is left out, so the result differs from the complete checksum.
    """
    joined = "".join(chunk_digests.get(number, "") for number in range(chunk_count))
    return sha256_hex(joined.encode("ascii"))


def object_reference(bucket: str, name: str, content: bytes) -> dict[str, Any]:
    """The `ref` that replaces, in a message, content kept in the object store."""
    return {"bucket": bucket, "name": name, "size": len(content), "sha256": sha256_hex(content)}

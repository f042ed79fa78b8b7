"""Which part of a table a worker copies next, and the SQL that reads it.

Tables are cut along block numbers (ctid), which costs no index and no sort; the last piece of each
heap is open at its end, so nothing that the snapshot can see lies beyond.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge.snapshot.tables import Size, TableShape

PIECE_BYTES: Final = 32 * 1024 * 1024
FEWEST_BLOCKS: Final = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of blocks of one heap; an `end` of None means to the end, no `storage` the root."""

    storage: int | None
    start: int = 0
    end: int | None = None


def cut(shape: TableShape, sizes: Sequence[Size]) -> list[Piece]:
    """Pieces that together are the whole table, each about as long to copy as the others."""
    if not all(storage.readable for storage in shape.storages):
        return [Piece(None)]
    pieces = []
    for index, size in enumerate(sizes):
        # Wide values live outside the heap, but they belong to its blocks.
        step = size.blocks
        if size.total_bytes > PIECE_BYTES:
            step = max(FEWEST_BLOCKS, size.blocks * PIECE_BYTES // size.total_bytes)
        start = 0
        while size.blocks - start > step:
            pieces.append(Piece(index, start, start + step))
            start += step
        pieces.append(Piece(index, start, None))
    return pieces


def useful_workers(sizes: Sequence[Size], most: int) -> int:
    """How many processes a copy of this size can occupy."""
    total = sum(size.total_bytes for size in sizes)
    return max(1, min(most, total // PIECE_BYTES + 1))


def quote(name: str) -> str:
    """An identifier for SQL, always in quotes."""
    return '"' + name.replace('"', '""') + '"'


def copy_sql(shape: TableShape, piece: Piece) -> str:
    """COPY of one piece, with the publication's column list and row filter."""
    conditions = []
    if piece.storage is None:
        source = f"{quote(shape.schema)}.{quote(shape.table)}"
    else:
        storage = shape.storages[piece.storage]
        source = f"ONLY {quote(storage.schema)}.{quote(storage.table)}"
        if piece.start:
            conditions.append(f"ctid >= '({piece.start},0)'::pg_catalog.tid")
        if piece.end is not None:
            conditions.append(f"ctid < '({piece.end},0)'::pg_catalog.tid")
    if shape.row_filter is not None:
        conditions.append(f"({shape.row_filter})")
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    columns = ", ".join(quote(column.name) for column in shape.columns)
    return f"COPY (SELECT {columns} FROM {source}{where}) TO STDOUT (FORMAT text)"  # noqa: S608


def lock_sql(shape: TableShape) -> str:
    """The lock that keeps every ALTER and TRUNCATE away, on all partitions of a root."""
    only = "" if shape.partitioned else "ONLY "
    return f"LOCK TABLE {only}{quote(shape.schema)}.{quote(shape.table)} IN ACCESS SHARE MODE"

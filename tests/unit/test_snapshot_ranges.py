"""Cutting a table into pieces, and the SQL that reads them."""

from __future__ import annotations

from itertools import pairwise

from bridge.events.values import ColumnType
from bridge.snapshot import tables as ranges
from bridge.snapshot.tables import (
    CopyColumn,
    Heap,
    HeapSize,
    Piece,
    TableDescription,
    copy_sql,
    cut,
    lock_sql,
    useful_workers,
)


def table(
    leaves: int = 1, *, readable: bool = True, row_filter: str | None = None
) -> TableDescription:
    return TableDescription(
        "s",
        't"x',
        1,
        2,
        leaves > 1,
        (CopyColumn(1, 1, "id", ColumnType(23), "integer", False),),
        row_filter,
        tuple(Heap("s", f"leaf{n}", 10 + n, 100 + n, readable) for n in range(leaves)),
    )


def blocks(pieces: list[Piece], heap: int) -> list[tuple[int, int | None]]:
    return [(piece.start, piece.end) for piece in pieces if piece.heap == heap]


def test_pieces_cover_every_block_once_and_the_last_is_open() -> None:
    for count in (0, 1, 15, 16, 17, 4096, 4097, 100_000):
        pieces = cut(table(), [HeapSize(count, count * 8192, 0)])
        edges = blocks(pieces, 0)
        assert edges[0][0] == 0
        assert edges[-1][1] is None
        assert all(a[1] == b[0] for a, b in pairwise(edges))


def test_wide_values_make_smaller_pieces() -> None:
    narrow = cut(table(), [HeapSize(4096, 4096 * 8192, 0)])
    wide = cut(table(), [HeapSize(4096, 4096 * 8192 * 16, 0)])
    assert len(narrow) == 1
    assert len(wide) == 16


def test_every_leaf_is_cut_and_unreadable_leaves_are_read_through_the_root() -> None:
    pieces = cut(
        table(3), [HeapSize(0, 0, 0), HeapSize(10, 81920, 0), HeapSize(20_000, 20_000 * 8192, 0)]
    )
    assert {piece.heap for piece in pieces} == {0, 1, 2}
    assert cut(table(3, readable=False), [HeapSize(9, 9, 9)] * 3) == [Piece(None)]
    assert cut(table(0), []) == []


def test_small_tables_get_one_worker() -> None:
    assert useful_workers([HeapSize(10, 81920, 0)], 8) == 1
    assert useful_workers([], 8) == 1
    assert useful_workers([HeapSize(1, ranges.PIECE_BYTES * 100, 0)], 8) == 8


def test_names_and_filters_reach_sql_quoted() -> None:
    sql = copy_sql(table(row_filter="(id > 5)"), Piece(0, 16, 32))
    assert sql == (
        'COPY (SELECT "id" FROM ONLY "s"."leaf0" WHERE ctid >= \'(16,0)\'::pg_catalog.tid'
        " AND ctid < '(32,0)'::pg_catalog.tid AND ((id > 5))) TO STDOUT (FORMAT text)"
    )
    assert copy_sql(table(), Piece(None)) == (
        'COPY (SELECT "id" FROM "s"."t""x") TO STDOUT (FORMAT text)'
    )
    assert lock_sql(table()) == 'LOCK TABLE ONLY "s"."t""x" IN ACCESS SHARE MODE'
    assert lock_sql(table(2)) == 'LOCK TABLE "s"."t""x" IN ACCESS SHARE MODE'

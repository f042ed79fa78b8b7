"""What the compiled readers gain over the general path: `python -m tests.bench.row_readers`."""

from __future__ import annotations

import json
from timeit import repeat
from typing import TYPE_CHECKING, Any

from bridge.events.row_code import compile_row_reader, compile_update_reader
from bridge.events.rows import RowConverter
from bridge.events.values import ColumnType
from bridge.snapshot.formats.copy_text import compile_row_decoder, parse_row
from bridge.wal.messages import Insert, Update
from bridge.wal.pgoutput import decode
from consumer_sdk.wire import oids
from tests.pgoutput_encoder import encode_message

if TYPE_CHECKING:
    from collections.abc import Callable

COLUMNS = [
    ("id", ColumnType(oids.INT8)),
    ("customer_id", ColumnType(oids.INT4)),
    ("name", ColumnType(oids.TEXT)),
    ("amount", ColumnType(oids.NUMERIC)),
    ("is_paid", ColumnType(oids.BOOL)),
    ("ratio", ColumnType(oids.FLOAT8)),
]
ROW = (b"123456", b"4711", b"some customer name", b"12.50", b"t", b"3.25")
ROUNDS = 5_000


def microseconds(action: Callable[[], object]) -> float:
    return min(repeat(action, number=ROUNDS, repeat=15)) / ROUNDS * 1e6


def measure() -> dict[str, Any]:
    """Microseconds per row of six columns, and the ratio of the general path to the compiled."""
    insert = encode_message(Insert(16_384, ROW))
    update = encode_message(Update(16_384, "O", ROW, ROW))
    line = b"\t".join(ROW) + b"\n"
    general = RowConverter(COLUMNS)
    read_row = compile_row_reader(COLUMNS)
    read_update = compile_update_reader(COLUMNS)
    decode_line = compile_row_decoder(COLUMNS)

    def general_insert() -> None:
        message = decode(insert)
        assert isinstance(message, Insert)
        general.convert(message.new)

    def general_update() -> None:
        message = decode(update)
        assert isinstance(message, Update)
        assert message.old is not None
        general.convert_pair(message.old, message.new)

    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "insert": (lambda: read_row(insert, 6), general_insert),
        "update_with_old_row": (lambda: read_update(update, 6), general_update),
        "copy": (lambda: decode_line(line), lambda: general.convert(tuple(parse_row(line)))),
    }
    result: dict[str, Any] = {}
    for name, (compiled, plain) in pairs.items():
        fast, slow = microseconds(compiled), microseconds(plain)
        result[name] = {
            "compiled_us": round(fast, 2),
            "general_us": round(slow, 2),
            "ratio": round(slow / fast, 1),
        }
    return result


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))

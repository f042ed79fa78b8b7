"""Writes rows to files: JSON lines, CSV or Parquet. An incomplete file never has the final name."""

from __future__ import annotations

import json
import os
import re
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from consumer_sdk.errors import CorruptData, TargetError, UsageError
from consumer_sdk.targets.stored_values import postgres_encoder
from consumer_sdk.transport.private_files import create_private, mode_of, resolve_own
from consumer_sdk.wire.envelope import to_json_value
from consumer_sdk.wire.errors import MISFITS
from consumer_sdk.wire.escaping import printable_json
from consumer_sdk.wire.jsonb import jsonb_text

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from consumer_sdk.snapshot.chunks import ArrowChunk, ChunkRows
    from consumer_sdk.wire.column_types import Column

Row = dict[str, Any]

# Control characters occur only between the tokens of a document: in strings they are escaped.
_BLANKS = re.compile(r"[\x00-\x1f]+")


class RowFile(Protocol):
    """A file for rows; it gets its final name only in `finish`."""

    snapshot_format: str | None
    """The format of snapshots that is written fastest; None for the bridge's default."""

    def prepare(self) -> None:
        """Load what writing needs; takes no part of the file's state, so any thread may call it."""

    def begin(self, columns: Sequence[Column]) -> None: ...

    def write(self, rows: ChunkRows) -> None: ...

    def write_arrow(self, chunk: ArrowChunk) -> bool:
        """Write a chunk without converting it to rows; False if that is not possible."""

    def finish(self) -> None: ...

    def abandon(self) -> None:
        """Remove an incomplete file; does nothing after `finish`."""


def open_row_file(out: str | None) -> RowFile:
    """The writer for a file name, by its ending; `-` is standard output, None discards the rows."""
    if out is None:
        return _Discard()
    if out == "-":
        return _StandardOutput()
    path = Path(out)
    if not path.parent.is_dir():
        raise UsageError(f"no such directory: {path.parent}")
    try:
        path = resolve_own(path)
    except OSError as error:
        raise write_error(path, error) from error
    if path.suffix == ".jsonl":
        return _JsonLines(path)
    if path.suffix == ".csv":
        return _Csv(path)
    if path.suffix == ".parquet":
        from consumer_sdk.commands.parquet import ParquetFile

        return ParquetFile(path)
    raise UsageError(f"--out {out}: the name must end in .jsonl, .csv or .parquet")


def temporary_path(path: Path) -> Path:
    """The temporary name of a file until it is complete."""
    return path.with_name(f".{path.name}.part")


def create_temporary(path: Path) -> int:
    """Create the file under its temporary name, with the mode of the file it will replace.

    A new file is readable by its owner alone.
    """
    temporary = temporary_path(path)
    try:
        # What an earlier run has left, or anybody's link.
        temporary.unlink(missing_ok=True)
        return create_private(temporary, mode_of(path))
    except OSError as error:
        raise write_error(path, error) from error


def write_error(path: Path, error: OSError) -> TargetError:
    """The error for a file that cannot be written."""
    return TargetError(f"cannot write {path}: {error.strerror or error}")


def mismatch(rows: ChunkRows) -> CorruptData:
    """The error for rows that do not match the snapshot's columns."""
    return CorruptData(f"chunk {rows.number} holds a row that does not match the columns and types")


class _WritesRows:
    """A file that takes rows only."""

    snapshot_format: str | None = None

    def prepare(self) -> None:
        pass

    def write_arrow(self, chunk: ArrowChunk) -> bool:  # noqa: ARG002
        return False


class _Discard(_WritesRows):
    def begin(self, columns: Sequence[Column]) -> None:
        pass

    def write(self, rows: ChunkRows) -> None:
        pass

    def finish(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class _StandardOutput(_Discard):
    def begin(self, columns: Sequence[Column]) -> None:
        self._lines = _Lines(columns)

    def write(self, rows: ChunkRows) -> None:
        sys.stdout.write(printable_json(_joined(rows, self._lines.line)))
        sys.stdout.flush()


def _joined(rows: ChunkRows, line: Callable[[Row, Container[str]], str]) -> str:
    try:
        return "".join(line(row, rows.raw(n)) for n, row in enumerate(rows))
    except MISFITS as error:
        raise mismatch(rows) from error


class _TextFile(_WritesRows, ABC):
    """A text file that has a temporary name until it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = os.fdopen(
            create_temporary(path), "w", encoding="utf-8", newline=""
        )

    @abstractmethod
    def begin(self, columns: Sequence[Column]) -> None: ...

    def write(self, rows: ChunkRows) -> None:
        self._put(_joined(rows, self._line))

    def finish(self) -> None:
        assert self._file is not None
        try:
            self._file.close()
            temporary_path(self._path).replace(self._path)
        except OSError as error:
            raise write_error(self._path, error) from error
        self._file = None

    def abandon(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            temporary_path(self._path).unlink(missing_ok=True)

    def _put(self, text: str) -> None:
        assert self._file is not None
        try:
            self._file.write(text)
        except OSError as error:
            raise write_error(self._path, error) from error

    @abstractmethod
    def _line(self, row: Row, raw: Container[str]) -> str: ...


class _JsonLines(_TextFile):
    def begin(self, columns: Sequence[Column]) -> None:
        self._lines = _Lines(columns)

    def _line(self, row: Row, raw: Container[str]) -> str:
        return self._lines.line(row, raw)


class _Csv(_TextFile):
    """CSV as PostgreSQL reads it: null is an empty field, an empty text is quoted."""

    def begin(self, columns: Sequence[Column]) -> None:
        self._columns = [(column.name, postgres_encoder(column)) for column in columns]
        self._put(",".join(_quoted(name) for name, _ in self._columns) + "\r\n")

    def _line(self, row: Row, raw: Container[str]) -> str:
        cells = []
        for name, encode in self._columns:
            value = row[name]
            if value is None:
                cells.append("")
            else:
                cells.append(_quoted(value if encode is None else encode(value, name in raw)))
        return ",".join(cells) + "\r\n"


class _Lines:
    """Rows as JSON lines; numbers in JSON documents keep every digit."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._documents = {one.name for one in columns if one.family in ("json", "jsonb")}

    def line(self, row: Row, raw: Container[str]) -> str:
        members = (
            f"{_dumped(name)}:{self._text(name, value, name in raw)}" for name, value in row.items()
        )
        return "{" + ",".join(members) + "}\n"

    def _text(self, name: str, value: Any, raw: bool) -> str:
        if name in self._documents:
            return _document(value) if raw else jsonb_text(value)
        # An array whose bounds do not start at 1 is PostgreSQL's text, not a document.
        return _document(value) if raw and isinstance(value, list) else _dumped(value)


def _document(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ",".join(map(_document, value)) + "]"
    return _BLANKS.sub(" ", value) if isinstance(value, str) else _dumped(value)


def _dumped(value: Any) -> str:
    return json.dumps(to_json_value(value), ensure_ascii=False, separators=(",", ":"))


def _quoted(text: str) -> str:
    if text and not any(char in text for char in ',"\r\n') and text != "\\.":
        return text
    return '"' + text.replace('"', '""') + '"'

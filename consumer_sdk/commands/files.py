"""Rows into files: JSON lines, CSV or Parquet, complete or not there at all."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from consumer_sdk.errors import TargetError, UsageError
from consumer_sdk.wire.envelope import to_json_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from consumer_sdk.wire.column_types import Column

Row = dict[str, Any]


class RowWriter(Protocol):
    """Where rows go; nothing is visible under the final name before `finish`."""

    def begin(self, columns: Sequence[Column]) -> None: ...

    def write(self, rows: Sequence[Row]) -> None: ...

    def finish(self) -> None: ...

    def abandon(self) -> None:
        """Remove what is unfinished; does nothing after `finish`."""


def open_writer(out: str | None) -> RowWriter:
    """The writer for a file name by its ending, for `-` or for nothing."""
    if out is None:
        return _Nowhere()
    if out == "-":
        return _Output()
    path = Path(out)
    if not path.parent.is_dir():
        raise UsageError(f"no such directory: {path.parent}")
    if path.suffix == ".jsonl":
        return _JsonLines(path)
    if path.suffix == ".csv":
        return _Csv(path)
    if path.suffix == ".parquet":
        from consumer_sdk.commands.parquet import ParquetFile

        return ParquetFile(path)
    raise UsageError(f"--out {out}: the name must end in .jsonl, .csv or .parquet")


def part_of(path: Path) -> Path:
    """Where a file grows until it is complete."""
    return path.with_name(f".{path.name}.part")


def refused(path: Path, error: OSError) -> TargetError:
    """The error for a file that cannot be written."""
    return TargetError(f"cannot write {path}: {error.strerror or error}")


class _Nowhere:
    def begin(self, columns: Sequence[Column]) -> None:
        pass

    def write(self, rows: Sequence[Row]) -> None:
        pass

    def finish(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class _Output(_Nowhere):
    def write(self, rows: Sequence[Row]) -> None:
        sys.stdout.write("".join(_json_line(row) for row in rows))
        sys.stdout.flush()


class _TextFile(ABC):
    """A text file under another name until it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: list[str] = []
        try:
            self._file: IO[str] | None = part_of(path).open("w", encoding="utf-8", newline="")
        except OSError as error:
            raise refused(path, error) from error

    def begin(self, columns: Sequence[Column]) -> None:
        self._names = [column.name for column in columns]

    def write(self, rows: Sequence[Row]) -> None:
        self._put("".join(map(self._line, rows)))

    def finish(self) -> None:
        assert self._file is not None
        try:
            self._file.close()
            part_of(self._path).replace(self._path)
        except OSError as error:
            raise refused(self._path, error) from error
        self._file = None

    def abandon(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            part_of(self._path).unlink(missing_ok=True)

    def _put(self, text: str) -> None:
        assert self._file is not None
        try:
            self._file.write(text)
        except OSError as error:
            raise refused(self._path, error) from error

    @abstractmethod
    def _line(self, row: Row) -> str: ...


class _JsonLines(_TextFile):
    def _line(self, row: Row) -> str:
        return _json_line(row)


class _Csv(_TextFile):
    """CSV as PostgreSQL reads it: null is nothing, an empty text is quoted."""

    def begin(self, columns: Sequence[Column]) -> None:
        super().begin(columns)
        self._put(",".join(map(_quoted, self._names)) + "\r\n")

    def _line(self, row: Row) -> str:
        return ",".join(_csv_cell(row.get(name)) for name in self._names) + "\r\n"


def _json_line(row: Row) -> str:
    return json.dumps(to_json_value(row), ensure_ascii=False, separators=(",", ":")) + "\n"


def _csv_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    if isinstance(value, (list, dict)):
        return _quoted(json.dumps(to_json_value(value), ensure_ascii=False))
    return _quoted(str(value))


def _quoted(text: str) -> str:
    if text and not any(char in text for char in ',"\r\n') and text != "\\.":
        return text
    return '"' + text.replace('"', '""') + '"'

"""A look, once a second, at what the other processes say: rows here and there, lag, health."""

from __future__ import annotations

import http.client
import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from bridge.demo import shop
from bridge.embedded import LOOPBACK

if TYPE_CHECKING:
    from pathlib import Path

_TIMEOUT_SECONDS: Final = 2.0


@dataclass(frozen=True)
class Survey:
    """Row counts by table token, where mirror and stream stood, the bridge's own words.

    While the mirror shows no tables yet, `mirror_loaded` says how many it has copied.
    """

    source_rows: dict[str, int] = field(default_factory=dict)
    mirror_rows: dict[str, int] = field(default_factory=dict)
    mirror_loaded: int = 0
    mirror_sequence: int = 0
    stream_sequence: int = 0
    bridge_status: dict[str, Any] = field(default_factory=dict)


class Surveyor:
    """Holds what a survey needs; blocking, to be called in a thread."""

    def __init__(self, dsn: str, http_port: int, mirror_path: Path) -> None:
        self._dsn = dsn
        self._http_port = http_port
        self._mirror_path = mirror_path
        self._source: psycopg.Connection | None = None

    def look(self, stream_sequence: int = 0) -> Survey:
        """Ask everybody; who does not answer is left out. The stream stands where it is said to."""
        survey = self._mirror()
        return replace(
            survey,
            source_rows=self._source_rows(),
            stream_sequence=stream_sequence,
            bridge_status=self._bridge_status(),
        )

    def close(self) -> None:
        """Give the connection back."""
        if self._source is not None:
            self._source.close()

    def _source_rows(self) -> dict[str, int]:
        counts = sql.SQL(", ").join(
            sql.SQL("(SELECT count(*) FROM {})").format(sql.Identifier(*name))
            for name in shop.TABLES
        )
        try:
            if self._source is None:
                self._source = psycopg.connect(self._dsn, autocommit=True)
            row = self._source.execute(sql.SQL("SELECT {}").format(counts)).fetchone()
        except psycopg.Error:
            return {}
        assert row is not None
        return dict(zip(shop.tokens(), row, strict=True))

    def _mirror(self) -> Survey:
        """Rows of the tables that show already, all seen at one moment."""
        if not self._mirror_path.exists():
            return Survey()
        try:
            with closing(
                sqlite3.connect(
                    f"{self._mirror_path.as_uri()}?mode=ro",
                    uri=True,
                    timeout=_TIMEOUT_SECONDS,
                    isolation_level=None,
                )
            ) as mirror:
                mirror.execute("BEGIN")
                return _read_mirror(mirror)
        except sqlite3.Error:
            return Survey()

    def _bridge_status(self) -> dict[str, Any]:
        status, body = _ask(self._http_port, "/status")
        try:
            document: dict[str, Any] = json.loads(body)
        except ValueError:
            return {}
        return document if status == http.client.OK else {}


def _read_mirror(mirror: sqlite3.Connection) -> Survey:
    present = {name for (name,) in mirror.execute("SELECT name FROM sqlite_master")}
    rows: dict[str, int] = {}
    for token in shop.tokens():
        if token in present:
            ((rows[token],),) = mirror.execute(f'SELECT count(*) FROM "{token}"')
    loaded = sequence = 0
    if "_tailrace_copies" in present:
        ((loaded,),) = mirror.execute(
            "SELECT count(*) FROM _tailrace_copies WHERE state NOT IN ('planned', 'loading')"
        )
    if "_tailrace_positions" in present:
        ((sequence,),) = mirror.execute("SELECT max(stream_seq) FROM _tailrace_positions")
    return Survey(mirror_rows=rows, mirror_loaded=loaded, mirror_sequence=sequence or 0)


def bridge_is_ready(http_port: int) -> bool:
    """Whether /ready answers so."""
    return _ask(http_port, "/ready")[0] == http.client.OK


def _ask(http_port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(LOOPBACK, http_port, timeout=_TIMEOUT_SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()

"""A snapshot of the source at a known LSN."""

from __future__ import annotations

import secrets
import threading
from typing import TYPE_CHECKING, Any

from psycopg.pq import DiagnosticField, ExecStatus

from consumer_sdk.errors import NotAvailable, UsageError
from consumer_sdk.verify.table_side import PostgresSide, connect_postgres, rollback_quietly
from consumer_sdk.wire.position import parse_lsn
from consumer_sdk.wire.subjects import format_table_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import psycopg

    from consumer_sdk.verify.table_side import TableLayout

WAIT_NOTICE_SECONDS = 2.0


class SourceSnapshot:
    """An exported snapshot that holds exactly the transactions with a commit LSN below `lsn`."""

    def __init__(
        self, connection: psycopg.Connection[Any], lsn: int, system_id: str, publication: str | None
    ) -> None:
        self.lsn = lsn
        self._connection = connection
        self._system_id = system_id
        self._publication = publication

    @classmethod
    def take(
        cls, dsn: str, timeout: float, on_wait: Callable[[str], None] | None = None
    ) -> SourceSnapshot:
        """Take the snapshot of a temporary slot, which PostgreSQL exports at a known LSN.

        Waits up to `timeout` seconds for write transactions; `on_wait` is called with the reason.
        """
        connection = connect_postgres(dsn, "the source")
        try:
            walsender = connect_postgres(
                dsn, "the source (as a role with REPLICATION)", replication="database"
            )
            try:
                system = _command(walsender, b"IDENTIFY_SYSTEM", "read")
                name = f"tailrace_verify_{secrets.token_hex(6)}"
                with _WaitTimers(walsender, timeout, on_wait):
                    slot = _command(
                        walsender,
                        f"CREATE_REPLICATION_SLOT {name} TEMPORARY LOGICAL pgoutput "
                        "EXPORT_SNAPSHOT".encode(),
                        "exported",
                    )
                connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                connection.execute(f"SET TRANSACTION SNAPSHOT '{slot[2]}'".encode())
                # The snapshot is taken by the first query at the latest.
                connection.execute("SELECT 1")
            finally:
                walsender.close()
        except BaseException:
            connection.close()
            raise
        return cls(connection, parse_lsn(slot[1]), system[0], None)

    def require_same_database(self, progress: Mapping[str, Any]) -> None:
        """Raise UsageError for a database other than the one that the source publishes."""
        (database,) = self._connection.execute(
            "SELECT pg_catalog.current_database()"
        ).fetchone() or ("",)
        if str(progress.get("system_id")) != self._system_id or progress["database"] != database:
            raise UsageError(
                f"--source is not the database that source {progress['source']} publishes "
                f"({progress['database']!r}); their positions cannot be compared"
            )
        self._publication = progress.get("publication")

    def side(self, layout: TableLayout) -> PostgresSide:
        """One of its tables, limited to the published rows."""
        schema = layout.schema
        table = format_table_name(schema.schema, schema.table)
        rows = self._connection.execute(
            "SELECT c.relkind::text FROM pg_catalog.pg_class c "
            "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND c.relname = %s AND c.relkind IN ('r', 'p')",
            (schema.schema, schema.table),
        ).fetchall()
        if not rows:
            raise NotAvailable(f"the source has no table {table} any more")
        missing = set(layout.names) - self._columns(layout)
        if missing:
            raise NotAvailable(f"{table} changed its structure in the meantime; run verify again")
        return PostgresSide(
            self._connection, layout, only=rows[0][0] == "r", condition=self._row_filter(layout)
        )

    def _columns(self, layout: TableLayout) -> set[str]:
        rows = self._connection.execute(
            "SELECT a.attname FROM pg_catalog.pg_attribute a "
            "JOIN pg_catalog.pg_class c ON c.oid = a.attrelid "
            "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped",
            (layout.schema.schema, layout.schema.table),
        ).fetchall()
        return {name for (name,) in rows}

    def _row_filter(self, layout: TableLayout) -> str | None:
        if self._connection.info.server_version < 150000:
            return None
        row = self._connection.execute(
            "SELECT rowfilter FROM pg_catalog.pg_publication_tables "
            "WHERE pubname = %s AND schemaname = %s AND tablename = %s",
            (self._publication, layout.schema.schema, layout.schema.table),
        ).fetchone()
        return row[0] if row else None

    def close(self) -> None:
        """End the transaction that holds the snapshot."""
        rollback_quietly(self._connection)
        self._connection.close()


class _WaitTimers:
    """Reports a long wait, and cancels the query when it has taken `timeout` seconds."""

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        timeout: float,
        on_wait: Callable[[str], None] | None,
    ) -> None:
        self._timers = [threading.Timer(timeout, connection.cancel)]
        if on_wait is not None:
            text = "waiting for write transactions that are open in the source"
            self._timers.append(threading.Timer(WAIT_NOTICE_SECONDS, on_wait, [text]))

    def __enter__(self) -> None:
        for timer in self._timers:
            timer.daemon = True
            timer.start()

    def __exit__(self, *_: object) -> None:
        for timer in self._timers:
            timer.cancel()


def _command(connection: psycopg.Connection[Any], command: bytes, what: str) -> list[str]:
    """The first row of a replication command, which must be sent as a simple query."""
    result = connection.pgconn.exec_(command)
    if result.status != ExecStatus.TUPLES_OK:
        # libpq gives the message if the server could not, as after a lost connection.
        text = result.error_field(DiagnosticField.MESSAGE_PRIMARY) or result.error_message
        line = (text or b"").decode("utf-8", "replace").partition("\n")[0]
        raise NotAvailable(
            f"the source cannot be {what}: {line.strip()}; verify needs a role with REPLICATION "
            "and a free replication slot"
        )
    return [(result.get_value(0, index) or b"").decode() for index in range(result.nfields)]

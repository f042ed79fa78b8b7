"""Errors of the bridge, by what the operator must do.

BridgeError
    SettingsError      exit 2: correct a flag, a variable or the configuration file.
    SourceError        exit 3: repair PostgreSQL, its publication, slot or grants.
        ProtocolError  what PostgreSQL sent is not what the replication protocol says.
        UnknownToLog   the log at the slot's position does not know the publication.
    BrokerError        exit 3: repair NATS, its streams, buckets or account.
        TableTaken     another source publishes the table on this stream.
    DataAtRiskError    exit 4: going on could lose changes; decide, then start again.
        HistoryBroken  what PostgreSQL sends is not the history that the stream records.
Retryable              waiting can help: the bridge tries again with backoff.
    SchemaOvertaken    another bridge has stored a schema version: start over.
"""

from __future__ import annotations

from typing import ClassVar


class BridgeError(Exception):
    """Stops the bridge; the message is one line: what is wrong; the remedy."""

    exit_code: ClassVar[int] = 1


class SettingsError(BridgeError):
    """A setting is missing, wrong or contradicts another."""

    exit_code = 2


class SourceError(BridgeError):
    """PostgreSQL cannot be used as configured."""

    exit_code = 3


class ProtocolError(SourceError):
    """PostgreSQL sent something that does not follow the replication protocol."""


class UnknownToLog(SourceError):
    """The publication is younger than the slot; waiting does not help."""


class BrokerError(BridgeError):
    """NATS cannot be used as configured."""

    exit_code = 3


class TableTaken(BrokerError):
    """A table belongs to another source of the stream; waiting does not help."""


class DataAtRiskError(BridgeError):
    """Continuing could lose or skip changes."""

    exit_code = 4


class HistoryBroken(DataAtRiskError):
    """The server's log is not the one that was streamed before; a new epoch can begin."""


class Retryable(Exception):
    """A condition that waiting can heal."""


class SchemaOvertaken(Retryable):
    """KV holds a schema version that this bridge neither read nor wrote: it must start over."""

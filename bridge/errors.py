"""Errors of the bridge, by what the operator must do.

BridgeError
    SettingsError          exit 2: correct a flag, a variable or the configuration file.
    SourceError            exit 3: repair PostgreSQL, its publication, slot or grants.
        ProtocolError      PostgreSQL sent something that violates the replication protocol.
        PublicationTooNew  the publication was created after the slot's position.
    BrokerError            exit 3: repair NATS, its streams, buckets or account.
        TableTaken         another source publishes the table on this stream.
    DataAtRiskError        exit 4: continuing could lose changes; decide, then start again.
        HistoryBroken      PostgreSQL sends other transactions than the stream has recorded.
    Refused                the request for a snapshot is answered with the reason.
    ForeignTable           the bridge that publishes the table answers that request.
    SnapshotError          a snapshot fails; the next request begins a new one.
Retryable                  waiting can help: the bridge tries again with backoff.
    SchemaOvertaken        another bridge has stored a newer schema version: start again.
"""

from __future__ import annotations

from typing import ClassVar


class BridgeError(Exception):
    """Stops the bridge; the message is one line with the problem and the remedy."""

    exit_code: ClassVar[int] = 1


class SettingsError(BridgeError):
    """A setting is missing, wrong or contradicts another."""

    exit_code = 2


class SourceError(BridgeError):
    """PostgreSQL cannot be used as configured."""

    exit_code = 3


class ProtocolError(SourceError):
    """PostgreSQL sent something that does not follow the replication protocol."""


class PublicationTooNew(SourceError):
    """The publication was created after the slot's position; waiting does not help."""


class BrokerError(BridgeError):
    """NATS cannot be used as configured."""

    exit_code = 3


class TableTaken(BrokerError):
    """A table belongs to another source of the stream; waiting does not help."""


class DataAtRiskError(BridgeError):
    """Continuing could lose or skip changes."""

    exit_code = 4


class HistoryBroken(DataAtRiskError):
    """The server's log differs from the one that was streamed before; a new epoch is needed."""


class Refused(BridgeError):
    """A request is refused; the message gives the reason and an alternative."""


class ForeignTable(BridgeError):
    """Another source of the same stream publishes the table."""


class SnapshotError(BridgeError):
    """A snapshot that was begun cannot be completed."""


class Retryable(Exception):
    """A condition that may end by itself; the bridge tries again."""


class SchemaOvertaken(Retryable):
    """KV holds a schema version that this bridge neither read nor wrote: it must start again."""

"""Errors of the Spark consumer, by what the operator must do; errors of the SDK are not wrapped.

SparkConsumerError        check Spark: it failed for the reason given
    SetupError            fix the installation or the options: pyspark, Java, flags
    UnsuitableTableError  fix the table: no key, columns the lake cannot name
    UnrepresentableError  choose what to do with values Spark cannot represent (--unrepresentable)
    SchemaChangeError     rebuild the table: its columns changed incompatibly
    LakeBusyError         end the other job on this lake, or let one job write all tables
    LakeConflictError     try again: another writer committed to a table first
    LakeError             check the lake: it holds another table, or others changed its rows
        MissingRowError   rebuild the table: it lacks a row that a change refers to
        LakeOptionsError  use the options that the table was created with

Each has an `exit_code`, the exit status of `spark-consumer`.
"""

from __future__ import annotations

from consumer_sdk.errors import CdcError


class SparkConsumerError(CdcError):
    """Base of the errors of the Spark consumer; the message is one line."""

    exit_code = 3


class SetupError(SparkConsumerError):
    """The job cannot run with this installation or these options."""

    exit_code = 2


class UnsuitableTableError(SparkConsumerError):
    """The lake cannot hold the table as PostgreSQL defines it."""

    exit_code = 3


class UnrepresentableError(SparkConsumerError):
    """The type of a column cannot represent a value."""

    exit_code = 4


class SchemaChangeError(SparkConsumerError):
    """A schema change cannot be applied to the existing table."""

    exit_code = 4


class LakeBusyError(SparkConsumerError):
    """Another job writes to this lake."""

    exit_code = 3


class LakeConflictError(SparkConsumerError):
    """Another writer committed to the table first; nothing was written."""

    exit_code = 4


class LakeError(SparkConsumerError):
    """The lake does not hold what this job wrote there."""

    exit_code = 4


class MissingRowError(LakeError):
    """The lake does not have a row that a change refers to."""

    def __init__(self, table: str) -> None:
        super().__init__(
            f"lake table {table} lacks a row that a change refers to, so it is not as the source "
            "was before the change; rebuild it with --rebootstrap"
        )


class LakeOptionsError(LakeError):
    """The table was created with other options than those given."""

    exit_code = 2

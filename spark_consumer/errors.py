"""Errors of the Spark consumer, by what the operator must do; the SDK's pass through unchanged.

SparkConsumerError        look at Spark: it failed, for the reason given
    SetupError            fix the installation or the options: pyspark, Java, flags
    UnsuitableTableError  fix the table: no key, columns the lake cannot name
    UnrepresentableError  decide what to do with values Spark cannot hold (--unrepresentable)
    SchemaChangeError     rebuild the table: its columns changed in a way that needs it
    LakeBusyError         end the other job, or give it all tables
    LakeConflictError     try again: somebody else committed to a table meanwhile
    LakeError             look at the lake: another table, a restored or foreign version
        LakeOptionsError  give the options that the lake's table was made with

Each carries `exit_code`, the status with which `spark-consumer` ends.
"""

from __future__ import annotations

from consumer_sdk.errors import CdcError


class SparkConsumerError(CdcError):
    """Anything that the Spark consumer itself reports; the message is one line."""

    exit_code = 3


class SetupError(SparkConsumerError):
    """The job cannot run as installed or as asked for."""

    exit_code = 2


class UnsuitableTableError(SparkConsumerError):
    """The table as PostgreSQL has it cannot be kept in the lake."""

    exit_code = 3


class UnrepresentableError(SparkConsumerError):
    """A value has no place in its column's type."""

    exit_code = 4


class SchemaChangeError(SparkConsumerError):
    """A schema change cannot be followed in place."""

    exit_code = 4


class LakeBusyError(SparkConsumerError):
    """Another job keeps this lake."""

    exit_code = 3


class LakeConflictError(SparkConsumerError):
    """Somebody else committed to the table meanwhile; nothing was written."""

    exit_code = 4


class LakeError(SparkConsumerError):
    """The lake does not hold what this job left there."""

    exit_code = 4


class LakeOptionsError(LakeError):
    """The lake's table was made with other options than those given."""

    exit_code = 2

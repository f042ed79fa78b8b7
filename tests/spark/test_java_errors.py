"""One line out of what Java prints."""

from __future__ import annotations

import pytest

from consumer_sdk.errors import CdcError, GapError, SnapshotFailed
from consumer_sdk.snapshot.request import RequestRefused
from consumer_sdk.transport.options import BadOption
from spark_consumer.errors import SetupError
from spark_consumer.runtime.failures import original_error, root_cause, start_failure
from spark_consumer.runtime.java import JavaProcess

CHAIN = """An error occurred while calling o90.start.
: org.apache.spark.SparkException: [STREAM] the query cannot start
\tat org.apache.spark.One.two(One.scala:1)
Caused by: java.lang.IllegalStateException: no luck
\tat org.apache.spark.Three.four(Three.scala:2)
Caused by: java.nio.file.AccessDeniedException: {}
\t... 12 more
"""
PYTHON = """[STREAM_FAILED] Query terminated with exception SQLSTATE: XXKST
JVM stacktrace:
org.apache.spark.sql.streaming.StreamingQueryException: [STREAM_FAILED] Query terminated
\tat org.apache.spark.One.two(One.scala:1)
Caused by: org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "worker.py", line 12, in main
    process()
ValueError: five is not four

\tat org.apache.spark.api.python.Runner.read(Runner.scala:9)
"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (CHAIN.format("the disk is read only"), "the disk is read only"),
        (CHAIN.format("/lake"), "AccessDeniedException: /lake"),
        ("java.lang.NullPointerException\n\tat a.b.C.d(C.java:1)", "NullPointerException"),
        (PYTHON, "ValueError: five is not four"),
        ("Answer from Java side is empty", None),
        ("", None),
    ],
)
def test_the_deepest_cause_is_told(text: str, cause: str | None) -> None:
    assert root_cause(text) == cause


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            [
                'Exception in thread "main" org.apache.spark.SparkException: no such master',
                "\tat x",
            ],
            "no such master",
        ),
        (
            ["", "Invalid maximum heap size: -Xmxwat", "Error: A fatal exception has occurred."],
            "Invalid maximum heap size: -Xmxwat",
        ),
        (["Error: Could not create the Java Virtual Machine."], None),
        ([], "it printed nothing"),
    ],
)
def test_a_java_that_does_not_start_says_why(lines: list[str], reason: str | None) -> None:
    assert start_failure(lines) == (lines[0] if reason is None else reason)


@pytest.mark.parametrize("kind", [GapError, SnapshotFailed, SetupError, BadOption, RequestRefused])
def test_an_error_of_ours_is_restored_from_what_another_process_printed(
    kind: type[CdcError],
) -> None:
    printed = (
        f"Traceback (most recent call last):\n{kind.__module__}.{kind.__name__}: it is so\n\tat"
    )
    found = original_error(RuntimeError(printed))
    assert (type(found), str(found)) == (kind, "it is so")


def test_an_error_of_others_stays_as_it_is() -> None:
    error = RuntimeError("consumer_sdk.nowhere.Odd: x\nconsumer_sdk.errors.re: y")
    assert original_error(error) is error


def test_a_java_that_was_ended_before_its_start_is_not_started() -> None:
    java = JavaProcess()
    java.kill()
    with pytest.raises(SetupError, match="interrupted"):
        java.start({})

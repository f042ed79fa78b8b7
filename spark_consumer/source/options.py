"""Options of the data sources `nats_cdc` and `nats_snapshot`.

Missing options are taken from the environment of the driver, as in every other reader. Options
never hold secrets, because Spark shows them.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, cast

from consumer_sdk.errors import UsageError
from consumer_sdk.reading.proof import (
    StreamBreak,
    find_break,
    require_continuation,
    require_same_stream,
)
from consumer_sdk.reading.schemas import resolve_table
from consumer_sdk.transport.logfmt import event
from consumer_sdk.transport.settings import NatsSettings
from consumer_sdk.wire.subjects import Subjects

if TYPE_CHECKING:
    from collections.abc import Mapping

    from consumer_sdk.transport.api import StreamBounds
    from spark_consumer.lake.column_values import Unrepresentable

logger = logging.getLogger(__name__)

Form = Literal["envelope", "typed", "message"]
FORMS: Final = ("envelope", "typed", "message")
POLICIES: Final = ("error", "null", "text")
DEFAULT_ROWS_PER_BATCH: Final = 200_000
DEFAULT_PARTITIONS: Final = 4

_NAME_PART: Final = re.compile(r'(?:[^",]|"(?:[^"]|"")*")+')


def split_tables(text: str) -> tuple[tuple[str, str], ...]:
    """`a, sales.b, "Odd, one"` as pairs of schema and table; quotes may contain commas."""
    names = [part.strip() for part in _NAME_PART.findall(text)]
    return tuple(dict.fromkeys(resolve_table(name) for name in names if name))


@dataclass(frozen=True)
class Start:
    """Where reading begins: `earliest`, `latest`, or after a sequence, one or one per source."""

    word: Literal["earliest", "latest"] | None = None
    after: int | None = None
    by_source: tuple[tuple[str, int], ...] = ()

    def sequence(self, source: str) -> int | None:
        """The sequence after which a source is read; None for `earliest` and `latest`."""
        return dict(self.by_source).get(source, self.after)


@dataclass(frozen=True)
class StreamRange:
    """The messages to read: from `start` to `end` or the last one, of the stream `created` then."""

    start: Start
    end: int | None
    created: int | None
    fail_on_data_loss: bool

    def first_after(self, bounds: StreamBounds, source: str) -> int:
        """The sequence after which a source is read; GapError if the next one is not stored."""
        require_same_stream(bounds, (self.start.after or 0) + 1, self.created)
        after = self.start.sequence(source)
        if after is None:
            return bounds.last if self.start.word == "latest" else bounds.first - 1
        return self.continued_after(bounds, after)

    def continued_after(self, bounds: StreamBounds, after: int) -> int:
        """`after`, or if messages are lost and failOnDataLoss=false, the last lost sequence."""
        is_trimmed = find_break(bounds, after + 1) is StreamBreak.TRIMMED
        if is_trimmed and not self.fail_on_data_loss:
            # Spark's reader process prints only the event of a log line, without its fields.
            lost = f"messages {after + 1} to {bounds.first - 1} are lost"
            event(logger, lost, level=logging.WARNING)
            return bounds.first - 1
        require_continuation(bounds, after + 1)
        return after


@dataclass(frozen=True)
class CdcOptions:
    """The options of `spark.readStream.format("nats_cdc")`."""

    settings: NatsSettings
    tables: tuple[tuple[str, str], ...]
    form: Form
    range: StreamRange
    rows_per_batch: int
    partitions: int
    policy: Unrepresentable

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> CdcOptions:
        """Read the options; UsageError names an invalid one."""
        form = options.get("form", "envelope")
        if form not in FORMS:
            raise UsageError(f"option form is {form!r}; there are {', '.join(FORMS)}")
        tables = split_tables(options.get("tables") or options.get("table") or "")
        if form == "typed" and len(tables) != 1:
            raise UsageError("option form=typed needs exactly one table in option tables")
        ending = options.get("endingPosition", "latest")
        return cls(
            settings=nats_settings(options),
            tables=tables,
            form=cast("Form", form),
            range=StreamRange(
                start=_start(options.get("startingPosition", "earliest")),
                end=None if ending == "latest" else _integer("endingPosition", ending),
                created=_optional_integer("streamCreated", options.get("streamCreated")),
                fail_on_data_loss=_boolean("failOnDataLoss", options.get("failOnDataLoss", "true")),
            ),
            rows_per_batch=_integer(
                "rowsPerBatch", options.get("rowsPerBatch", str(DEFAULT_ROWS_PER_BATCH)), least=1
            ),
            partitions=_integer(
                "partitions", options.get("partitions", str(DEFAULT_PARTITIONS)), least=1
            ),
            policy=policy_of(options),
        )


@dataclass(frozen=True)
class SnapshotOptions:
    """The options of `spark.read.format("nats_snapshot")`."""

    settings: NatsSettings
    table: tuple[str, str]
    partitions: int
    fresh: bool
    policy: Unrepresentable

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SnapshotOptions:
        """Read the options; UsageError names an invalid one."""
        tables = split_tables(options.get("table") or options.get("tables") or "")
        if len(tables) != 1:
            raise UsageError("nats_snapshot needs exactly one table in option table")
        return cls(
            settings=nats_settings(options),
            table=tables[0],
            partitions=_integer(
                "partitions", options.get("partitions", str(DEFAULT_PARTITIONS)), least=1
            ),
            fresh=_boolean("fresh", options.get("fresh", "false")),
            policy=policy_of(options),
        )


def nats_settings(options: Mapping[str, str]) -> NatsSettings:
    """Options `servers`, `prefix` or `stream`, and files: `creds`, `nkey`, `ca`, `cert`, `key`."""
    prefix = options.get("prefix")
    stream = options.get("stream")
    if stream is not None:
        wanted = stream.removesuffix("CDC").removesuffix("_")
        prefix = wanted if prefix is None else prefix
        if Subjects(prefix).cdc_stream != stream:
            raise UsageError(
                f"option stream is {stream!r}; with prefix {prefix!r} the stream is called "
                f"{Subjects(prefix).cdc_stream!r}"
            )
    settings = NatsSettings.resolve(options.get("servers"), prefix=prefix, name="tailrace-spark")
    return replace(
        settings,
        creds=options.get("creds", settings.creds),
        nkey=options.get("nkey", settings.nkey),
        ca=options.get("ca", settings.ca),
        cert=options.get("cert", settings.cert),
        key=options.get("key", settings.key),
    )


def policy_of(options: Mapping[str, str]) -> Unrepresentable:
    """Option `unrepresentable`."""
    policy = options.get("unrepresentable", "error")
    if policy not in POLICIES:
        raise UsageError(f"option unrepresentable is {policy!r}; there are {', '.join(POLICIES)}")
    return cast("Unrepresentable", policy)


def _start(text: str) -> Start:
    if text in ("earliest", "latest"):
        return Start(word=cast("Literal['earliest', 'latest']", text))
    if text.startswith("{"):
        try:
            by_source = {str(name): int(value) for name, value in json.loads(text).items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise UsageError(
                'option startingPosition is not a map of sequences, {"source": 42}'
            ) from error
        return Start(word="earliest", by_source=tuple(sorted(by_source.items())))
    return Start(after=_integer("startingPosition", text))


def _integer(name: str, text: str, least: int = 0) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise UsageError(f"option {name} is {text!r}, which is not a number") from error
    if value < least:
        raise UsageError(f"option {name} is {value}; it must be at least {least}")
    return value


def _optional_integer(name: str, text: str | None) -> int | None:
    return None if text is None else _integer(name, text)


def _boolean(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise UsageError(f"option {name} is {text!r}; write true or false")
    return text.lower() == "true"

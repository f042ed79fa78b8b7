"""Checks existing streams and buckets for settings that lose, refuse or delay changes."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from bridge.jetstream.streams import NEARLY_FULL
from bridge.preflight.findings import Finding, Severity, ok, warning
from bridge.telemetry.wal_monitor import format_bytes, format_duration
from consumer_sdk.wire.escaping import shell_word

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Config = dict[str, Any]

ALWAYS = "jetstream { sync_interval: always }"


def check_durability(replicas: int, varz: dict[str, Any] | None) -> Iterator[Finding]:
    """Which failures acknowledged changes survive: a killed server, a lost one, a power cut."""
    if varz is None:
        if replicas >= 3:
            yield ok(
                "nats",
                "durability",
                f"{replicas} replicas: acknowledged changes survive the loss of one server",
            )
            return
        yield warning(
            "nats",
            "durability",
            "sync_interval cannot be seen through a client connection; the default is 2 minutes",
            "with one replica, acknowledged changes survive a killed server but not a power cut: "
            "up to 2 minutes of them can be lost, which the bridge then announces as a gap",
            f"in nats-server.conf: {ALWAYS}\n"
            "# and let this check see it: set BRIDGE_NATS_MONITOR=http://host:8222",
        )
        return
    config = (varz.get("jetstream") or {}).get("config") or {}
    interval = config.get("sync_interval", 0) / 1e9
    if config.get("sync_always"):
        copies = f"{replicas} replicas" if replicas > 1 else "one replica"
        yield ok("nats", "durability", f"each acknowledged change is on disk, in {copies}")
    elif replicas >= 3:
        yield ok(
            "nats",
            "durability",
            f"{replicas} replicas, written to disk every {format_duration(interval)}: "
            "acknowledged changes survive the loss of one server, not a power cut of all",
        )
    else:
        yield warning(
            "nats",
            "durability",
            f"one replica, written to disk every {format_duration(interval)}",
            "acknowledged changes survive a killed server but not a power cut: up to "
            f"{format_duration(interval)} of them can be lost, which the bridge announces as a gap",
            f"in nats-server.conf: {ALWAYS}",
        )


NANOSECONDS = 1_000_000_000
LONGEST_WINDOW_SECONDS = 30
SUGGESTED_BYTES = 16 * 1024**3
SHORTEST_AGE_SECONDS = 3600
# What nats-server keeps in memory for each message id within the window.
WINDOW_ENTRY_BYTES = 250


def update_command(config: Config, **changes: object) -> str:
    """The command that changes some settings of a stream and keeps the others."""
    body = json.dumps({**config, **changes}, separators=(",", ":"))
    subject = shell_word(f"$JS.API.STREAM.UPDATE.{config['name']}")
    return f"nats req {subject} {shlex.quote(body)}"


def delete_command(config: Config) -> str:
    """The command that deletes a stream, for settings that cannot be changed."""
    return (
        f"nats req {shell_word('$JS.API.STREAM.DELETE.' + config['name'])} ''\n"
        "# its messages are gone then: the bridge creates it anew, with --on-gap=new-epoch"
    )


@dataclass(frozen=True)
class Rule:
    """One setting of a stream that can be wrong."""

    code: str
    severity: Severity
    is_wrong: Callable[[Config], bool]
    what: str
    why: str
    changes: Config | None
    blocks: bool = False
    only_cdc: bool = False

    def judge(self, config: Config) -> Finding | None:
        if not self.is_wrong(config):
            return None
        fix = (
            delete_command(config)
            if self.changes is None
            else update_command(config, **self.changes)
        )
        what = f"stream {config['name']} {self.what.format(**config)}"
        return Finding(self.severity, "nats", self.code, what, self.why, fix, self.blocks)


RULES = (
    Rule(
        "stream-retention",
        "problem",
        lambda c: c["retention"] == "workqueue",
        "has retention {retention}",
        "a message would be removed once one consumer has read it",
        None,
    ),
    Rule(
        "stream-retention",
        "problem",
        lambda c: c["retention"] == "interest",
        "has retention {retention}",
        "messages are removed as soon as no consumer is waiting for them",
        {"retention": "limits"},
    ),
    Rule(
        "stream-per-subject",
        "problem",
        lambda c: c["max_msgs_per_subject"] > 0,
        "keeps only {max_msgs_per_subject} messages per subject",
        "older changes of a table are removed while newer ones are still to be read",
        {"max_msgs_per_subject": -1},
        blocks=True,
        only_cdc=True,
    ),
    Rule(
        "stream-no-ack",
        "problem",
        lambda c: bool(c.get("no_ack")),
        "does not acknowledge messages",
        "the bridge could never confirm anything to PostgreSQL",
        {"no_ack": False},
        blocks=True,
    ),
    Rule(
        "stream-sealed",
        "problem",
        lambda c: bool(c.get("sealed")),
        "is sealed",
        "it accepts no messages",
        None,
        blocks=True,
    ),
    Rule(
        "stream-memory",
        "problem",
        lambda c: c["storage"] == "memory",
        "is kept in memory",
        "a restart of the server loses every acknowledged change",
        None,
    ),
    Rule(
        "stream-discard-old",
        "warning",
        lambda c: c["discard"] == "old" and c["max_bytes"] > 0,
        "removes its oldest messages when it is full",
        "a consumer that has not read them has a gap then, and must bootstrap again",
        {"discard": "new"},
    ),
    Rule(
        "stream-max-msgs",
        "warning",
        lambda c: c["max_msgs"] > 0,
        "keeps only {max_msgs} messages",
        "one large transaction can push out what consumers have not read",
        {"max_msgs": -1},
    ),
    Rule(
        "stream-message-size",
        "warning",
        lambda c: c.get("max_msg_size", -1) > 0,
        "refuses messages larger than {max_msg_size} bytes",
        "the bridge sizes messages by the server's max_payload and would be refused",
        {"max_msg_size": -1},
    ),
    Rule(
        "stream-allow-direct",
        "warning",
        lambda c: not c.get("allow_direct"),
        "does not allow direct reads",
        "replay and snapshots are read slower",
        {"allow_direct": True},
    ),
    Rule(
        "stream-duplicate-window",
        "warning",
        lambda c: c.get("duplicate_window", 0) > LONGEST_WINDOW_SECONDS * NANOSECONDS,
        "has a long duplicate window",
        "the server keeps about 250 bytes in memory per message within it, and the bridge does "
        "not need it: it resumes from what the stream holds",
        {"duplicate_window": NANOSECONDS // 10},
        only_cdc=True,
    ),
)


def check_stream(info: dict[str, Any], subjects: str, *, is_cdc: bool) -> Iterator[Finding]:
    """Everything about one existing stream."""
    config = info["config"]
    name = config["name"]
    if config.get("mirror") or config.get("subject_transform"):
        kind = "a mirror" if config.get("mirror") else "transforming subjects"
        yield Finding(
            "problem",
            "nats",
            "stream-mirror",
            f"stream {name} is {kind}",
            "changes cannot be published to it under their own subjects",
            "choose another stream name or --prefix for the bridge",
            blocks=True,
        )
        return
    held = config.get("subjects") or []
    if subjects not in held and ">" not in held:
        yield Finding(
            "problem",
            "nats",
            "stream-subjects",
            f"stream {name} does not hold {subjects}",
            "what the bridge publishes would not be stored",
            update_command(config, subjects=[*held, subjects]),
            blocks=True,
        )
    for rule in RULES:
        if is_cdc or not rule.only_cdc:
            finding = rule.judge(config)
            if finding is not None:
                yield _with_memory(finding, info)
    yield from _check_size(info, is_cdc=is_cdc)


def _check_size(info: dict[str, Any], *, is_cdc: bool) -> Iterator[Finding]:
    """Whether the stream has a size limit, and room below it."""
    config, state = info["config"], info["state"]
    name, most, held = config["name"], config["max_bytes"], state["bytes"]
    count, size = state["messages"], format_bytes(held)
    if most > 0:
        yield ok(
            "nats",
            "stream",
            f"stream {name} holds {count} messages, {size} of at most {format_bytes(most)}",
        )
        if held > most * NEARLY_FULL:
            yield warning(
                "nats",
                "stream-nearly-full",
                f"stream {name} has used {held / most:.0%} of its size limit",
                "when it is full, the bridge waits and PostgreSQL keeps WAL"
                if is_cdc
                else "when it is full, snapshots fail",
                update_command(config, max_bytes=most * 2),
            )
        return
    yield ok("nats", "stream", f"stream {name} holds {count} messages, {size}")
    yield warning(
        "nats",
        "stream-no-limit",
        f"stream {name} has no size limit",
        "it can fill the account or the disk; after a full disk nats-server accepts nothing for "
        "its streams until it is restarted"
        + ("" if is_cdc else ", and whoever may request snapshots can fill it"),
        update_command(config, max_bytes=max(SUGGESTED_BYTES, held * 4), discard="new"),
    )


def _with_memory(finding: Finding, info: dict[str, Any]) -> Finding:
    """Add the memory that the window takes at the mean rate of the stream."""
    if finding.code != "stream-duplicate-window":
        return finding
    window = info["config"]["duplicate_window"] / NANOSECONDS
    what = f"{finding.what} of {format_duration(window)}"
    state = info["state"]
    if state["messages"] > 1:
        first, last = (
            datetime.fromisoformat(_micro(state[key])) for key in ("first_ts", "last_ts")
        )
        rate = state["messages"] / max((last - first).total_seconds(), 1.0)
        what += f", about {format_bytes(rate * window * WINDOW_ENTRY_BYTES)} at its mean rate"
    return Finding("warning", "nats", finding.code, what, finding.why, finding.fix)


def _micro(timestamp: str) -> str:
    head, _, fraction = timestamp.removesuffix("Z").partition(".")
    return f"{head}.{(fraction or '0')[:6].ljust(6, '0')}+00:00"


def check_ages(
    cdc: Config | None, init: Config | None, objects: Config | None
) -> Iterator[Finding]:
    """Whether each stream keeps messages as long as the others need them."""
    if cdc is not None and 0 < cdc["max_age"] < SHORTEST_AGE_SECONDS * NANOSECONDS:
        age = format_duration(cdc["max_age"] / NANOSECONDS)
        yield Finding(
            "warning",
            "nats",
            "stream-age",
            f"stream {cdc['name']} keeps changes for {age} only",
            "a consumer whose snapshot takes longer can never catch up, and a short outage of a "
            "consumer means a new bootstrap",
            update_command(cdc, max_age=8 * 86400 * NANOSECONDS),
        )
    if cdc is not None and init is not None and _outlives(init["max_age"], cdc["max_age"]):
        yield Finding(
            "warning",
            "nats",
            "init-age",
            f"stream {init['name']} keeps snapshots longer than {cdc['name']} keeps changes",
            "an old snapshot without the changes since is only wasted space",
            update_command(init, max_age=cdc["max_age"]),
        )
    if objects is not None and objects["max_age"] > 0:
        ages = [config["max_age"] for config in (cdc, init) if config is not None]
        if any(_outlives(age, objects["max_age"]) for age in ages):
            longest = 0 if 0 in ages else max(ages) + 86400 * NANOSECONDS
            yield Finding(
                "problem",
                "nats",
                "objects-age",
                f"object store {objects['name'].removeprefix('OBJ_')} forgets values before the "
                "streams forget the messages that refer to them",
                "such a message can be read but its row cannot",
                update_command(objects, max_age=longest),
            )


def _outlives(age: int, other: int) -> bool:
    """Whether something kept for `age` is kept longer than `other`; 0 means for ever."""
    return other > 0 and (age == 0 or age > other)


def check_bucket(config: Config) -> Iterator[Finding]:
    """Check that a KV bucket keeps its keys for ever, and on disk."""
    name = config["name"].removeprefix("KV_")
    if config["max_age"] > 0:
        yield Finding(
            "problem",
            "nats",
            "bucket-age",
            f"bucket {name} forgets keys after {format_duration(config['max_age'] / NANOSECONDS)}",
            "schemas, dictionaries and positions are needed as long as the streams",
            update_command(config, max_age=0),
        )
    if config["storage"] == "memory":
        yield Finding(
            "problem",
            "nats",
            "bucket-memory",
            f"bucket {name} is kept in memory",
            "a restart of the server loses schemas and positions",
            delete_command(config),
        )


def check_replicas(info: dict[str, Any]) -> Iterator[Finding]:
    """Check that a stream in a cluster has replicas."""
    config = info["config"]
    if info.get("cluster", {}).get("name") and config["num_replicas"] < 3:
        yield Finding(
            "warning",
            "nats",
            "stream-replicas",
            f"stream {config['name']} has {config['num_replicas']} replica in a cluster",
            "while its server is away nothing can be published or read; its disk is the only copy",
            update_command(config, num_replicas=3),
        )

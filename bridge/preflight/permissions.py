"""NATS permissions that the bridge and its consumers need, and a check that tries them."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

from bridge.jetstream.connection import open_connection
from bridge.preflight.findings import Finding, ok, problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from consumer_sdk.wire.subjects import Subjects

REFUSAL_ROUNDS = 5
REFUSAL_PAUSE_SECONDS = 0.05
# The protocol reports a violation only as text: -ERR 'Permissions Violation for …'.
_VIOLATION = re.compile(
    r"permissions violation for (publish|subscription) to \"([^\"]+)\"", re.IGNORECASE
)
# Makes JetStream refuse the message, so that the trial stores nothing.
_NOT_STORED = {"Nats-Expected-Stream": "none-such"}


def stream_names(subjects: Subjects) -> list[str]:
    """All streams that the bridge writes to, including those of buckets and objects."""
    return [
        subjects.cdc_stream,
        subjects.init_stream,
        f"KV_{subjects.schemas_bucket}",
        f"KV_{subjects.bridge_bucket}",
        f"KV_{subjects.dicts_bucket}",
        f"OBJ_{subjects.objects_bucket}",
    ]


def _reading(stream: str) -> list[str]:
    return [
        f"$JS.API.STREAM.INFO.{stream}",
        f"$JS.API.STREAM.MSG.GET.{stream}",
        f"$JS.API.DIRECT.GET.{stream}",
        f"$JS.API.DIRECT.GET.{stream}.>",
        f"$JS.API.CONSUMER.*.{stream}",
        f"$JS.API.CONSUMER.*.{stream}.>",
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.>",
        f"$JS.FC.{stream}.>",
    ]


def bridge_publishes(subjects: Subjects) -> list[str]:
    """Subjects the bridge must be allowed to publish to."""
    names = stream_names(subjects)
    return [
        subjects.cdc_all,
        subjects.init_all,
        f"{subjects.snapshot}.progress.>",
        f"$KV.{subjects.schemas_bucket}.>",
        f"$KV.{subjects.bridge_bucket}.>",
        f"$KV.{subjects.dicts_bucket}.>",
        f"$O.{subjects.objects_bucket}.>",
        "$JS.API.INFO",
        "$JS.API.STREAM.NAMES",
        *(f"$JS.API.STREAM.CREATE.{name}" for name in names),
        f"$JS.API.STREAM.PURGE.OBJ_{subjects.objects_bucket}",
        *(subject for name in names for subject in _reading(name)),
    ]


def bridge_subscribes(subjects: Subjects) -> list[str]:
    """Subjects the bridge must be allowed to subscribe to."""
    return ["_INBOX.>", f"{subjects.snapshot}.request.>"]


def consumer_publishes(subjects: Subjects) -> list[str]:
    """Subjects a consumer must be allowed to publish to; none of them changes stored data."""
    return [
        f"{subjects.snapshot}.request.>",
        "$JS.API.INFO",
        "$JS.API.STREAM.NAMES",
        *(subject for name in stream_names(subjects) for subject in _reading(name)),
    ]


def consumer_subscribes(subjects: Subjects) -> list[str]:
    """Subjects a consumer must be allowed to subscribe to."""
    return ["_INBOX.>", f"{subjects.snapshot}.progress.>"]


def permission_block(publish: Sequence[str], subscribe: Sequence[str]) -> str:
    """The block for a user in nats-server.conf."""
    allowed = ",\n    ".join(json.dumps(subject) for subject in publish)
    heard = ", ".join(json.dumps(subject) for subject in subscribe)
    return (
        f"permissions {{\n  publish {{ allow: [\n    {allowed}\n  ] }}\n"
        f"  subscribe {{ allow: [{heard}] }}\n  allow_responses: true\n}}"
    )


def _trials(subjects: Subjects) -> dict[str, tuple[str, bytes]]:
    """For each needed subject one concrete subject to try, and a body that has no effect."""
    trials = {
        subjects.cdc_all: (f"{subjects.cdc}.$check.probe", b""),
        subjects.init_all: (f"{subjects.init}.$check.probe", b""),
        f"{subjects.snapshot}.progress.>": (f"{subjects.snapshot}.progress.$check.probe", b""),
        f"$KV.{subjects.schemas_bucket}.>": (f"$KV.{subjects.schemas_bucket}.check.probe", b""),
        f"$KV.{subjects.bridge_bucket}.>": (f"$KV.{subjects.bridge_bucket}.check.probe", b""),
        f"$KV.{subjects.dicts_bucket}.>": (f"$KV.{subjects.dicts_bucket}.check.probe", b""),
        f"$O.{subjects.objects_bucket}.>": (f"$O.{subjects.objects_bucket}.C.check.probe", b""),
    }
    for name in stream_names(subjects):
        for request in ("STREAM.INFO", "STREAM.CREATE", "STREAM.MSG.GET", "DIRECT.GET"):
            subject = f"$JS.API.{request}.{name}"
            trials[subject] = (subject, b"{}")
        trials[f"$JS.API.CONSUMER.*.{name}.>"] = (f"$JS.API.CONSUMER.CREATE.{name}.none.x", b"{}")
        trials[f"$JS.API.CONSUMER.MSG.NEXT.{name}.>"] = (
            f"$JS.API.CONSUMER.MSG.NEXT.{name}.none",
            b"{}",
        )
    return trials


async def check_permissions(options: Mapping[str, Any], subjects: Subjects) -> list[Finding]:
    """Try the bridge's requests on a separate connection; nothing is stored or created."""
    refused: set[tuple[str, str]] = set()

    async def note(error: Exception) -> None:
        for kind, subject in _VIOLATION.findall(str(error)):
            refused.add((kind.lower(), subject.lower()))

    settings = {**options, "allow_reconnect": False, "error_cb": note}
    client = await open_connection(**settings)
    try:
        for subject, body in _trials(subjects).values():
            await client.publish(subject, body, headers=_NOT_STORED)
        await client.flush()
        request = f"{subjects.snapshot}.request.>"
        subscription = await client.subscribe(request)
        for _ in range(REFUSAL_ROUNDS):
            await client.flush()
            if ("subscription", request.lower()) in refused:
                break
            # On a busy machine the refusal may arrive after the answer to a ping.
            await asyncio.sleep(REFUSAL_PAUSE_SECONDS)
        else:
            await subscription.unsubscribe()
    finally:
        await client.close()
    missing = [
        f"publish {needed}"
        for needed, (subject, _) in _trials(subjects).items()
        if ("publish", subject.lower()) in refused
    ]
    if ("subscription", request.lower()) in refused:
        missing.append(f"subscribe {request}")
    if not missing:
        return [ok("nats", "nats-permissions", "the user may do all the bridge does")]
    return [
        problem(
            "nats",
            "nats-permissions",
            f"the NATS user may not {', '.join(missing)}",
            "the bridge could not publish, answer snapshot requests or read back what it wrote",
            "# for this user in nats-server.conf, then reload\n"
            + permission_block(bridge_publishes(subjects), bridge_subscribes(subjects)),
            blocks=True,
        )
    ]

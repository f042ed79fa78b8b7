"""NATS accounts and permissions for the bridge and for readers: a check, and how to set them up.

NATS does not check whether a user may publish to the reply subject of its request. A user who may
read from JetStream in the bridge's account could therefore let the answer be stored as a change, or
be taken for a request to delete the stream. So readers have an account of their own. It imports the
requests that reading takes, and an answer to another account goes to no subject of the bridge's.
https://docs.nats.io/running-a-nats-service/configuration/securing_nats/accounts
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bridge.jetstream.connection import open_connection
from bridge.preflight.findings import Finding, ok, problem
from consumer_sdk.transport.calls import API, ApiCall, bridge_calls, reader_calls

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from consumer_sdk.wire.subjects import Subjects

BRIDGE_ACCOUNT: Final = "TAILRACE"
READER_ACCOUNT: Final = "READERS"
BRIDGE_USER: Final = "bridge"
READER_USER: Final = "consumer"
READER_INBOX: Final = f"_INBOX_{READER_USER}"
MAX_CONSUMERS: Final = 1000
MAX_CONNECTIONS: Final = 100
MAX_SUBSCRIPTIONS: Final = 1000
REFUSAL_ROUNDS: Final = 5
REFUSAL_PAUSE_SECONDS: Final = 0.05
_BRIDGE_ACCOUNT_NOTE: Final = (
    "The bridge's account stores everything. Only bridges and administrators log in here."
)
_READER_NOTE: Final = f"Readers set NATS_INBOX_PREFIX={READER_INBOX}, which no other user may hear."
# The protocol reports a violation only as text: -ERR 'Permissions Violation for …'.
_VIOLATION: Final = re.compile(
    r"permissions violation for (publish|subscription) to \"([^\"]+)\"", re.IGNORECASE
)
# Makes JetStream refuse the message, so that the trial stores nothing.
_NOT_STORED: Final = {"Nats-Expected-Stream": "none-such"}
# JetStream refuses a purge with both, and the filter matches no message.
_NO_PURGE: Final = b'{"filter": "none.such", "seq": 1, "keep": 1}'


@dataclass(frozen=True, slots=True)
class Permissions:
    """The subjects that one user may publish and subscribe to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    responds: bool = False
    """Whether the user may answer the requests that it receives."""

    def block(self, indent: str = "") -> str:
        """The block for the user in nats-server.conf."""
        allowed = f",\n{indent}    ".join(json.dumps(subject) for subject in self.publish)
        heard = ", ".join(json.dumps(subject) for subject in self.subscribe)
        lines = [
            "permissions {",
            f"  publish {{ allow: [\n{indent}    {allowed}\n{indent}  ] }}",
            f"  subscribe {{ allow: [{heard}] }}",
            *(["  allow_responses: true"] if self.responds else []),
            "}",
        ]
        return f"\n{indent}".join(lines)


@dataclass(frozen=True, slots=True)
class Export:
    """A request that the bridge's account answers for readers, or messages that they may hear."""

    subject: str
    is_service: bool = True
    has_many_answers: bool = False


def stream_names(subjects: Subjects) -> list[str]:
    """All streams that the bridge writes to, including those of buckets and objects."""
    return [name for name in bridge_calls(subjects) if name]


def bridge_permissions(subjects: Subjects, inbox_prefix: str) -> Permissions:
    """What the bridge's user must be allowed."""
    calls = bridge_calls(subjects)
    watched = [name for name, made in calls.items() if ApiCall.CONSUMER_CREATE_UNNAMED in made]
    return Permissions(
        publish=(
            subjects.cdc_all,
            subjects.init_all,
            f"{subjects.snapshot}.progress.>",
            f"$KV.{subjects.schemas_bucket}.>",
            f"$KV.{subjects.bridge_bucket}.>",
            f"$KV.{subjects.dicts_bucket}.>",
            f"$O.{subjects.objects_bucket}.>",
            *_patterns(calls),
            *(f"$JS.FC.{name}.>" for name in watched),
        ),
        subscribe=(f"{inbox_prefix}.>", f"{subjects.snapshot}.request.>"),
        responds=True,
    )


def reader_permissions(subjects: Subjects, inbox_prefix: str) -> Permissions:
    """What a reader's user must be allowed, in an account that imports `reader_exports`."""
    exports = reader_exports(subjects)
    return Permissions(
        publish=tuple(one.subject for one in exports if one.is_service),
        subscribe=(f"{inbox_prefix}.>", *(one.subject for one in exports if not one.is_service)),
    )


def reader_exports(subjects: Subjects) -> list[Export]:
    """What the bridge's account exports to readers."""
    calls = [
        Export(call.pattern(stream), has_many_answers=call.has_many_answers)
        for stream, made in reader_calls(subjects).items()
        for call in made
    ]
    return [
        Export(f"{subjects.snapshot}.request.>"),
        *calls,
        Export(_progress(subjects), is_service=False),
    ]


def _progress(subjects: Subjects) -> str:
    return f"{subjects.snapshot}.progress.>"


def _patterns(calls: Mapping[str, Sequence[ApiCall]]) -> Iterator[str]:
    for stream, made in calls.items():
        for call in made:
            yield call.pattern(stream)


def server_configuration(subjects: Subjects, inbox_prefix: str) -> str:
    """The two accounts for nats-server.conf; passwords come from the server's environment."""
    return "\n".join(_server_configuration(subjects, inbox_prefix))


def _server_configuration(subjects: Subjects, inbox_prefix: str) -> Iterator[str]:
    exports = reader_exports(subjects)
    yield f"# {_BRIDGE_ACCOUNT_NOTE}"
    yield f"# {_READER_NOTE}"
    yield "accounts {"
    yield f"  {BRIDGE_ACCOUNT} {{"
    yield f"    jetstream {{ max_consumers: {MAX_CONSUMERS} }}"
    yield "    users: ["
    yield from _user(
        BRIDGE_USER, "$NATS_BRIDGE_PASSWORD", bridge_permissions(subjects, inbox_prefix)
    )
    yield "    ]"
    yield "    exports: ["
    for one in exports:
        kind = "service" if one.is_service else "stream"
        answers = ", response_type: stream" if one.has_many_answers else ""
        subject = json.dumps(one.subject)
        yield f"      {{ {kind}: {subject}{answers}, accounts: [{READER_ACCOUNT}] }}"
    yield "    ]"
    yield "  }"
    yield f"  {READER_ACCOUNT} {{"
    yield (
        f"    limits {{ max_connections: {MAX_CONNECTIONS}, "
        f"max_subscriptions: {MAX_SUBSCRIPTIONS} }}"
    )
    yield "    users: ["
    yield from _user(
        READER_USER, "$NATS_CONSUMER_PASSWORD", reader_permissions(subjects, READER_INBOX)
    )
    yield "    ]"
    yield "    imports: ["
    for one in exports:
        kind = "service" if one.is_service else "stream"
        source = f"account: {BRIDGE_ACCOUNT}, subject: {json.dumps(one.subject)}"
        yield f"      {{ {kind}: {{ {source} }} }}"
    yield "    ]"
    yield "  }"
    yield "}"


def _user(name: str, password: str, permissions: Permissions) -> Iterator[str]:
    yield "      {"
    yield f"        user: {name}"
    yield f"        password: {password}"
    yield f"        {permissions.block(' ' * 8)}"
    yield "      }"


def nsc_commands(subjects: Subjects, inbox_prefix: str) -> str:
    """The same two accounts as commands of nsc, for servers whose accounts are JWTs."""
    return "\n".join(_nsc_commands(subjects, inbox_prefix))


def _nsc_commands(subjects: Subjects, inbox_prefix: str) -> Iterator[str]:
    bridge, readers = BRIDGE_ACCOUNT, READER_ACCOUNT
    yield f"# {_BRIDGE_ACCOUNT_NOTE}"
    yield _nsc("add", "account", "--name", bridge)
    yield _nsc(
        "edit", "account", "--name", bridge, "--js-disk-storage", "-1", "--js-mem-storage", "-1",
        "--js-streams", "-1", "--js-consumer", str(MAX_CONSUMERS),
    )  # fmt: skip
    yield _nsc_user(bridge, BRIDGE_USER, bridge_permissions(subjects, inbox_prefix))
    yield f"# {_READER_NOTE}"
    yield _nsc("add", "account", "--name", readers)
    yield _nsc(
        "edit", "account", "--name", readers, "--conns", str(MAX_CONNECTIONS),
        "--subscriptions", str(MAX_SUBSCRIPTIONS),
    )  # fmt: skip
    yield _nsc_user(readers, READER_USER, reader_permissions(subjects, READER_INBOX))
    yield "# The exports are private: only an account with an activation token can import them."
    key = _nsc("describe", "account", "--name", readers, "--field", "sub")
    yield f"key=$({key} | tr -d '\"')"
    for number, one in enumerate(reader_exports(subjects), 1):
        name = f"tailrace-{number}"
        kind = ("--service",) if one.is_service else ()
        many = ("--response-type", "Stream") if one.has_many_answers else ()
        yield _nsc(
            "add", "export", "--account", bridge, "--name", name, "--private", *kind, *many,
            "--subject", one.subject,
        )  # fmt: skip
        activation = _nsc(
            "generate", "activation", "--account", bridge, *kind, "--subject", one.subject,
            "--output-file", f"{name}.jwt", "--target-account",
        )  # fmt: skip
        yield f'{activation} "$key"'
        yield _nsc(
            "add", "import", "--account", readers, "--name", name, "--token", f"{name}.jwt",
            *kind, "--local-subject", one.subject,
        )  # fmt: skip
    yield "# The files for NATS_CREDS of the bridge and of readers."
    for account, user in ((bridge, BRIDGE_USER), (readers, READER_USER)):
        yield _nsc("generate", "creds", "--account", account, "--name", user) + f" > {user}.creds"


def _nsc_user(account: str, name: str, permissions: Permissions) -> str:
    return _nsc(
        "add", "user", "--account", account, "--name", name,
        "--allow-pub", ",".join(permissions.publish),
        "--allow-sub", ",".join(permissions.subscribe),
        *(["--allow-pub-response"] if permissions.responds else []),
    )  # fmt: skip


def _nsc(*words: str) -> str:
    return f"nsc {shlex.join(words)}"


def _trials(subjects: Subjects) -> dict[str, tuple[str, bytes]]:
    """For each needed subject one concrete subject to try, and a body that has no effect."""
    trials = {
        subjects.cdc_all: (f"{subjects.cdc}.$check.probe", b""),
        subjects.init_all: (f"{subjects.init}.$check.probe", b""),
        _progress(subjects): (f"{subjects.snapshot}.progress.$check.probe", b""),
        f"$KV.{subjects.schemas_bucket}.>": (f"$KV.{subjects.schemas_bucket}.check.probe", b""),
        f"$KV.{subjects.bridge_bucket}.>": (f"$KV.{subjects.bridge_bucket}.check.probe", b""),
        f"$KV.{subjects.dicts_bucket}.>": (f"$KV.{subjects.dicts_bucket}.check.probe", b""),
        f"$O.{subjects.objects_bucket}.>": (f"$O.{subjects.objects_bucket}.C.check.probe", b""),
    }
    for stream, made in bridge_calls(subjects).items():
        for call in made:
            body = _NO_PURGE if call is ApiCall.STREAM_PURGE else b"{}"
            subject = f"{API}.{call.of(stream, 'none-such', 'none.such')}"
            trials[call.pattern(stream)] = (subject, body)
    return trials


async def check_permissions(
    options: Mapping[str, Any], subjects: Subjects, inbox_prefix: str
) -> list[Finding]:
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
        heard = (f"{subjects.snapshot}.request.>", f"{inbox_prefix}.check.>")
        for subject in heard:
            await client.subscribe(subject)
        for _ in range(REFUSAL_ROUNDS):
            # On a busy machine the refusal may arrive after the answer to a ping.
            await client.flush()
            await asyncio.sleep(REFUSAL_PAUSE_SECONDS)
    finally:
        await client.close()
    missing = [
        f"publish {needed}"
        for needed, (subject, _) in _trials(subjects).items()
        if ("publish", subject.lower()) in refused
    ]
    missing += [
        f"subscribe {subject}" for subject in heard if ("subscription", subject.lower()) in refused
    ]
    if not missing:
        return [ok("nats", "nats-permissions", "the user may do all the bridge does")]
    return [
        problem(
            "nats",
            "nats-permissions",
            f"the NATS user may not {', '.join(missing)}",
            "the bridge could not publish, answer snapshot requests or read back what it wrote",
            "# for this user in nats-server.conf, then reload; `bridge check --permissions` prints "
            "the accounts of bridge and readers\n"
            + bridge_permissions(subjects, inbox_prefix).block(),
            blocks=True,
        )
    ]

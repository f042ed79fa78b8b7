"""Each finding of `bridge check` on NATS: provoked, its printed fix applied, and gone."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import nats
import pytest

from bridge.config import Settings
from bridge.errors import BrokerError
from bridge.jetstream.connection import open_connection
from bridge.jetstream.frames import FrameWriter
from bridge.jetstream.streams import api
from bridge.preflight import Finding, raise_if_blocked
from bridge.preflight.nats import check_nats
from bridge.preflight.permissions import check_permissions
from consumer_sdk.wire import Subjects
from consumer_sdk.wire.envelope import encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from nats.aio.client import Client

    from bridge.embedded import NatsCluster, NatsServer

SECOND = 1_000_000_000
SOUND: dict[str, Any] = {
    "retention": "limits",
    "storage": "file",
    "max_age": 8 * 86400 * SECOND,
    "duplicate_window": 10 * SECOND,
    "allow_direct": True,
    "allow_batched": True,
    "max_bytes": 10**9,
    "discard": "new",
}


@dataclass(frozen=True)
class Case:
    """A stream setting that provokes a finding."""

    code: str
    severity: str
    config: dict[str, Any] = field(default_factory=dict)
    stream: str = "cdc"
    update: dict[str, Any] | None = None


CASES = [
    Case("stream-retention", "problem", {"retention": "interest"}),
    Case("stream-retention", "problem", {"retention": "workqueue"}),
    Case("stream-per-subject", "problem", {"max_msgs_per_subject": 1}),
    Case("stream-no-ack", "problem", {"no_ack": True, "allow_batched": False}),
    Case("stream-sealed", "problem", update={"sealed": True}),
    Case("stream-memory", "problem", {"storage": "memory"}),
    Case("stream-discard-old", "warning", {"discard": "old"}),
    Case("stream-discard-old", "warning", {"discard": "old"}, stream="init"),
    Case("stream-no-limit", "warning", {"max_bytes": -1}),
    Case("stream-no-limit", "warning", {"max_bytes": -1}, stream="init"),
    Case("stream-max-msgs", "warning", {"max_msgs": 1000}),
    Case("stream-message-size", "warning", {"max_msg_size": 1000}),
    Case("stream-allow-direct", "warning", {"allow_direct": False}),
    Case("stream-allow-direct", "warning", {"allow_direct": False}, stream="init"),
    Case("stream-allow-batched", "warning", {"allow_batched": False}),
    Case("stream-duplicate-window", "warning", {"duplicate_window": 120 * SECOND}),
    Case("stream-age", "warning", {"max_age": 60 * SECOND}),
    Case("init-age", "warning", {"max_age": 9 * 86400 * SECOND}, stream="init"),
    Case("stream-subjects", "problem", {"subjects": ["elsewhere.cdc.>"]}),
]


async def run_fix(client: Client, finding: Finding) -> None:
    """Send what the printed `nats req` commands would send."""
    lines = [line for line in finding.fix.splitlines() if not line.startswith("#")]
    assert lines
    for line in lines:
        program, verb, subject, body = shlex.split(line)
        assert (program, verb) == ("nats", "req")
        answer = json.loads((await client.request(subject, body.encode(), timeout=5)).data)
        assert "error" not in answer, answer


async def findings(client: Client, prefix: str, **options: Any) -> list[Finding]:
    return await check_nats(client, subjects=Subjects(prefix), **options)


def matching(found: list[Finding], code: str) -> list[Finding]:
    return [finding for finding in found if finding.code == code and finding.severity != "ok"]


async def create(client: Client, name: str, subject: str, **config: Any) -> None:
    body = {"name": name, "subjects": [subject], **SOUND, **config}
    await api(client, f"STREAM.CREATE.{name}", body)


async def create_both(client: Client, prefix: str, case: Case) -> None:
    subjects = Subjects(prefix)
    cdc = case.config if case.stream == "cdc" else {}
    init = {"max_age": SOUND["max_age"], **(case.config if case.stream == "init" else {})}
    if case.code == "stream-age":
        init["max_age"] = case.config["max_age"]
    cdc = {key: [f"{prefix}.{one}" for one in value] if key == "subjects" else value
           for key, value in cdc.items()}  # fmt: skip
    await create(client, subjects.cdc_stream, subjects.cdc_all, **cdc)
    await create(client, subjects.init_stream, subjects.init_all, **init)
    if case.update:
        info = await api(client, f"STREAM.INFO.{subjects.cdc_stream}")
        body = {**info["config"], **case.update}
        await api(client, f"STREAM.UPDATE.{subjects.cdc_stream}", body)


async def test_sound_streams_have_no_finding_but_the_unknown_sync_interval(
    nats_client: Client, prefix: str
) -> None:
    await create_both(nats_client, prefix, Case("", ""))
    found = await findings(nats_client, prefix)
    assert {finding.code for finding in found if finding.severity != "ok"} == {"durability"}


async def test_an_empty_account_has_no_finding_but_what_cannot_be_seen(
    nats_client: Client, prefix: str
) -> None:
    found = await findings(nats_client, prefix)
    seen = {finding.code for finding in found if finding.severity != "ok"}
    assert seen == {"durability", "stream-no-limit"}
    (finding,) = matching(found, "stream-no-limit")
    assert finding.what == f"stream {prefix}_CDC will be created without a size limit"


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=f"{case.code}-{n}") for n, case in enumerate(CASES)]
)
async def test_stream_finding_is_seen_and_its_fix_removes_it(
    nats_client: Client, prefix: str, case: Case
) -> None:
    await create_both(nats_client, prefix, case)
    found = matching(await findings(nats_client, prefix), case.code)
    assert [finding.severity for finding in found] == [case.severity]
    assert found[0].why
    await run_fix(nats_client, found[0])
    assert matching(await findings(nats_client, prefix), case.code) == []


async def test_the_cost_of_the_duplicate_window_is_told_in_bytes(
    nats_client: Client, prefix: str
) -> None:
    await create_both(
        nats_client, prefix, Case("", "", {"duplicate_window": 120 * SECOND})
    )  # fmt: skip
    jetstream = nats_client.jetstream()
    for number in range(3):
        await jetstream.publish(
            f"{prefix}.cdc.t.insert", b"x", headers={"Nats-Msg-Id": f"{number}"}
        )
    (finding,) = matching(await findings(nats_client, prefix), "stream-duplicate-window")
    assert "of 2 min, about" in finding.what.replace("120 s", "2 min")


async def test_a_stream_that_already_holds_our_subjects_is_named(
    nats_client: Client, prefix: str
) -> None:
    await create(nats_client, f"{prefix}_OTHER", f"{prefix}.cdc.>")
    found = matching(await findings(nats_client, prefix), "stream-overlap")
    assert len(found) == 1
    assert f"{prefix}_OTHER" in found[0].what
    with pytest.raises(BrokerError, match=f"{prefix}_OTHER"):
        raise_if_blocked(found)
    await run_fix(nats_client, found[0])
    assert matching(await findings(nats_client, prefix), "stream-overlap") == []


async def test_a_mirror_cannot_be_the_cdc_stream(nats_client: Client, prefix: str) -> None:
    subjects = Subjects(prefix)
    await create(nats_client, f"{prefix}_ORIGIN", f"{prefix}.origin.>")
    body = {"name": subjects.cdc_stream, "storage": "file", "retention": "limits"}
    mirror = {**body, "mirror": {"name": f"{prefix}_ORIGIN"}}
    await api(nats_client, f"STREAM.CREATE.{subjects.cdc_stream}", mirror)
    (finding,) = matching(await findings(nats_client, prefix), "stream-mirror")
    assert finding.blocks
    assert "--prefix" in finding.fix
    assert matching(await findings(nats_client, f"{prefix}b"), "stream-mirror") == []


async def test_buckets_that_forget_are_problems_until_fixed(
    nats_client: Client, prefix: str
) -> None:
    subjects = Subjects(prefix)
    await create_both(nats_client, prefix, Case("", ""))
    jetstream = nats_client.jetstream()
    await jetstream.create_key_value(bucket=subjects.schemas_bucket, ttl=60)
    await jetstream.create_key_value(bucket=subjects.bridge_bucket, storage="memory")
    await jetstream.create_object_store(bucket=subjects.objects_bucket, ttl=3600)
    for code in ("bucket-age", "bucket-memory", "objects-age"):
        (finding,) = matching(await findings(nats_client, prefix), code)
        assert finding.severity == "problem"
        await run_fix(nats_client, finding)
        assert matching(await findings(nats_client, prefix), code) == []


async def test_a_table_of_another_source_is_refused_until_that_source_is_gone(
    nats_client: Client, prefix: str
) -> None:
    subjects = Subjects(prefix)
    jetstream = nats_client.jetstream()
    bucket = await jetstream.create_key_value(bucket=subjects.schemas_bucket)
    document = {"v": 1, "source": "other", "schema": "public", "table": "users", "columns": []}
    await bucket.put("users", encode(document))
    tables = [("public", "users"), ("sales", "orders")]
    found = await findings(nats_client, prefix, source="mine", tables=tables)
    (finding,) = matching(found, "table-owned")
    assert finding.blocks
    assert "bridge drop --slot other --yes" in finding.fix
    assert matching(await findings(nats_client, prefix, source="other", tables=tables),
                    "table-owned") == []  # fmt: skip
    await bucket.delete("users")
    found = await findings(nats_client, prefix, source="mine", tables=tables)
    assert matching(found, "table-owned") == []


async def connected(server: NatsServer, **options: Any) -> Client:
    return await nats.connect(server.url, **options)


async def test_a_server_without_jetstream_is_refused_until_its_fix_is_in(
    own_nats: Callable[..., NatsServer],
) -> None:
    server = own_nats(jetstream=None)
    client = await connected(server)
    (finding,) = matching(await findings(client, ""), "jetstream")
    await client.close()
    assert finding.blocks
    store = server.directory / "store"
    server.config = _snippet(finding).replace("/var/lib/nats", json.dumps(str(store)))
    server.restart()
    client = await connected(server)
    assert matching(await findings(client, ""), "jetstream") == []
    await client.close()


async def test_a_small_payload_limit_is_reported_until_its_fix_is_in(
    own_nats: Callable[..., NatsServer],
) -> None:
    server = own_nats(config="max_payload: 64KB")
    client = await connected(server)
    (finding,) = matching(await findings(client, ""), "max-payload")
    await client.close()
    server.config = _snippet(finding)
    server.restart()
    client = await connected(server)
    assert matching(await findings(client, ""), "max-payload") == []
    await client.close()


ACCOUNT = (
    "accounts {{ APP {{ users: [{{user: app, password: app}}], jetstream {{ {limits} }} }} }}\n"
    "no_auth_user: app"
)


@pytest.mark.parametrize(
    ("limits", "code", "severity"),
    [
        ("max_streams: 3", "account-streams", "problem"),
        ("max_file: 100MB", "account-storage", "warning"),
        ("max_bytes_required: true", "account-max-bytes", "problem"),
    ],
)
async def test_a_tight_account_limit_is_seen_and_its_fix_removes_it(
    own_nats: Callable[..., NatsServer], limits: str, code: str, severity: str
) -> None:
    server = own_nats(config=ACCOUNT.format(limits=limits))
    client = await connected(server)
    (finding,) = matching(await findings(client, ""), code)
    assert finding.severity == severity
    await client.close()
    fixed = _snippet(finding).removeprefix("jetstream {").removesuffix("}").strip()
    server.config = ACCOUNT.format(limits=fixed)
    server.restart()
    client = await connected(server)
    assert matching(await findings(client, ""), code) == []
    await client.close()


USER = (
    "authorization {{ users: [ {{ user: bridge, password: secret, {permissions} }} ] }}"
)  # fmt: skip


@pytest.mark.parametrize(
    "permissions",
    [
        'permissions { publish: { deny: ["cdc.>"] } }',
        'permissions { publish: { allow: ["cdc.>", "init.>", "$JS.API.>"] } }',
        'permissions { subscribe: { allow: ["_INBOX.>"] } }',
        'permissions { publish: { deny: ["$JS.API.STREAM.CREATE.>"] } }',
        'permissions { publish: { deny: ["$JS.API.STREAM.CREATE.CDC"] } }',
        'permissions { publish: { deny: ["$JS.API.STREAM.CREATE.OBJ_cdc_objects"] } }',
        'permissions { publish: { deny: ["$JS.API.STREAM.MSG.GET.CDC"] } }',
    ],
)
async def test_missing_permissions_are_named_and_the_printed_block_is_enough(
    own_nats: Callable[..., NatsServer], permissions: str
) -> None:
    server = own_nats(config=USER.format(permissions=permissions))
    options = {"servers": [server.url_as("bridge", "secret")]}
    (finding,) = await check_permissions(options, Subjects(), "_INBOX")
    assert finding.severity == "problem"
    assert finding.blocks
    block = "\n".join(line for line in finding.fix.splitlines() if not line.startswith("#"))
    server.config = USER.format(permissions=block)
    server.restart()
    (finding,) = await check_permissions(options, Subjects(), "_INBOX")
    assert finding.severity == "ok"
    client = await nats.connect(**options)
    try:
        found = await findings(client, "")
        assert not any(finding.blocks for finding in found)
    finally:
        await client.close()


async def test_the_permission_trial_leaves_nothing_behind(
    nats_client: Client, nats_server: NatsServer, prefix: str
) -> None:
    subjects = Subjects(prefix)
    await create_both(nats_client, prefix, Case("", ""))
    await nats_client.jetstream().create_key_value(bucket=subjects.schemas_bucket)
    await check_permissions({"servers": [nats_server.bridge_url]}, subjects, "_INBOX")
    names = [subjects.cdc_stream, subjects.init_stream, f"KV_{subjects.schemas_bucket}"]
    for name in names:
        info = await api(nats_client, f"STREAM.INFO.{name}")
        assert info["state"]["last_seq"] == 0
        assert info["state"]["consumer_count"] == 0
    left = await api(nats_client, "STREAM.NAMES", {"subject": f"{prefix}.>"})
    assert sorted(left["streams"]) == sorted(names[:2])


async def test_sync_interval_is_read_from_the_monitoring_port(
    own_nats: Callable[..., NatsServer],
) -> None:
    server = own_nats()
    client = await connected(server)
    found = await findings(client, "", settings=Settings(nats_monitor=server.monitor_url))
    (finding,) = matching(found, "durability")
    assert "every 120 s" in finding.what.replace("2 min", "120 s")
    assert "sync_interval: always" in finding.fix
    await client.close()
    server.jetstream = {"sync_interval": "always"}
    server.restart()
    client = await connected(server)
    found = await findings(client, "", settings=Settings(nats_monitor=server.monitor_url))
    assert matching(found, "durability") == []
    assert any("on disk" in finding.what for finding in found if finding.code == "durability")
    found = await findings(client, "", settings=Settings(nats_monitor="http://127.0.0.1:1"))
    assert len(matching(found, "nats-monitor")) == 1
    await client.close()


async def test_a_single_replica_in_a_cluster_is_reported_until_there_are_three(
    nats_cluster: NatsCluster,
) -> None:
    client = await nats.connect(nats_cluster.url.split(","))
    try:
        await create_both(client, "", Case("", ""))
        found = matching(await findings(client, ""), "stream-replicas")
        assert len(found) == 2
        for finding in found:
            await run_fix(client, finding)
        found = await findings(client, "")
        assert matching(found, "stream-replicas") == []
        assert matching(found, "durability") == []
    finally:
        await client.close()


def _snippet(finding: Finding) -> str:
    return finding.fix.splitlines()[0].partition("nats-server.conf: ")[2]


async def test_frames_are_written_to_the_transport_under_the_printed_permissions(
    nats_server: Any, nats_client: Client, prefix: str
) -> None:
    stream = Subjects(prefix).cdc_stream
    await nats_client.jsm().add_stream(name=stream, subjects=[Subjects(prefix).cdc_all])
    client = await open_connection(servers=[nats_server.bridge_url])
    try:
        writer = await FrameWriter.create(client, stream)
        assert writer.direct
    finally:
        await client.close()

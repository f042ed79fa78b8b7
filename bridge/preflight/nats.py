"""Checks the NATS side: server, account, streams, buckets and permissions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.config import Settings
from bridge.jetstream.broker import OLDEST_VERSION
from bridge.jetstream.streams import api, read_monitor, read_size_limits, stored_message
from bridge.preflight.findings import Finding, ok, problem, warning
from bridge.preflight.permissions import stream_names
from bridge.preflight.streams import (
    check_ages,
    check_bucket,
    check_durability,
    check_replicas,
    check_stream,
    update_command,
)
from bridge.schemas.store import read_document
from bridge.telemetry.wal_monitor import format_bytes
from consumer_sdk.transport.api import STREAM_NOT_FOUND, ApiError
from consumer_sdk.transport.calls import ApiCall
from consumer_sdk.wire.escaping import shell_word
from consumer_sdk.wire.subjects import format_table_name, table_token

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nats.aio.client import Client

    from bridge.jetstream.streams import SizeLimit
    from consumer_sdk.wire.subjects import Subjects

FAST_VERSION = (2, 14, 0)
USUAL_PAYLOAD = 1024**2
LITTLE_STORAGE = 1024**3


async def check_nats(
    client: Client,
    *,
    subjects: Subjects,
    source: str = "",
    tables: Iterable[tuple[str, str]] = (),
    settings: Settings | None = None,
) -> list[Finding]:
    """All findings about server, account, streams and buckets; nothing is changed or created.

    `tables` are (schema, name) pairs that `source` will publish.
    """
    settings = settings or Settings()
    version = client.connected_server_version
    found = list(_version((version.major, version.minor, version.patch)))
    found += _payload(client.max_payload)
    try:
        account = await api(client, ApiCall.ACCOUNT_INFO.of())
    except ApiError as error:
        return [*found, _no_jetstream(error)]
    infos = {name: await _stream_info(client, name) for name in stream_names(subjects)}
    found += _account(account, sum(info is None for info in infos.values()))
    limits = await read_size_limits(client, settings)
    for name, subject, limit in (
        (subjects.cdc_stream, subjects.cdc_all, limits.cdc),
        (subjects.init_stream, subjects.init_all, limits.init),
    ):
        info = infos[name]
        if info is None:
            found += await _missing(client, name, subject, limit)
        else:
            found += check_stream(info, subject, is_cdc=name == subjects.cdc_stream)
            found += check_replicas(info)
    cdc = infos[subjects.cdc_stream]
    if cdc is not None:
        found += _batched(cdc, (version.major, version.minor, version.patch))
    found += check_ages(
        _config(cdc),
        _config(infos[subjects.init_stream]),
        _config(infos[f"OBJ_{subjects.objects_bucket}"]),
    )
    for bucket in (subjects.schemas_bucket, subjects.bridge_bucket, subjects.dicts_bucket):
        config = _config(infos[f"KV_{bucket}"])
        if config is not None:
            found += check_bucket(config)
    if infos[f"KV_{subjects.schemas_bucket}"] is not None:
        found += await _foreign_tables(client, subjects, source, tables)
    replicas = cdc["config"]["num_replicas"] if cdc is not None else 1
    found += await _durability(replicas, settings.nats_monitor)
    return found


def _config(info: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if info is None else info["config"]


async def _stream_info(client: Client, name: str) -> dict[str, Any] | None:
    try:
        return await api(client, ApiCall.STREAM_INFO.of(name))
    except ApiError as error:
        if error.err_code == STREAM_NOT_FOUND:
            return None
        raise


def _version(version: tuple[int, int, int]) -> Iterator[Finding]:
    text = ".".join(map(str, version))
    if version < OLDEST_VERSION:
        yield problem(
            "nats",
            "nats-version",
            f"nats-server {text} is older than 2.11",
            "only a newer one refuses what a bridge writes after another has taken over",
            "upgrade nats-server to 2.11 or newer, best 2.14 or newer",
            blocks=True,
        )
    elif version < FAST_VERSION:
        yield ok("nats", "nats-version", f"nats-server {text}; from 2.14 on publishing is faster")
    else:
        yield ok("nats", "nats-version", f"nats-server {text}")


def _payload(limit: int) -> Iterator[Finding]:
    if limit >= USUAL_PAYLOAD:
        yield ok("nats", "max-payload", f"max_payload is {format_bytes(limit)}")
        return
    yield warning(
        "nats",
        "max-payload",
        f"max_payload is only {format_bytes(limit)}",
        "wider rows have to travel through the object store, which is slower, and snapshot chunks "
        "become small",
        "in nats-server.conf: max_payload: 1MB",
    )


def _no_jetstream(error: ApiError) -> Finding:
    return problem(
        "nats",
        "jetstream",
        f"no JetStream for this account: {error.description}",
        "changes are stored in JetStream streams",
        "in nats-server.conf: jetstream { store_dir: /var/lib/nats }\n"
        "# and, where accounts are used, in this account: jetstream: enabled",
        blocks=True,
    )


def _account(account: dict[str, Any], to_create: int) -> Iterator[Finding]:
    limits = account["limits"]
    if limits["max_streams"] > 0 and account["streams"] + to_create > limits["max_streams"]:
        yield problem(
            "nats",
            "account-streams",
            f"the account may have {limits['max_streams']} streams and has {account['streams']}; "
            f"the bridge needs {to_create} more",
            "missing streams and buckets cannot be created",
            "in this account in nats-server.conf: "
            f"jetstream {{ max_streams: {account['streams'] + to_create} }}",
            blocks=True,
        )
    storage = limits["max_storage"]
    left = storage - account["storage"]
    if storage >= 0 and left < LITTLE_STORAGE:
        yield warning(
            "nats",
            "account-storage",
            f"the account has {format_bytes(max(left, 0))} of storage left",
            "when it is full NATS refuses changes and PostgreSQL keeps WAL",
            "in this account in nats-server.conf: jetstream { max_file: 50GB }",
        )
    if limits.get("max_bytes_required") and to_create:
        yield problem(
            "nats",
            "account-max-bytes",
            "the account demands a size limit for each stream",
            "streams and buckets cannot be created without one",
            "in this account in nats-server.conf: jetstream { max_bytes_required: false }",
            blocks=True,
        )


async def _missing(client: Client, name: str, subject: str, limit: SizeLimit) -> list[Finding]:
    answer = await api(client, ApiCall.STREAM_NAMES.of(), {"subject": subject})
    holders = answer.get("streams") or []
    if not holders:
        return _to_be_created(name, limit)
    return [
        problem(
            "nats",
            "stream-overlap",
            f"stream {', '.join(holders)} already holds subjects within {subject}",
            f"stream {name} cannot be created beside it",
            f"nats req {shell_word(f'$JS.API.STREAM.DELETE.{holders[0]}')} ''\n"
            "# only if it is not needed; else give the bridge another --prefix",
            blocks=True,
        )
    ]


def _to_be_created(name: str, limit: SizeLimit) -> list[Finding]:
    created = f"stream {name} does not exist and will be created at start"
    if limit.max_bytes > 0:
        size = f"at most {format_bytes(limit.max_bytes)} ({limit.origin})"
        return [ok("nats", "stream", f"{created}, with {size}")]
    return [
        ok("nats", "stream", created),
        warning(
            "nats",
            "stream-no-limit",
            f"stream {name} will be created without a size limit",
            "the account has no storage limit and no other is set, so it can fill the disk; after "
            "a full disk nats-server accepts nothing for its streams until it is restarted",
            "in this account in nats-server.conf: jetstream { max_file: 50GB }\n"
            "# or set BRIDGE_NATS_MONITOR=http://host:8222, or a size for the stream",
        ),
    ]


def _batched(info: dict[str, Any], version: tuple[int, int, int]) -> Iterator[Finding]:
    config = info["config"]
    if version >= FAST_VERSION and not config.get("allow_batched"):
        yield warning(
            "nats",
            "stream-allow-batched",
            f"stream {config['name']} does not allow fast-ingest batches",
            "the bridge publishes at about two thirds of the speed",
            update_command(config, allow_batched=True),
        )


async def _foreign_tables(
    client: Client, subjects: Subjects, source: str, tables: Iterable[tuple[str, str]]
) -> list[Finding]:
    found = []
    for schema, table in tables:
        subject = f"$KV.{subjects.schemas_bucket}.{table_token(schema, table)}"
        owner = await _owner(client, f"KV_{subjects.schemas_bucket}", subject)
        if owner and owner != source:
            name = format_table_name(schema, table)
            found.append(
                problem(
                    "nats",
                    "table-owned",
                    f"table {name} is already published by source {owner}",
                    "a table belongs to one source per stream; the bridge would exit",
                    f"bridge drop --slot {shell_word(owner)} --yes\n"
                    "# if that source is retired; else take the table out of one publication, or "
                    "give this bridge another --prefix",
                    blocks=True,
                )
            )
    return found


async def _owner(client: Client, stream: str, subject: str) -> str:
    message = await stored_message(client, stream, {"last_by_subj": subject})
    if message is None:
        return ""
    document = read_document(message.payload)
    return "" if document is None else str(document.get("source") or "")


async def _durability(replicas: int, monitor_url: str) -> list[Finding]:
    if not monitor_url:
        return list(check_durability(replicas, None))
    try:
        varz = await read_monitor(monitor_url)
    except (OSError, ValueError) as error:
        return [
            warning(
                "nats",
                "nats-monitor",
                f"the monitoring port of nats-server does not answer: {error}",
                "durability cannot be judged",
                "in nats-server.conf: http: 8222\n# and set BRIDGE_NATS_MONITOR to its address",
            )
        ]
    return list(check_durability(replicas, varz))

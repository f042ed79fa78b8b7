"""The bridge's connection to NATS: opened once; it reconnects for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import nats.errors

from bridge.errors import BrokerError, Retryable, SettingsError
from consumer_sdk.transport.connection import NatsConnection
from consumer_sdk.transport.options import BadOption, ConnectionOptions
from consumer_sdk.transport.refusals import explain_refusal, is_refused, one_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from nats.aio.client import Client

    from bridge.config import Settings


def servers_of(settings: Settings) -> tuple[str, ...]:
    """The server URLs, credentials included."""
    if _address_setting(settings) == "nats_url":
        urls = tuple(part.strip() for part in settings.nats_url.split(",") if part.strip())
        return urls or ("",)
    host = settings.nats_host
    return (f"nats://{f'[{host}]' if ':' in host else host}:{settings.nats_port}",)


def _address_setting(settings: Settings) -> str:
    """The setting that the address comes from."""
    is_part_given = any(settings.outranks(name, "nats_url") for name in ("nats_host", "nats_port"))
    return "nats_url" if settings.nats_url and not is_part_given else "nats_host"


def connection_options(settings: Settings) -> ConnectionOptions:
    """Connection options from the settings; SettingsError for an invalid address."""
    try:
        return ConnectionOptions(
            servers=servers_of(settings),
            name=f"tailrace {settings.slot}".strip(),
            user=settings.nats_user,
            password=settings.nats_password,
            creds=settings.nats_creds,
            nkey=settings.nats_nkey,
            ca=settings.nats_ca,
            cert=settings.nats_cert,
            key=settings.nats_key,
            inbox_prefix=settings.nats_inbox_prefix,
            password_file=settings.nats_password_file,
            # A worker receives the settings as JSON, which has no tuples.
            password_command=tuple(settings.nats_password_command),
            tls_first=settings.nats_tls_first,
        )
    except BadOption as error:
        raise _settings_error(settings, error) from error


def options_of(settings: Settings) -> dict[str, Any]:
    """Connection options of nats-py from the settings; SettingsError if they cannot work."""
    try:
        options = connection_options(settings).for_nats()
    except BadOption as error:
        raise _settings_error(settings, error) from error
    return {
        **options,
        "ping_interval": 5,
        "max_outstanding_pings": 2,
        # No buffer: nats-py would send it late after a reconnect, and the bridge sends
        # unacknowledged messages again itself.
        "pending_size": -1,
    }


def _settings_error(settings: Settings, error: BadOption) -> SettingsError:
    """A SettingsError that names the flag, variable or file key of the option."""
    if error.option == "tls":
        return SettingsError(error.problem)
    if error.option == "password_file" and settings.nats_password_command:
        return SettingsError(f"{settings.where('nats_password_command')}: {error.problem}")
    if error.option == "servers":
        if _address_setting(settings) == "nats_host":
            return SettingsError(
                f"{settings.where('nats_host')} is not the name of a host; "
                "a whole address belongs into NATS_URL"
            )
        return SettingsError(f"{settings.where('nats_url')} is {error.problem}")
    return SettingsError(f"{settings.where(f'nats_{error.option}')}: {error.problem}")


async def open_connection(**options: Any) -> NatsConnection:
    """Connect with the given options of nats-py."""
    client = NatsConnection()
    await client.connect(**options)
    return client


async def probe(settings: Settings) -> None:
    """Try to connect once: BrokerError if an operator must act, Retryable if waiting can help."""
    where = connection_options(settings).hosts
    seen: list[Exception] = []

    async def note(error: Exception) -> None:
        seen.append(error)

    once = {"allow_reconnect": False, "max_reconnect_attempts": 1, "error_cb": note}
    try:
        client = await open_connection(**options_of(settings) | once)
    except (TimeoutError, OSError, nats.errors.Error, ValueError) as error:
        login = connection_options(settings)
        for reason in (error, *seen):
            if is_refused(reason):
                raise BrokerError(explain_refusal(reason, login)) from error
        raise Retryable(f"cannot connect to NATS at {where}: {_causes(error, seen)}") from error
    await client.close()


def _causes(error: Exception, seen: list[Exception]) -> str:
    """Why no server accepted the connection: nats-py reports that only to its callback."""
    causes = seen if isinstance(error, nats.errors.NoServersError) and seen else [error]
    return "; ".join(dict.fromkeys(map(one_line, causes)))


async def connect(
    settings: Settings,
    *,
    on_disconnect: Callable[[], None],
    on_reconnect: Callable[[], None],
    on_error: Callable[[Exception], None],
) -> NatsConnection:
    """Open the connection; it reconnects for ever by itself."""

    async def disconnected() -> None:
        on_disconnect()

    async def reconnected() -> None:
        on_reconnect()

    async def failed(error: Exception) -> None:
        on_error(error)

    return await open_connection(
        **options_of(settings),
        disconnected_cb=disconnected,
        reconnected_cb=reconnected,
        error_cb=failed,
    )


def server_version(client: Client) -> tuple[int, int, int]:
    """Version of the connected server; zeros if it is unknown."""
    version = client.connected_server_version
    return (version.major, version.minor, version.patch)

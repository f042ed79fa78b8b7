"""What settings may not be, beyond their kind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from bridge.errors import SettingsError

if TYPE_CHECKING:
    from bridge.config import Settings

_SLOT_NAME = re.compile(r"[a-z0-9_]{1,63}\Z")


def refuse_visible_secret(flag: str, url: str) -> None:
    """A secret among the flags would show in the process list."""
    is_nats = flag == "--nats-url"
    for part in url.split(",") if is_nats else (url,):
        whole = part.strip() if "//" in part or "=" in part else f"//{part.strip()}"
        try:
            parts = urlsplit(whole)
            # NATS takes a user without a password for a token.
            is_token = is_nats and bool(parts.username)
            visible = bool(parts.password) or is_token
        except ValueError:
            visible = False
        if visible or re.search(r"(^|[\s?&])(ssl)?password\s*=", part):
            raise SettingsError(
                f"{flag}: a password or token on the command line shows in the "
                "process list; use the environment or --config"
            )


def check_together(settings: Settings) -> None:
    """Refuse values that are of the right kind and still cannot be."""
    if settings.slot and _SLOT_NAME.match(settings.slot) is None:
        raise SettingsError(
            f"{settings.where('slot')}: {settings.slot!r} is not a slot name; "
            "use up to 63 of a-z, 0-9 and _"
        )
    if settings.prefix and re.fullmatch(r"[A-Za-z0-9_-]+", settings.prefix) is None:
        raise SettingsError(
            f"{settings.where('prefix')}: {settings.prefix!r} may hold only letters, digits, "
            "- and _"
        )
    for name in ("port", "pg_port", "nats_port"):
        number = cast("int", getattr(settings, name))
        if number > 65535:
            raise SettingsError(f"{settings.where(name)}: {number} is not a port")
    if settings.ring_slots & (settings.ring_slots - 1):
        raise SettingsError(
            f"{settings.where('ring_slots')}: {settings.ring_slots} is not a power of two"
        )
    for name in ("cdc_stream", "init_stream"):
        value = cast("str", getattr(settings, name))
        if re.search(r"[\s.*>/\\]", value):
            raise SettingsError(f"{settings.where(name)}: {value!r} is not a stream name")
    if settings.subjects.cdc_stream == settings.subjects.init_stream:
        name = "init_stream" if settings.init_stream else "cdc_stream"
        raise SettingsError(
            f"{settings.where(name)}: {getattr(settings, name)!r} is the other stream's name; "
            "changes and snapshots need a stream each"
        )
    for name in ("nats_creds", "nats_nkey", "nats_ca", "nats_cert", "nats_key"):
        path = cast("str", getattr(settings, name))
        if path and not Path(path).is_file():
            raise SettingsError(f"{settings.where(name)}: no file {path}")

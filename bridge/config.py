"""Every setting of the bridge, defined once: flag, variable, file key, default, help."""

from __future__ import annotations

import math
import os
import re
import shlex
import tomllib
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast
from urllib.parse import unquote

from bridge.errors import SettingsError
from consumer_sdk.transport.calls import INBOX_PREFIX_FORM, is_inbox_prefix
from consumer_sdk.transport.passwords import parse_command
from consumer_sdk.wire.subjects import Subjects

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Kind = Literal["text", "integer", "flag", "seconds", "bytes", "command"]

_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_BYTES = {"": 1, "b": 1, "kb": 1024, "mb": 1024**2, "gb": 1024**3, "tb": 1024**4}
# nats-server counts nanoseconds and bytes in 64 bits.
_MOST: dict[str, float] = {"seconds": 100 * 365 * 86400, "bytes": 2**63 - 1}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*\Z")


def parse(
    text: Any,
    where: str,
    kind: Kind,
    *,
    choices: Sequence[str] = (),
    low: float | None = None,
    high: float | None = None,
    secret: bool = False,
) -> Any:
    """Convert a setting to a value of its kind and check its bounds; `where` names its origin."""
    shown = "***" if secret else repr(text)
    try:
        value = _PARSERS[kind](text)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{where}: {shown} is not {_EXPECTED[kind]}") from error
    if choices and value not in choices:
        raise SettingsError(f"{where}: {shown} is not one of {', '.join(choices)}")
    if low is not None and value < low:
        raise SettingsError(f"{where}: {shown} is too small; the least is {low}")
    high = _MOST.get(kind) if high is None else high
    if high is not None and value > high:
        raise SettingsError(f"{where}: {shown} is too large; the most is {high}")
    return value


def _parse_text(text: Any) -> str:
    if not isinstance(text, str) or "\0" in text:
        raise ValueError
    # Python decodes invalid UTF-8 in arguments and variables to lone surrogates.
    text.encode()
    return text


def _parse_integer(text: Any) -> int:
    if isinstance(text, bool | float):
        raise TypeError
    return int(text)


def _parse_command(text: Any) -> tuple[str, ...]:
    if isinstance(text, list | tuple):
        return tuple(_parse_text(part) for part in text)
    return parse_command(_parse_text(text))


def _parse_flag(text: Any) -> bool:
    if isinstance(text, bool):
        return text
    lowered = str(text).strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off", ""):
        return False
    raise ValueError


def _with_unit(text: Any, units: Mapping[str, float], default_unit: str) -> float:
    if isinstance(text, bool):
        raise TypeError
    if isinstance(text, int | float):
        if not math.isfinite(text):
            raise ValueError
        return float(text)
    match = _NUMBER.match(str(text))
    if match is None:
        raise ValueError
    unit = match[2].lower() or default_unit
    if unit not in units:
        raise ValueError
    return float(match[1]) * units[unit]


_PARSERS: dict[Kind, Any] = {
    "text": _parse_text,
    "command": _parse_command,
    "integer": _parse_integer,
    "flag": _parse_flag,
    "seconds": lambda text: _with_unit(text, _SECONDS, "s"),
    "bytes": lambda text: int(_with_unit(text, _BYTES, "b")),
}
_EXPECTED: dict[Kind, str] = {
    "text": "a text in UTF-8",
    "command": "a command with its arguments",
    "integer": "a whole number",
    "flag": "yes or no",
    "seconds": "a duration such as 500ms, 30s, 2h or 8d",
    "bytes": "a size such as 256KB, 16MB or 1GB",
}


_SLOT_NAME = re.compile(r"[a-z0-9_]{1,63}\Z")


def check_together(settings: Settings) -> None:
    """Refuse values that cannot work although each has the right kind."""
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
    if not is_inbox_prefix(settings.nats_inbox_prefix):
        raise SettingsError(
            f"{settings.where('nats_inbox_prefix')}: {settings.nats_inbox_prefix!r} "
            f"{INBOX_PREFIX_FORM}"
        )
    for side in ("pg", "nats"):
        names = (f"{side}_password", f"{side}_password_file", f"{side}_password_command")
        given = [settings.where(name) for name in names if getattr(settings, name)]
        if len(given) > 1:
            raise SettingsError(f"{' and '.join(given)} are both given; keep one")
    for name in (
        "nats_creds", "nats_nkey", "nats_ca", "nats_cert", "nats_key", "nats_password_file",
        "pg_password_file", "http_cert", "http_key",
    ):  # fmt: skip
        path = cast("str", getattr(settings, name))
        if path and not Path(path).is_file():
            raise SettingsError(f"{settings.where(name)}: no file {path}")


def setting(
    default: Any,
    help_text: str,
    *,
    kind: Kind = "text",
    env: Sequence[str] = (),
    flag: bool = True,
    secret: bool = False,
    choices: Sequence[str] = (),
    group: str = "bridge",
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """Declare one setting; its flag, variable and file key derive from this."""
    return field(
        default=default,
        repr=not secret,
        metadata={
            "help": help_text,
            "kind": kind,
            "env": tuple(env),
            "flag": flag,
            "secret": secret,
            "choices": tuple(choices),
            "group": group,
            "low": low,
            "high": high,
        },
    )


@dataclass(frozen=True)
class Settings:
    """The effective settings; `origins` says where each came from."""

    slot: str = setting("", "replication slot; also the name of the source")
    pub: str = setting("", "publication to stream")
    port: int = setting(9090, "HTTP port, 0 for any free one", kind="integer", low=0)
    host: str = setting("127.0.0.1", "HTTP address to listen on")
    json: bool = setting(False, "publish JSON instead of MessagePack", kind="flag")
    pack: bool = setting(False, "several rows of a transaction share one message", kind="flag")
    zstd: bool = setting(False, "compress snapshot chunks", kind="flag")
    zstd_events: bool = setting(False, "compress events too", kind="flag")
    prefix: str = setting("", "prefix of all subjects, streams and buckets")
    on_gap: str = setting(
        "exit",
        "when continuity is lost: stop with exit code 4, or begin a new epoch",
        choices=("exit", "new-epoch"),
    )
    failover: bool = setting(
        False, "create the slot so that it fails over to a standby (17+)", kind="flag"
    )
    origin: str = setting(
        "any", "'none' leaves out changes that were themselves replicated", choices=("any", "none")
    )
    http_open: bool = setting(
        False,
        "on an address that is not loopback, /status, /metrics and the dashboard need no token",
        kind="flag",
    )
    http_cert: str = setting("", "certificate file (PEM) for HTTPS; a renewed one is read again")
    http_key: str = setting("", "its key file, unless the key is in the certificate file")
    admin_token: str = setting(
        "", "token for POST /shutdown, and for reading too", secret=True, flag=False
    )
    read_token: str = setting(
        "", "token for /status, /metrics and the dashboard", secret=True, flag=False
    )

    database_url: str = setting(
        "", "PostgreSQL in one piece", env=("DATABASE_URL",), secret=True, group="PostgreSQL"
    )
    pg_host: str = setting("", "PostgreSQL host", env=("PG_HOST",), group="PostgreSQL")
    pg_port: int = setting(
        5432, "PostgreSQL port", kind="integer", env=("PG_PORT",), group="PostgreSQL", low=1
    )
    pg_db: str = setting("postgres", "database", env=("PG_DB",), group="PostgreSQL")
    pg_user: str = setting("", "PostgreSQL role", env=("POSTGRES_BRIDGE_USER",), group="PostgreSQL")
    pg_password: str = setting(
        "", "its password", env=("POSTGRES_BRIDGE_PASSWORD",), secret=True, flag=False,
        group="PostgreSQL",
    )  # fmt: skip
    pg_password_file: str = setting(
        "", "file that holds its password; read for every connection",
        env=("POSTGRES_BRIDGE_PASSWORD_FILE",), group="PostgreSQL",
    )  # fmt: skip
    pg_password_command: tuple[str, ...] = setting(
        (), "command that prints its password; no shell runs it", kind="command",
        env=("POSTGRES_BRIDGE_PASSWORD_COMMAND",), group="PostgreSQL",
    )  # fmt: skip
    pg_sslmode: str = setting(
        "", "TLS towards PostgreSQL, as in libpq", env=("PGSSLMODE",), group="PostgreSQL"
    )
    pg_sslrootcert: str = setting(
        "", "CA certificate of PostgreSQL", env=("PGSSLROOTCERT",), group="PostgreSQL"
    )
    pg_sslcert: str = setting("", "client certificate", env=("PGSSLCERT",), group="PostgreSQL")
    pg_sslkey: str = setting("", "client key file", env=("PGSSLKEY",), group="PostgreSQL")

    nats_url: str = setting(
        "", "NATS in one piece, several separated by commas", env=("NATS_URL",), secret=True,
        group="NATS",
    )  # fmt: skip
    nats_host: str = setting("127.0.0.1", "NATS host", env=("NATS_HOST",), group="NATS")
    nats_port: int = setting(
        4222, "NATS port", kind="integer", env=("NATS_PORT",), group="NATS", low=1
    )
    nats_user: str = setting("", "NATS user", env=("NATS_BRIDGE_USER",), group="NATS")
    nats_password: str = setting(
        "", "its password", env=("NATS_BRIDGE_PASSWORD",), secret=True, flag=False, group="NATS"
    )
    nats_password_file: str = setting(
        "", "file that holds its password; read for every connection", env=("NATS_PASSWORD_FILE",),
        group="NATS",
    )  # fmt: skip
    nats_password_command: tuple[str, ...] = setting(
        (), "command that prints its password; no shell runs it", kind="command",
        env=("NATS_PASSWORD_COMMAND",), group="NATS",
    )  # fmt: skip
    nats_creds: str = setting("", "credentials file", env=("NATS_CREDS",), group="NATS")
    nats_nkey: str = setting("", "nkey seed file", env=("NATS_NKEY",), group="NATS")
    nats_ca: str = setting("", "CA certificate of NATS", env=("NATS_CA",), group="NATS")
    nats_cert: str = setting("", "client certificate", env=("NATS_CERT",), group="NATS")
    nats_key: str = setting("", "client key file", env=("NATS_KEY",), group="NATS")
    nats_inbox_prefix: str = setting(
        "_INBOX", "what the bridge's inboxes begin with, _INBOX or _INBOX_NAME",
        env=("NATS_INBOX_PREFIX",), group="NATS",
    )  # fmt: skip
    nats_tls_first: bool = setting(
        False, "begin TLS before the server speaks, as its `handshake_first` demands", kind="flag",
        env=("NATS_TLS_FIRST",), group="NATS",
    )  # fmt: skip
    nats_monitor: str = setting(
        "", "monitoring address of nats-server, http://host:8222, for `bridge check` and the "
        "limits of created streams", group="NATS",
    )  # fmt: skip

    cdc_stream: str = setting("", "name of the CDC stream, default {prefix_}CDC", group="streams")
    init_stream: str = setting(
        "", "name of the INIT stream, default {prefix_}INIT", group="streams"
    )
    cdc_max_age: float = setting(
        8 * 86400.0, "how long a created CDC stream keeps changes", kind="seconds", group="streams",
        low=0,
    )  # fmt: skip
    cdc_max_bytes: int = setting(
        0, "size limit of a created CDC stream, 0 for none; by default a share of what the NATS "
        "account, or the server at --nats-monitor, may still store", kind="bytes", group="streams",
        low=0,
    )  # fmt: skip
    cdc_discard: str = setting(
        "new", "a full CDC stream that was created refuses new changes, so that the bridge waits "
        "and PostgreSQL keeps WAL, or removes the oldest ones, even unread", choices=("new", "old"),
        group="streams",
    )  # fmt: skip
    init_max_age: float = setting(
        7 * 86400.0, "how long a created INIT stream keeps snapshots", kind="seconds",
        group="streams", low=0,
    )  # fmt: skip
    init_max_bytes: int = setting(
        0, "size limit of a created INIT stream, 0 for none; by default a share as for CDC, or "
        "60GB where no limit can be seen", kind="bytes", group="streams", low=0,
    )  # fmt: skip
    replicas: int = setting(
        1, "replicas of created streams and buckets", kind="integer", group="streams", low=1
    )
    duplicate_window: float = setting(
        0.1, "deduplication window of a created CDC stream; the bridge does not rely on it, and a "
        "longer one costs nats-server memory and speed", kind="seconds", group="streams", low=0.1,
    )  # fmt: skip

    ring_slots: int = setting(
        65536, "slots of the ring, a power of two", kind="integer", group="pipeline", low=2,
        high=2**24,
    )  # fmt: skip
    ring_bytes: int = setting(
        16 * 1024**2, "bytes the ring may hold", kind="bytes", group="pipeline", low=65536
    )
    batch_events: int = setting(
        500, "events in a batch at most", kind="integer", group="pipeline", low=1
    )
    batch_bytes: int = setting(
        256 * 1024, "bytes in a batch at most", kind="bytes", group="pipeline", low=1024
    )
    flush_timeout: float = setting(
        10.0, "how long a batch may wait for its acknowledgement", kind="seconds",
        group="pipeline", low=0.1,
    )  # fmt: skip
    drain_timeout: float = setting(
        10.0, "how long a shutdown may take to drain", kind="seconds", group="pipeline", low=0
    )
    nats_away_limit: float = setting(
        60.0, "close the replication connection after so long without NATS", kind="seconds",
        group="pipeline", low=1,
    )  # fmt: skip
    status_interval: float = setting(
        1.0,
        "how often the position is confirmed to PostgreSQL",
        kind="seconds",
        group="pipeline",
        low=0.05,
    )

    snapshot_chunk_rows: int = setting(
        10_000, "rows in a snapshot chunk at most", kind="integer", group="snapshots", low=1,
        high=10_000,
    )  # fmt: skip
    snapshot_workers: int = setting(
        2, "processes that copy one large table", kind="integer", group="snapshots", low=1
    )
    snapshot_wait: float = setting(
        300.0, "how long a snapshot waits for running transactions", kind="seconds",
        group="snapshots", low=1,
    )  # fmt: skip
    snapshot_export_limit: float = setting(
        600.0, "a table with a key whose copy takes longer is copied in groups of key ranges, "
        "none of which holds back vacuum for longer", kind="seconds", group="snapshots", low=0.05,
    )  # fmt: skip
    snapshot_interval: float = setting(
        10.0, "how often a new snapshot of a table may begin, once ten have begun in a row; "
        "0 for no limit", kind="seconds", group="snapshots", low=0,
    )  # fmt: skip

    wal_check_interval: float = setting(
        30.0, "how often lag and slot are checked", kind="seconds", group="telemetry", low=0.1
    )
    wal_warning: int = setting(
        512 * 1024**2, "lag that causes a warning", kind="bytes", group="telemetry", low=0
    )
    wal_critical: int = setting(
        1024**3, "lag that is critical", kind="bytes", group="telemetry", low=0
    )
    metrics_interval: float = setting(
        15.0, "how often the METRICS line is logged", kind="seconds", group="telemetry", low=0.1
    )
    log_level: str = setting(
        "info", "lowest level that is logged", choices=("debug", "info", "warning", "error"),
        group="telemetry",
    )  # fmt: skip
    log_format: str = setting(
        "logfmt", "format of the log", choices=("logfmt", "json"), group="telemetry"
    )

    origins: Mapping[str, str] = field(default_factory=dict, repr=False)

    def outranks(self, part: str, whole: str) -> bool:
        """Whether the origin of `part` overrides that of `whole`: `pg_host` and `database_url`."""
        return _rank(self.origins.get(part)) > _rank(self.origins.get(whole))

    def where(self, name: str) -> str:
        """How the user gave a setting: its flag, its variable, or its key in the file."""
        kind, _, place = self.origins.get(name, "default").partition(" ")
        if kind == "file":
            return f"{place}: {name}"
        return place or f"--{name.replace('_', '-')}"

    @property
    def subjects(self) -> Subjects:
        """Names on NATS; the settings may override the stream names."""
        names = Subjects(self.prefix)
        if self.cdc_stream:
            names.cdc_stream = self.cdc_stream
        if self.init_stream:
            names.init_stream = self.init_stream
        return names


def _rank(origin: str | None) -> int:
    return ("default", "file", "environment", "flag").index((origin or "default").split()[0])


def definitions() -> list[Field[Any]]:
    """The fields of Settings that are settings (all but `origins`), in order."""
    return [item for item in fields(Settings) if "help" in item.metadata]


def environment_names(item: Field[Any]) -> tuple[str, ...]:
    """The variables a setting is read from, most specific first."""
    return (f"BRIDGE_{item.name.upper()}", *item.metadata["env"])


def flag_name(item: Field[Any]) -> str:
    return "--" + item.name.replace("_", "-")


def _parsed(item: Field[Any], text: Any, where: str) -> Any:
    meta = item.metadata
    return parse(
        text, where, meta["kind"], choices=meta["choices"], low=meta["low"], high=meta["high"],
        secret=meta["secret"],
    )  # fmt: skip


def load(
    flags: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    config_file: str | None = None,
) -> Settings:
    """Merge flags over environment over file over defaults, and check every value."""
    environ = os.environ if environ is None else environ
    config_file = config_file or environ.get("BRIDGE_CONFIG") or None
    from_file = _read_file(config_file) if config_file else {}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    known = {item.name for item in definitions()}
    unknown = sorted(set(from_file) - known)
    if unknown:
        raise SettingsError(f"{config_file}: unknown setting {unknown[0]!r}; see bridge --help")
    for item in definitions():
        name = item.name
        if flags.get(name) is not None:
            origins[name] = f"flag {flag_name(item)}"
            values[name] = _parsed(item, flags[name], flag_name(item))
            continue
        variable = next((n for n in environment_names(item) if environ.get(n)), None)
        if variable is not None:
            origins[name] = f"environment {variable}"
            values[name] = _parsed(item, environ[variable], variable)
        elif name in from_file:
            origins[name] = f"file {config_file}"
            values[name] = _parsed(item, from_file[name], f"{config_file}: {name}")
        else:
            assert item.default is not MISSING
            origins[name] = "default"
            values[name] = item.default
    settings = Settings(**values, origins=origins)
    check_together(settings)
    return settings


def misspelled(environ: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """Unknown variables that resemble a setting, each with the setting's variable."""
    known = [name for item in definitions() for name in environment_names(item)]
    known.append("BRIDGE_CONFIG")
    found = []
    for name in sorted(set(os.environ if environ is None else environ) - set(known)):
        # Other variables may have this prefix: Kubernetes names those of services like this.
        if name.startswith("BRIDGE_"):
            found += [(name, near) for near in get_close_matches(name, known, n=1, cutoff=0.85)]
    return found


def _read_file(path: str) -> dict[str, Any]:
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config {path}: not valid TOML: {error}") from error
    return {key.replace("-", "_"): value for key, value in document.items()}


# The placeholder in our own example files, however it is written.
_EXAMPLE_SECRET = re.compile(r"(?i)change[-_ ]?me\Z")
_PASSWORDS_IN_ADDRESS = re.compile(
    r"(?i)//(?:[^@/?#,]*:)?([^@:/?#,]+)@|password\s*=\s*'?([^\s'&]+)"
)


def is_example_secret(secret: str) -> bool:
    """Whether a password, a token, or the password in an address is one of our examples."""
    candidates = [secret, *(a or b for a, b in _PASSWORDS_IN_ADDRESS.findall(secret))]
    return any(_EXAMPLE_SECRET.match(unquote(one).strip()) for one in candidates)


def example_secrets(settings: Settings, environ: Mapping[str, str] | None = None) -> list[str]:
    """Where the user gave an example password or token: flag, variable or key in the file."""
    found = [
        settings.where(item.name)
        for item in definitions()
        if item.metadata["secret"] and is_example_secret(getattr(settings, item.name))
    ]
    # libpq reads this one itself.
    if is_example_secret((os.environ if environ is None else environ).get("PGPASSWORD", "")):
        found.append("PGPASSWORD")
    return found


def refuse_example_secrets(settings: Settings, environ: Mapping[str, str] | None = None) -> None:
    """Raise SettingsError if a password or token is one that everybody can read in our examples."""
    found = example_secrets(settings, environ)
    if found:
        raise SettingsError(
            f"{', '.join(found)}: the password or token of the example is still there; "
            "set one of your own, for instance from `openssl rand -hex 32`"
        )


def require(settings: Settings, *names: str) -> None:
    """Raise SettingsError if a setting that the command needs is missing."""
    for item in definitions():
        if item.name in names and not getattr(settings, item.name):
            raise SettingsError(
                f"{flag_name(item)} is missing; give it or set {environment_names(item)[0]}"
            )


def masked(settings: Settings) -> list[tuple[str, str, str]]:
    """Name, value and origin of every setting, secrets hidden."""
    rows = []
    for item in definitions():
        value = getattr(settings, item.name)
        shown = str(value)
        if item.metadata["secret"] and value:
            shown = "***"
        elif item.metadata["kind"] == "flag":
            shown = "yes" if value else "no"
        elif item.metadata["kind"] == "command":
            shown = shlex.join(value)
        rows.append((item.name, shown, settings.origins[item.name]))
    return rows

"""What a request may ask for: an empty body, or a map of options."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import msgpack

from bridge.snapshot.errors import Refused
from consumer_sdk.wire import envelope

if TYPE_CHECKING:
    from collections.abc import Mapping

Format = Literal["msgpack", "json", "arrow"]

FORMATS: Final = ("msgpack", "json", "arrow")
KNOWN: Final = ("columns", "format", "zstd", "fresh")
# What a client library adds of itself; it does not change the snapshot.
IGNORED: Final = ("v",)
MOST_BYTES: Final = 64 * 1024
# With one of these a map in MessagePack begins.
MAP_BYTES: Final = frozenset(bytes([byte]) for byte in (*range(0x80, 0x90), 0xDE, 0xDF))


@dataclass(frozen=True, slots=True)
class Options:
    """What one snapshot is made of; equal options of one table share a snapshot."""

    columns: tuple[str, ...] | None
    format: Format
    zstd: bool


@dataclass(frozen=True, slots=True)
class Request:
    """A request as understood: `asked` is what goes into the meta, `fresh` forbids reuse."""

    options: Options
    asked: dict[str, Any]
    fresh: bool


def body_is_json(body: bytes, headers: Mapping[str, str] | None, default: bool) -> bool:
    """Whether a body is JSON: by its Content-Type, else by its first byte; `default` for no map."""
    kind = (headers or {}).get(envelope.CONTENT_TYPE)
    if kind in (envelope.JSON, envelope.MSGPACK):
        return kind == envelope.JSON
    first = body.lstrip()[:1]
    return first == b"{" or (first not in MAP_BYTES and default)


def parse_request(
    body: bytes, headers: Mapping[str, str] | None, *, as_json: bool, zstd: bool
) -> Request:
    """Read a request; `as_json` and `zstd` are what applies where it says nothing."""
    asked = _read_map(body, headers)
    unknown = sorted(set(asked) - {*KNOWN, *IGNORED})
    if unknown:
        raise Refused(f"unknown option {unknown[0]!r}; known are {', '.join(KNOWN)}")
    columns = _columns(asked.get("columns"))
    kind = asked.get("format")
    if kind is None:
        kind = "json" if as_json else "msgpack"
    elif kind not in FORMATS:
        raise Refused(f"option format must be one of {', '.join(FORMATS)}")
    if kind == "arrow" and importlib.util.find_spec("pyarrow") is None:
        raise Refused(
            "format arrow needs pyarrow on the bridge's side; run: pip install 'tailrace[arrow]'"
        )
    compressed = _flag(asked, "zstd", zstd)
    fresh = _flag(asked, "fresh", False)
    kept = {
        key: asked[key]
        for key in ("columns", "format", "zstd")
        if asked.get(key) is not None
    }  # fmt: skip
    return Request(Options(columns, cast("Format", kind), compressed), kept, fresh)


def _read_map(body: bytes, headers: Mapping[str, str] | None) -> dict[str, Any]:
    if not body.strip():
        return {}
    if len(body) > MOST_BYTES:
        raise Refused("the request is too long; send an empty body or a small map of options")
    try:
        if body_is_json(body, headers, default=False):
            asked = json.loads(body)
        else:
            asked = msgpack.unpackb(body, strict_map_key=True)
    except Exception as error:  # whatever a decoder says of foreign bytes
        raise Refused("the request is neither JSON nor MessagePack; leave it empty") from error
    if not isinstance(asked, dict) or not all(isinstance(key, str) for key in asked):
        raise Refused("the request is not a map of options")
    return asked


def _columns(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise Refused("option columns must be a list of column names")
    if not all(isinstance(name, str) for name in value):
        raise Refused("option columns must be a list of column names")
    if len(set(value)) != len(value):
        raise Refused("option columns names a column twice")
    return tuple(value)


def _flag(asked: Mapping[str, Any], name: str, default: bool) -> bool:
    value = asked.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise Refused(f"option {name} must be true or false")
    return value

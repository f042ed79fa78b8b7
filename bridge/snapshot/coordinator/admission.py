"""Limits on what requests may cost, checked before any work is done for them.

A request states its reply subject, its table and its options, and each of them may be a lie or an
attack. Therefore limits apply to what the bridge counts itself: requests in all, checks in all, new
snapshots of each table. Limits for each requester only keep honest requesters apart.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from bridge.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from consumer_sdk.wire.subjects import Subjects

# With service imports between accounts, the server replaces the requester's inbox by _R_.….
_INBOX: Final = re.compile(rb"(?:_INBOX(?:_[^.*>\s]+)?|_R_)(?:\.[^.*>\s]+)+\Z")
REQUEST_INFO: Final = "Nats-Request-Info"
"""The header with which the server names the requester, if the import has `share: true`."""
_LONGEST_NAME: Final = 200

MOST_REQUESTERS: Final = 1024
TABLE_BURST: Final = 10
REQUESTER_BURST: Final = 128
FRESH_BURST: Final = 512
REQUESTER_SHARE: Final = 10
"""How many times the rate of one table a requester may use for fresh snapshots of all tables."""
FRESH_SHARE: Final = 20
"""The same for all requesters together."""


class TooMany(Refused):
    """The request is valid, but there are too many at the moment; it may be granted later."""


class ReplySubjects:
    """Decides which reply subjects the bridge answers to: inboxes that are not its own."""

    def __init__(self, subjects: Subjects, subscribed: Callable[[], Iterable[str]]) -> None:
        """`subscribed` returns the subjects of the bridge's own subscriptions."""
        names = (subjects.cdc, subjects.init, subjects.snapshot)
        self._deployment = tuple(f"{name}.".encode() for name in names)
        self._subscribed = subscribed

    def allow(self, reply: bytes) -> bool:
        """Whether an answer there can reach only who waits for one.

        The server lets the bridge publish where the requester may not. So nothing else may be
        answered: an answer to `cdc.…` or `$KV.…` would be stored as data of the bridge, and one to
        an inbox of the bridge would be taken for an answer of JetStream.
        """
        if _INBOX.match(reply) is None or reply.startswith(self._deployment):
            return False
        own = tuple(subject.rstrip("*>").encode() for subject in self._subscribed())
        return not reply.startswith(own)


def requester_of(reply: str, headers: Mapping[str, str] | None) -> str:
    """Who asks, as far as NATS tells: account and user, or the inbox; empty if neither is known."""
    try:
        info: Any = json.loads((headers or {}).get(REQUEST_INFO) or "{}")
        if info:
            return f"{info.get('acc', '')} {info.get('user', '')}"[:_LONGEST_NAME]
    except (ValueError, AttributeError, RecursionError):
        pass
    tokens = reply.split(".")
    if tokens[0] == "_INBOX":
        return ".".join(tokens[:2])[:_LONGEST_NAME]
    return tokens[0][:_LONGEST_NAME] if tokens[0].startswith("_INBOX_") else ""


class TokenBucket:
    """Allows a burst, then one more every `seconds`."""

    __slots__ = ("_at", "_burst", "_seconds", "_spent")

    def __init__(self, burst: int, seconds: float) -> None:
        self._burst = burst
        self._seconds = seconds
        self._spent = 0.0
        self._at = time.monotonic()

    def wait_seconds(self) -> float:
        """How long until one is allowed; 0 if it is now."""
        now = time.monotonic()
        if self._seconds > 0:
            self._spent = max(0.0, self._spent - (now - self._at) / self._seconds)
        else:
            self._spent = 0.0
        self._at = now
        return max(0.0, (self._spent + 1 - self._burst) * self._seconds)

    def spend(self) -> None:
        """Count one."""
        self._spent += 1

    def take(self) -> bool:
        """Count one if it is allowed."""
        if self.wait_seconds() > 0:
            return False
        self._spent += 1
        return True

    @property
    def is_full(self) -> bool:
        """Whether it allows the whole burst again, like a new one."""
        self.wait_seconds()
        return self._spent == 0


class _Buckets:
    """Token buckets by name; the number of names is bounded."""

    def __init__(self, burst: int, seconds: float, most: int) -> None:
        self._burst = burst
        self._seconds = seconds
        self._most = most
        self._known: OrderedDict[str, TokenBucket] = OrderedDict()

    def __getitem__(self, name: str) -> TokenBucket:
        found = self._known.get(name)
        if found is None:
            if len(self._known) >= self._most:
                self._forget()
            found = self._known[name] = TokenBucket(self._burst, self._seconds)
        self._known.move_to_end(name)
        return found

    def _forget(self) -> None:
        for name in [name for name, one in self._known.items() if one.is_full]:
            del self._known[name]
        while len(self._known) >= self._most:
            self._known.popitem(last=False)


class SnapshotRates:
    """How often new snapshots may begin: of a table, and fresh ones by a requester and in all.

    A table may have `TABLE_BURST` at once, and then one every `seconds`; 0 means no limit.
    """

    def __init__(self, seconds: float, most_tables: int = 100_000) -> None:
        self._tables = _Buckets(TABLE_BURST, seconds, most_tables)
        # Requests for some rows must not keep others from the whole table.
        self._parts = _Buckets(TABLE_BURST, seconds, most_tables)
        self._requesters = _Buckets(REQUESTER_BURST, seconds / REQUESTER_SHARE, MOST_REQUESTERS)
        self._fresh = TokenBucket(FRESH_BURST, seconds / FRESH_SHARE)

    def take(self, table: str, requester: str, *, fresh: bool, is_part: bool = False) -> None:
        """Count a new snapshot; TooMany if it may not begin now."""
        limits = [(f"snapshots of {table} have", self._tables[table])]
        if is_part:
            limits = [(f"snapshots of rows of {table} have", self._parts[table])]
        if fresh:
            limits.append(("fresh snapshots have", self._fresh))
            if requester:
                limits.append(("fresh snapshots for you have", self._requesters[requester]))
        for what, bucket in limits:
            wait = bucket.wait_seconds()
            if wait > 0:
                raise TooMany(f"too many {what} begun lately; ask again in {math.ceil(wait)} s")
        for _, bucket in limits:
            bucket.spend()

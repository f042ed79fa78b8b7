"""Every call of JetStream's API that bridge and consumers make, and on which stream.

The code builds its requests from `ApiCall`. `bridge check` tries the calls of `bridge_calls`, and
prints permissions for them and for those of `reader_calls`.
"""

from __future__ import annotations

import re
import secrets
from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from consumer_sdk.wire.subjects import Subjects

API: Final = "$JS.API"
DEFAULT_INBOX_PREFIX: Final = "_INBOX"
INBOX_PREFIX_FORM: Final = "is not _INBOX, nor _INBOX_ and letters, digits, - and _"
_INBOX_PREFIX: Final = re.compile(r"_INBOX(?:_[A-Za-z0-9_-]{1,64})?\Z")


class ApiCall(Enum):
    """A call of JetStream's API; the value is its subject after `$JS.API.`."""

    ACCOUNT_INFO = "INFO"
    STREAM_NAMES = "STREAM.NAMES"
    STREAM_INFO = "STREAM.INFO.{stream}"
    STREAM_CREATE = "STREAM.CREATE.{stream}"
    STREAM_PURGE = "STREAM.PURGE.{stream}"
    MESSAGE_GET = "STREAM.MSG.GET.{stream}"
    DIRECT_GET_LAST = "DIRECT.GET.{stream}.{subject}"
    CONSUMER_CREATE = "CONSUMER.CREATE.{stream}.{consumer}"
    CONSUMER_CREATE_UNNAMED = "CONSUMER.CREATE.{stream}"
    CONSUMER_INFO = "CONSUMER.INFO.{stream}.{consumer}"
    CONSUMER_DELETE = "CONSUMER.DELETE.{stream}.{consumer}"
    CONSUMER_NEXT = "CONSUMER.MSG.NEXT.{stream}.{consumer}"

    def of(self, stream: str = "", consumer: str = "", subject: str = "") -> str:
        """The subject of one call, without `$JS.API.`."""
        return self.value.format(stream=stream, consumer=consumer, subject=subject)

    def pattern(self, stream: str = "") -> str:
        """The subject that stands for every such call on a stream, with wildcards."""
        return f"{API}.{self.of(stream, '*', '>')}"

    @property
    def has_many_answers(self) -> bool:
        """Whether one request is answered by several messages."""
        return self is ApiCall.CONSUMER_NEXT


_READ_KEY: Final = (ApiCall.STREAM_INFO, ApiCall.MESSAGE_GET, ApiCall.DIRECT_GET_LAST)
_PULL: Final = (
    ApiCall.STREAM_INFO,
    ApiCall.MESSAGE_GET,
    ApiCall.CONSUMER_CREATE,
    ApiCall.CONSUMER_INFO,
    ApiCall.CONSUMER_DELETE,
    ApiCall.CONSUMER_NEXT,
)
# nats-py watches keys and lists objects with a push consumer that the server names.
_WATCH: Final = (
    ApiCall.CONSUMER_CREATE_UNNAMED,
    ApiCall.CONSUMER_INFO,
    ApiCall.CONSUMER_DELETE,
)


def reader_calls(subjects: Subjects) -> dict[str, tuple[ApiCall, ...]]:
    """The calls of a consumer, by stream; none of them changes what is stored.

    Nobody makes ACCOUNT_INFO. But nats-server takes an account that does not import it for one
    without JetStream, and then answers all its calls itself.
    """
    return {
        "": (ApiCall.ACCOUNT_INFO,),
        subjects.cdc_stream: _PULL,
        subjects.init_stream: _PULL,
        f"KV_{subjects.schemas_bucket}": (*_PULL, ApiCall.DIRECT_GET_LAST),
        f"KV_{subjects.bridge_bucket}": (ApiCall.MESSAGE_GET,),
        f"KV_{subjects.dicts_bucket}": _READ_KEY,
        f"OBJ_{subjects.objects_bucket}": (*_PULL, ApiCall.DIRECT_GET_LAST),
    }


def bridge_calls(subjects: Subjects) -> dict[str, tuple[ApiCall, ...]]:
    """The calls of the bridge, by stream; the empty name stands for calls without a stream."""
    create, purge = ApiCall.STREAM_CREATE, ApiCall.STREAM_PURGE
    return {
        "": (ApiCall.ACCOUNT_INFO, ApiCall.STREAM_NAMES),
        subjects.cdc_stream: (create, *_PULL),
        subjects.init_stream: (create, purge, *_PULL),
        f"KV_{subjects.schemas_bucket}": (create, *_READ_KEY, *_WATCH),
        f"KV_{subjects.bridge_bucket}": (create, purge, *_READ_KEY, *_WATCH),
        f"KV_{subjects.dicts_bucket}": (create, *_READ_KEY),
        f"OBJ_{subjects.objects_bucket}": (create, purge, *_READ_KEY, *_WATCH),
    }


def is_inbox_prefix(prefix: str) -> bool:
    """Whether a prefix can stand before inboxes: `_INBOX`, or `_INBOX_` and a name."""
    return _INBOX_PREFIX.match(prefix) is not None


def consumer_name(inbox_prefix: str) -> str:
    """A new name for a consumer, which nobody else can guess.

    Whoever knows the name of a consumer may delete it or take its messages. The user's part of the
    inbox prefix comes first, so that an operator sees whose consumer it is.
    """
    user = inbox_prefix.removeprefix(DEFAULT_INBOX_PREFIX).removeprefix("_") or "tailrace"
    return f"{user}-{secrets.token_hex(16)}"

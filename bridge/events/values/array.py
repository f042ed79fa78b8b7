"""Array literals to nested lists.

https://www.postgresql.org/docs/current/arrays.html#ARRAYS-IO
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from bridge.errors import ProtocolError
from bridge.events.values.converter import Converter, RawList, RawText
from bridge.events.values.scalars import to_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.events.values.converter import Value

_MAX_DIMENSIONS: Final = 6
_ESCAPED: Final = re.compile(rb"\\(.)", re.DOTALL)


def array_converter(element: Converter, delimiter: str = ",", *, raw: bool = False) -> Converter:
    """Convert array literals of one element type; `raw` marks the whole column as raw.

    An array whose bounds do not start at 1 has no list form and stays text: `[2:3]={7,8}`.
    """
    separator = delimiter.encode()
    convert_element = element.convert

    def to_list(data: bytes) -> Value:
        if data[:1] == b"[":
            return to_text(data)
        # Nothing is quoted, nested or null: the text between two delimiters is an element.
        if b'"' not in data and data.rfind(b"{") == 0 and data.find(b"}") == len(data) - 1:
            inside = data[1:-1]
            if not inside:
                return []
            if b"NULL" not in inside and b"null" not in inside and b"\\" not in inside:
                parts = inside.split(separator)
                if b"" in parts:
                    raise ProtocolError("an array literal has an empty element")
                return [convert_element(part) for part in parts]
        return _parse(data, separator, convert_element)

    def to_raw_list(data: bytes) -> Value:
        value = to_list(data)
        return RawList(value) if isinstance(value, list) else RawText(value)

    if raw:
        return Converter(to_raw_list, may_be_raw=True)
    return Converter(to_list)


@lru_cache(maxsize=16)
def _tokens(separator: bytes) -> re.Pattern[bytes]:
    """Tokens of an array literal: braces, delimiters, quoted elements and bare elements."""
    mark = re.escape(separator)
    return re.compile(
        rb"(?P<mark>[{}]|" + mark + rb")"
        rb'|"(?P<quoted>(?:[^"\\]|\\.)*)"'
        rb'|(?P<bare>(?:[^{}"\\' + mark + rb"]|\\.)+)",
        re.DOTALL,
    )


def _parse(data: bytes, separator: bytes, convert: Callable[[bytes], Value]) -> list[Any]:
    open_lists: list[list[Any]] = []
    finished: list[Any] | None = None
    element_due = True
    position = 0
    match_token = _tokens(separator).match
    while position < len(data):
        token = match_token(data, position)
        if token is None or finished is not None:
            raise _damaged(position)
        kind = token.lastgroup
        if kind == "mark":
            mark = token[0]
            if mark == b"{":
                if not element_due or len(open_lists) == _MAX_DIMENSIONS:
                    raise _damaged(position)
                open_lists.append([])
            elif mark == b"}":
                # `{}` is empty, `{1,}` is damaged.
                if not open_lists or (element_due and open_lists[-1]):
                    raise _damaged(position)
                closed = open_lists.pop()
                element_due = False
                if open_lists:
                    open_lists[-1].append(closed)
                else:
                    finished = closed
            else:
                if element_due:
                    raise _damaged(position)
                element_due = True
        else:
            if not element_due or not open_lists:
                raise _damaged(position)
            open_lists[-1].append(_element(token, convert))
            element_due = False
        position = token.end()
    if finished is None:
        raise _damaged(position)
    return finished


def _element(token: re.Match[bytes], convert: Callable[[bytes], Value]) -> Value:
    quoted = token["quoted"]
    if quoted is not None:
        return convert(_ESCAPED.sub(rb"\1", quoted))
    bare = token["bare"]
    if bare.upper() == b"NULL":
        return None
    return convert(_ESCAPED.sub(rb"\1", bare))


def _damaged(position: int) -> ProtocolError:
    return ProtocolError(f"an array literal is damaged at byte {position}")

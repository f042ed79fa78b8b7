"""Errors of the wire format, by what the reader must do.

WireError
    The message violates the format: do not apply it, and find out who published it.
WireVersionError(WireError)
    Written by a newer tailrace: upgrade this reader.
DictionaryMissing(WireError)
    The message is compressed with a dictionary that must be fetched first.
"""

from __future__ import annotations


class WireError(Exception):
    """A message or name does not follow the wire format."""


MISFITS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What Python raises for a value of the wrong type, range or nesting depth."""


class WireVersionError(WireError):
    """The message carries a wire version larger than this reader understands."""


class DictionaryMissing(WireError):
    """A zstd dictionary is needed before the message can be read."""

    def __init__(self, dictionary_id: str) -> None:
        super().__init__(
            f"zstd dictionary {dictionary_id} is not loaded; fetch it from the dictionary bucket"
        )
        self.dictionary_id = dictionary_id

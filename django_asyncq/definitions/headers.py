"""The headers of a task: short texts beside its arguments, which travel with the message to any program."""

from __future__ import annotations

from collections.abc import Mapping

from ..exceptions import InvalidOption
from ..trace_ids import is_trace_header

MOST_HEADERS = 32
LARGEST_BYTES = 8_192


def checked_headers(headers: object) -> dict[str, str]:
    """Return the headers as a plain dictionary. Raises: InvalidOption."""

    def refuse(what: str) -> InvalidOption:
        return InvalidOption(f"headers are not valid: {what}")

    if not isinstance(headers, Mapping):
        raise refuse(f"give a mapping of texts, not {type(headers).__qualname__}")
    if len(headers) > MOST_HEADERS:
        raise refuse(f"there are {len(headers)}, more than {MOST_HEADERS}")
    found: dict[str, str] = {}
    for key, value in headers.items():
        if not isinstance(key, str) or not key or not isinstance(value, str):
            raise refuse(f"{key!r}: {value!r} is not a name with a text")
        if "\x00" in key + value or (not (key + value).isascii() and _has_surrogate(key + value)):
            raise refuse(f"{key!r} holds a character that a database or a Go program cannot store")
        found[str(key)] = str(value)
    size = _size_of(found)
    if size > LARGEST_BYTES:
        raise refuse(f"they take {size:,} bytes, more than {LARGEST_BYTES:,}")
    return found


def with_inherited(own: dict[str, str] | None, inherited: Mapping[str, str]) -> dict[str, str] | None:
    """Return the headers of a call together with those that it inherits from the task that makes it.

    own: of `checked_headers`, None for none. A call that names its trace inherits none; nor does one without space for
    them.
    """
    if not inherited or (own and any(map(is_trace_header, own))):
        return own
    found = {**inherited, **(own or {})}
    return found if len(found) <= MOST_HEADERS and _size_of(found) <= LARGEST_BYTES else own


def _size_of(headers: Mapping[str, str]) -> int:
    return sum(len(key.encode()) + len(value.encode()) for key, value in headers.items())


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)

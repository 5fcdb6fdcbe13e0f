"""Parse JSON that others may have written, such as what is read from Redis. It never raises and uses bounded memory."""

from __future__ import annotations

import json
import re
from typing import Any, Final, final


@final
class Unreadable:
    """The type of UNREADABLE, which is false like None and, unlike None, is no value of JSON."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "UNREADABLE"


UNREADABLE: Final = Unreadable()

# A string, so that brackets within it are not counted, or a bracket. The closing quote is optional: without one the
# string lasts to the end of the text, and the match needs no second attempt.
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)


def loads_untrusted(text: str | bytes, *, max_bytes: int, max_depth: int) -> Any:
    """Parse JSON; return UNREADABLE when it is not JSON in UTF-8, is too large or is nested too deeply.

    max_depth: how many lists and objects may lie within each other; checked before the parser, which would run out
    of stack. NaN and Infinity are refused, as are escapes of half a character, since no database stores them.
    """
    if len(text) > max_bytes:
        return UNREADABLE
    try:
        found = text.decode() if isinstance(text, bytes) else text
        if len(found.encode()) > max_bytes or _is_deeper(found, max_depth):
            return UNREADABLE
        value = json.loads(found, parse_constant=_refuse, parse_float=_finite)
        if "\\u" in found:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return UNREADABLE
    return value


def _is_deeper(text: str, max_depth: int) -> bool:
    """Return whether lists and objects are nested deeper than `max_depth`."""
    if text.count("[") + text.count("{") <= max_depth:
        return False
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        bracket = match[0]
        if bracket in "[{":
            depth += 1
            if depth > max_depth:
                return True
        elif bracket in "]}":
            depth -= 1
    return False


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{digits} is too large")
    return value

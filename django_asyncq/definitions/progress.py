"""What a task reports of its progress: checked where the body reports it, and read back from rows and from Redis.

A value is never changed once it is made, so that threads may share it without a lock.
"""

from __future__ import annotations

import math
from typing import Any

from .. import conf
from ..exceptions import InvalidArguments, InvalidOption
from .payload import json_bytes, plain

# MariaDB stores 31 levels, of which `data` and the whole take one each.
DEEPEST = 20
# A text of ASCII letters that certainly fits needs no encoding: 6 bytes a letter, and 100 for the rest.
LONGEST_LETTER_BYTES = 6
OTHER_BYTES = 100
# Of a run that has reported nothing yet, in a row where an earlier run has: null would keep what is there.
CLEARED: dict[str, Any] = {"done": None}


def progress_value(done: float, total: float | None, message: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return the progress as it is stored: {"done", "total", "message", "data"}. Raises: InvalidOption."""
    _check_number("done", done)
    if total is not None:
        _check_number("total", total)
        if done > total:
            raise InvalidOption(f"progress(done={done!r}, total={total!r}) is not valid: done is above total")
    if not isinstance(message, str):
        raise InvalidOption(f"progress(message=…) is a {type(message).__qualname__}: give a text, such as str(…) of it")
    value = {"done": done, "total": total, "message": message, "data": data}
    largest = conf.current().max_progress_bytes
    if not data and _is_plain_text(message) and LONGEST_LETTER_BYTES * len(message) + OTHER_BYTES <= largest:
        return value
    try:
        value["message"] = plain(message, "message", 1)
        value["data"] = {name: plain(item, name, DEEPEST) for name, item in data.items()}
    except InvalidArguments as error:
        raise InvalidOption(f"progress(…): {error}") from error
    if (size := len(json_bytes(value))) > largest:
        raise InvalidOption(
            f"progress(…) takes {size:,} bytes as JSON, more than ASYNCQ['MAX_PROGRESS_BYTES'] = {largest:,}: "
            f"shorten the message, or store the data and report its key"
        )
    return value


def shown_progress(value: Any) -> dict[str, Any] | None:
    """Return the progress that a row or Redis holds, for its reader; None when there is none."""
    if not isinstance(value, dict) or value.get("done") is None:
        return None
    return {
        "done": value["done"],
        "total": value.get("total"),
        "message": value.get("message") or "",
        "data": value.get("data") or {},
    }


def _check_number(name: str, value: object) -> None:
    # Not `isinstance`: True is no amount, and a subclass may compare as it likes.
    if type(value) not in (int, float) or not 0 <= value < math.inf or value >= 2**63:  # type: ignore[operator]
        raise InvalidOption(f"progress({name}={value!r}) is not valid: give a number, 0 or more")


def _is_plain_text(text: str) -> bool:
    return type(text) is str and text.isascii() and "\x00" not in text

"""The headers of a task: short texts beside its arguments, which travel with the message to any program."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..exceptions import InvalidOption

# --- The trace id of a task: what joins its log lines with those of the request that enqueued it.
#
# It is read from the headers of the task, which any program may have written. Needs no Django: log filters use it.
# Source: W3C Trace Context, section 3.2 (traceparent).

# The first one that a task has names its trace. A task that it enqueues gets all of them.
TRACE_HEADERS = ("traceparent", "trace-id", "x-request-id")
LONGEST = 200
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")


def trace_id_of(headers: Any) -> str | None:
    """Return the trace id that headers hold; None when they have none that a log line can show."""
    found = {name.lower(): value for name, value in trace_headers_of(headers).items()}
    match = _TRACEPARENT.fullmatch(found.pop("traceparent", "").lower())
    if match is not None:
        return match[1]
    values = (found.get(name, "") for name in TRACE_HEADERS)
    # A line break would let another program write log lines.
    return next((value for value in values if 0 < len(value) <= LONGEST and value.isprintable()), None)


def trace_headers_of(headers: Any) -> dict[str, str]:
    """Return those of some headers that say to which trace they belong; names are compared as in HTTP, without case."""
    if not isinstance(headers, dict):
        return {}
    return {name: value for name, value in headers.items() if is_trace_header(name) and isinstance(value, str)}


def is_trace_header(name: str) -> bool:
    """Return whether a header says to which trace a task belongs."""
    return name.lower() in TRACE_HEADERS


MOST_HEADERS = 32
LARGEST_BYTES = 8_192
# Names the schedule that has enqueued the task.
SCHEDULE_HEADER = "asyncq-schedule"


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


def with_inherited(
    own: dict[str, str] | None, inherited: Mapping[str, str], sourced: Mapping[str, str] | None = None
) -> dict[str, str] | None:
    """Return the headers of a call together with those of its trace, and those that the project adds.

    own: of `checked_headers`, None for none. inherited: that say to which trace the task belongs that makes the call.
    sourced: of `header_sources`. The trace is the one that the call names, or else a source, or else the inherited one.
    A call without space for them gets none.
    """
    if not inherited and not sourced:
        return own
    more = dict(sourced or {})
    if own and any(map(is_trace_header, own)):
        more = {name: value for name, value in more.items() if not is_trace_header(name)}
    elif not any(map(is_trace_header, more)):
        more = {**inherited, **more}
    found = {**more, **(own or {})}
    return found if found and len(found) <= MOST_HEADERS and _size_of(found) <= LARGEST_BYTES else own


def with_schedule(headers: Mapping[str, str] | None, name: str) -> dict[str, str]:
    """Return the headers of a task that a schedule enqueues; without its name where they leave no space for it."""
    named = {**(headers or {}), SCHEDULE_HEADER: name}
    return named if len(named) <= MOST_HEADERS and _size_of(named) <= LARGEST_BYTES else dict(headers or {})


def _size_of(headers: Mapping[str, str]) -> int:
    return sum(len(key.encode()) + len(value.encode()) for key, value in headers.items())


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)

"""The trace id of a task: what joins its log lines with those of the request that enqueued it.

It is read from the headers of the task, which any program may have written. Needs no Django: log filters use it.
Source: W3C Trace Context, section 3.2 (traceparent).
"""

from __future__ import annotations

import re
from typing import Any

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

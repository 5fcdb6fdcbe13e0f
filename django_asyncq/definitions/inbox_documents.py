"""What a document in an inbox says: a task to enqueue, as any program may write it in JSON. Uses no store.

`{"task": …, "args": […], "kwargs": {…}, "id": …, "headers": {…}, "run_after": …, "priority": …}`. Only `task` must be
there; null is as good as no key. The name of the task is only ever looked up among those that are declared with
`inbox=True`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from ..exceptions import InvalidOption
from .headers import checked_headers
from .moments import checked_aware
from .untrusted_json import UNREADABLE, loads_untrusted

KEYS = ("task", "args", "kwargs", "id", "headers", "run_after", "priority")
LONGEST_ID = 200
# Around the arguments are the document itself, and a list or an object.
LEVELS_AROUND = 2


class Document(NamedTuple):
    """One call. task: a dotted name or a wire name. id: of the document, in the words of its author; None for none.

    run_after: a moment, or how long from now. headers, run_after, priority: None for none.
    """

    task: str
    args: list[Any]
    kwargs: dict[str, Any]
    id: str | None
    headers: dict[str, str] | None
    run_after: datetime | timedelta | None
    priority: int | None


def read_document(data: bytes, *, largest_bytes: int, max_depth: int) -> Document:
    """Read a document. Raises: InvalidOption, which says what is wrong with it."""
    found = _read_object(data, largest_bytes, max_depth)
    if unknown := sorted(set(found) - set(KEYS)):
        names = ", ".join(repr(name[:50]) for name in unknown[:5])
        raise InvalidOption(f"it has the unknown key {names}: it may have {', '.join(KEYS)}")
    given = {key: value for key, value in found.items() if value is not None}
    headers = given.get("headers")
    return Document(
        task=_read(given, "task", str, "a text, the name of a task", lambda value: bool(value)),
        args=_read({"args": [], **given}, "args", list, "a list"),
        kwargs=_read({"kwargs": {}, **given}, "kwargs", dict, "an object"),
        id=_read(given, "id", str, f"a text of 1 to {LONGEST_ID} characters", _is_id) if "id" in given else None,
        headers=None if headers is None else checked_headers(headers),
        run_after=_read_moment(given["run_after"]) if "run_after" in given else None,
        priority=_read(given, "priority", int, "a whole number") if "priority" in given else None,
    )


def _read_object(data: bytes, largest_bytes: int, max_depth: int) -> dict[str, Any]:
    if len(data) > largest_bytes:
        raise InvalidOption(f"it takes more than ASYNCQ['MAX_INBOX_BYTES'] = {largest_bytes:,} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InvalidOption(f"it is not UTF-8: byte {error.start} cannot be read") from error
    levels = max_depth + LEVELS_AROUND
    found = loads_untrusted(text, max_bytes=largest_bytes, max_depth=levels)
    if found is UNREADABLE:
        raise InvalidOption(
            f"it is not JSON, or holds what databases do not store: NaN, Infinity, half a character, or more than "
            f"{levels} lists and objects within each other"
        )
    if not isinstance(found, dict):
        raise InvalidOption(f"it is {_named(found)}, not an object")
    return found


def _read(
    given: Mapping[str, Any], key: str, kind: type, what: str, holds: Callable[[Any], bool] = lambda value: True
) -> Any:
    if key not in given:
        raise InvalidOption(f"it has no {key!r}: give {what}")
    value = given[key]
    if type(value) is not kind or not holds(value):
        raise InvalidOption(f"its {key!r} is {_named(value)}: give {what}")
    return value


def _read_moment(value: Any) -> datetime | timedelta:
    try:
        if type(value) is str:
            return checked_aware("run_after", datetime.fromisoformat(value))
        if type(value) in (int, float) and value >= 0:
            return timedelta(seconds=value)
    except (ValueError, OverflowError) as error:
        raise InvalidOption(f"its 'run_after' is not valid: {error}") from error
    what = "seconds from now, or a time such as '2026-12-24T18:00:00+01:00'"
    raise InvalidOption(f"its 'run_after' is {_named(value)}: give {what}")


def _is_id(value: str) -> bool:
    return 0 < len(value) <= LONGEST_ID


def _named(value: Any) -> str:
    """Return a value in words, as JSON calls it; a long one is not shown."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {value!r:.40}" if isinstance(value, float) or abs(value) < 10**30 else "a huge number"
    if isinstance(value, str):
        return f"the text {value!r}" if len(value) <= 50 else f"a text of {len(value):,} characters"
    return "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else "null"

"""The JSON form of an outcome that is spilled to Redis: what the latest run would have written to its row.

It holds only what the run has changed, and only its own error, because the row has the earlier ones. `decode` checks
every field, so that nothing else can reach a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from ..definitions.payload import (
    LARGEST_INTEGER,
    MESSAGE_CHARACTERS,
    SMALLEST_INTEGER,
    TRACEBACK_CHARACTERS,
    json_bytes,
)
from ..definitions.untrusted_json import loads_untrusted
from ..models import FailureReason, TaskRecord, TaskState
from .failures import CLASS_CHARACTERS, append_entry

LARGEST_BYTES = 1_048_576
# MAX_DEPTH is at most 500; an outcome holds the return value as one of its fields.
DEEPEST = 501
LARGEST_FENCE = 2**63 - 1
LARGEST_COUNT = 2**31 - 1
WORKER_CHARACTERS = 255
# `storable_text` puts a note where it cuts a text.
CUT_NOTE_CHARACTERS = 100
# MySQL stores no earlier year. A day before the last one, so that a time zone cannot lead beyond it.
EARLIEST = datetime(1000, 1, 1, tzinfo=UTC)
LATEST = datetime(9999, 12, 30, tzinfo=UTC)
TIMES = ("started_at", "last_attempted_at", "finished_at", "retry_at")
COPIED = ("state", "reason", "last_exception", "attempt", "worker_ids", "return_value")


class RunOutcome(NamedTuple):
    """A decoded outcome. counted: whether the run used up an attempt. values: of the row's columns.

    error: what the run adds to the row's errors; None when it adds none.
    """

    fence: int
    counted: bool
    values: Mapping[str, Any]
    error: Mapping[str, Any] | None


def encode(record: TaskRecord, fence: int, *, counted: bool) -> bytes:
    """Encode what the run with this fence has changed; without its result when that is too large for Redis."""
    found = {"fence": fence, "counted": counted, **{name: getattr(record, name) for name in COPIED}}
    for name in TIMES:
        at: datetime | None = getattr(record, name)
        found[name] = at.isoformat() if at else None
    is_failed = record.state == TaskState.FAILED
    found["error"] = record.errors[-1] if is_failed and counted else None
    if is_failed:
        found["return_value"] = None
    encoded = json_bytes(found)
    if len(encoded) <= LARGEST_BYTES:
        return encoded
    reason = f"the database was unreachable, and {len(encoded):,} bytes are too many to spill to Redis"
    if found["error"]:
        found["error"] = {**found["error"], "message": f"not stored: {reason}", "traceback": ""}
    else:
        found["return_value"] = {"result_not_stored": reason}
    return json_bytes(found)


def decode(encoded: bytes) -> RunOutcome | None:
    """Decode an outcome; None when anything in it is not as `encode` writes it. Fields that it lacks are ignored."""
    found = loads_untrusted(encoded, max_bytes=LARGEST_BYTES, max_depth=DEEPEST)
    if not isinstance(found, dict) or not _is_storable(found):
        return None
    if not all(name in found and holds(found[name]) for name, holds in RULES.items()):
        return None
    times = {name: _time(found[name]) for name in TIMES}
    if not _is_consistent(found, times):
        return None
    values = {**{name: found[name] for name in COPIED}, **times}
    return RunOutcome(found["fence"], found["counted"], values, found["error"])


def apply(outcome: RunOutcome, record: TaskRecord) -> None:
    """Change the `TaskRecord` in memory as the run has changed it."""
    for name, value in outcome.values.items():
        setattr(record, name, value)
    if outcome.error is not None:
        append_entry(record, dict(outcome.error))
    if outcome.counted and record.retry_at:
        record.crash_count = 0  # as `lifecycle.fail` does
    # The process of the run lived until it had spilled the outcome.
    record.is_suspect = False
    record.fence = outcome.fence


# --- the rules


def _is_storable(value: Any) -> bool:
    """Return whether every database can store all texts and numbers in a value.

    Not `payload.plain`: on Python 3.11 its recursion ends before the deepest value that MAX_DEPTH can allow.
    """
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            left += item.keys()
            left += item.values()
        elif isinstance(item, list):
            left += item
        elif "\x00" in item if isinstance(item, str) else _is_beyond_64_bits(item):
            return False
    return True


def _is_beyond_64_bits(value: Any) -> bool:
    return isinstance(value, int) and not SMALLEST_INTEGER <= value <= LARGEST_INTEGER


def _is_whole(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _is_one_of(*allowed: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value in allowed


def _is_text(most: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and len(value) <= most


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_worker_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text(WORKER_CHARACTERS), value))


def _is_time(value: Any) -> bool:
    return value is None or _time(value) is not None


def _time(value: Any) -> datetime | None:
    """Parse a time that every database can store; None for anything else."""
    if not isinstance(value, str):
        return None
    try:
        at = datetime.fromisoformat(value)
        return at if at.tzinfo is not None and EARLIEST <= at.astimezone(UTC) <= LATEST else None
    except (ValueError, OverflowError):
        return None


def _is_error(value: Any) -> bool:
    """Return whether a value is None or has the fields of an error; a newer release may add plain ones."""
    if value is None:
        return True
    if not isinstance(value, dict) or any(isinstance(item, dict | list) for item in value.values()):
        return False
    return all(name in value and holds(value[name]) for name, holds in ERROR_RULES.items())


def _is_anything(value: Any) -> bool:
    return True


def _is_consistent(found: Mapping[str, Any], times: Mapping[str, datetime | None]) -> bool:
    """Return whether the fields agree with each other, as the constraints of the table demand."""
    if (found["state"] == TaskState.SUCCEEDED) is not (found["reason"] == FailureReason.NONE):
        return False
    if found["state"] == TaskState.SUCCEEDED:
        return times["finished_at"] is not None and times["retry_at"] is None and found["error"] is None
    is_closed_once = (times["finished_at"] is None) is not (times["retry_at"] is None)
    return is_closed_once and found["return_value"] is None and (found["error"] is not None) is found["counted"]


ERROR_RULES: dict[str, Callable[[Any], bool]] = {
    "exception": _is_text(LARGEST_BYTES),
    "message": _is_text(MESSAGE_CHARACTERS + CUT_NOTE_CHARACTERS),
    "traceback": _is_text(TRACEBACK_CHARACTERS + CUT_NOTE_CHARACTERS),
    "attempt": _is_whole(0, LARGEST_COUNT),
    "worker": _is_text(WORKER_CHARACTERS),
    "started_at": _is_time,
    "failed_at": _is_time,
}
RULES: dict[str, Callable[[Any], bool]] = {
    "fence": _is_whole(1, LARGEST_FENCE),
    "counted": _is_bool,
    "state": _is_one_of(TaskState.SUCCEEDED, TaskState.FAILED),
    "reason": _is_one_of(*FailureReason.values),
    "last_exception": _is_text(CLASS_CHARACTERS),
    "attempt": _is_whole(0, LARGEST_COUNT),
    "worker_ids": _is_worker_list,
    "return_value": _is_anything,
    "error": _is_error,
    **dict.fromkeys(TIMES, _is_time),
}

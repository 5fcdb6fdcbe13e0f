"""What an entry says of its row, when another program may have changed the entry. Reads and changes nothing in a store.

An entry may also differ from its row because a process of ours died between the two, or because Redis was restored from
an older copy. Two things distinguish these from another program's doing:

- The fence. Every change of a row that is made from an entry raises the fence of both, so an entry with a lower fence
  than its row is older than the row.
- The field `settled`. It is the state in which our own reporter left a failed task.
"""

from __future__ import annotations

import enum
from datetime import UTC, datetime

from .. import conf
from ..broker.decoding import UndecodableMessage, decode_message
from ..broker.evidence import Evidence
from ..broker.message import TaskMessage
from ..definitions.payload import MESSAGE_CHARACTERS, as_base64, storable_result, storable_text
from ..definitions.task_options import MOST_ATTEMPTS
from ..definitions.untrusted_json import UNREADABLE, loads_untrusted
from ..exceptions import RemoteFailure, TaskCancelled, TaskNotRegistered, TaskTimeout, WorkerLost
from ..models import FailureReason, TaskRecord, TaskState
from .failures import append_error

NO_HANDLER = "handler not found for task"
LEASE_EXPIRED_THERE = "asynq: task lease expired"
DEADLINE_PASSED = "context deadline exceeded"
BY_ANOTHER_PROGRAM = "archived by another program"
# 9999-12-31: no time of a database is later.
LATEST_SECONDS = 253_402_300_799


class Verdict(enum.Enum):
    """What the row must show. AGREES: nothing new. FINAL: the row is final, and only the entry must be settled."""

    AGREES = enum.auto()
    FINAL = enum.auto()
    SUCCEEDED = enum.auto()
    FAILED = enum.auto()
    CANCELLED = enum.auto()
    RETRYING = enum.auto()
    # No outcome: the program that took the task has no handler for it.
    UNHANDLED = enum.auto()
    # An outcome that the settings do not accept.
    REFUSED = enum.auto()
    # Of tasks that only another program runs.
    QUEUED = enum.auto()
    RUNNING = enum.auto()
    MISSING = enum.auto()


OUTCOMES = frozenset({Verdict.SUCCEEDED, Verdict.FAILED, Verdict.CANCELLED, Verdict.RETRYING})


def verdict_of(row: TaskRecord, found: Evidence) -> Verdict:
    """Return what the row must show because of its entry."""
    verdict = _said(row, found)
    # The others belong to another program, or only another program runs them.
    is_ours = row.wire_id is None and not row.is_remote
    if verdict in OUTCOMES and is_ours and not conf.current().accept_outcomes:
        return Verdict.REFUSED
    return verdict


def _said(row: TaskRecord, found: Evidence) -> Verdict:
    """Return what the entry says of its row."""
    if row.is_final:
        # A task of another program that ran here stays in `completed` for as long as its message says.
        is_left = found.state == "completed" and row.wire_id is None
        is_left = is_left or (found.state == "archived" and found.settled != "archived")
        return Verdict.FINAL if is_left else Verdict.AGREES
    if row.is_remote:
        if (verdict := _of_place(row, found)) is not None:
            return verdict
    elif found.fence < row.fence:
        return Verdict.AGREES
    if found.state == "completed":
        return Verdict.SUCCEEDED
    if found.state not in ("archived", "retry") or found.settled == found.state:
        return Verdict.AGREES
    return _of_failure(row, found)


def _of_place(row: TaskRecord, found: Evidence) -> Verdict | None:
    """Return what a place says of a task that only another program runs; None for the places of finished runs."""
    if not found.state:
        return Verdict.MISSING
    if found.state in ("pending", "scheduled", "aggregating"):
        return Verdict.AGREES if row.state == TaskState.QUEUED else Verdict.QUEUED
    if found.state == "active":
        # A worker of ours that has claimed it gives it back at once.
        return Verdict.AGREES if row.state == TaskState.RUNNING or found.worker else Verdict.RUNNING
    return None


def _of_failure(row: TaskRecord, found: Evidence) -> Verdict:
    text = found.message.error_msg if found.message else ""
    is_untouched = found.message is not None and _is_untouched(row, found.message)
    if found.worker and (text == LEASE_EXPIRED_THERE or is_untouched):
        # The recoverer of another program has set aside what a lost worker of ours held: no outcome.
        return Verdict.AGREES
    if row.is_remote and row.state == TaskState.RUNNING:
        # asynq's tools leave a running task where it is.
        is_untouched = False
    if found.state == "retry":
        if is_untouched:
            return Verdict.AGREES
        return Verdict.UNHANDLED if text.startswith(NO_HANDLER) else Verdict.RETRYING
    if is_untouched:
        return Verdict.CANCELLED
    return Verdict.UNHANDLED if text.startswith(NO_HANDLER) else Verdict.FAILED


def _is_untouched(row: TaskRecord, message: TaskMessage) -> bool:
    """Return whether no other program has failed the task since its message was written.

    asynq writes the time into each message whose run has failed, whatever else it counts.
    """
    known = int(row.last_attempted_at.timestamp()) if row.last_attempted_at else 0
    if row.wire_message is not None:
        try:
            known = max(known, decode_message(bytes(row.wire_message)).last_failed_at)
        except UndecodableMessage:
            known = max(known, 0)
    return message.last_failed_at <= known and message.retried <= max(row.attempt, 0)


def apply(row: TaskRecord, found: Evidence, verdict: Verdict, now: datetime) -> None:
    """Change a row in memory as its entry says. verdict: any of OUTCOMES, or QUEUED or RUNNING of a remote task."""
    message = found.message or TaskMessage()
    row.retry_at = row.finished_at = None
    row.reason = FailureReason.NONE
    row.is_suspect = False
    if verdict is Verdict.QUEUED:
        row.state = TaskState.QUEUED
    elif verdict is Verdict.RUNNING:
        row.state = TaskState.RUNNING
        row.attempt = max(row.attempt, _retried(message) + 1)
        row.started_at = row.started_at or now
        row.last_attempted_at = now
    elif verdict is Verdict.SUCCEEDED:
        row.state = TaskState.SUCCEEDED
        row.finished_at = now
        row.attempt = max(row.attempt, _retried(message) + 1)
        row.return_value = result_of_bytes(found)
    elif verdict is Verdict.CANCELLED:
        row.state = TaskState.FAILED
        row.finished_at = now
        _append(row, TaskCancelled(BY_ANOTHER_PROGRAM), now)
    else:
        _apply_failure(row, found, message, verdict, now)


def _apply_failure(row: TaskRecord, found: Evidence, message: TaskMessage, verdict: Verdict, now: datetime) -> None:
    row.state = TaskState.FAILED
    row.last_attempted_at = _moment(message.last_failed_at) or now
    if verdict is Verdict.RETRYING:
        row.retry_at = _moment(found.score) or now
        row.attempt = max(row.attempt, _retried(message))
    else:
        row.finished_at = now
        # asynq does not count the last run.
        row.attempt = max(row.attempt, min(message.retried + 1, row.max_attempts))
    text = "its message cannot be read" if found.message is None else message.error_msg
    _append(row, error_of(text), now)


def _retried(message: TaskMessage) -> int:
    """Return how often a task was retried, below what every database can hold: any program may write any number."""
    return min(message.retried, MOST_ATTEMPTS - 1)


def fail_as(row: TaskRecord, exception: BaseException, now: datetime) -> None:
    """Change a row in memory to a final failure that another program has caused without a run."""
    row.state, row.retry_at, row.finished_at = TaskState.FAILED, None, now
    _append(row, exception, now)


def _append(row: TaskRecord, exception: BaseException, now: datetime) -> None:
    append_error(row, exception, "", now)
    # It was no worker of ours.
    row.errors[-1]["worker"] = ""


def error_of(text: str) -> BaseException:
    """Return the error that stands for the text that another program has written into a message."""
    text = storable_text(text, MESSAGE_CHARACTERS)
    kinds: dict[str, type[BaseException]] = {LEASE_EXPIRED_THERE: WorkerLost, DEADLINE_PASSED: TaskTimeout}
    return kinds.get(text, RemoteFailure)(text)


def unhandled_error(row: TaskRecord) -> TaskNotRegistered:
    """Return the error of a task for which no program that took it has had a handler for too long."""
    return TaskNotRegistered(
        f"another program took the task from the queue {row.queue_name}, has no handler for {row.name!r}, and has "
        "given it up again and again: give each program a queue of its own, or register a handler there"
    )


def result_of_bytes(found: Evidence) -> object:
    """Return the result that another program has written: as JSON, else as text, else `{"base64": …}`."""
    settings = conf.current()
    if found.result is None:
        is_large = found.result_bytes > settings.max_result_bytes
        reason = f"the result takes {found.result_bytes:,} bytes, more than ASYNCQ['MAX_RESULT_BYTES']"
        return {"result_not_stored": reason} if is_large else None
    value = loads_untrusted(found.result, max_bytes=settings.max_result_bytes, max_depth=settings.max_depth)
    if value is not UNREADABLE:
        return storable_result(value)
    try:
        return storable_result(found.result.decode())
    except UnicodeDecodeError:
        return storable_result(as_base64(found.result))


def _moment(seconds: float | None) -> datetime | None:
    """Return a time that another program has written, or None when it is none."""
    if not seconds or not 0 < seconds <= LATEST_SECONDS - 86_400:
        return None
    return datetime.fromtimestamp(seconds, UTC)

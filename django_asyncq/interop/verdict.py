"""What an entry in Redis means for its row: for one that has none, and for one that another program may have changed.

Reads and changes nothing in a store.

| an entry without a row | what it is                                        | what becomes of it              |
|------------------------|---------------------------------------------------|---------------------------------|
| adoptable              | a task of the alias runs its type (`wire_name`)   | it gets a row, and runs         |
| foreign                | nothing here runs it                              | it goes back, for other workers |
| no task                | nothing could run it                              | it is rejected                  |

An entry may also differ from its row because a process of ours died between the two, or because Redis was restored
from an older copy. Two things distinguish these from another program's doing:

- The fence. Every change of a row that is made from an entry raises the fence of both, so an entry with a lower fence
  than its row is older than the row.
- The field `settled`. It is the state in which our own reporter left a failed task.
"""

from __future__ import annotations

import enum
from datetime import UTC, datetime
from typing import Any, NamedTuple

from .. import conf
from ..broker.foreign import LARGEST_MESSAGE_BYTES, Evidence, StoredMessage
from ..broker.message import TaskMessage, UndecodableMessage, decode_message
from ..core import names
from ..core.names import QUEUE_NAME
from ..core.options import MOST_ATTEMPTS
from ..core.payload import (
    MAX_DEPTH,
    MESSAGE_CHARACTERS,
    UNREADABLE,
    as_base64,
    loads_untrusted,
    storable_result,
    storable_text,
)
from ..exceptions import RemoteFailure, TaskCancelled, TaskNotRegistered, TaskTimeout, WorkerLost
from ..lifecycle.base import append_error
from ..models import FailureReason, Suspicion, TaskRecord, TaskState

# MySQL's TEXT holds 65,535 bytes.
LONGEST_ID = 16_000


class Rowless(NamedTuple):
    """An entry without a row.

    stored: what its hash holds. message: None when it is none of asynq's, or too large to be read. task: the declared
    task that runs it; with one it is adoptable, else foreign. reason: why it can be no task at all; "" for one that
    others may run.
    """

    id: str
    stored: StoredMessage
    message: TaskMessage | None
    task: Any | None
    reason: str

    @property
    def text(self) -> str:
        """The error with which it is archived: when nobody has taken it for long, or it is too large to be rejected."""
        if self.reason:
            return f"it can be no task: {self.reason}"
        if self.message is None:
            return f"its message is larger than {LARGEST_MESSAGE_BYTES:,} bytes, so no worker of django_asyncq reads it"
        return (
            f"no row in the database, and no worker takes tasks of the type {self.message.type[:200]!r} from this "
            f"queue: declare one with @task(wire_name=…), or start the program that runs them"
        )


def judge(id: str, queue: str, stored: StoredMessage, alias: str) -> Rowless:
    """Decide what an entry without a row is. alias: that of the worker, whose tasks may run it."""
    if stored.size_bytes and not stored.data:
        return Rowless(id, stored, None, None, "" if _is_text(id) else "its id is not UTF-8")
    try:
        message = decode_message(stored.data)
    except UndecodableMessage as error:
        return Rowless(id, stored, None, None, f"it is no message of asynq: {error}")
    reason = _why_no_task(id, queue, message)
    # A column holds a queue's name of ours only; nothing declares others.
    can_have_row = not reason and QUEUE_NAME.fullmatch(queue) is not None
    return Rowless(id, stored, message, names.task_of(message.type, alias) if can_have_row else None, reason)


def _why_no_task(id: str, queue: str, message: TaskMessage) -> str:
    if not _is_text(id):
        return "its id is not UTF-8"
    if not id or "\x00" in id:
        return "its id is empty, or holds a NUL character"
    if len(id) > LONGEST_ID:
        return f"its id has more than {LONGEST_ID:,} characters"
    if message.id != id:
        return "the id in its message is not that of its key"
    if message.queue != queue:
        return "the queue in its message is not that of its key"
    return ""


def _is_text(id: str) -> bool:
    try:
        id.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- What an entry says of its row.

NO_HANDLER = "handler not found for task"
LEASE_EXPIRED_THERE = "asynq: task lease expired"
DEADLINE_PASSED = "context deadline exceeded"
BY_ANOTHER_PROGRAM = "archived by another program"
DELETED = (
    "its entry has left Redis without an outcome: the handler of another program has revoked the task, or somebody has "
    "deleted it"
)
# asynq deletes the members of a group when their aggregate is enqueued, and leaves no trace of them.
LEFT_GROUP = (
    "the call has left its group: another program has aggregated it with others, or has deleted it; nothing in Redis "
    "says which, or what became of the aggregate"
)
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
# What changes the row.
WRITTEN = OUTCOMES | {Verdict.QUEUED, Verdict.RUNNING}


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
    """Change a row in memory as its entry says. verdict: any of WRITTEN; UNHANDLED or MISSING: it fails for good."""
    message = found.message or TaskMessage()
    row.retry_at = row.finished_at = None
    row.reason = FailureReason.NONE
    row.suspicion = Suspicion.NONE
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
    else:
        row.state = TaskState.FAILED
        if verdict is Verdict.RETRYING:
            row.retry_at = _moment(found.score) or now
            row.attempt = max(row.attempt, _retried(message))
        else:
            row.finished_at = now
        if verdict is Verdict.FAILED:
            # asynq does not count the last run.
            row.attempt = max(row.attempt, min(message.retried + 1, row.max_attempts))
        if verdict in (Verdict.FAILED, Verdict.RETRYING):
            row.last_attempted_at = _moment(message.last_failed_at) or now
        append_error(row, _error_of(row, found, verdict), "", now)
        # It was no worker of ours.
        row.errors[-1]["worker"] = ""


def _error_of(row: TaskRecord, found: Evidence, verdict: Verdict) -> BaseException:
    if verdict is Verdict.CANCELLED:
        return TaskCancelled(BY_ANOTHER_PROGRAM)
    if verdict is Verdict.MISSING:
        return WorkerLost(LEFT_GROUP if row.group else DELETED)
    if verdict is Verdict.UNHANDLED:
        return TaskNotRegistered(
            f"another program took the task from the queue {row.queue_name}, has no handler for {row.name!r}, and has "
            "given it up again and again: give each program a queue of its own, or register a handler there"
        )
    return error_of("its message cannot be read" if found.message is None else found.message.error_msg)


def _retried(message: TaskMessage) -> int:
    """Return how often a task was retried, below what every database can hold: any program may write any number."""
    return min(message.retried, MOST_ATTEMPTS - 1)


def error_of(text: str) -> BaseException:
    """Return the error that stands for the text that another program has written into a message."""
    text = storable_text(text, MESSAGE_CHARACTERS)
    kinds: dict[str, type[BaseException]] = {LEASE_EXPIRED_THERE: WorkerLost, DEADLINE_PASSED: TaskTimeout}
    return kinds.get(text, RemoteFailure)(text)


def result_of_bytes(found: Evidence) -> object:
    """Return the result that another program has written: as JSON, else as text, else `{"base64": …}`."""
    settings = conf.current()
    if found.result is None:
        is_large = found.result_bytes > settings.max_result_bytes
        reason = f"the result takes {found.result_bytes:,} bytes, more than ASYNCQ['MAX_RESULT_BYTES']"
        return {"result_not_stored": reason} if is_large else None
    value = loads_untrusted(found.result, max_bytes=settings.max_result_bytes, max_depth=MAX_DEPTH)
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

"""Spill outcomes to Redis when a worker must stop while the database is unreachable, and replay them later.

An outcome lies in the hash of its task, behind a signature over the identity of the database, the task's id, the run's
fence and the very bytes that follow. Only what a worker of this database signed reaches a row; anything else counts as
absent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.conf import settings
from django.db import Error as DatabaseError
from django.template.defaultfilters import pluralize
from django.utils.crypto import constant_time_compare, salted_hmac

from .. import conf
from ..broker import Broker, Lease
from ..broker.task_entries import SpilledOutcome, SpilledOutcomes
from ..core.guard import attempt, get_logger
from ..core.logs import log_extra
from ..core.payload import (
    MAX_DEPTH,
    MESSAGE_CHARACTERS,
    TRACEBACK_CHARACTERS,
    json_bytes,
    loads_untrusted,
    plain,
)
from ..core.run_log import LOGGER_CHARACTERS, MOST_LEVEL, MOST_LINE_BYTES, RunLog
from ..models import FailureReason, Suspicion, TaskRecord, TaskState
from ..storage import identity
from ..storage.batches import FencedWrite
from ..storage.errors import ErrorKind, kind_of
from ..storage.routing import writing_database
from .base import CLASS_CHARACTERS, Run, announce, append_entry
from .dispatching import by_queue
from .following import write_fenced, write_usable
from .progress import record_log_lines
from .running import acknowledge, strip_result, undo_attempt

# --- The JSON form of an outcome that is spilled to Redis: what the latest run would have written to its row.
#
# It holds only what the run has changed, and only its own error, because the row has the earlier ones. `decode`
# checks every field, so that nothing else can reach a row.

LARGEST_OUTCOME_BYTES = 1_048_576
# An outcome holds the return value as one of its fields.
DEEPEST = MAX_DEPTH + 1
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

    read_fence: that of the row when the run read it. error: what the run adds to the errors of the row, or None.
    lines: the values of each `Line` that it has logged, if its task keeps any.
    """

    fence: int
    read_fence: int
    counted: bool
    values: Mapping[str, Any]
    error: Mapping[str, Any] | None
    lines: Sequence[Sequence[Any]] = ()


def encode(run: Run) -> bytes:
    """Encode what a run has changed; without its log lines, then without its result, if it is too large."""
    record, counted = run.record, run.counted
    found: dict[str, Any] = {"fence": run.lease.fence, "read_fence": run.read_fence, "counted": counted}
    found |= {name: getattr(record, name) for name in COPIED}
    for name in TIMES:
        at: datetime | None = getattr(record, name)
        found[name] = at.isoformat() if at else None
    is_failed = record.state == TaskState.FAILED
    found["error"] = record.errors[-1] if is_failed and counted else None
    found["lines"] = run.log.lines if run.log is not None else []
    if is_failed:
        found["return_value"] = None
    encoded = json_bytes(found)
    if len(encoded) > LARGEST_OUTCOME_BYTES and found["lines"]:
        found["lines"] = []
        encoded = json_bytes(found)
    if len(encoded) <= LARGEST_OUTCOME_BYTES:
        return encoded
    reason = f"the database was unreachable, and {len(encoded):,} bytes are too many to spill to Redis"
    if found["error"]:
        found["error"] = {**found["error"], "message": f"not stored: {reason}", "traceback": ""}
    else:
        found["return_value"] = {"result_not_stored": reason}
    return json_bytes(found)


def decode(encoded: bytes) -> RunOutcome | None:
    """Decode an outcome; None when anything in it is not as `encode` writes it. Fields that it lacks are ignored."""
    found = loads_untrusted(encoded, max_bytes=LARGEST_OUTCOME_BYTES, max_depth=DEEPEST)
    if not isinstance(found, dict) or attempt(plain, found, "outcome", DEEPEST).error is not None:
        return None
    if not all(name in found and holds(found[name]) for name, holds in RULES.items()):
        return None
    times = {name: _time(found[name]) for name in TIMES}
    if not _is_consistent(found, times):
        return None
    values = {**{name: found[name] for name in COPIED}, **times}
    return RunOutcome(found["fence"], found["read_fence"], found["counted"], values, found["error"], found["lines"])


def apply(outcome: RunOutcome, record: TaskRecord) -> None:
    """Change the `TaskRecord` in memory as the run has changed it."""
    for name, value in outcome.values.items():
        setattr(record, name, value)
    if outcome.error is not None:
        append_entry(record, dict(outcome.error))
    if outcome.counted and record.retry_at:
        record.crash_count = 0  # as `lifecycle.fail` does
    # The process of the run lived until it had spilled the outcome.
    record.suspicion = Suspicion.NONE
    record.fence = outcome.fence


# --- the rules


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


def _is_line(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != len(LINE_RULES):
        return False
    return all(holds(item) for holds, item in zip(LINE_RULES, value, strict=True))


def _is_line_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_line, value))


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
    "exception": _is_text(LARGEST_OUTCOME_BYTES),
    "message": _is_text(MESSAGE_CHARACTERS + CUT_NOTE_CHARACTERS),
    "traceback": _is_text(TRACEBACK_CHARACTERS + CUT_NOTE_CHARACTERS),
    "attempt": _is_whole(0, LARGEST_COUNT),
    "worker": _is_text(WORKER_CHARACTERS),
    "started_at": _is_time,
    "failed_at": _is_time,
}
# As the fields of a `Line`.
LINE_RULES: tuple[Callable[[Any], bool], ...] = (
    _is_whole(1, LARGEST_COUNT),
    lambda value: type(value) is float and 0 <= value <= LATEST.timestamp(),
    _is_whole(0, MOST_LEVEL),
    _is_text(LOGGER_CHARACTERS),
    _is_text(MOST_LINE_BYTES),
)
RULES: dict[str, Callable[[Any], bool]] = {
    "fence": _is_whole(1, LARGEST_FENCE),
    "read_fence": _is_whole(0, LARGEST_FENCE),
    "counted": _is_bool,
    "state": _is_one_of(TaskState.SUCCEEDED, TaskState.FAILED),
    "reason": _is_one_of(*FailureReason.values),
    "last_exception": _is_text(CLASS_CHARACTERS),
    "attempt": _is_whole(0, LARGEST_COUNT),
    "worker_ids": _is_worker_list,
    "return_value": _is_anything,
    "error": _is_error,
    "lines": _is_line_list,
    **dict.fromkeys(TIMES, _is_time),
}


# --- Sign what the package leaves in Redis and trusts later. Write access to Redis is not enough to make one.
#
# The key is the project's SECRET_KEY. Like Django's own signatures, these are also accepted when they were made
# with one of SECRET_KEY_FALLBACKS, so that keys can be rotated while tasks run.

# Each purpose has a salt of its own, so that a signature made for one is worth nothing for another.
SALT = "django_asyncq."
ALGORITHM = "sha256"
SIGNATURE_BYTES = 64


def sign(purpose: str, message: bytes) -> bytes:
    """Return the signature of a message: 64 hexadecimal digits.

    Raises: django.core.exceptions.ImproperlyConfigured without a SECRET_KEY; see `conf.has_secret_key`.
    """
    return salted_hmac(SALT + purpose, message, algorithm=ALGORITHM).hexdigest().encode()


def is_signed(purpose: str, message: bytes, signature: bytes) -> bool:
    """Return whether a signature was made with the SECRET_KEY or with one of the SECRET_KEY_FALLBACKS."""
    if not conf.has_secret_key():
        return False
    # An empty fallback would be a key that everybody knows.
    for secret in (settings.SECRET_KEY, *[key for key in settings.SECRET_KEY_FALLBACKS if key]):
        expected = salted_hmac(SALT + purpose, message, secret=secret, algorithm=ALGORITHM).hexdigest()
        if constant_time_compare(signature, expected.encode()):
            return True
    return False


logger = get_logger("django_asyncq.lifecycle")

PURPOSE = "outcome"
LARGEST_BYTES = SIGNATURE_BYTES + LARGEST_OUTCOME_BYTES


class Found(NamedTuple):
    """An outcome that fits a lease and the row. has_waited: for a process that can verify it, in vain."""

    lease: Lease
    row: TaskRecord
    outcome: RunOutcome
    is_genuine: bool
    has_waited: bool


def spill_outcomes(broker: Broker, worker_id: str, runs: Sequence[Run]) -> int:
    """Store in Redis the outcomes of runs that cannot be recorded now; return how many Redis accepted.

    | check    | the fence: an entry that another run holds is left alone                            |
    | row      | nothing yet: `replay_outcomes` writes it, in the reconciler or the next worker      |
    | Redis    | the outcome in the hash of the task; the lease expires at once, so that it is found |
    | announce | nothing yet                                                                         |

    If we die before, the lease expires and the reconciler requeues the task: it runs again.
    Raises: BrokerUnavailable; the same holds then.
    """
    if not conf.has_secret_key():
        count, extra = len(runs), log_extra(*(run.record for run in runs))
        text = "SECRET_KEY is empty, so outcomes cannot be signed: %d; their tasks run again"
        logger.error(text, count, extra=extra)
        return 0
    spilled = 0
    for of_alias, queue, group in by_queue(broker, [run.record for run in runs]):
        ids = {record.id for record in group}
        items = [(run.lease, signed(run)) for run in runs if run.record.id in ids]
        spilled += SpilledOutcomes(of_alias.role, of_alias.alias).write(queue, worker_id, items).count("spilled")
    return spilled


def signed(run: Run) -> bytes:
    """Return the outcome of a finished run as it is stored: its signature, then its JSON."""
    encoded = encode(run)
    # The database is unreachable now. A process that has claimed a task knows the identity.
    message = _message(identity.known(), run.lease.id, run.lease.fence, encoded)
    return sign(PURPOSE, message) + encoded


def _message(database: UUID | None, id: str, fence: int, encoded: bytes) -> bytes:
    """Return what is signed. The identity of the database, the id and the fence each end at a space."""
    return f"{database} {id} {fence} ".encode() + encoded


def replay_outcomes(
    broker: Broker, queue: str, worker_id: str, leases: Sequence[Lease], rows: Mapping[str, TaskRecord]
) -> set[str]:
    """Record outcomes that a worker spilled to Redis; return the ids of the tasks that this settles for now.

    An outcome with a signature that this process cannot verify stays, and its task is postponed once, for one lease:
    another host may have the key. rows: by id; they are not changed.

    | check    | the signature; the fence of the finished run: an outcome is void when another run has begun         |
    | row      | RUNNING or QUEUED → SUCCEEDED or FAILED, as the worker would have written it; RUNNING → QUEUED, if  |
    |          | the task is postponed                                                                               |
    | Redis    | removed, retry or archived; scheduled, if the task is postponed                                     |
    | announce | `task_state_changed`                                                                                |

    If we die in between, the next worker that claims the entry, or the reconciler, does the same again.
    Raises: BrokerUnavailable, django.db.Error.
    """
    ids = [lease.id for lease in leases]
    spilled = SpilledOutcomes(broker.role, broker.alias).read(queue, ids, largest_bytes=LARGEST_BYTES)
    read = [_read(lease, rows[lease.id], spilled[lease.id]) for lease in leases if lease.id in spilled.keys() & rows]
    found = [each for each in read if each is not None]
    runs = [run for each in found if each.is_genuine and (run := _record_outcome(each)) is not None]
    waiting = [each for each in found if not each.is_genuine and not each.has_waited]
    if waiting:
        _wait_for_key(broker, queue, worker_id, waiting)
    if runs:
        acknowledge(broker, worker_id, runs)
        for state in (TaskState.SUCCEEDED, TaskState.FAILED):
            announce([run.record for run in runs if run.record.state == state], TaskState.RUNNING, state)
        count, extra = len(runs), log_extra(*(run.record for run in runs))
        text = "queue %s: recorded %d outcome%s that a worker had spilled to Redis"
        logger.info(text, queue, count, pluralize(count), extra=extra)
    return {run.lease.id for run in runs} | {each.lease.id for each in waiting}


def _read(lease: Lease, row: TaskRecord, spilled: SpilledOutcome) -> Found | None:
    """Read one spilled outcome; None when it is unreadable, or the row shows that it is not of the latest run."""
    size = SIGNATURE_BYTES
    signature, encoded = spilled.outcome[:size], spilled.outcome[size:]
    outcome = decode(encoded)
    if outcome is None:
        logger.warning("task %s: its outcome in Redis is unreadable", lease.id, extra=log_extra(row))
        return None
    # The row decides, because whoever writes to Redis chooses the fence of the entry too.
    # A row that is RETRYING may show the outcome already: the commit's reply was lost, so the outcome was spilled too.
    # A QUEUED one is as the run has read it, or as `_wait_for_key` has left it.
    of_queued = (outcome.read_fence, outcome.fence - 1)
    of_row = row.fence in of_queued if row.state == TaskState.QUEUED else row.fence == outcome.fence
    if outcome.fence > lease.fence or not of_row or row.is_final:
        return None
    is_genuine = is_signed(PURPOSE, _message(identity.own(), lease.id, outcome.fence, encoded), signature)
    return Found(lease, row, outcome, is_genuine, has_waited=spilled.waited_fence == outcome.fence)


def _wait_for_key(broker: Broker, queue: str, worker_id: str, waiting: Sequence[Found]) -> None:
    """Postpone tasks whose outcome this process cannot verify; the row looks as it did before the run was written.

    If we die in between, the task is postponed again, or runs again.
    """
    delay_seconds = conf.current().lease_seconds
    begun = [copy.copy(each.row) for each in waiting if each.row.state == TaskState.RUNNING]
    held = {record.id: record.fence for record in begun}
    for record in begun:
        undo_attempt(record)
        record.state = TaskState.QUEUED
        # Below the fence of the run, so that another host can still record its outcome. Not what the outcome says that
        # the run has read: nobody has verified it yet.
        record.fence -= 1
    writes = [FencedWrite(record, held[record.id], held[record.id]) for record in begun]
    accepted = write_usable(writes, writing_database(TaskRecord)) if writes else set()
    broker.postpone(queue, worker_id, [each.lease for each in waiting], delay_seconds)
    SpilledOutcomes(broker.role, broker.alias).mark_waited(
        queue, {each.lease.id: each.outcome.fence for each in waiting}
    )
    announce([record for record in begun if record.id in accepted], TaskState.RUNNING, TaskState.QUEUED)
    for each in waiting:
        logger.warning(
            "task %s: its outcome in Redis is not signed with this host's SECRET_KEY or SECRET_KEY_FALLBACKS, or it is "
            "that of another database; the task waits %d s for a host that can verify it, then it runs again",
            each.lease.id,
            delay_seconds,
            extra=log_extra(each.row),
        )


def _record_outcome(found: Found) -> Run | None:
    """Write one spilled outcome to its row; return its run, or None when the row refuses it."""
    record, lease = copy.copy(found.row), found.lease
    write = FencedWrite(record, found.outcome.fence, found.row.fence)
    apply(found.outcome, record)
    run = Run(record, lease, counted=found.outcome.counted)
    database = writing_database(TaskRecord)
    if found.outcome.lines:
        # Before the row: if we die in between, this is done again.
        record_log_lines([RunLog.of_lines(record.id, record.fence, record.attempt, found.outcome.lines)])
    try:
        written = write_fenced([write], database)
    except DatabaseError as error:
        if kind_of(error) is not ErrorKind.ROW:
            raise
        logger.exception("task %s: the database refuses its result", lease.id, extra=log_extra(record))
        strip_result(run, str(error))
        written = write_usable([write], database)
    return run if written else None

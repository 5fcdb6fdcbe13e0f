"""One claim of one task, as it goes from the claim to the outcome."""

from __future__ import annotations

import contextvars
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, ClassVar, NamedTuple, Self
from uuid import UUID

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import QuerySet
from django.dispatch import Signal

from .. import conf, gates
from ..broker import Broker, Lease
from ..broker.foreign import read_messages, read_row_fields
from ..broker.message import UndecodableMessage, decode_message
from ..core import django_internals
from ..core.aliases import uses_redis
from ..core.batches import batch_of
from ..core.django_internals import last_commit_hook, savepoint_of_project, waiting_commit_hooks
from ..core.guard import attempt, class_name, get_logger, is_a
from ..core.logs import RUN_LOGGER, about, log_extra
from ..core.names import ROW_ID
from ..core.payload import TRACEBACK_CHARACTERS, class_path, storable_text, text_of
from ..core.run_log import RunLog
from ..core.run_signals import RunSignal
from ..exceptions import (
    Discard,
    ParentFailed,
    TaskCancelled,
    TaskExpired,
    TaskNotRegistered,
    TaskTimeout,
    UpgradeFailed,
    WorkerLost,
)
from ..models import FailureReason, TaskRecord, TaskState
from ..signals import task_failed, task_state_changed, task_state_changing
from ..storage.batches import read_rows
from ..storage.isolation import is_set_aside, usable_rows
from ..storage.rollbacks import Acquired, Release
from ..storage.routing import follow_commit, writing_database
from .counting import counter


@dataclass(slots=True, eq=False)
class Run:
    """One claim of a task.

    read_fence: that of the row when the run read it; `begin` notes it. Whatever changes a row that says QUEUED gives it
    another fence, and so makes the run void.
    counted: whether the run uses up an attempt. begun: whether `begin` was called. written: whether the row says
    RUNNING. pause_seconds: how long an unfinished run is postponed; 0: it is requeued at once.
    members: of a batch: one for each call. Their leases are in no entry: Redis holds the batch alone.
    log: what it logs, if its task keeps any lines. unfit: why it cannot be called; set by its claim.
    """

    record: TaskRecord
    lease: Lease
    read_fence: int = 0
    counted: bool = True
    begun: bool = False
    written: bool = False
    pause_seconds: int = 0
    members: list[Run] = field(default_factory=list)
    log: RunLog | None = None
    unfit: BaseException | None = None


# --- The two signals around every change of a task: one asks whether it may happen, one announces that it did.

logger = get_logger("django_asyncq.lifecycle")


# Receivers of this package: one for each of the two signals, and it acquires and releases the slots of gates.
OWN_RECEIVERS = 1
ENDED = (TaskState.SUCCEEDED, TaskState.FAILED)


def has_receivers(signal: Signal, records: Sequence[TaskRecord]) -> bool:
    """Return whether anybody listens to a change of these tasks: the project does, or a task has a gate."""
    return bool(records) and (len(signal.receivers) > OWN_RECEIVERS or bool([each for each in records if each.gate]))


def ask(records: Sequence[TaskRecord], old: TaskState | None, *, partial: bool, timed: bool = False) -> set[UUID]:
    """Ask every receiver whether the tasks may be queued; return the ids refused (only with `partial`).

    timed: the tasks are retried because their time has come, so no caller could handle a refusal.

    Raises: what a receiver vetoes with. The gate slots acquired before the veto are released first.
    """
    refused: set[UUID] = set()
    if not has_receivers(task_state_changing, records):
        return refused
    try:
        answers = task_state_changing.send(
            sender=TaskRecord, records=list(records), old=old, new=TaskState.QUEUED, partial=partial, timed=timed
        )
    except BaseException:
        (gates.release_uncommitted if old is None else gates.give_back)(records)
        raise
    for _receiver, answer in answers:
        if isinstance(answer, set):
            refused |= answer
    if refused:
        gates.release_uncommitted([record for record in records if record.id in refused])
    return refused


def announce(records: Sequence[TaskRecord], old: TaskState | None, new: TaskState) -> None:
    """Send `task_state_changed` to every receiver. A receiver that raises is logged and changes nothing."""
    if records and new in ENDED:
        counter.count(records, old, new)
    if not has_receivers(task_state_changed, records):
        return
    # In a copy of the context: the thread, which goes on with other tasks, keeps nothing that a receiver sets.
    run, send = contextvars.copy_context().run, task_state_changed.send_robust
    answers, error = attempt(run, send, sender=TaskRecord, records=list(records), old=old, new=new)
    if error is not None:
        # `send_robust` outlives an Exception only, and has not called the receivers after this one.
        logger.error("task_state_changed: a receiver ended the signal", exc_info=error, extra=log_extra(*records))
        if new not in gates.LIVE_STATES:
            gates.release(records)
        return
    for receiver, answer in answers:
        if isinstance(answer, Exception):
            extra = log_extra(*records)
            logger.error("task_state_changed: receiver %r failed", receiver, exc_info=answer, extra=extra)


# --- Write that tasks wait at a gate.


def update_waiting(rows: QuerySet[TaskRecord], records: Sequence[TaskRecord], **changes: Any) -> None:
    """Write the same changes into the rows of tasks, and at which of its gates a task waits that was moved there.

    rows: those that may be changed.
    """
    groups: dict[tuple[Any, ...], list[TaskRecord]] = {}
    for record in records:
        stands = (record.gate, record.queue_limit, record.other_gates) if record.is_moved else ()
        groups.setdefault(stands, []).append(record)
    for stands, group in groups.items():
        where = dict(zip(("gate", "queue_limit", "other_gates"), stands, strict=False))
        rows.filter(id__in=[record.id for record in group]).update(**changes, **where)


# --- Why a task failed: the one door for `errors`, `reason` and `last_exception`, which must agree.
#
# Filters ask for `reason` and `last_exception`, which are indexed or small; they never read the JSON of `errors`.
#
# - `reason` says why the row is FAILED or RETRYING now. In every other state it is NONE: a retry clears it, and a
#   constraint of the database enforces that.
# - `last_exception` is the class path of the last entry of `errors`. It stays as long as the entry does, so a task that
#   succeeded after retries still shows the error of its last failed attempt.

REASONS: dict[type[BaseException], FailureReason] = {
    TaskTimeout: FailureReason.TIMEOUT,
    TaskCancelled: FailureReason.CANCELLED,
    TaskExpired: FailureReason.EXPIRED,
    ParentFailed: FailureReason.PARENT_FAILED,
    WorkerLost: FailureReason.WORKER_LOST,
    TaskNotRegistered: FailureReason.NOT_REGISTERED,
    UpgradeFailed: FailureReason.UPGRADE_FAILED,
    Discard: FailureReason.DISCARDED,
}
CLASS_CHARACTERS = 200


def append_error(record: TaskRecord, exception: BaseException, traceback: str, now: datetime) -> None:
    """Append the error of a failed attempt, in memory; a row that is FAILED gets the reason too.

    The state must have been set before: a lost worker's task may be QUEUED again, with the error and no reason.
    """
    entry = {
        "exception": class_path(exception),
        "message": text_of(exception),
        "traceback": storable_text(traceback, TRACEBACK_CHARACTERS),
        "attempt": record.attempt,
        "worker": record.worker_ids[-1] if record.worker_ids else "",
        "started_at": record.last_attempted_at.isoformat() if record.last_attempted_at else None,
        "failed_at": now.isoformat(),
    }
    if version := conf.current().app_version:
        entry["app_version"] = version
    append_entry(record, entry)
    record.reason = reason_of(exception) if record.state == TaskState.FAILED else FailureReason.NONE


def append_entry(record: TaskRecord, entry: dict[str, Any]) -> None:
    """Append an entry as `append_error` made it, perhaps in another process; the reason comes separately."""
    record.errors = [*record.errors, entry]
    record.last_exception = entry["exception"][:CLASS_CHARACTERS]


def reason_of(exception: BaseException) -> FailureReason:
    """Return the reason that this exception stands for."""
    return next((reason for kind, reason in REASONS.items() if is_a(exception, kind)), FailureReason.EXCEPTION)


# --- Which row an entry in Redis is that of.
#
# An entry is that of a row when the row has its queue and its id. The id is that of the row, except for a message
# that another program has enqueued: its id may be any text, and come again when the first task has finished. So the
# hash of such a task names its row in the field `row`, which is read only for ids that no row has. What has no row
# is that of another program, and is never removed by us: `interop` says what becomes of it.


def load_rows(ids: Iterable[str]) -> dict[str, TaskRecord]:
    """Load rows by their ids; a text that is not a UUID has no row.

    A row that cannot be read is missing too, and `is_set_aside` says so.
    """
    wanted = [id for id in ids if ROW_ID.fullmatch(id)]
    if not wanted:
        return {}
    database = writing_database(TaskRecord)
    return {str(row.id): row for row in usable_rows(wanted, lambda part: read_rows(part, database), database=database)}


def rows_of_entries(broker: Broker, queue: str, ids: Iterable[str]) -> dict[str, TaskRecord]:
    """Load the rows of entries of one queue, by the ids that the entries have in Redis.

    Plain tasks cost one SELECT. For ids that no row has, their hashes are asked, with one script; and for those of
    finished rows, since the entry may be that of another program, which has chosen the id of a row for it.
    Raises: BrokerUnavailable, django.db.Error.
    """
    return look_up(broker, queue, list(ids)).rows


class Found(NamedTuple):
    """Entries of one queue. rows: by the ids of those that have one. missing: ids of those that have none.

    unusable: ids of those whose row cannot be read.
    """

    rows: dict[str, TaskRecord]
    missing: list[str]
    unusable: list[str]


def look_up(broker: Broker, queue: str, wanted: Sequence[str]) -> Found:
    """Do what `rows_of_entries` does, and say of the others why they have no row."""
    loaded = load_rows(wanted)
    # As `is_entry_of` asks; most have no other id in Redis than that of the row.
    rows = {id: row for id, row in loaded.items() if row.queue_name == queue and row.wire_id in (None, id)}
    if finished := [id for id, row in rows.items() if row.finished_at is not None and row.wire_id is None]:
        for id in _of_others(broker, queue, {id: rows[id] for id in finished}):
            del rows[id]
    unknown = [id for id in wanted if id not in rows and not is_set_aside(id)]
    named = read_row_fields(broker, queue, unknown) if unknown else {}
    found = load_rows(named.values())
    for id, row_id in named.items():
        if row_id in found and is_entry_of(found[row_id], queue, id):
            rows[id] = found[row_id]
    without = [id for id in wanted if id not in rows]
    unusable = [id for id in without if is_set_aside(id) or is_set_aside(named.get(id, ""))]
    return Found(rows, [id for id in without if id not in unusable], unusable)


def _of_others(broker: Broker, queue: str, rows: dict[str, TaskRecord]) -> list[str]:
    """Return the ids whose entry is not that of the row: it names another one, or its type is no task of ours."""
    return [
        id
        for id, stored in read_messages(broker, queue, list(rows)).items()
        if stored.row or (stored.data and _type_of(stored.data) not in (None, rows[id].name))
    ]


def _type_of(data: bytes) -> str | None:
    try:
        return decode_message(data).type
    except UndecodableMessage:
        return None


def is_entry_of(row: TaskRecord, queue: str, id: str) -> bool:
    """Return whether an entry is that of a row. Another program may choose the id of any row for its own entry."""
    return row.queue_name == queue and row.redis_id == id


# --- Which tasks wait in a group, in the place of pending, and under which rules the group is taken.


class GroupPlace(NamedTuple):
    """A group of a queue. rules: from `Batch.rules`; "" for a group that only another program takes."""

    name: str
    rules: str


NO_GROUP = GroupPlace("", "")


def place_of(record: TaskRecord) -> GroupPlace | None:
    """Return the group in which a task waits; None for pending.

    Where the code of the task has no batch, or this process lacks it, the task runs by itself.
    """
    if not record.group or record.is_batch:
        return None
    if record.is_remote:
        return GroupPlace(record.group, "")
    batch = batch_of(record.name)
    return None if batch is None else GroupPlace(record.group, batch.rules)


def by_group(records: list[TaskRecord]) -> tuple[list[TaskRecord], dict[GroupPlace, list[TaskRecord]]]:
    """Return the tasks of no group, and the others by their groups. Most have none."""
    if not any(record.group for record in records):
        return records, {}
    plain: list[TaskRecord] = []
    grouped: dict[GroupPlace, list[TaskRecord]] = {}
    for record in records:
        place = place_of(record)
        if place is None:
            plain.append(record)
        else:
            grouped.setdefault(place, []).append(record)
    return plain, grouped


def rules_of_groups(records: Sequence[TaskRecord]) -> dict[str, str]:
    """Return the rules of the groups in which these tasks wait, by the name of the group; "" as in `GroupPlace`."""
    places = [place_of(record) for record in records]
    return {place.name: place.rules for place in sorted(filter(None, places))}


# --- Runs in this process that no worker has: those of the test kit. What stops a run elsewhere finds them here.

_here: dict[UUID, Callable[[], object]] = {}


@contextmanager
def shown_here(id: UUID, ask_to_stop: Callable[[], object]) -> Iterator[None]:
    """Show a run while the block lasts. ask_to_stop: called when its task is cancelled, from any thread."""
    _here[id] = ask_to_stop
    try:
        yield
    finally:
        del _here[id]


def ask_runs_here(records: Iterable[TaskRecord]) -> None:
    """Ask the runs of these tasks to stop, if they are in this process."""
    for record in records:
        if ask_to_stop := _here.get(record.id):
            ask_to_stop()


# --- One call after the commit for all that a transaction has changed.


class CommitHook(ABC):
    """Collects the tasks that one transaction changed, and follows up once after its commit.

    deletes: whether the change is their deletion.
    """

    deletes: ClassVar[bool] = False

    def __init__(self) -> None:
        self.records: list[TaskRecord] = []
        self._is_registered = False
        self._is_called = False
        # What gives it back → what these tasks hold until the commit.
        self._acquired: dict[Release, Acquired] = {}

    @property
    def is_called(self) -> bool:
        """Whether the transaction has committed, so that the hook was called."""
        return self._is_called

    def __call__(self) -> None:
        """Follow up; Django calls this after the commit."""
        self._is_called = True
        for acquired in self._acquired.values():
            acquired.keep()
        follow_commit(self.follow_up)

    @abstractmethod
    def follow_up(self) -> None:
        """Do what follows the commit. Called once."""

    @classmethod
    def of_transaction(cls, connection: BaseDatabaseWrapper) -> Self:
        """Return the hook of this kind that the current transaction or savepoint registered last, or a new one.

        In the transaction of a test case each task has a hook of its own, as it would without that transaction:
        `captureOnCommitCallbacks` calls only the hooks that were registered within it.
        """
        if not connection.in_atomic_block:
            return cls()
        commits = _commits_of_test_case(connection)
        hook = last_commit_hook(connection) if commits is None else commits.last_hook()
        # Not isinstance: a hook of a subclass does something else. A capture leaves the hooks there that it has called.
        if type(hook) is not cls or hook._is_called or savepoint_of_project(connection) == "":
            return cls()
        return hook

    def release_at_rollback(
        self, records: Iterable[TaskRecord], connection: BaseDatabaseWrapper, release: Release = gates.give_back
    ) -> None:
        """Have the gate slots of tasks released if the transaction, or its savepoint, is rolled back."""
        self.give_back_at_rollback([record for record in records if record.gate], connection, release)

    def give_back_at_rollback(
        self,
        holders: Sequence[TaskRecord],
        connection: BaseDatabaseWrapper,
        release: Release,
        *,
        looks_itself: bool = False,
    ) -> None:
        """Have `release` called with tasks that hold something, if the transaction or its savepoint is rolled back.

        looks_itself: as of `Acquired`.
        """
        # Without a transaction the tasks are committed already. What no other process sees needs no release.
        holders = [record for record in holders if uses_redis(record.backend)]
        if not (holders and connection.in_atomic_block):
            return
        if release not in self._acquired:
            self._acquired[release] = Acquired(self, connection, release, looks_itself=looks_itself)
        self._acquired[release].add(holders)

    def register(self, connection: BaseDatabaseWrapper) -> None:
        """Have the hook called after the commit; without a transaction it is called at once."""
        if not self._is_registered:
            self._is_registered = True
            if connection.in_atomic_block and (commits := _commits_of_test_case(connection)) is not None:
                commits.add(self)
                return
            connection.on_commit(self)


def waiting_hooks(connection: BaseDatabaseWrapper, *, of_project_only: bool = False) -> list[CommitHook]:
    """Return the hooks that wait for the end of the open transaction. of_project_only: as `waiting_commit_hooks`."""
    hooks: list[Callable[[], Any]] = waiting_commit_hooks(connection, of_project_only=of_project_only)
    if (commits := _commits_of_test_case(connection)) is not None:
        hooks += commits.hooks
    return [hook for hook in hooks if isinstance(hook, CommitHook) and not hook.is_called]


def _commits_of_test_case(connection: BaseDatabaseWrapper) -> django_internals.Commits | None:
    return None if django_internals.commits_of is None else django_internals.commits_of(connection)


# --- What is said about runs: a log line for each failure, on request one for each start and success, and signals.
#
# The lines have a logger of their own, `django_asyncq.runs`, so that a project can have them without all else that
# is logged at DEBUG. A final failure is one ERROR with its traceback, wherever it is noticed: an error monitor
# counts those lines.

run_logger = get_logger(RUN_LOGGER)

LONGEST_TEXT = 500
# Such a failure was no attempt of its own: the attempt did not count, or there was none.
NO_ATTEMPT = (FailureReason.WORKER_LOST, FailureReason.NOT_REGISTERED, FailureReason.EXPIRED)


def announce_runs(signal: RunSignal, record: TaskRecord, **more: Any) -> None:
    """Send a signal about a run, if anybody listens."""
    text = "task %s: a receiver of a signal about its run failed"
    for receive in signal.direct:
        if error := attempt(receive, record=record, **more).error:
            run_logger.error(text, record.id, exc_info=error, extra=log_extra(record))
    if not signal.receivers:
        return
    try:
        signal.send_robust(TaskRecord, record=record, **more)
    except BaseException:  # `send_robust` outlives an Exception only
        run_logger.exception(text, record.id, extra=log_extra(record))


def announce_apart(signal: RunSignal, record: TaskRecord, **more: Any) -> None:
    """Do so in a copy of the context: the thread goes on with other tasks, and keeps nothing that a receiver sets."""
    contextvars.copy_context().run(announce_runs, signal, record, **more)


def log_started(record: TaskRecord) -> None:
    """Log at DEBUG that a run has started."""
    text = "task %s %s: attempt %d of %d started"
    run_logger.debug(text, record.id, record.name, record.attempt, record.max_attempts, extra=log_extra(record))


def log_returned(record: TaskRecord, seconds: float) -> None:
    """Log at DEBUG that the body of a task has returned. seconds: how long it ran."""
    text = "task %s %s: attempt %d of %d returned after %.3f s"
    of = (record.id, record.name, record.attempt, record.max_attempts)
    run_logger.debug(text, *of, seconds, extra=log_extra(record))


def log_failed(record: TaskRecord, exception: BaseException | None = None, *, has_backoff_failed: bool = False) -> None:
    """Log a failure that the row shows: ERROR when it is final, WARNING when the task is retried.

    exception: adds the traceback, to a WARNING only where the logger takes DEBUG too; None where nothing was raised.
    A task that somebody has cancelled, or that has discarded itself, is no error: that is INFO. So is one that did not
    run because another had failed, which was logged.
    """
    if record.reason == FailureReason.CANCELLED:
        text = "task %s %s: cancelled: %s"
        with about(record):
            run_logger.info(text, record.id, record.name, _last_error(record), extra=log_extra(record))
        return
    if record.is_discarded:
        text, message = "task %s %s: discarded: %s", _one_line(record.errors[-1]["message"])
        with about(record):
            run_logger.info(text, record.id, record.name, message, extra=log_extra(record))
        return
    if record.reason == FailureReason.PARENT_FAILED:
        text, message = "task %s %s: not run: %s", _one_line(record.errors[-1]["message"])
        with about(record):
            run_logger.info(text, record.id, record.name, message, extra=log_extra(record))
        return
    is_final = record.retry_at is None
    with_traceback = is_final or run_logger.isEnabledFor(logging.DEBUG)
    attempt = "" if record.reason in NO_ATTEMPT else f"attempt {record.attempt} of {record.max_attempts} "
    if has_backoff_failed:
        then = "; its backoff failed; it is not retried"
    elif record.retry_at is None:
        then = "; it is not retried"
    else:
        then = f"; next attempt at {_due_second(record.retry_at):%Y-%m-%dT%H:%M:%SZ}"
    with about(record):
        run_logger.log(
            logging.ERROR if is_final else logging.WARNING,
            "task %s %s: %sfailed%s: %s",
            record.id,
            record.name,
            attempt,
            then,
            _last_error(record),
            exc_info=exception if with_traceback else None,
            extra=log_extra(record),
        )
    if is_final:
        announce_apart(task_failed, record, exception=exception)


def log_uncounted(record: TaskRecord, reason: str) -> None:
    """Log at DEBUG that a run used no attempt, and that the task runs again. reason: what the run did."""
    if run_logger.isEnabledFor(logging.DEBUG):
        text = "task %s %s: its run %s; it runs again later, without using an attempt"
        run_logger.debug(text, record.id, record.name, reason, extra=log_extra(record))


def log_cut(record: TaskRecord, error: BaseException) -> None:
    """Log that the database connection of a run was cut: ERROR when the task has failed, else WARNING."""
    then = "it has failed" if record.is_final else "it is queued again, without using an attempt"
    with about(record):
        run_logger.log(
            logging.ERROR if record.is_final else logging.WARNING,
            "task %s %s: its database connection was cut, and nothing was committed; %s: %s",
            record.id,
            record.name,
            then,
            _one_line(f"{class_name(error)}: {text_of(error)}"),
            extra=log_extra(record),
        )
    if record.is_final:
        announce_apart(task_failed, record, exception=error)


def _due_second(retry_at: datetime) -> datetime:
    """Return the whole second at which a retry is due in Redis, which is never earlier than the row says."""
    return retry_at.replace(microsecond=0) + timedelta(seconds=retry_at.microsecond > 0)


def _last_error(record: TaskRecord) -> str:
    """Return the class and the text of the row's last error, as the last line of a traceback has them."""
    error = record.errors[-1]
    return _one_line(f"{error['exception'].removeprefix('builtins.')}: {error['message']}")


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"

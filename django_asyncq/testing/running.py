"""Run the tasks of a test with the worker's own code, on the caller's thread and connections, without Redis."""

from __future__ import annotations

import contextvars
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import cache, partial
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import connections, transaction
from django.db.models import Q
from django.utils import timezone

from .. import compat, lifecycle
from ..aliases import uses_redis
from ..broker import Lease
from ..definitions.moments import moment_after
from ..exceptions import InvalidOption, LeaseLost, TaskNotRegistered, TooManyRuns
from ..gates import row_slots
from ..guard import get_logger, is_a
from ..logs import log_extra
from ..models import FailureReason, TaskRecord, TaskRecordQuerySet, TaskState
from ..pausing.rows import is_paused
from ..registry import load_task_modules, registered
from ..results import result_of
from ..storage import database_clock
from ..storage.routing import is_in_transaction, rows_of, transaction_of, writing_database
from ..worker.execute import outcomes
from ..worker.execute.calling import call_here
from ..worker.execute.completion import Completion
from ..worker.execute.connections import close_if_open_transaction
from ..worker.execute.job import Job, JobPhase, Outcome, StopReason
from ..worker.execute.steps import RunSteps
from ..worker.unconnected import changes_row
from . import faults
from .clock import steady_seconds, travel
from .faults import ProcessDied
from .groups import groups_of
from .transactions import BodyTransactions, as_in_autocommit

logger = get_logger("django_asyncq.testing")

WORKER_ID = "run_tasks"
# How many tasks may run within one another in the mode "immediate"; Python's limit of recursion lies at about 80.
DEEPEST = 30

# The names of the tasks that run around the caller, the outermost first.
_running: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("django_asyncq_running", default=())

# Workers do it when they start. Once in a process: where an app has no tasks, each attempt searches the disk.
load_tasks_once = cache(load_task_modules)


def run_tasks(
    *,
    backend: str = "default",
    queues: Collection[str] | None = None,
    most: int = 1000,
    until: timedelta | datetime | None = None,
    raise_failures: bool = False,
) -> list[compat.TaskResult[Any, Any]]:
    """Run the tasks that are due as a worker would, one at a time, and go on until none is due.

    Tasks of a paused queue, and those that are paused by name, stay as they are.

    backend: an alias in TASKS whose backend is a `TestBackend`. queues: names; None means all. most: how many runs.
    until: run also what becomes due by then, such as retries: the clock is moved on to each next due time, and restored
        at the end. A timedelta counts from now.
    raise_failures: raise what made the first task fail for good, with its traceback; the others then stay QUEUED.
    Returns: one result for each task that has finished, in the order of its last run.
    Raises: TooManyRuns when tasks are still due after `most` runs, InvalidOption.
    """
    if uses_redis(backend):
        raise InvalidOption(
            f"run_tasks(backend={backend!r}): workers run the tasks of this alias; in the settings of the tests write "
            f"TASKS = {{{backend!r}: {{'BACKEND': 'django_asyncq.testing.TestBackend'}}}}"
        )
    if isinstance(queues, str):
        raise InvalidOption(f"run_tasks(queues={queues!r}): give a list of names, such as [{queues!r}]")
    load_tasks_once()
    rows = rows_of(TaskRecord).filter(backend=backend)
    if queues is not None:
        rows = rows.filter(queue_name__in=list(queues))
    runner = Runner(rows, most, raise_failures=raise_failures)
    with travel() as clock:
        if isinstance(until, timedelta):
            until = moment_after("until", clock.now(), until)
        elif until is not None and timezone.is_naive(until) is settings.USE_TZ:
            raise InvalidOption(f"run_tasks(until={until!r}): give a moment as timezone.now() does, or a timedelta")
        with suppress(ProcessDied):
            runner.recover_lost()
            runner.run_due()
            while until is not None and (next_at := runner.next_due_at()) is not None and next_at <= until:
                clock.move(seconds=(next_at - clock.now()).total_seconds())
                runner.run_due()
    return list(runner.finished.values())


def run_enqueued(alias: str, enqueue: Callable[[], list[Any]]) -> list[Any]:
    """Enqueue, and run what was enqueued and is due: now, or in a transaction of the project's code after its commit.

    enqueue: returns results; None for those refused.
    Raises: TooManyRuns when DEEPEST tasks run around the caller, each enqueued by the one before.
    """
    if len(names := _running.get()) >= DEEPEST:
        remedy = 'each has enqueued the next; use the mode "store" and run_tasks() if that is right'
        raise TooManyRuns(DEEPEST, dict(Counter(names).most_common()), remedy)
    database = writing_database(TaskRecord)
    if is_in_transaction(database):
        results = enqueue()
        transaction.on_commit(lambda: _run(alias, results), using=database)
        return results
    with as_in_autocommit():
        results = enqueue()
    _run(alias, results)
    return results


def _run(alias: str, results: Sequence[Any]) -> None:
    """Run the tasks of these results that are due, and have the results show what became of them."""
    enqueued = [result for result in results if result is not None]
    wanted = Q(id__in=[UUID(result.id) for result in enqueued])
    rows = rows_of(TaskRecord).filter(backend=alias)
    if keys := set(rows.filter(wanted).exclude(unique_key="").values_list("unique_key", flat=True)):
        # Those that follow them, which a body may enqueue.
        wanted |= Q(unique_key__in=keys)
    if groups := set(rows.filter(wanted).exclude(group="").values_list("group", flat=True)):
        # A call may be the one that fills its group.
        wanted |= Q(group__in=groups)
    Runner(rows.filter(wanted), most=1000).run_due()
    for result in enqueued:
        with suppress(compat.TaskResultDoesNotExist):  # a body may delete its own row
            result.refresh()


class Runner(RunSteps):
    """Runs tasks on the caller's thread, and writes each outcome at once.

    rows: those that it may run. most: how many runs. finished: the results of the tasks that finished, by id.
    """

    def __init__(self, rows: TaskRecordQuerySet, most: int, *, raise_failures: bool = False) -> None:
        super().__init__(WORKER_ID)
        self.rows = rows
        self.most = most
        self.raise_failures = raise_failures
        self.finished: dict[UUID, compat.TaskResult[Any, Any]] = {}
        self._names: Counter[str] = Counter()
        # A task that waits at a gate asks again only after a run, which may have freed a slot.
        self._may_ask_gates = True
        self._body: BodyTransactions | None = None
        self._life: faults.Life | None = None
        # When it looked last: what was due then has run, or cannot run.
        self._looked_at = database_clock.now()
        self._unreadable: set[UUID] = set()
        # Those that wait for others.
        self._in_groups: set[UUID] = set()

    # --- which

    def run_due(self) -> None:
        """Run what is due until nothing is. Raises: TooManyRuns; with `raise_failures` the error of a task."""
        while row_slots.are_reachable():
            self._look()
            self._move_up()
            self._form_batches()
            record = self._next()
            if record is None:
                return
            if self._names.total() >= self.most:
                raise TooManyRuns(self.most, dict(self._names.most_common()))
            self._names[record.name] += 1
            self._may_ask_gates = True
            # As in a slot: what a task activates, such as a language, vanishes with its context.
            contextvars.copy_context().run(self.run, record)

    def recover_lost(self) -> None:
        """Recover the tasks whose process has died, as the supervisor does of a process with a single task."""
        if not (faults.lost_ids() and row_slots.are_reachable()):
            return
        for id in faults.lost_ids().difference(rows_of(TaskRecord).values_list("id", flat=True)):
            faults.take_lost(id)
        for id in list(self.rows.filter(id__in=faults.lost_ids()).order_by("id").values_list("id", flat=True)):
            lost = faults.take_lost(id)
            blame = lifecycle.Blame(counted=frozenset({str(id)} if lost.has_begun else ()))
            with as_in_autocommit():
                lifecycle.recover_without_redis(WORKER_ID, [lost.lease], reason=faults.REASON, blame=blame)

    def next_due_at(self) -> datetime | None:
        """Return when the next task is due that is not due yet; None when there is none."""
        if not row_slots.are_reachable():
            return None
        times = [
            *self.rows.queued().filter(run_after__isnull=False).values_list("run_after", flat=True),
            *self.rows.retrying().values_list("retry_at", flat=True),
            *self._unfinished().filter(expires_at__isnull=False).values_list("expires_at", flat=True),
            # Throttled tasks that others follow.
            *rows_of(TaskRecord)
            .filter(unique_slot__in=self.rows.filter(after_id__isnull=False).values("unique_key"))
            .values_list("unique_until", flat=True),
        ]
        times += [ripe_at for _, ripe_at in groups_of(self._grouped())]
        return min((each for each in times if each is not None and each > self._looked_at), default=None)

    def _unfinished(self) -> TaskRecordQuerySet:
        return self.rows.filter(finished_at__isnull=True)

    def _look(self) -> None:
        """Close and retry what is due; look again after a retry, since what was retried is due since then."""
        while True:
            self._looked_at = database_clock.now()
            self._close_overdue()
            if not self._retry_due():
                return

    def _close_overdue(self) -> None:
        """Close what was cancelled while it ran, or has not begun in time, as the leader's reconciler does."""
        late = Q(cancel_requested_at__isnull=False) | Q(expires_at__lte=self._looked_at)
        ids = set(self._unfinished().filter(late).values_list("id", flat=True))
        if not ids:
            return
        with as_in_autocommit():
            lifecycle.close_cancelled(ids)
            lifecycle.expire(ids)
        for record in self.rows.filter(id__in=ids):
            self._note(record, None)

    def _retry_due(self) -> int:
        """Retry what is due; return how many tasks are queued now."""
        due = Q(retry_at__lte=self._looked_at)
        if self._may_ask_gates:
            due |= Q(reason=FailureReason.GATE_FULL)
            self._may_ask_gates = False
        if ids := list(self.rows.retrying().filter(due).values_list("id", flat=True)):
            with as_in_autocommit():
                return lifecycle.retry_without_redis(ids)
        return 0

    def _move_up(self) -> None:
        """Let followers move up whose holder is over by the clock of the test, or gone by what the test did to rows."""
        with as_in_autocommit():
            lifecycle.move_up_waiting()

    def _grouped(self) -> list[TaskRecord]:
        """Return the tasks that wait in a group, in the order in which they joined it."""
        is_due = Q(run_after=None) | Q(run_after__lte=self._looked_at)
        # The group of a remote task is another program's.
        rows = self.rows.queued().filter(is_due, after_id=None, batch_id=None, waits_for=None, is_remote=False)
        return [record for record in rows.exclude(group="").order_by("id") if lifecycle.place_of(record) is not None]

    def _form_batches(self) -> None:
        """Make batches of the groups that are ripe by the clock of the test, as the maintenance of a worker does."""
        grouped = self._grouped()
        self._in_groups = {record.id for record in grouped}
        for members, ripe_at in groups_of(grouped):
            if ripe_at is None or ripe_at <= self._looked_at:
                with as_in_autocommit():
                    batches = lifecycle.make_batches(members)
                lifecycle.announce(batches, None, TaskState.QUEUED)

    def _next(self) -> TaskRecord | None:
        """Return the task that a worker would claim first: by priority, then in the order of enqueueing."""
        is_due = Q(run_after=None) | Q(run_after__lte=self._looked_at)
        due = self.rows.queued().filter(is_due, after_id=None, batch_id=None, is_remote=False)
        ids = due.exclude(is_paused()).order_by("-priority", "id").values_list("id", flat=True)
        while (found := ids.exclude(id__in=self._unreadable | self._in_groups).first()) is not None:
            if record := lifecycle.load_rows([str(found)]).get(str(found)):
                return record
            self._unreadable.add(found)
        return None

    # --- one run

    def run(self, record: TaskRecord) -> None:
        """Run one task, and write what became of it. Raises: ProcessDied, as `fail_at` says."""
        _running.set((*_running.get(), record.name))
        run = lifecycle.Run(record, Lease(str(record.id), record.fence + 1))
        with as_in_autocommit():
            if not lifecycle.with_members(None, WORKER_ID, [run]):
                return
        with faults.living(run.lease) as life:
            outer = self._body, self._life
            self._life = life
            try:
                self._run(run)
            finally:
                self._body, self._life = outer

    def _run(self, run: lifecycle.Run) -> None:
        record = run.record
        try:
            task = registered(record.name)
        except TaskNotRegistered as error:
            with as_in_autocommit():
                lifecycle.refuse(None, run, error)
            self._note(record, error)
            return
        job = Job(run, task, time.monotonic(), clock=steady_seconds)
        value, exception = None, None
        self._body = BodyTransactions()
        with lifecycle.shown_here(record.id, partial(job.ask_to_stop, StopReason.CANCELLED)):
            try:
                args, kwargs = self.begin(job)
                value = self.call(job, args, kwargs)
            except BaseException as error:
                # A process that died had committed what its transactions had committed, hooks included.
                if _is_for_caller(error) and not is_a(error, ProcessDied):
                    raise
                exception = error
            exception = self._conclude(exception)
        self._check_life()
        self._lose_lease(run)
        if outcome := self.finish(job, value, exception):
            with as_in_autocommit():
                self.report(outcome)

    def _conclude(self, exception: BaseException | None) -> BaseException | None:
        """Finish the transactions of a body; return its error, or else that of a commit hook."""
        assert self._body is not None  # noqa: S101 - set by `run`
        try:
            self._body.finish()
        except BaseException as error:
            if _is_for_caller(error):
                raise
            if exception is not None:
                logger.exception("a commit hook of a task that failed has failed too")
                return exception
            return error
        finally:
            for connection in connections.all(initialized_only=True):
                if not self._body.holds(connection.alias):
                    close_if_open_transaction(connection)
        return exception

    def _check_life(self) -> None:
        assert self._life is not None  # noqa: S101 - set by `run`
        self._life.check()

    def _lose_lease(self, run: lifecycle.Run) -> None:
        """Have another worker claim the task, if `lose_lease` says so."""
        if faults.loses_lease(run.record.id):
            with as_in_autocommit():
                lifecycle.recover_without_redis(WORKER_ID, [run.lease], reason=lifecycle.LEASE_EXPIRED)

    def enter(self, job: Job) -> None:
        """Note that the task is to blame if the process dies."""
        assert self._life is not None  # noqa: S101 - set by `run`
        self._life.is_shown = True

    def leave(self, job: Job) -> None:
        """Note that it is not."""
        assert self._life is not None  # noqa: S101 - set by `run`
        self._life.is_shown = False

    def completion(self, job: Job) -> Completion:
        """Return the transaction that completes a run, within that of a test case if there is one."""
        assert self._body is not None  # noqa: S101 - set by `run`
        return Completion(job, _claim_row, self.report, partial(self._completing, job.run, self._body))

    @contextmanager
    def _completing(self, run: lifecycle.Run, body: BodyTransactions) -> Iterator[None]:
        self._lose_lease(run)
        with body.completing():
            yield

    def mark_first(self, job: Job) -> None:
        """Write RUNNING, outside what the body does."""
        with as_in_autocommit():
            if _mark(job.run):
                raise LeaseLost(f"task {job.run.record.id}: another run has taken its place")

    def call_plainly(self, job: Job, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call the function, and await what it may return, in the caller's thread."""
        return call_here(job, args, kwargs)

    # --- its outcome

    def report(self, outcome: Outcome) -> None:
        """Write an outcome and send its signals, as the reporter of a worker does."""
        run = outcome.job.run
        try:
            is_lost = self._write(outcome)
        except Exception as error:
            logger.exception("task %s: its outcome cannot be recorded", run.record.id, extra=log_extra(run.record))
            outcomes.fail_unrecorded(outcome, error)
            if not _record(run):
                self._note(run.record, error)
            return
        if not is_lost:
            outcomes.record_logs([outcome.job])
        outcomes.note_recorded()
        if not is_lost:
            outcomes.announce([outcome])
            for member in run.members:
                self._note(member.record, outcome.exception)
            self._note(outcome.job.run.record, outcome.exception)

    def report_log(self, job: Job) -> None:
        """Store the lines of a run that has completed itself."""
        with as_in_autocommit():
            outcomes.record_logs([job])

    def _write(self, outcome: Outcome) -> bool:
        """Write the row unless the task has completed itself; return whether the run lost its row meanwhile."""
        run = outcome.job.run
        if run.record.state == TaskState.RUNNING:
            outcomes.apply(outcome)
        return changes_row(outcome) and outcomes.record_alone(run, lambda: _record(run))

    def _note(self, record: TaskRecord, exception: BaseException | None) -> None:
        """Note the result of a task that has finished. Raises: its error, with `raise_failures`."""
        if not record.is_final:
            return
        self.finished.pop(record.id, None)
        self.finished[record.id] = result_of(record)
        if self.raise_failures and record.state == TaskState.FAILED and exception is not None:
            raise exception


def _record(run: lifecycle.Run) -> list[lifecycle.Run]:
    """Write a run; an error of the database must not break the caller's transaction."""
    with transaction_of(TaskRecord):
        return lifecycle.record_runs([run])


def _mark(run: lifecycle.Run) -> list[lifecycle.Run]:
    """Write RUNNING; an error of the database must not break the caller's transaction."""
    with transaction_of(TaskRecord):
        return lifecycle.mark_running([run])


def _claim_row(job: Job) -> None:
    """Leave the row to the completion: nobody else writes it here."""
    job.phase = JobPhase.COMPLETING


def _is_for_caller(error: BaseException) -> bool:
    """Whether an error is no failure of the task: Ctrl-C, pytest's own, the death of the process, a loop of tasks."""
    pytest = sys.modules.get("pytest")
    own = (pytest.fail.Exception, pytest.skip.Exception, pytest.exit.Exception) if pytest else ()
    return is_a(error, (KeyboardInterrupt, ProcessDied, TooManyRuns, *own))

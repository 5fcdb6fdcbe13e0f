"""Run the tasks of a test with the worker's own code, on the caller's thread and connections, without Redis."""

from __future__ import annotations

import contextvars
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import cache, partial
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import Error as DatabaseError
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q
from django.utils import timezone

from .. import lifecycle
from ..broker import Broker, Lease
from ..control import is_paused
from ..core import compat, fairness
from ..core.aliases import is_redis_used, uses_redis
from ..core.batches import batch_of
from ..core.django_internals import (
    discard_commit_hooks,
    last_hook_number,
    leave_blocks,
    open_blocks,
    open_savepoints,
    outer_wrappers,
    run_commit_hooks,
    savepoint_of_project,
)
from ..core.guard import get_logger, is_a
from ..core.logs import current_task, log_extra
from ..core.registry import load_task_modules, runnable
from ..core.run_log import RunLog
from ..core.schedules import declared_schedules
from ..core.time import moment_after
from ..exceptions import InvalidOption, LeaseLost, TaskNotRegistered, TooManyRuns, WaitTimeout
from ..models import FailureReason, Schedule, TaskRecord, TaskRecordQuerySet, TaskState
from ..models.tasks import IS_READY
from ..observe.waits import refuse_deadlocks, results_by_id, take_outcomes, values_of
from ..results import result_of
from ..scheduling.scheduler import Scheduler
from ..storage import database_clock
from ..storage.routing import is_in_transaction, rows_of, transaction_of, writing_database
from ..worker import outcomes
from ..worker.call import await_here, close_if_open_transaction
from ..worker.complete import Completion
from ..worker.job import Job, JobPhase, Outcome, StopReason
from ..worker.run import RunSteps
from . import failpoints, faults, memory_broker
from .contexts import steady_seconds, travel
from .fair_order import FairOrders
from .faults import ProcessDied
from .quiet import quiet
from .rates import next_start

# --- Which calls the test kit runs together, and when, by the clock of the test. Workers ask Redis.


def groups_of(records: Sequence[TaskRecord]) -> list[tuple[list[TaskRecord], datetime | None]]:
    """Return the next members of each group that run together, and when they are ripe; None: at once, they are enough.

    records: in the order in which they joined.
    """
    groups: dict[tuple[str, str, str], list[TaskRecord]] = {}
    for record in records:
        groups.setdefault((record.name, record.queue_name, record.group), []).append(record)
    found: list[tuple[list[TaskRecord], datetime | None]] = []
    for (name, _, _), members in groups.items():
        batch = batch_of(name)
        assert batch is not None  # noqa: S101 - or it would be in no group
        joined = [max(filter(None, (record.enqueued_at, record.run_after))) for record in members]
        times = [joined[0] + timedelta(seconds=batch.within_seconds)]
        if batch.quiet_seconds is not None:
            times.append(joined[-1] + timedelta(seconds=batch.quiet_seconds))
        found.append((members[: batch.size], None if len(members) >= batch.size else min(times)))
    return found


# --- What a test case's transaction keeps from happening: commits, and the hooks that wait for them.
#
# In a worker a body runs in autocommit. In a TestCase it runs within the transaction of the test, so each body gets
# a savepoint, and its hooks are called when a worker's commit would have called them.


class BodyTransactions:
    """The savepoints of one body, one for each database in which the caller has a transaction.

    Low-level savepoints, because Django refuses a durable block within an atomic one.
    """

    def __init__(self) -> None:
        open_aliases = [each.alias for each in connections.all(initialized_only=True) if each.in_atomic_block]
        self._savepoints = {alias: _create_savepoint(alias) for alias in open_aliases}
        self._blocks = {alias: open_blocks(connections[alias]) for alias in open_aliases}
        self._first_hooks = {alias: _separate_hooks(alias) for alias in open_aliases}

    def finish(self) -> None:
        """Keep what the body has written, as autocommit would, and call its hooks.

        Where a database error broke the transaction, nothing can be kept: it is rolled back to the beginning of the
        body. Raises: what a hook raises.
        """
        for alias, savepoint in self._savepoints.items():
            # What was never committed; a worker closes the connection.
            leave_blocks(connections[alias], self._blocks[alias])
            if not _release(alias, savepoint):
                discard_commit_hooks(connections[alias], self._first_hooks[alias])
        for alias in self._savepoints:
            _run_hooks(alias, self._first_hooks[alias])

    def holds(self, alias: str) -> bool:
        """Whether the caller has a transaction open in a database."""
        return alias in self._savepoints

    @contextmanager
    def completing(self) -> Iterator[None]:
        """Open the transaction that completes a run; its hooks have run when it is left, as after a commit.

        What it has written is kept whatever the rest of the body does.
        """
        database = writing_database(TaskRecord)
        if not self.holds(database):
            with transaction_of(TaskRecord, durable=True):
                yield
            return
        first_hook = _separate_hooks(database)
        with transaction_of(TaskRecord, durable=True):
            yield
            # A commit would check the deferred foreign keys, and fail.
            connections[database].check_constraints()
        transaction.savepoint_commit(self._savepoints[database], database)
        self._savepoints[database] = _create_savepoint(database)
        _run_hooks(database, first_hook)


class CommitsOfTestCase:
    """Calls hooks when the project's outermost block in a test case's transaction ends, as at a commit.

    In Django's own list `captureOnCommitCallbacks` would show them to the test. So this reads the statements of the
    connection: the block ends with RELEASE, and a rollback of a block forgets the hooks that were added in it.
    savepoint: of the block; "" where none is open: as in autocommit hooks are called at once.
    """

    def __init__(self, connection: BaseDatabaseWrapper, savepoint: str) -> None:
        self.savepoint = savepoint
        self._connection = connection
        self._entries: list[tuple[set[str], Callable[[], Any]]] = []

    @property
    def hooks(self) -> list[Callable[[], Any]]:
        """Those that wait."""
        return [hook for _, hook in self._entries]

    def last_hook(self) -> Callable[[], Any] | None:
        """Return the hook that was added last, if that was in the current block."""
        if self._entries and self._entries[-1][0] == open_savepoints(self._connection):
            return self._entries[-1][1]
        return None

    def add(self, hook: Callable[[], Any]) -> None:
        """Have a hook called at the end of the block."""
        if not self.savepoint:
            hook()
            return
        if not self._entries:
            outer_wrappers(self._connection).insert(0, self)
        self._entries.append((open_savepoints(self._connection), hook))

    def __call__(self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any) -> Any:
        """Execute a statement, and see whether it ends the block, or one within it. A wrapper as Django documents."""
        result = execute(sql, params, many, context)
        operations = self._connection.ops
        if sql == operations.savepoint_commit_sql(self.savepoint):
            for hook in self._take():
                hook()
        elif str(sql).startswith("ROLLBACK TO"):
            kept = [
                (savepoints, hook)
                for savepoints, hook in self._entries
                # A rollback of more than the block closes it first.
                if self.savepoint in open_savepoints(self._connection)
                and not any(sql == operations.savepoint_rollback_sql(each) for each in savepoints)
            ]
            if kept:
                self._entries = kept
            else:
                self._take()
        return result

    def _take(self) -> list[Callable[[], Any]]:
        hooks, self._entries = self.hooks, []
        wrappers = outer_wrappers(self._connection)
        if self in wrappers:
            wrappers.remove(self)
        return hooks


def commits_of(connection: BaseDatabaseWrapper) -> CommitsOfTestCase | None:
    """Return what stands for the commits of a connection; None where Django calls the hooks.

    That is outside a test case, where an alias uses Redis, and in a block without a savepoint, whose end nobody sees.
    """
    savepoint = savepoint_of_project(connection)
    if savepoint is None or is_redis_used():
        return None
    for wrapper in list(outer_wrappers(connection)):
        if isinstance(wrapper, CommitsOfTestCase):
            if wrapper.savepoint == savepoint:
                return wrapper
            # Of a block that is open no more, as when the connection was lost in it.
            outer_wrappers(connection).remove(wrapper)
    return CommitsOfTestCase(connection, savepoint)


@contextmanager
def as_in_autocommit() -> Iterator[None]:
    """Keep what the block writes, and call its commit hooks when it is left, also in the transaction of a test case."""
    transactions = BodyTransactions()
    try:
        yield
    finally:
        transactions.finish()


def _separate_hooks(alias: str) -> int:
    """Register a hook that does nothing, and return its number; `_run_hooks` runs those after it.

    It keeps a hook that was registered before from collecting more: that one runs at another time, or has run.
    """
    number = last_hook_number(connections[alias])
    transaction.on_commit(_do_nothing, using=alias)
    return number


def _do_nothing() -> None:
    pass


def _run_hooks(alias: str, number: int) -> None:
    """Run the hooks after the one that `_separate_hooks` has registered, each as in autocommit; forget that one too."""
    try:
        run_commit_hooks(connections[alias], number + 1, as_in_autocommit)
    finally:
        discard_commit_hooks(connections[alias], number)


def _create_savepoint(alias: str) -> str:
    # Django 6.1 has renamed it, and warns about the old name; remove when 5.2 is no longer supported.
    create: Callable[[str], str] | None = getattr(transaction, "savepoint_create", None)
    return create(alias) if create is not None else transaction.savepoint(alias)


def _release(alias: str, savepoint: str) -> bool:
    """Release a savepoint; roll back to it if the transaction is broken, and return False."""
    if not transaction.get_rollback(alias):
        try:
            transaction.savepoint_commit(savepoint, alias)
            return True
        except DatabaseError:
            pass
    transaction.set_rollback(False, alias)
    transaction.savepoint_rollback(savepoint, alias)
    return False


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
        at the end. A timedelta counts from now. Schedules do not fire: `run_schedules` enqueues their tasks.
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
    runner = Runner(backend, rows, most, raise_failures=raise_failures)
    with travel() as clock:
        if isinstance(until, timedelta):
            until = moment_after("until", clock.now(), until)
        elif until is not None and timezone.is_naive(until) is settings.USE_TZ:
            raise InvalidOption(f"run_tasks(until={until!r}): give a moment as timezone.now() does, or a timedelta")
        with suppress(ProcessDied):
            runner.recover_lost()
            runner.run_due()
            while until is not None and (next_at := runner.next_due_at()) is not None and next_at <= until:
                clock.move(next_at - clock.now())
                runner.run_due()
    if until is not None and not rows.exists() and (names := [name for name, _ in declared_schedules()]):
        remedy = "call run_schedules(), move the clock with travel(), and call it again"
        warnings.warn(f"run_tasks(until=…): nothing was enqueued; for the schedules {names} {remedy}", stacklevel=2)
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
        run = partial(_run, alias, results)
        if (commits := commits_of(connections[database])) is not None:
            commits.add(run)
        else:
            transaction.on_commit(run, using=database)
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
    # Those that wait for these, which a body may enqueue too.
    wanted |= Q(workflow_id__in=rows.filter(wanted, workflow_id__isnull=False).values("workflow_id"))
    if groups := set(rows.filter(wanted).exclude(group="").values_list("group", flat=True)):
        # A call may be the one that fills its group.
        wanted |= Q(group__in=groups)
    Runner(alias, rows.filter(wanted), most=1000).run_due()
    for result in enqueued:
        with suppress(compat.TaskResultDoesNotExist):  # a body may delete its own row
            result.refresh()


class Runner(RunSteps):
    """Runs tasks on the caller's thread, and writes each outcome at once.

    alias: in TASKS. rows: those of it that it may run. most: how many runs. finished: the results of the tasks that
    finished, by id.
    """

    def __init__(self, alias: str, rows: TaskRecordQuerySet, most: int, *, raise_failures: bool = False) -> None:
        super().__init__(WORKER_ID)
        self.broker = Broker("worker", alias)
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
        self._fair_orders = FairOrders()
        # When those that wait for their rate are looked at next.
        self._rated: dict[UUID, datetime] = {}

    # --- which

    @quiet()
    def run_due(self) -> None:
        """Run what is due until nothing is. Raises: TooManyRuns; with `raise_failures` the error of a task."""
        while memory_broker.is_reachable():
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

    @quiet()
    def recover_lost(self) -> None:
        """Recover the tasks whose process has died, as the supervisor does of a process with a single task."""
        if not (faults.lost_ids() and memory_broker.is_reachable()):
            return
        for id in faults.lost_ids().difference(rows_of(TaskRecord).values_list("id", flat=True)):
            faults.take_lost(id)
        found = self.rows.filter(id__in=faults.lost_ids()).order_by("id")
        for id, queue in list(found.values_list("id", "queue_name")):
            lost = faults.take_lost(id)
            blame = lifecycle.Blame(alone=frozenset({str(id)} if lost.has_begun else ()))
            self._recover(queue, lost.lease, faults.REASON, blame)

    def next_due_at(self) -> datetime | None:
        """Return when the next task is due that is not due yet; None when there is none."""
        if not memory_broker.is_reachable():
            return None
        times = [
            *self.rows.queued().filter(IS_READY, run_after__isnull=False).values_list("run_after", flat=True),
            *self.rows.retrying().values_list("retry_at", flat=True),
            *self._unfinished().filter(expires_at__isnull=False).values_list("expires_at", flat=True),
            # Throttled tasks that others follow.
            *rows_of(TaskRecord)
            .filter(unique_slot__in=self.rows.filter(after_id__isnull=False).values("unique_key"))
            .values_list("unique_until", flat=True),
        ]
        times += [ripe_at for _, ripe_at in groups_of(self._grouped())]
        times += self._rated.values()
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

    def _retry_due(self) -> bool:
        """Retry what is due, and what waits at a gate; return whether any of these tasks is queued now."""
        due = Q(retry_at__lte=self._looked_at)
        if self._may_ask_gates:
            due |= Q(reason=FailureReason.GATE_FULL)
            self._may_ask_gates = False
        waiting = Q(state=TaskState.FAILED, retry_at__isnull=False) | lifecycle.WAITS
        if ids := list(self.rows.filter(waiting, due).values_list("id", flat=True)):
            with as_in_autocommit():
                lifecycle.retry_waiting(self.broker, [str(id) for id in sorted(ids)])
        return self.rows.queued().filter(reason=FailureReason.NONE, id__in=ids).exists()

    def _move_up(self) -> None:
        """Let followers move up whose holder is over by the clock of the test, or gone by what the test did to rows."""
        with as_in_autocommit():
            lifecycle.move_up_waiting()

    def _grouped(self) -> list[TaskRecord]:
        """Return the tasks that wait in a group, in the order in which they joined it."""
        is_due = Q(run_after=None) | Q(run_after__lte=self._looked_at)
        # The group of a remote task is another program's.
        rows = self.rows.queued().filter(is_due, after_id=None, batch_id=None, batch_size=None, is_remote=False)
        rows = rows.filter(IS_READY, reason=FailureReason.NONE)
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
        """Return the task that a worker would claim first: by priority, then in fair order, then by its age."""
        is_due = Q(run_after=None) | Q(run_after__lte=self._looked_at)
        due = self.rows.queued().filter(is_due, after_id=None, batch_id=None, is_remote=False)
        due = due.exclude(is_paused()).filter(IS_READY, reason=FailureReason.NONE)
        self._rated = {id: at for id, at in self._rated.items() if at > self._looked_at}
        while True:
            found = self._first_id(due.exclude(id__in={*self._unreadable, *self._in_groups, *self._rated}))
            if found is None:
                return None
            if (record := lifecycle.load_rows([str(found)]).get(str(found))) is None:
                self._unreadable.add(found)
            elif (at := next_start(record)) is None:
                return record
            else:
                self._rated[found] = at

    def _first_id(self, due: TaskRecordQuerySet) -> UUID | None:
        if fairness.declared and due.filter(name__in=fairness.declared).exists():
            return self._fair_orders.next_id(due)
        return due.order_by("-priority", "id").values_list("id", flat=True).first()

    # --- one run

    def run(self, record: TaskRecord) -> None:
        """Run one task, and write what became of it. Raises: ProcessDied, as `fail_at` says."""
        _running.set((*_running.get(), record.name))
        run = lifecycle.Run(record, Lease(str(record.id), record.fence + 1))
        with as_in_autocommit():
            if not lifecycle.with_members(self.broker, WORKER_ID, [run]):
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
            task = runnable(record.name, record.version)
        except TaskNotRegistered as error:
            with as_in_autocommit():
                lifecycle.refuse(self.broker, run, error)
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
            self._recover(run.record.queue_name, run.lease, lifecycle.LEASE_EXPIRED)

    def _recover(self, queue: str, lease: Lease, reason: str, blame: lifecycle.Blame | None = None) -> None:
        with as_in_autocommit():
            lifecycle.recover(self.broker, queue, WORKER_ID, [lease], reason=reason, blame=blame)

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

    def mark_within(self, job: Job) -> None:
        """Write RUNNING while the body runs."""
        self.mark_first(job)

    def await_value(self, job: Job, value: Any) -> tuple[Any, BaseException | None]:
        """Await it in the caller's thread."""
        return await_here(job, value)

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
        if not is_lost and run.log is not None:
            lifecycle.record_log_lines([run.log])
        failpoints.reach("report.row_written")
        if not is_lost:
            outcomes.announce([outcome])
            for member in run.members:
                self._note(member.record, outcome.exception)
            self._note(outcome.job.run.record, outcome.exception)

    def report_log(self, log: RunLog) -> None:
        """Store the lines of a run that has completed itself."""
        with as_in_autocommit():
            lifecycle.record_log_lines([log])

    def _write(self, outcome: Outcome) -> bool:
        """Write the row unless the task has completed itself; return whether the run lost its row meanwhile."""
        run = outcome.job.run
        if run.record.state == TaskState.RUNNING:
            outcomes.apply(outcome)
        return outcomes.changes_row(outcome) and outcomes.record_alone(run, lambda: _record(run))

    def _note(self, record: TaskRecord, exception: BaseException | None) -> None:
        """Note the result of a task that has finished. Raises: its error, with `raise_failures`."""
        if not record.is_final:
            return
        self.finished.pop(record.id, None)
        self.finished[record.id] = result_of(record)
        is_failure = record.state == TaskState.FAILED and not record.is_discarded
        if self.raise_failures and is_failure and exception is not None:
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


# --- Enqueue the occurrences of schedules in a test, without a leader and without Redis.


def run_schedules(*, most: int = 1000) -> list[compat.TaskResult[Any, Any]]:
    """Enqueue a task for each occurrence that is due by the clock, as a leader does that was never stopped.

    The first call writes the rows of the schedules that the code declares; their occurrences count from then. So a
    test calls it, moves the clock of `travel`, and calls it again. Each occurrence fires as if the clock showed its
    time, so none is missed. most: how many occurrences.
    Returns: the results of the tasks enqueued, in order; `run_tasks` runs them.
    Raises: InvalidOption when more than `most` occurrences are due.
    """
    load_tasks_once()
    Scheduler().sync()
    fired: list[Any] = []
    while (moment := _next_occurrence()) is not None and moment <= database_clock.now():
        if len(fired) >= most:
            raise InvalidOption(
                f"run_schedules(most={most}): more occurrences are due; move the clock by less, or give a higher number"
            )
        fired += Scheduler(clock=partial(_same, moment)).fire_due().fired
        if _next_occurrence() == moment:
            break  # it could not be fired, and the log says why
    rows = rows_of(TaskRecord).in_bulk([each.task_id for each in fired])
    return [result_of(rows[each.task_id]) for each in fired if each.task_id in rows]


def _same(moment: datetime) -> datetime:
    return moment


def _next_occurrence() -> datetime | None:
    rows = rows_of(Schedule).firing().order_by("next_occurrence_at")
    return rows.values_list("next_occurrence_at", flat=True).first()


# --- `result.wait()` under the test kit: no worker runs the task, so the wait runs what is due.

MOST_RUNS = 1000


def run_until_finished(alias: str, results: Sequence[Any], seconds: float, *, allow_in_task: bool) -> list[Any]:
    """Run what is due, and what becomes due within some seconds, until the tasks have succeeded; return their values.

    The clock is moved on to each next due time, and restored at the end, as `run_tasks(until=…)` does. Within a task
    only the tasks that are waited for run.
    Raises: as `AsyncqResult.wait`; WaitTimeout as soon as nothing more is due in time. TooManyRuns.
    """
    refuse_deadlocks(results, allow_in_task=allow_in_task, in_test_kit=True)
    load_tasks_once()
    by_id = results_by_id(results)
    ids = list(by_id)
    rows = rows_of(TaskRecord).filter(backend=alias)
    runner = Runner(alias, rows if current_task() is None else rows.filter(id__in=ids), MOST_RUNS)
    with travel() as clock:
        until = moment_after("the timeout of wait()", clock.now(), seconds)
        while True:
            finished = _finished(ids)
            if len(finished) < len(ids):
                with suppress(ProcessDied):
                    runner.recover_lost()
                    runner.run_due()
                finished = _finished(ids)
            take_outcomes(by_id, [finished[id] for id in by_id if id in finished])
            if len(finished) == len(ids):
                return values_of(results, finished)
            next_at = runner.next_due_at()
            if next_at is None or next_at > until:
                unfinished = next(id for id in ids if id not in finished)
                raise WaitTimeout(str(unfinished), seconds)
            clock.move(next_at - clock.now())


def _finished(ids: Sequence[UUID]) -> dict[UUID, TaskRecord]:
    """Return the rows of the tasks that are final. Raises: TaskResultDoesNotExist."""
    found = {record.id: record for record in rows_of(TaskRecord).filter(id__in=ids)}
    if missing := [id for id in ids if id not in found]:
        raise compat.TaskResultDoesNotExist(str(missing[0]))
    return {id: record for id, record in found.items() if record.is_final}

"""All errors of django_asyncq, as a tree. This module must not import any other of the project.

AsyncqError
├── InvalidOption          an option or an argument is wrong; nothing was written
│   ├── InvalidArguments   the function does not take the arguments, or JSON cannot represent them exactly
│   ├── InvalidTiming      a schedule's cron expression, time zone, interval or bounds are wrong
│   └── UnknownGate        a gate has no limit
├── EnqueueRefused         the task is valid but cannot be enqueued now; nothing was written
│   ├── DuplicateTask      a task with the same unique key is queued or running
│   ├── QueueFull          the gate is full
│   └── GateUnavailable    Redis is unreachable or refuses this client, so the gate admits nothing
├── BrokerUnavailable      Redis cannot be reached or refuses to write
│   └── BrokerMisconfigured  Redis refuses this client until a setting is corrected; waiting does not help
│       └── BrokerPermissionDenied  the Redis user lacks a right
├── RedisNotForTests       a test run would use a Redis that is not the tests' own
├── DatabaseNotSetUp       the database lacks a table, a column or a privilege; waiting does not help
├── PrefixTaken            the Redis prefix belongs to another database; nothing was written
├── LockLost               another process holds the lock; nothing was written
├── RunAborted             a run failed for a reason outside its function; the row stores it
│   ├── TaskTimeout        the run took longer than the task's timeout, or passed its deadline
│   │   └── SoftTimeout    the run took longer than its soft timeout; raised in the function, which may finish
│   ├── TaskCancelled      the task was cancelled
│   ├── TaskExpired        the task had not begun in time
│   ├── ParentFailed       a task that it waited for has failed, so it did not run
│   ├── WorkerLost         the worker process or its host died
│   ├── LeaseLost          another run owns the task now; not stored
│   ├── InvalidResult      the function returned what JSON cannot hold
│   ├── TaskNotRegistered  the worker's code has no task of this name
│   └── TaskNotRunnable    the function cannot be called, or its body did not run
│       └── UpgradeFailed  the task's `upgrade` made no arguments for this code
├── TransactionEnded       the function ended the transaction that was to complete its task; the row stores it
├── WaitTimeout            a task had not finished when the time to wait was over
├── StillRunning           workers still had tasks of what was paused or drained when the time to wait was over
├── TaskFailed             the task that was waited for has failed
├── TooManyRuns            run_tasks() met tasks that enqueue or retry each other without end
├── Discard                raised by a task's function: there is nothing to do any more; the row stores it
└── RetryRequested         raised by `context.retry()`; never leaves the worker
"""

from __future__ import annotations

import uuid

# Of many ids, an error names so many.
MOST_IDS_SHOWN = 10


class AsyncqError(Exception):
    """Base of all errors of django_asyncq."""


class InvalidOption(AsyncqError, ValueError):
    """An option or an argument of a task is wrong; the message names it and the remedy."""


class InvalidArguments(InvalidOption, TypeError):
    """The task's function does not take the arguments, or JSON cannot represent them exactly.

    Also a TypeError, which Django's own backends raise for such arguments.
    path: where in the arguments, such as `args[0]['when']`; "" when the function does not take them.
    is_json: whether JSON itself could hold the value, which is too large, too deep, or of characters or digits that not
    every database stores.
    """

    def __init__(self, message: str, *, path: str, is_json: bool = False) -> None:
        super().__init__(message)
        self.path = path
        self.is_json = is_json


class InvalidTiming(InvalidOption):
    """A schedule's timing is wrong.

    field: the wrong field of `Schedule`: cron, zone, interval_seconds, starts_at or ends_at.
    """

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class UnknownGate(InvalidOption):
    """The gate has no limit: neither a Gate row nor a queue_limit of the task."""

    def __init__(self, gate: str) -> None:
        super().__init__(
            f"gate {gate!r} has no limit: add a Gate named {gate!r} in the admin, or give the task a queue_limit"
        )
        self.gate = gate


class EnqueueRefused(AsyncqError):
    """The task cannot be enqueued now; nothing was written."""


class DuplicateTask(EnqueueRefused):
    """A task with the same unique key is queued or running, or was enqueued a short time ago.

    task: its name. existing_id: the id of that task; None when it finished or was deleted at this moment, or when
    `enqueue_many` was given two calls with the same key.
    """

    def __init__(self, task: str, existing_id: uuid.UUID | None, *, in_list: bool = False) -> None:
        holder = f"task {existing_id} holds its unique key" if existing_id else "another task held its unique key"
        if in_list:
            holder = "two calls of the list have the same unique key"
        super().__init__(self._text(task, holder))
        self.task = task
        self.existing_id = existing_id

    @staticmethod
    def _text(task: str, holder: str) -> str:
        return (
            f"task {task} was not enqueued: {holder}. "
            f"To get the existing one, to give it the new arguments or to run after it, set on_duplicate to "
            f"'return', 'replace' or 'follow'"
        )


class QueueFull(EnqueueRefused):
    """The gate admits no more tasks.

    gate: its name. limit: maximum of tasks queued or running. occupancy: tasks that hold a slot now.
    waiting: retries that get the next free slots. retry_after: estimated whole seconds until a slot is free for a new
    task, at least 1. paused: whether it admits nothing because a person has paused it; nobody knows for how long, and
    `retry_after` is then when to ask again.
    """

    def __init__(
        self, *, gate: str, limit: int, occupancy: int, retry_after: int, waiting: int = 0, paused: bool = False
    ) -> None:
        others = f", {waiting} waiting to be retried" if waiting else ""
        full = f"is full: {occupancy} of {limit} queued or running{others}; try again in about {retry_after} s"
        super().__init__(f"gate {gate!r} {'is paused: it admits no new task until it is resumed' if paused else full}")
        self.gate = gate
        self.limit = limit
        self.occupancy = occupancy
        self.waiting = waiting
        self.retry_after = retry_after
        self.paused = paused


class GateUnavailable(EnqueueRefused):
    """Redis is unreachable or refuses this client, so the gate admits nothing.

    reason: why, without user name and password.
    """

    def __init__(self, gate: str, reason: str = "Redis is unreachable or refuses to write") -> None:
        super().__init__(
            f"gate {gate!r} cannot be asked: {reason}. "
            f"Enqueue again when the gate can be asked; tasks without a gate are still accepted"
        )
        self.gate = gate
        self.reason = reason


class BrokerUnavailable(AsyncqError):
    """Redis cannot be reached, or refuses the command (out of memory, read-only, loading)."""


class BrokerMisconfigured(BrokerUnavailable):
    """Redis refuses this client until a setting is corrected: its password, database number, TLS or kind of client.

    `runworkers` does not start with it. While a worker runs it is treated as an outage, because a password may be
    changed on the server first. remedy: the setting to correct.
    """

    def __init__(self, server: str, wrong: str, reason: str, remedy: str) -> None:
        super().__init__(f"{server} {wrong} ({reason}). Remedy: correct {remedy}.")
        self.remedy = remedy


class BrokerPermissionDenied(BrokerMisconfigured):
    """The Redis user may not use a command, a key or a channel. The text says what Redis has named."""


class RedisNotForTests(AsyncqError):
    """A test run would use a Redis that is not the tests' own; nothing was sent to it.

    server: its address, without user name and password.
    """

    def __init__(self, server: str) -> None:
        super().__init__(
            f"a test would use {server}, which is not the Redis of the tests. Remedy: without Redis, let TASKS use "
            f"django_asyncq.testing.TestBackend; with a Redis for the tests alone, use the pytest fixture asyncq_redis "
            f"or start a django_asyncq.testing.EmbeddedRedis; if that server is only for tests, as in CI, set "
            f"ASYNCQ['REDIS_IS_FOR_TESTS'] = True in the settings of the tests."
        )
        self.server = server


class DatabaseNotSetUp(AsyncqError):
    """The database lacks a table, a column or a privilege, or refuses the user; waiting does not help.

    reason: the database's error. remedy: what a person must do.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"the database is not set up for this code: {reason}. Remedy: {remedy}.")
        self.reason = reason
        self.remedy = remedy


class PrefixTaken(AsyncqError):
    """The Redis prefix belongs to another database; nothing was written.

    prefix: the KEY_PREFIX, or that of an alias in TASKS. owner: the identity of the database to which it belongs.
    database: that of this one.
    """

    def __init__(self, *, prefix: str, owner: uuid.UUID, database: uuid.UUID) -> None:
        super().__init__(
            f"the Redis prefix {prefix!r} belongs to another database (its identity is {owner}, that of this database "
            f'is {database}). Remedy: give this project an ASYNCQ["KEY_PREFIX"] of its own, or another "prefix" in the '
            f"OPTIONS of the alias in TASKS that has it. If this database replaces the other one, stop the workers of "
            f"the other one and run: manage.py asyncq adopt"
        )
        self.prefix = prefix
        self.owner = owner
        self.database = database


class LockLost(AsyncqError):
    """Another process holds the lock; nothing was written.

    name: of the lock. term: the fencing token of the lost term; None when this process never held the lock.
    """

    def __init__(self, name: str, term: int | None) -> None:
        reason = "this process does not hold it" if term is None else f"term {term} has been superseded"
        super().__init__(f"lock {name!r} is lost: {reason}; nothing was written")
        self.name = name
        self.term = term


class RunAborted(AsyncqError):
    """Base of the errors that make a run fail for a reason outside its function."""


class TaskTimeout(RunAborted):
    """The run took longer than the task's timeout, or passed its deadline."""


class SoftTimeout(TaskTimeout):
    """The run took longer than the task's soft timeout; the function may still clean up and finish."""


class TaskCancelled(RunAborted):
    """The task was cancelled. `context.check()` raises it in the function.

    had_begun: whether the function had been called.
    """

    had_begun = True


class TaskExpired(RunAborted):
    """The task had not begun in time."""


class ParentFailed(RunAborted):
    """A task that this one waited for has failed, was cancelled or was deleted, so this one did not run."""


class WorkerLost(RunAborted):
    """The worker process that ran the task died, its lease expired, or its transaction's connection was cut."""


class RemoteFailure(RunAborted):
    """Another program ran the task, and it failed there; the text is that program's."""


class LeaseLost(RunAborted):
    """Another run owns the task now, so this run must not commit; nothing of it is stored."""


class InvalidResult(RunAborted, TypeError):
    """The function had finished and returned what JSON cannot hold: another type, NaN, a key that is not text.

    The task is not retried. The row stores it as a plain TypeError, as Django's own backends do.
    """


class TaskNotRegistered(RunAborted):
    """The worker's code registers no task of this name."""


class TaskNotRunnable(RunAborted):
    """The row's arguments are not a list and an object, or a part of the function's body did not run.

    The latter when it returned a generator, or an awaitable that cannot be awaited.
    """


class UpgradeFailed(TaskNotRunnable):
    """The task's `upgrade` failed, or what it returned cannot be passed; the row keeps the old arguments."""


class TransactionEnded(AsyncqError):
    """The function itself ended the transaction that was to complete its task, or closed the connection.

    The task is not retried: what was written before a COMMIT of its own stays.
    """


class WaitTimeout(AsyncqError, TimeoutError):
    """A task had not finished when the time to wait was over; it goes on.

    task_id: its id. has_worker: False when no worker was alive.
    """

    def __init__(self, task_id: str, seconds: float, *, has_worker: bool = True) -> None:
        remedy = (
            f"to wait longer, give timeout=; `manage.py asyncq tasks show {task_id}` says what it waits for"
            if has_worker
            else "no worker is alive: start one with `manage.py runworkers`"
        )
        super().__init__(f"task {task_id} had not finished after {seconds:g} s; it goes on. Remedy: {remedy}")
        self.task_id = task_id
        self.has_worker = has_worker


class StillRunning(AsyncqError, TimeoutError):
    """What was paused or drained is in force, but workers still had tasks of it when the time to wait was over.

    ids: of these tasks, as Redis names them.
    """

    def __init__(self, what: str, seconds: float, ids: set[str]) -> None:
        shown = ", ".join([*sorted(ids)[:MOST_IDS_SHOWN], *(["…"] if len(ids) > MOST_IDS_SHOWN else [])])
        state = (
            f"workers still have {len(ids)} of its tasks, which run or may begin: {shown}"
            if ids
            else "workers may not have noticed it"
        )
        super().__init__(f"{what}: {state} (after {seconds:g} s)")
        self.ids = sorted(ids)


class TaskFailed(AsyncqError):
    """The task that was waited for has failed.

    task_id: its id. reason: of the row, a `FailureReason`. exception: class path of its last error, "" for none.
    """

    def __init__(self, task_id: str, *, reason: int, exception: str, text: str) -> None:
        super().__init__(f"task {task_id} has failed: {text}")
        self.task_id = task_id
        self.reason = reason
        self.exception = exception


class TooManyRuns(AsyncqError, AssertionError):
    """Tasks were still due in a test after the most runs; they probably enqueue or retry each other without end.

    runs: how often each task was run, by name, the most frequent first.
    """

    def __init__(
        self, most: int, runs: dict[str, int], remedy: str = "give most= a higher number if that is right"
    ) -> None:
        shown = ", ".join(f"{name} ({count})" for name, count in runs.items())
        super().__init__(f"tasks are still due after {most} runs: {shown}; {remedy}")
        self.runs = runs


class Discard(AsyncqError):
    """Raised by a task's function when there is nothing to do any more, such as for an order that was deleted.

    The task ends as FAILED with the reason *discarded* and this text: it is not retried, and counts as no failure.
    """


class RetryRequested(AsyncqError):
    """Raised by `context.retry()` to stop the run and retry the task.

    delay_seconds: how long to wait; None means the task's backoff. counted: whether the run uses up an attempt.
    """

    def __init__(self, *, delay_seconds: float | None, counted: bool) -> None:
        super().__init__("the task asked for a retry")
        self.delay_seconds = delay_seconds
        self.counted = counted

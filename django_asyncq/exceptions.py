"""Every error of django_asyncq, as a tree. Imports nothing of the project.

AsyncqError
├── InvalidOption          a task option or argument of ours is wrong; nothing was written
│   ├── InvalidArguments   JSON cannot carry the arguments exactly
│   ├── InvalidTiming      a schedule's cron expression, zone, interval or bounds are wrong
│   └── UnknownGate        a gate that has no limit from anywhere
├── EnqueueRefused         the task is right, but may not be queued now; nothing was written
│   ├── QueueFull          the gate is full
│   └── GateUnavailable    the gate cannot be asked, so it is closed
├── BrokerUnavailable      Redis cannot be reached or refuses to write
├── LockLost               another process holds the lock by now; nothing was written
├── RunEnded               how a run ended when its function did not end it; recorded on the row
│   ├── TaskTimeout        the run took longer than its timeout
│   ├── WorkerLost         the process died, or its host did
│   ├── LeaseLost          another run has taken the task over; recorded nowhere
│   ├── TaskNotRegistered  no code of this name here
│   └── TaskNotRunnable    the row's arguments cannot be given to any function
└── RetryRequested         raised by `context.retry()`; never seen outside the worker
"""

from __future__ import annotations


class AsyncqError(Exception):
    """Base of all errors of django_asyncq."""


class InvalidOption(AsyncqError, ValueError):
    """A task option or an argument is wrong; the message names it and the remedy."""


class InvalidArguments(InvalidOption):
    """The arguments cannot be carried by JSON exactly.

    path: where in the arguments, such as `args[0]['when']`.
    """

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class InvalidTiming(InvalidOption):
    """A schedule's timing is wrong.

    field: the field of `Schedule` it is about: cron, zone, interval_seconds, starts_at or ends_at.
    """

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class UnknownGate(InvalidOption):
    """A gate that has neither a Gate row nor a queue_limit on the task."""

    def __init__(self, gate: str) -> None:
        super().__init__(
            f"gate {gate!r} has no limit: add a Gate named {gate!r} in the admin, or give the task a queue_limit"
        )
        self.gate = gate


class EnqueueRefused(AsyncqError):
    """The task may not be queued now; nothing was written."""


class QueueFull(EnqueueRefused):
    """The gate admits no more tasks.

    gate: its name. limit: most tasks queued or running. occupancy: tasks that hold a slot now.
    retry_after: seconds after which a slot may be free, an estimate; whole, at least 1.
    """

    def __init__(self, *, gate: str, limit: int, occupancy: int, retry_after: int) -> None:
        super().__init__(
            f"gate {gate!r} is full: {occupancy} of {limit} queued or running; try again in about {retry_after} s"
        )
        self.gate = gate
        self.limit = limit
        self.occupancy = occupancy
        self.retry_after = retry_after


class GateUnavailable(EnqueueRefused):
    """The gate cannot be asked because Redis is away, so nothing is admitted."""

    def __init__(self, gate: str) -> None:
        super().__init__(
            f"gate {gate!r} cannot be asked: Redis is unreachable or refuses to write. "
            f"Try again when it is back; tasks without a gate are still accepted"
        )
        self.gate = gate


class BrokerUnavailable(AsyncqError):
    """Redis cannot be reached, or refuses the command (out of memory, read-only, loading)."""


class LockLost(AsyncqError):
    """Another process holds the lock by now; nothing was written.

    name: of the lock. term: the number that is over; None when the lock was not held to begin with.
    """

    def __init__(self, name: str, term: int | None) -> None:
        over = "it is not held" if term is None else f"its term {term} is over"
        super().__init__(f"lock {name!r} was to be held here, but {over}; nothing was written")
        self.name = name
        self.term = term


class RunEnded(AsyncqError):
    """Base of what ends a run from outside its function."""


class TaskTimeout(RunEnded):
    """The run took longer than the task's timeout."""


class WorkerLost(RunEnded):
    """The worker process that ran the task died, or its lease ran out."""


class LeaseLost(RunEnded):
    """Another run has taken the task over, so this one may not commit; nothing of it is recorded."""


class TaskNotRegistered(RunEnded):
    """No task of this name is registered in the worker's code."""


class TaskNotRunnable(RunEnded):
    """The row's arguments are not a list and an object, so no function can be called with them."""


class RetryRequested(AsyncqError):
    """Raised by `context.retry()` to end the run and have it tried again.

    delay_seconds: how long to wait, or None for the task's own backoff. counted: whether the run uses up an attempt.
    """

    def __init__(self, *, delay_seconds: float | None, counted: bool) -> None:
        super().__init__("the task asked to be tried again")
        self.delay_seconds = delay_seconds
        self.counted = counted

"""Faults in the test's own process: a run or an enqueue that dies, an unreachable Redis, a lease that is lost.

A process that dies is imitated by an exception. What a real one had committed stays, and nothing more is written; the
next `run_tasks` recovers the task as the supervisor of a killed worker does. `crash_at` kills real processes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from uuid import UUID

from ..broker import Lease
from ..lifecycle import describe_exit
from . import failpoints, memory_broker
from .crashes import AtPoint

REASON = f"{describe_exit(-signal.SIGKILL)}; lost alone"


class ProcessDied(BaseException):
    """The test's process has reached the point of `fail_at`, where another would have died. point: its name."""

    def __init__(self, point: str) -> None:
        super().__init__(f"the process died at the failpoint {point}")
        self.point = point


class Lost(NamedTuple):
    """A run whose process died. has_begun: whether the task may be to blame."""

    lease: Lease
    has_begun: bool


class Life:
    """The process of one run. is_shown: whether the run has begun and has not finished, as a slot table shows it."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.is_shown = False
        self.death: ProcessDied | None = None

    def check(self) -> None:
        """Raise the death of the process again, if the project's code has swallowed it. Raises: ProcessDied."""
        if self.death is not None:
            raise self.death


# The runs of this process that have not finished, each enqueued within the one before.
_lives: list[Life] = []
# What died and is not recovered.
_lost: dict[UUID, Lost] = {}
# Tasks whose lease is lost at their next run, and whether it was.
_leases: dict[UUID, bool] = {}


@contextmanager
def fail_at(point: str, *, nth: int = 1) -> Iterator[None]:
    """Have the block's run, or enqueue, stop at a failpoint as if its process had died there.

    A run stops, and `run_tasks` returns. Its row stays as it is at that moment, and so does what its function has
    committed; an open transaction is rolled back, that of an atomic task and of `complete_on_commit` too. The next
    `run_tasks` recovers the task, with the error `WorkerLost`, and runs it again, as after a real crash. So a test can
    show that a task may run twice. An enqueue of the test itself raises `ProcessDied`.
    point: a name from docs/reference/failpoints.md. nth: the process dies the n-th time it reaches the point; the
        arrivals of the thread that has entered the block count.
    Raises: ValueError for an unknown point, or an nth below 1; AssertionError after a block that has not reached the
    point that often.
    """
    dies = _DieAt(point, nth)
    dies.before = failpoints.arm(dies, point)
    try:
        yield
    finally:
        failpoints.arm(dies.before)
    if dies.reached < nth:
        times = f"{dies.reached} times" if dies.reached != 1 else "once"
        raise AssertionError(
            f"fail_at({point!r}, nth={nth}): the block has reached this point {times}, so nothing died. Without Redis "
            f"and workers, only the points of an enqueue, of a run and of a retry are reached"
        )


class _DieAt(AtPoint):
    """Raise at a point, in one thread. before: the action that was armed before; it is called too."""

    before: Callable[[str], None] | None = None

    def __init__(self, point: str, nth: int) -> None:
        super().__init__(point, nth)
        self._thread = threading.get_ident()

    def __call__(self, name: str) -> None:
        if self.before is not None:
            self.before(name)
        if threading.get_ident() == self._thread:
            super().__call__(name)

    def act(self) -> None:
        """Raises: ProcessDied."""
        error = ProcessDied(self.point)
        for life in _lives:
            life.death = error
        raise error


@contextmanager
def living(lease: Lease) -> Iterator[Life]:
    """Give the life of one run; note its task as lost if the process dies."""
    life = Life(lease)
    _lives.append(life)
    try:
        yield life
        life.check()
    except ProcessDied:
        _lost[UUID(lease.id)] = Lost(lease, life.is_shown)
        raise
    finally:
        _lives.remove(life)


def lost_ids() -> set[UUID]:
    """Return the ids of the tasks that are to be recovered."""
    return set(_lost)


def take_lost(id: UUID) -> Lost:
    """Return a lost run, to be recovered now."""
    return _lost.pop(id)


def lose_redis() -> AbstractContextManager[None]:
    """Have Redis be unreachable in the block.

    Plain tasks are accepted and wait in their rows; an enqueue at a gate raises `GateUnavailable`; `run_tasks` runs
    nothing, as no worker gets a task. After the block everything runs.
    """
    return memory_broker.unreachable()


@contextmanager
def lose_lease(result: Any) -> Iterator[None]:
    """Have another worker claim a task while its function runs for the first time in the block.

    result: of the enqueue. That run then may not store its outcome: its transaction, if it is atomic or in
    `complete_on_commit`, is rolled back with `LeaseLost`, and the task runs again, as after a worker that stood still
    for longer than its lease. Raises: AssertionError after a block in which the task did not run.
    """
    id = UUID(str(result.id))
    _leases[id] = False
    try:
        yield
        was_lost = _leases[id]
    finally:
        del _leases[id]
    if not was_lost:
        raise AssertionError(f"lose_lease(): the block did not run the task {id}")


def loses_lease(id: UUID) -> bool:
    """Return whether the run of a task loses its lease now; it does once."""
    if _leases.get(id, True):
        return False
    _leases[id] = True
    return True

"""Wait until the row says RUNNING, before the function of a unique task is called.

The row of a plain task says QUEUED while a short function runs. A unique task's must not: a call that is enqueued
once the function has read its data would be refused as a duplicate, or replace arguments that are in use. The
reporter writes it, many at a time, and goes on trying while the database is unreachable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future

from django.db import OperationalError

from ..exceptions import LeaseLost
from ..lifecycle import Run
from .job import Job

Mark = Callable[[Iterable[Job]], None]


def is_marked_first(job: Job) -> bool:
    """Whether the row must say RUNNING before the function is called. The transaction of an atomic task sees to it."""
    if job.task.atomic:
        return False
    run = job.run
    return bool(run.record.unique_key or [member for member in run.members if member.record.unique_key])


def wait_until_marked(job: Job, mark: Mark) -> None:
    """Have the row written, and wait in a slot's thread.

    mark: the reporter's. Raises: LeaseLost, TaskCancelled; OperationalError if the timeout passes, and the run is no
    attempt.
    """
    try:
        _marked_by(mark, job).result(job.seconds_left)
    except TimeoutError as error:
        raise _unmarked(job) from error
    _check(job)


async def await_until_marked(job: Job, mark: Mark) -> None:
    """Have the row written, and wait in the event loop. Raises: as `wait_until_marked`."""
    # Not cancelled with the waiting: the reporter sets it.
    waiting = asyncio.shield(asyncio.wrap_future(_marked_by(mark, job)))
    try:
        async with asyncio.timeout(job.seconds_left):
            await waiting
    except TimeoutError as error:
        raise _unmarked(job) from error
    _check(job)


def wait_within_run(job: Job, mark: Mark) -> None:
    """Have the row written while the function runs, and wait in its thread, which is in no transaction.

    Raises: LeaseLost; TaskTimeout.
    """
    try:
        _marked_by(mark, job).result(job.seconds_left)
    except TimeoutError as error:
        raise job.timed_out() from error


def settle_marks(jobs: Sequence[Job], lost: Collection[Run]) -> None:
    """Let the slots of jobs go on that wait for the mark, or say that they must not call the function.

    lost: the runs whose place another run has taken.
    """
    for job in jobs:
        if job.marked is None or job.marked.done():
            continue
        if job.run.written and job.run not in lost:
            job.marked.set_result(None)
        else:
            job.marked.set_exception(LeaseLost(f"task {job.run.record.id}: another run has taken its place"))


def _marked_by(mark: Mark, job: Job) -> Future[None]:
    marked: Future[None] = Future()
    job.marked = marked
    mark([job])
    return marked


def _check(job: Job) -> None:
    """Raise if the run was cancelled meanwhile: nothing could interrupt the wait."""
    if job.is_cancelled:
        raise job.cancelled(had_begun=False)


def _unmarked(job: Job) -> OperationalError:
    """Return the error of a run that could not be written as RUNNING in time: nothing of it has happened."""
    job.unconnected = OperationalError("the database did not accept within the timeout that the task is RUNNING")
    return job.unconnected

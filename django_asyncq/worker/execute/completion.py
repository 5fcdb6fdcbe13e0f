"""A task whose effects and success are one commit: `@task(atomic=True)` and `context.complete_on_commit()`.

The slot's own thread writes the row, in the transaction in which the task writes: with the fence, so that a run that
was taken over has no effects, and as the last statement, so that the row is locked for an instant only. The reporter
must not write that row meanwhile; it hears of the run when all is committed, tells Redis and announces.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from django.db import router, transaction
from django.utils import timezone

from ... import failpoints, lifecycle
from ...context import Ending
from ...exceptions import InvalidOption, LeaseLost, TaskTimeout
from ...models import TaskRecord
from .job import Job, Outcome

logger = logging.getLogger("django_asyncq.worker")


class Completion:
    """The transaction that ends one run.

    withhold: takes the job out of the reporter's hands. on_completed: told once the success is committed.
    """

    def __init__(self, job: Job, withhold: Callable[[Job], None], on_completed: Callable[[Outcome], None]) -> None:
        self.job = job
        self.withhold = withhold
        self.on_completed = on_completed
        self._is_used = False
        self._is_ending = False
        self._is_committed = False

    @contextmanager
    def block(self, result: object = None) -> Iterator[Ending]:
        """Commit what is written in the block, and the run's success, or neither.

        Raises: InvalidOption for a second use; LeaseLost, TaskTimeout: nothing is committed; what the commit raises.
        """
        if self._is_used:
            raise InvalidOption("this run was ended by complete_on_commit() before, or is being ended by it")
        self._is_used = True
        ending = Ending(result)
        database = router.db_for_write(TaskRecord)
        completed = None
        try:
            self._prepare(database)
            with transaction.atomic(using=database, durable=True):
                # The first hook of the transaction: one of the task's own that fails comes after it.
                transaction.on_commit(self._note_commit, using=database)
                yield ending
                self._is_ending = True
                completed = self._write(ending)
        finally:
            self._conclude(completed, ending)

    def refuse(self, result: object = None) -> NoReturn:
        """Stand in for `block` in a task that is atomic. Raises: InvalidOption."""
        raise InvalidOption("complete_on_commit() in a task that is atomic: all of it is such a block")

    def _prepare(self, database: str) -> None:
        """Write that the task runs before the transaction begins: no one could while it lasts, on SQLite."""
        if transaction.get_connection(database).in_atomic_block:
            raise InvalidOption("complete_on_commit() within a transaction: what commits must be the outermost one")
        run = self.job.run
        self.withhold(self.job)
        if not run.written and lifecycle.mark_running([run]):
            raise LeaseLost(f"task {run.record.id}: another run has taken it over")

    def _note_commit(self) -> None:
        self._is_committed = True

    def _write(self, ending: Ending) -> lifecycle.Run:
        """Write the success; refuse it where the run may not end so, so that the transaction is rolled back."""
        job = self.job
        if job.is_over or job.is_overdue(time.monotonic()):
            raise TaskTimeout(f"the task took longer than its timeout of {job.timeout_seconds or 0:g} s")
        completed = lifecycle.complete(job.run, ending.result, timezone.now())
        if completed is None:
            raise LeaseLost(f"task {job.run.record.id}: another run has taken it over; its effects are rolled back")
        failpoints.reach("complete.row_written")
        return completed

    def _conclude(self, completed: lifecycle.Run | None, ending: Ending) -> None:
        job = self.job
        if not self._is_committed:
            # Where the commit itself failed, nobody knows: the reporter looks, and another try must not be made here.
            job.doubtful = completed
            self._is_used = completed is not None
            return
        assert completed is not None  # noqa: S101 - the commit comes after the write
        failpoints.reach("complete.committed")
        if job.is_over:
            logger.error("task %s: its end was reported before it was committed", job.run.record.id)
            return
        job.run = completed
        job.is_completed = True
        finished_at = completed.record.finished_at
        self.on_completed(Outcome(job, finished_at or timezone.now(), ending.result))

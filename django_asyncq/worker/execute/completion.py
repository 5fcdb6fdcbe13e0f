"""A task whose effects and success are one commit: `@task(atomic=True)` and `context.complete_on_commit()`.

The slot's own thread writes the row, in the transaction in which the task writes. It names the fence, so a run that was
recovered meanwhile has no effects. It writes last, so the row is locked for an instant only. The reporter must not
write that row meanwhile; it gets the outcome after the commit, acknowledges it in Redis and announces it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

from django.db import Error as DatabaseError
from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ... import failpoints, lifecycle
from ...context import Ending
from ...exceptions import InvalidOption, InvalidResult, LeaseLost
from ...guard import get_logger, is_a
from ...logs import log_extra
from ...models import TaskRecord
from ...storage import database_clock
from ...storage.errors import ErrorKind, is_connection_limit, kind_of
from ...storage.routing import is_in_transaction, transaction_of, writing_database
from .batch_calls import settle_members, storable
from .cuts import causes_of, is_cut
from .job import Job, JobPhase, Outcome

logger = get_logger("django_asyncq.worker")


def outermost() -> AbstractContextManager[object]:
    """Return the transaction of a run in a slot."""
    return transaction_of(TaskRecord, durable=True)


class Completion:
    """The transaction that completes one run.

    claim_row: makes the reporter leave the job's row to this slot. report: called once the success is committed.
    transaction: opens the outermost transaction; its hooks have run when it is left.
    """

    def __init__(
        self,
        job: Job,
        claim_row: Callable[[Job], None],
        report: Callable[[Outcome], None],
        transaction: Callable[[], AbstractContextManager[object]] = outermost,
    ) -> None:
        self.job = job
        self.claim_row = claim_row
        self.report = report
        self.transaction = transaction
        self._is_used = False
        self._is_committed = False

    @contextmanager
    def block(self, result: object = None) -> Iterator[Ending]:
        """Commit what is written in the block, and the run's success, or neither.

        Raises: InvalidOption for a second use; LeaseLost, TaskTimeout, and TaskCancelled in a run that was reported
        before: nothing is committed; what the commit raises.
        """
        if self._is_used:
            raise InvalidOption("complete_on_commit() was used in this run before, or is being used")
        self._is_used = True
        ending = Ending(result)
        database = writing_database(TaskRecord)
        connection = transaction.get_connection(database)
        completed, used = None, connection.connection
        try:
            self._prepare(connection)
            used = connection.connection
            with self.transaction():
                used = connection.connection
                # The first hook of the transaction, so that a hook of the task that fails comes after it.
                transaction.on_commit(self._note_commit, using=database)
                yield ending
                completed = self._write(ending)
        except BaseException as error:
            if used is None and is_a(error, DatabaseError) and kind_of(error) is ErrorKind.UNAVAILABLE:
                # Nothing has begun. Three such in a row, of a server that is full or restarts, must not fail the task.
                self.job.unconnected = error
            else:
                self._note_cut(error, connection, used)
            raise
        finally:
            self._conclude(completed, ending)

    def refuse(self, result: object = None) -> NoReturn:
        """Stand in for `block` in a task that is atomic. Raises: InvalidOption."""
        raise InvalidOption("complete_on_commit() in a task that is atomic: all of it is such a block")

    def _prepare(self, connection: BaseDatabaseWrapper) -> None:
        """Write RUNNING before the transaction begins: on SQLite nobody else can write while it lasts."""
        if is_in_transaction(connection.alias):
            raise InvalidOption("complete_on_commit() within a transaction: what commits must be the outermost one")
        run = self.job.run
        self.claim_row(self.job)
        self._refuse_if_reported()
        if not run.written and lifecycle.mark_running([run]):
            raise LeaseLost(f"task {run.record.id}: another run has taken its place")

    def _note_commit(self) -> None:
        self._is_committed = True

    def _write(self, ending: Ending) -> lifecycle.Run:
        """Write the success; raise if the run must not succeed, so that the transaction is rolled back."""
        job = self.job
        self._refuse_if_reported()
        if job.is_overdue(job.clock()):
            raise job.timed_out()
        try:
            ending.result = storable(job, ending.result)
        except InvalidResult as error:
            raise InvalidResult(f"{error}; nothing that it wrote in the transaction was committed") from error.__cause__
        now = database_clock.estimate()
        if job.run.record.is_batch:
            settle = partial(self._settle_members, ending.result, now)
            completed = lifecycle.complete(job.run, None, now, settle_members=settle)
            ending.result = None
        else:
            completed = lifecycle.complete(job.run, ending.result, now)
        if completed is None:
            raise LeaseLost(f"task {job.run.record.id}: another run has taken its place; its effects are rolled back")
        failpoints.reach("complete.row_written")
        return completed

    def _settle_members(self, results: Mapping[str, Any], now: datetime, run: lifecycle.Run) -> None:
        settle_members(self.job, run, results, now)

    def _refuse_if_reported(self) -> None:
        """Raise if the run was reported: the event loop cancelled it, and its block is in another thread.

        Raises: TaskTimeout, TaskCancelled.
        """
        if self.job.phase is JobPhase.REPORTED:
            raise self.job.stopped()

    def _note_cut(self, error: BaseException, connection: BaseDatabaseWrapper, used: Any) -> None:
        """Note that the connection was cut; close it, so that the thread makes a new one."""
        if self._is_committed or not is_cut(error, connection, used):
            return
        if any(map(is_connection_limit, causes_of(error))):
            # PgBouncer ends the connection of a client that has waited for one to the server for too long.
            self.job.unconnected = error
        else:
            self.job.cut = error
        with suppress(DatabaseError):
            connection.close()

    def _conclude(self, completed: lifecycle.Run | None, ending: Ending) -> None:
        job = self.job
        if not self._is_committed:
            # If the commit itself failed, nobody knows: the reporter looks the row up, and no other block may follow.
            job.uncertain = completed
            self._is_used = completed is not None
            return
        assert completed is not None  # noqa: S101 - the commit comes after the write
        failpoints.reach("complete.committed")
        if job.phase is JobPhase.REPORTED:
            record = job.run.record
            logger.error("task %s: its outcome was reported before its commit", record.id, extra=log_extra(record))
            return
        job.run = completed
        job.phase = JobPhase.COMPLETED
        self.report(Outcome(job, completed.record.finished_at or database_clock.estimate(), ending.result))

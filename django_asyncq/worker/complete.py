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

from .. import lifecycle
from ..context import Ending
from ..core.batches import BatchItem
from ..core.guard import attempt, get_logger, is_a
from ..core.logs import log_extra
from ..core.payload import storable_result, traceback_of
from ..exceptions import InvalidOption, InvalidResult, LeaseLost, TaskNotRunnable, TransactionEnded, UpgradeFailed
from ..lifecycle.base import log_failed, log_uncounted
from ..models import TaskRecord
from ..results import as_discard, judge_failure
from ..storage import database_clock
from ..storage.errors import ErrorKind, is_connection_limit, kind_of
from ..storage.routing import is_in_transaction, transaction_of, writing_database
from .call import arguments_of_row
from .job import Job, JobPhase, Outcome

# --- The calls of a batch: what its function gets, and what becomes of each of them.
#
# A task with `batch` always gets a list, also when it runs by itself: after its batch has died alone, or because a
# tool has put it into pending. What the function returns says what becomes of each call: None, or a mapping of ids
# to values and exceptions. What it raises is the failure of all of them.

logger = get_logger("django_asyncq.worker")


def arguments_of(job: Job) -> tuple[list[Any], dict[str, Any], str | None]:
    """Return what the function of a job is called with, without its context; and the type of a foreign message.

    Raises: TaskNotRunnable.
    """
    record = job.run.record
    if job.task.batch is None:
        if record.batch_size is not None:
            # Its members then run by themselves.
            job.run.members = []
            raise TaskNotRunnable("the row is that of a batch, and the code of the task has none any more")
        return arguments_of_row(job, record)
    if job.task.upgrade is None or not record.is_batch:
        return [[_item_of(job, run.record) for run in calls_of(job)]], {}, None
    return [_upgraded_items(job)], {}, None


def _upgraded_items(job: Job) -> list[BatchItem]:
    """Return the calls of a batch whose arguments could be upgraded; the others fail alone. Raises: UpgradeFailed."""
    items, unfit = [], dict[str, BaseException]()
    for run in job.run.members:
        try:
            items.append(_item_of(job, run.record))
        except UpgradeFailed as error:
            unfit[str(run.record.id)] = error
    if not items:
        raise next(iter(unfit.values()))
    job.unfit = unfit
    return items


def calls_of(job: Job) -> list[lifecycle.Run]:
    """Return the runs of the calls of a batch: its members, or the task itself when it runs alone."""
    return job.run.members if job.run.record.is_batch else [job.run]


def _item_of(job: Job, record: TaskRecord) -> BatchItem:
    args, kwargs, _ = arguments_of_row(job, record)
    return BatchItem(str(record.id), args, kwargs, record.headers or {}, record.attempt)


def storable(job: Job, value: Any) -> Any:
    """Return what a function has returned as the row can hold it; for a batch, id → value or exception.

    Raises: InvalidResult; for a call that runs alone, also the exception that the function has given for it.
    """
    if job.task.batch is None:
        return storable_result(value)
    unfit = job.unfit or {}
    ids = [id for run in calls_of(job) if (id := str(run.record.id)) not in unfit]
    results = {**dict(_results(job, value, ids)), **unfit}
    if job.run.record.is_batch:
        return results
    alone = results.get(ids[0])
    if isinstance(alone, BaseException):
        raise alone
    return alone


def _results(job: Job, value: Any, ids: list[str]) -> Iterator[tuple[str, Any]]:
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise InvalidResult(
            f"the function of a batch returns None, or a mapping of ids to values and exceptions, not "
            f"{type(value).__qualname__}"
        )
    if unknown := sorted(map(str, set(value) - set(ids)))[:5]:
        extra = log_extra(job.run.record)
        text = "task %s: the function of the batch returned results of calls that it did not get: %s"
        logger.error(text, job.run.record.id, ", ".join(unknown), extra=extra)
    for id in ids:
        found = value.get(id)
        if isinstance(found, BaseException):
            yield id, as_discard(job.task, found)
            continue
        kept, error = attempt(storable_result, found)
        yield id, kept if error is None else error


def settle_members(job: Job, run: lifecycle.Run, results: Mapping[str, Any] | None, now: datetime) -> None:
    """Change the rows of the members of a batch in memory, as the function has returned."""
    for member in run.members:
        result = (results or {}).get(str(member.record.id))
        if isinstance(result, BaseException):
            fail_member(job, member, result, now)
        else:
            lifecycle.succeed(member, result, now)


def fail_member(job: Job, member: lifecycle.Run, exception: BaseException, now: datetime) -> None:
    """Change the row of one member in memory to a failure, with a retry as its task says."""
    is_cancelled = job.is_cancelled
    estimate = database_clock.estimate()
    judgement = judge_failure(job.task, member.record, exception, estimate, is_cancelled=is_cancelled)
    error = judgement.exception
    lifecycle.fail(
        member,
        error,
        traceback_of(error),
        now,
        retry_at=judgement.retry_at,
        counted=judgement.counted,
        is_cancelled=is_cancelled,
    )
    if judgement.counted:
        log_failed(member.record, error, has_backoff_failed=judgement.is_fault)
    else:
        log_uncounted(member.record, "asked to be retried")


def fail_batch(job: Job, exception: BaseException, now: datetime) -> None:
    """Change the row of a batch and those of its members in memory to failures: its function has raised.

    The batch itself is never retried: each member is, as its task says, and joins its group again.
    """
    run = job.run
    for member in run.members:
        fail_member(job, member, exception, now)
    error = _named(exception)
    lifecycle.fail(run, error, traceback_of(error), now, retry_at=None, is_cancelled=job.is_cancelled)
    log_failed(run.record, error)


def _named(exception: BaseException) -> BaseException:
    """Return the exception that a row names: for a result that JSON cannot hold, the framework's own class."""
    if is_a(exception, InvalidResult):
        return TypeError(str(exception)).with_traceback(exception.__traceback__)
    return exception


# --- Find out whether a transaction failed because its connection was cut: by the server, a restart, or the network.
#
# Such a run has left nothing in the database, and its function is not to blame: it is reported as `OutcomeKind.CUT`. A
# function that ends its transaction itself is to blame.

# SQLSTATEs with which a server ends a session: connection failures, shutdown, and the two idle timeouts.
CUTTING_SQLSTATES = ("08", "57P0", "25P03", "25P04")
# Numbers with which MySQL, MariaDB and their driver do: shutdown, KILL (1927), a lost connection, the idle timeouts.
CUTTING_NUMBERS = {1053, 1927, 2006, 2013, 2055, 4031}
# What the databases say to RELEASE when the savepoint is not there, or there is no transaction.
NO_SAVEPOINT_SQLSTATES = {"3B001", "25P01"}
NO_SAVEPOINT_NUMBER = 1305
NO_SAVEPOINT_TEXT = "no such savepoint"
CLOSED = (
    "the task closed its own database connection before its transaction was committed, so its success was not: leave "
    "the connection open, also in what it calls"
)
ENDED = (
    "the task ended its own transaction, so its success was not committed, and what it wrote may be there or not. It "
    "executed ROLLBACK, COMMIT or a statement that commits by itself, or went on after an error with which the "
    "database had rolled it back. Use Django's atomic() within it, and raise an error to roll all of it back"
)
# Not the attributes of the exception, which a class of the project may have replaced.
_cause_of = BaseException.__dict__["__cause__"].__get__
_context_of = BaseException.__dict__["__context__"].__get__


def is_cut(error: BaseException, connection: BaseDatabaseWrapper, used: Any) -> bool:
    """Whether an error of the database, or one that it caused, came from a connection that is dead now.

    connection: outside any transaction, in the thread that uses it. used: the driver's connection that was used.
    """
    found = _database_errors(error)
    if not found:
        return False
    # Django drops a connection that cannot roll back, and may already have made a new one.
    is_dropped = connection.connection is None or (used is not None and connection.connection is not used)
    return is_dropped or any(map(_ends_session, found)) or not connection.is_usable()


@contextmanager
def kept_open(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Let the block write in the open transaction, but not end it.

    A savepoint tells: what ends the transaction removes it, whether that was a statement, the driver, or a commit that
    the database has made of its own. Raises: TransactionEnded; what the block raises.
    """
    used, has_returned = connection.connection, False
    try:
        with transaction.atomic(using=connection.alias):
            yield
            # Else the end of this block would roll back to its savepoint, and the task would succeed without effects.
            connection.validate_no_broken_transaction()
            has_returned = True
    except BaseException as error:
        found = _database_errors(error)
        # Django closes a connection at the end of the outermost block only, so nobody but the block can have done it.
        if found and not any(map(_ends_session, found)) and _is_closed_here(connection, used):
            raise TransactionEnded(CLOSED) from error
        if has_returned and _has_no_savepoint(error):
            raise TransactionEnded(ENDED) from error
        raise


def reason_of(error: BaseException) -> BaseException:
    """Return the error that says best why the connection was cut: that of the server, else the first."""
    found = _database_errors(error)
    return next(filter(_ends_session, found), found[-1] if found else error)


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then what it was raised from, or while handling."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = _cause_of(error) or _context_of(error)


def _database_errors(error: BaseException) -> list[BaseException]:
    """Return the errors of the database among the causes of an error, the latest first."""
    return [each for each in causes_of(error) if is_a(each, DatabaseError)]


def _ends_session(error: BaseException) -> bool:
    code = _code_of(error)
    return code.startswith(CUTTING_SQLSTATES) if isinstance(code, str) else code in CUTTING_NUMBERS


def _has_no_savepoint(error: BaseException) -> bool:
    code = _code_of(error)
    return code == NO_SAVEPOINT_NUMBER or code in NO_SAVEPOINT_SQLSTATES or NO_SAVEPOINT_TEXT in str(_cause_of(error))


def _code_of(error: BaseException) -> str | int | None:
    """Return the SQLSTATE or the number of the server's error; None for one of the driver."""
    original: Any = _cause_of(error)
    code = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
    if isinstance(code, str):
        return code
    number, *text = original.args if is_a(original, Exception) and original.args else (None,)
    # mysqlclient has a number without a text for a connection that was closed on this side.
    return number if type(number) is int and text != [""] else None


def _is_closed_here(connection: BaseDatabaseWrapper, used: Any) -> bool:
    """Whether this process has closed the connection of the open transaction. used: the driver's connection."""
    if connection.closed_in_transaction or connection.connection is None:
        return True
    if connection.vendor == "postgresql":
        # psycopg 3 says `broken` of one that the server has ended; psycopg 2 says 2.
        return bool(used.closed == 1 and not getattr(used, "broken", False))
    if connection.vendor == "mysql":
        return not used.open
    return attempt(getattr, used, "total_changes").error is not None  # SQLite refuses it


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

        Raises: InvalidOption for a second use; TransactionEnded; LeaseLost, TaskTimeout, and TaskCancelled in a run
        that was reported before: nothing is committed; what the commit raises.
        """
        if self._is_used:
            raise InvalidOption("complete_on_commit() was used in this run before, or is being used")
        self._is_used = True
        ending = Ending(result)
        database = writing_database(TaskRecord)
        connection = transaction.get_connection(database)
        completed, used = None, connection.connection
        ended: TransactionEnded | None = None
        try:
            self._prepare(connection)
            used = connection.connection
            with self.transaction():
                used = connection.connection
                # The first hook of the transaction, so that a hook of the task that fails comes after it.
                transaction.on_commit(self._note_commit, using=database)
                try:
                    self.job.is_in_completion = True
                    with kept_open(connection):
                        yield ending
                except TransactionEnded as error:
                    ended = error
                    raise
                completed = self._write(ending)
        except BaseException as error:
            if ended is not None:
                # mysqlclient refuses to close a closed connection once more, and says so instead.
                raise ended from ended.__cause__
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
        job.is_in_completion = False
        if not self._is_committed:
            # If the commit itself failed, nobody knows: the reporter looks the row up, and no other block may follow.
            job.uncertain = completed
            self._is_used = completed is not None
            return
        assert completed is not None  # noqa: S101 - the commit comes after the write
        if job.phase is JobPhase.REPORTED:
            record = job.run.record
            logger.error("task %s: its outcome was reported before its commit", record.id, extra=log_extra(record))
            return
        job.run = completed
        job.phase = JobPhase.COMPLETED
        self.report(Outcome(job, completed.record.finished_at or database_clock.estimate(), ending.result))

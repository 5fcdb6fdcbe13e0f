"""The calls of a batch: what its function gets, and what becomes of each of them.

A task with `batch` always gets a list, also when it runs by itself: after its batch has died twice, or because a tool
has put it into pending. What the function returns says what becomes of each call: None, or a mapping of ids to values
and exceptions. What it raises is the failure of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from ... import lifecycle
from ...definitions.batches import BatchItem
from ...definitions.exception_text import traceback_of
from ...definitions.payload import storable_result
from ...exceptions import InvalidResult, TaskNotRunnable
from ...guard import attempt, get_logger, is_a
from ...logs import log_extra
from ...models import TaskRecord
from ...results import judge_failure
from ...runs import log_failed, log_uncounted
from ...storage import database_clock
from .job import Job

logger = get_logger("django_asyncq.worker")


def arguments_of(job: Job) -> tuple[list[Any], dict[str, Any], str | None]:
    """Return what the function of a job is called with, without its context; and the type of a foreign message.

    Raises: TaskNotRunnable; TaskExpired when no call of a batch may begin any more.
    """
    record = job.run.record
    if job.task.batch is None:
        if record.is_batch:
            # Its members then run by themselves.
            job.run.members = []
            raise TaskNotRunnable("the row is that of a batch, and the code of the task has none any more")
        return _call_of(job, record)
    if record.is_batch:
        _refuse_late(job)
    return [[_item_of(job, run.record) for run in calls_of(job)]], {}, None


def calls_of(job: Job) -> list[lifecycle.Run]:
    """Return the runs of the calls of a batch: its members, or the task itself when it runs alone."""
    return job.run.members if job.run.record.is_batch else [job.run]


def _item_of(job: Job, record: TaskRecord) -> BatchItem:
    args, kwargs, _ = _call_of(job, record)
    return BatchItem(str(record.id), args, kwargs, record.headers or {}, record.attempt)


def _call_of(job: Job, record: TaskRecord) -> tuple[list[Any], dict[str, Any], str | None]:
    """Return the arguments of one call, from its message if another program has written that."""
    if not isinstance(record.args, list) or not isinstance(record.kwargs, dict):
        raise TaskNotRunnable("the row's arguments are not a list and an object")
    if (call := lifecycle.wire_call_of(record, job.task)) is not None:
        return list(call.args), dict(call.kwargs), call.type
    return list(record.args), dict(record.kwargs), None


def _refuse_late(job: Job) -> None:
    """Skip members that have expired while their batch waited in this process; the reconciler closes them."""
    now = database_clock.estimate()
    job.run.members = [each for each in job.run.members if not lifecycle.is_expired(each.record, now)]
    if not job.run.members:
        raise lifecycle.expired()


def storable(job: Job, value: Any) -> Any:
    """Return what a function has returned as the row can hold it; for a batch, id → value or exception.

    Raises: InvalidResult; for a call that runs alone, also the exception that the function has given for it.
    """
    if job.task.batch is None:
        return storable_result(value)
    ids = [str(run.record.id) for run in calls_of(job)]
    results = dict(_results(job, value, ids))
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
            yield id, found
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

"""What a worker does for `context.checkpoint`: the value is in the row when the call returns.

Written by the thread of the body with its own connection, not later by the reporter as progress is. So whatever
happens next, a SIGTERM, `kill -9` or an emptied Redis, the next run repeats the steps since the last checkpoint and no
others; and in a transaction of the body the checkpoint is committed with the step, or with it rolled back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from django.core.exceptions import SynchronousOnlyOperation
from django.db import transaction

from .. import lifecycle
from ..exceptions import LeaseLost
from ..models import TaskRecord
from ..storage.routing import is_in_transaction, writing_database
from .job import Job, JobPhase


def keep(mark: Callable[[Job], object], job: Job, value: Any) -> None:
    """Store a checkpoint of a run, for its context.

    mark: has the row written as RUNNING, and returns once that is done. value: plain JSON values.
    Raises: LeaseLost; django.db.Error; SynchronousOnlyOperation in an event loop.
    """
    if job.phase is JobPhase.COMPLETED or job.is_in_completion:
        # The success clears the checkpoint. A rollback would take a new one back: so the row is not locked for it.
        return
    record = job.run.record
    if job.phase is JobPhase.REPORTED:
        raise LeaseLost(f"task {record.id}: its run is over, and its checkpoint is not stored")
    _refuse_event_loop()
    database = writing_database(TaskRecord)
    if not job.run.written:
        if is_in_transaction(database):
            # Another thread would wait for that transaction, on SQLite even to write another row.
            transaction.on_commit(partial(_mark_once, mark, job), using=database)
        else:
            # A requeue, and whatever closes the task, go by what the run says of its row.
            mark(job)
    if not lifecycle.record_checkpoint(job.run, value):
        raise LeaseLost(f"task {record.id}: another run has taken its place, and its checkpoint is not stored")


def _refuse_event_loop() -> None:
    """Refuse to hold up all coroutines of the process, before anything is written."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise SynchronousOnlyOperation("checkpoint() in async code: write `await context.acheckpoint(…)`")


def _mark_once(mark: Callable[[Job], object], job: Job) -> None:
    if not job.run.written:
        mark(job)

"""Checkpoints: how far a run has come, in the row, so that the next run of the task goes on from there."""

from __future__ import annotations

import copy
from typing import Any

from ..models import TaskRecord, TaskState
from ..storage.batches import CHECKPOINT, FencedWrite, write_fenced
from ..storage.routing import writing_database
from .base import Run


def record_checkpoint(run: Run, value: Any) -> bool:
    """Write the checkpoint of a run, in the caller's transaction if one is open; return whether the run has its task.

    value: plain JSON values, from `payload.checkpoint_value`; None for no checkpoint.

    | check    | the fence: a run that lost its lease changes nothing                     |
    | row      | QUEUED or RUNNING → RUNNING, with the checkpoint                         |
    | Redis    | nothing: it may forget everything, and the next run reads the row anyway |
    | announce | nothing: `mark_running` does                                             |

    If we die in between, the checkpoint is there, or that before it. Raises: django.db.Error.
    """
    # A copy: the outcome of a run that was stopped may be noted in the record now, while its thread goes on.
    record = copy.copy(run.record)
    if record.state != TaskState.RUNNING:
        return False
    record.checkpoint = value
    # Of a batch its own row alone: the members follow when `mark_running` writes that.
    write = FencedWrite(record, run.lease.fence, run.read_fence)
    return record.id in write_fenced([write], writing_database(TaskRecord), changes=(CHECKPOINT,))

"""The two ends of every change: asking whether it may be, and telling that it was."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from uuid import UUID

from .. import gates
from ..models import TaskRecord, TaskState
from ..signals import task_state_changed, task_state_changing

logger = logging.getLogger("django_asyncq.lifecycle")


def ask(records: Sequence[TaskRecord], old: TaskState | None, *, partial: bool, timed: bool = False) -> set[UUID]:
    """Ask every receiver whether the records may be queued; return the ids refused (only with `partial`).

    timed: their time has come, and nobody waits for the answer.

    Raises: whatever a receiver vetoes with; the gate slots taken until then are given back first.
    """
    refused: set[UUID] = set()
    try:
        answers = task_state_changing.send(
            sender=TaskRecord, records=list(records), old=old, new=TaskState.QUEUED, partial=partial, timed=timed
        )
    except BaseException:
        gates.release_uncommitted(records)
        raise
    for _receiver, answer in answers:
        if isinstance(answer, set):
            refused |= answer
    if refused:
        gates.release_uncommitted([record for record in records if record.id in refused])
    return refused


def announce(records: Sequence[TaskRecord], old: TaskState | None, new: TaskState) -> None:
    """Tell every receiver what has changed. A receiver that raises is logged and changes nothing."""
    if not records:
        return
    for receiver, answer in task_state_changed.send_robust(sender=TaskRecord, records=list(records), old=old, new=new):
        if isinstance(answer, Exception):
            logger.error("task_state_changed: receiver %r failed", receiver, exc_info=answer)

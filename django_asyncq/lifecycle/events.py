"""The two signals around every change of a task: one asks whether it may happen, one announces that it did."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from .. import gates
from ..guard import attempt, get_logger
from ..logs import log_extra
from ..models import TaskRecord, TaskState
from ..signals import task_state_changed, task_state_changing

logger = get_logger("django_asyncq.lifecycle")


def ask(records: Sequence[TaskRecord], old: TaskState | None, *, partial: bool, timed: bool = False) -> set[UUID]:
    """Ask every receiver whether the tasks may be queued; return the ids refused (only with `partial`).

    timed: the tasks are retried because their time has come, so no caller could handle a refusal.

    Raises: what a receiver vetoes with. The gate slots acquired before the veto are released first.
    """
    refused: set[UUID] = set()
    try:
        answers = task_state_changing.send(
            sender=TaskRecord, records=list(records), old=old, new=TaskState.QUEUED, partial=partial, timed=timed
        )
    except BaseException:
        gates.give_back(records)
        raise
    for _receiver, answer in answers:
        if isinstance(answer, set):
            refused |= answer
    if refused:
        gates.release_uncommitted([record for record in records if record.id in refused])
    return refused


def announce(records: Sequence[TaskRecord], old: TaskState | None, new: TaskState) -> None:
    """Send `task_state_changed` to every receiver. A receiver that raises is logged and changes nothing."""
    if not records:
        return
    answers, error = attempt(task_state_changed.send_robust, sender=TaskRecord, records=list(records), old=old, new=new)
    if error is not None:
        # `send_robust` outlives an Exception only, and has not called the receivers after this one.
        logger.error("task_state_changed: a receiver ended the signal", exc_info=error, extra=log_extra(*records))
        if new not in gates.LIVE_STATES:
            gates.release(records)
        return
    for receiver, answer in answers:
        if isinstance(answer, Exception):
            extra = log_extra(*records)
            logger.error("task_state_changed: receiver %r failed", receiver, exc_info=answer, extra=extra)

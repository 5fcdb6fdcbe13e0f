"""Move tasks that have become due: delayed tasks to pending, retries through `lifecycle` to QUEUED.

Any number of processes may do this at once: forwarding is one script, and a retry locks its row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from .. import failpoints, lifecycle
from ..broker import Broker
from ..broker.many_queues import queues_with
from ..faults import in_turn
from ..models import TaskRecord
from ..storage.isolation import each_alone, set_aside
from ..storage.routing import writing_database

LARGEST_BATCH = 100
SOURCES: tuple[Literal["scheduled", "retry"], ...] = ("scheduled", "retry")
RETRY = "retry of tasks"


class Forwarded(NamedTuple):
    """How many tasks were moved. next_seconds: until the next task is due, by Redis's clock; None without one."""

    forwarded: int
    retried: int
    next_seconds: float | None


def forward_due(broker: Broker, queues: Iterable[str]) -> Forwarded:
    """Move every task that is due in these queues.

    Raises: BrokerUnavailable, django.db.Error; tasks moved before the error stay moved. What fails in one queue is
    raised after the others are done.
    """
    found: list[Forwarded] = []
    waiting = queues_with(broker, list(queues), "scheduled", "due", "retry")
    sources = [(queue, source) for queue in waiting for source in SOURCES]
    in_turn(sources, lambda each: found.append(_forward(broker, *each)))
    waiting_seconds = [each.next_seconds for each in found if each.next_seconds is not None]
    return Forwarded(
        sum(each.forwarded for each in found),
        sum(each.retried for each in found),
        min(waiting_seconds, default=None),
    )


def _forward(broker: Broker, queue: str, source: Literal["scheduled", "retry"]) -> Forwarded:
    """Move every task that is due in one set of one queue."""
    forwarded = retried = 0
    seen: set[str] = set()
    while True:
        answer = broker.forward(queue, source, LARGEST_BATCH)
        forwarded += answer.moved
        if answer.own:
            failpoints.reach("forward.retry_found")
            retried += _retry_due(broker, queue, answer.own)
        # A retry whose process died between the row and Redis is listed again; the sweep pushes it. Only other tasks
        # are a reason to go on.
        has_news = answer.moved or not seen.issuperset(answer.own)
        seen.update(answer.own)
        if answer.moved + len(answer.own) < LARGEST_BATCH or not has_news:
            return Forwarded(forwarded, retried, answer.next_seconds)


def _retry_due(broker: Broker, queue: str, ids: Sequence[str]) -> int:
    """Retry due tasks; return how many. One that the database refuses leaves Redis until the next sweep."""

    def retry(part: Sequence[str]) -> list[int]:
        return [lifecycle.retry_due(broker, queue, part)]

    retried = sum(each_alone(RETRY, ids, retry, database=writing_database(TaskRecord)))
    if refused := [id for id in ids if set_aside.holds(RETRY, id)]:
        broker.remove(queue, refused)
    return retried

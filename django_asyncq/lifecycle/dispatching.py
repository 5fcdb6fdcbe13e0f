"""How committed rows get into Redis, and what becomes of those that have lost their gate slot meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

from django.utils import timezone

from .. import failpoints, gates
from ..broker import Broker, Entry
from ..exceptions import BrokerUnavailable, GateUnavailable
from ..models import TaskRecord, TaskState
from .events import announce
from .messages import entry_of, later_fence

logger = logging.getLogger("django_asyncq.lifecycle")

# After Redis failed a push, pushes are skipped for so long: a request pays for one time-out, not for each.
BREAKER_SECONDS = 2.0
GATE_RETRY_SECONDS = 5

_breaker_closes_at = 0.0


def dispatch(records: Sequence[TaskRecord], *, again: bool = False) -> int:
    """Confirm the gate slots of committed rows in state 0 and push them to Redis; return how many were pushed.

    again: the rows may have been in Redis before; fences then start above any that can have been handed out.
    Never raises for Redis: what cannot be pushed now is pushed by the reconciler.
    """
    global _breaker_closes_at
    if time.monotonic() < _breaker_closes_at:
        return 0
    try:
        return push(Broker("producer"), records, again=again)
    except (BrokerUnavailable, GateUnavailable) as error:
        _breaker_closes_at = time.monotonic() + BREAKER_SECONDS
        logger.warning("%d tasks not pushed now, the reconciler will: %s", len(records), error)
        return 0


def push(broker: Broker, records: Sequence[TaskRecord], *, again: bool = False) -> int:
    """Do what `dispatch` does, but raise BrokerUnavailable or GateUnavailable when it cannot be done.

    The script that makes a task pending confirms its slot too, where one can reach both. Only a task that has lost its
    slot, or that waits for its time, costs another call.
    """
    confirmed = not broker.reaches_all
    if confirmed:
        records = _confirmed(list(records))
    pushed = 0
    for queue, group in by_queue(records):
        broker.register_queue(queue)
        due, delayed = _by_time(group)
        if due:
            pushed += _make_pending(broker, queue, due, again=again, confirmed=confirmed)
        if delayed := delayed if confirmed else _confirmed(delayed):
            words = broker.schedule(queue, [_entry(record, again=again) for record in delayed])
            pushed += words.count("scheduled")
        failpoints.reach("dispatch.queue_pushed")
    return pushed


def _by_time(records: list[TaskRecord]) -> tuple[list[TaskRecord], list[TaskRecord]]:
    """Return those that are due, and those that wait for their time."""
    timed = [record for record in records if record.run_after is not None]
    if not timed:
        return records, []
    now = timezone.now()
    due: list[TaskRecord] = []
    delayed: list[TaskRecord] = []
    for record in records:
        (due if record.run_after is None or record.run_after <= now else delayed).append(record)
    return due, delayed


def _make_pending(broker: Broker, queue: str, records: list[TaskRecord], *, again: bool, confirmed: bool) -> int:
    """Make tasks of one queue pending; return how many. confirmed: their slots last already."""
    entries = [_entry(record, again=again, confirmed=confirmed) for record in records]
    words = broker.enqueue(queue, entries, again=again)
    pushed = words.count("queued")
    if "no_slot" in words:
        kept = _confirmed([record for record, word in zip(records, words, strict=True) if word == "no_slot"])
        pushed += _make_pending(broker, queue, kept, again=again, confirmed=True) if kept else 0
    return pushed


def _confirmed(records: list[TaskRecord]) -> list[TaskRecord]:
    """Return those whose slots last from now on; who has lost one that others have by now is parked."""
    if not records:
        return records
    lost = gates.confirm(records)
    failpoints.reach("dispatch.slots_confirmed")
    if not lost:
        return records
    park([record for record in records if record.id in lost], timedelta(seconds=GATE_RETRY_SECONDS))
    return [record for record in records if record.id not in lost]


def _entry(record: TaskRecord, *, again: bool, confirmed: bool = True) -> Entry:
    of_gate = gates.keys_for(record) if record.gate and not confirmed else None
    return entry_of(record, fence=later_fence(record) if again else 0, gate=of_gate)


def by_queue(records: Sequence[TaskRecord]) -> Iterator[tuple[str, list[TaskRecord]]]:
    """Group records by queue: one script call each."""
    groups: dict[str, list[TaskRecord]] = {}
    for record in records:
        groups.setdefault(record.queue_name, []).append(record)
    yield from groups.items()


def park(records: Sequence[TaskRecord], delay: timedelta) -> None:
    """Put queued tasks that lost their gate slot aside, to be looked at again.

    | check    | only rows that are still in state 0                          |
    | row      | 0 → 3 with `retry_at`                                        |
    | Redis    | asynq's retry set                                            |
    | announce | `task_state_changed`                                         |

    If we die in between, the reconciler puts the row's entry into the retry set.
    """
    if not records:
        return
    retry_at = timezone.now() + delay
    changed = TaskRecord.objects.filter(id__in=[record.id for record in records], state=TaskState.QUEUED)
    changed.update(state=TaskState.FAILED, retry_at=retry_at)
    failpoints.reach("park.row_written")
    for record in records:
        record.state, record.retry_at = TaskState.FAILED, retry_at
    broker = Broker("producer")
    for queue, group in by_queue(records):
        broker.park(queue, [entry_of(record) for record in group])
    announce(records, TaskState.QUEUED, TaskState.FAILED)

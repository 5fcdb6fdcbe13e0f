"""Dispatch committed rows to Redis, and park those whose gate slot was lost in the meantime."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

from django.template.defaultfilters import pluralize

from .. import failpoints, gates
from ..aliases import through_redis
from ..broker import Broker, Entry
from ..broker.groups import Groups
from ..exceptions import BrokerMisconfigured, BrokerUnavailable, GateUnavailable
from ..guard import get_logger, is_a
from ..logs import log_extra
from ..models import FailureReason, TaskRecord, TaskState
from ..storage import database_clock
from ..storage.routing import rows_of
from ..storage.row_conditions import as_check
from . import prefix_check
from .events import announce
from .group_places import NO_GROUP, GroupPlace, by_group
from .messages import entry_of, later_fence
from .remote_seen import note_grouped

logger = get_logger("django_asyncq.lifecycle")

# After a failed push, pushes are skipped for this time: a request pays for one timeout, not for each of its pushes.
BREAKER_SECONDS = 2.0
# A task that waits at a gate is retried when a slot is released; after this time it is retried in any case, since Redis
# may have forgotten that it waits, or no leader looks at the waiters. The next leader needs LOCK_TTL_SECONDS.
GATE_RETRY_SECONDS = 30
# How long the same failure of pushes is not logged again: it may last for hours, and a busy site pushes all the time.
LOG_AGAIN_SECONDS = 60.0

_breaker_closes_at = 0.0
# The texts of the failures that were logged lately, and when.
_logged: dict[str, float] = {}


def dispatch(records: Sequence[TaskRecord], *, again: bool = False) -> int:
    """Confirm the gate slots of committed QUEUED rows and push them to Redis; return how many were pushed.

    again: Redis may have had the rows before; their fences then start above all that were handed out.
    Rows of an alias without Redis are not pushed. Never raises for Redis: the reconciler pushes what could not be.
    """
    if not records or is_paused():
        return 0
    try:
        return push(Broker("producer", records[0].backend), records, again=again)
    except (BrokerUnavailable, GateUnavailable) as error:
        note_failed_push(error, records)
        return 0


def is_paused() -> bool:
    """Return whether pushes are skipped now, because one has just failed."""
    return time.monotonic() < _breaker_closes_at


def note_failed_push(error: Exception, records: Sequence[TaskRecord]) -> None:
    """Skip pushes for BREAKER_SECONDS, and log that the push of these tasks failed."""
    global _breaker_closes_at
    _breaker_closes_at = time.monotonic() + BREAKER_SECONDS
    # Redis may be another one, or empty, when it answers again.
    prefix_check.forget()
    log_failed_push(error, records, time.monotonic())


def log_failed_push(error: Exception, records: Sequence[TaskRecord], now: float) -> None:
    """Log a failed push, unless one with the same cause was logged within LOG_AGAIN_SECONDS. now: monotonic seconds."""
    text = str(error)
    for each, logged_at in list(_logged.items()):
        if now >= logged_at + LOG_AGAIN_SECONDS:
            _logged.pop(each, None)
    if text in _logged:
        return
    _logged[text] = now
    is_wrong = any(is_a(each, BrokerMisconfigured) for each in (error, error.__cause__))
    level = logging.ERROR if is_wrong else logging.WARNING
    count, text = len(records), "push of %d task%s failed; the reconciler will retry: %s"
    logger.log(level, text, count, pluralize(count), error, extra=log_extra(*records))


def push(broker: Broker, records: Sequence[TaskRecord], *, again: bool = False) -> int:
    """Do what `dispatch` does, but raise BrokerUnavailable or GateUnavailable when that is impossible.

    The script that makes a task pending also confirms its slot, where one script can reach both keys. Only a task that
    is delayed, or has lost its slot, costs a second call.
    """
    # A task that follows another one waits as a row alone, until it moves up. A member of a batch waits in the batch.
    records = [record for record in through_redis(records) if record.after_id is None and not record.is_in_batch]
    if not records:
        return 0
    confirmed = not broker.reaches_all
    if confirmed:
        records = _confirmed(records)
    pushed = 0
    for of_alias, queue, group in by_queue(broker, records):
        if of_alias.register_queue(queue):
            # Redis did not know it: it may have lost its memory, and be another database's now.
            prefix_check.forget()
        due, delayed = _by_time(group)
        due, grouped = by_group(due)
        if due:
            pushed += _make_pending(of_alias, queue, due, again=again, confirmed=confirmed)
        for place, of_group in grouped.items():
            pushed += _add_to_group(of_alias, queue, place, of_group, again=again, confirmed=confirmed)
        if delayed := delayed if confirmed else _confirmed(delayed):
            pushed += _schedule(of_alias, queue, delayed, again=again)
        failpoints.reach("dispatch.queue_pushed")
    return pushed


def _by_time(records: list[TaskRecord]) -> tuple[list[TaskRecord], list[TaskRecord]]:
    """Return the tasks that are due, and those that are delayed."""
    timed = [record for record in records if record.run_after is not None]
    if not timed:
        return records, []
    now = database_clock.now()
    due: list[TaskRecord] = []
    delayed: list[TaskRecord] = []
    for record in records:
        (due if record.run_after is None or record.run_after <= now else delayed).append(record)
    return due, delayed


def _schedule(broker: Broker, queue: str, records: list[TaskRecord], *, again: bool) -> int:
    """Schedule delayed tasks of one queue; return how many. One with a group joins it when it is due."""
    plain, grouped = by_group(records)
    pushed = 0
    for place, of_group in [(NO_GROUP, plain), *grouped.items()]:
        if of_group:
            entries = [_entry(record, again=again) for record in of_group]
            words = broker.schedule(queue, entries, group=place.name, rules=place.rules)
            # Those whose lock another program has go without it.
            if "duplicate" in words:
                entries = _without_locks(entries, words)
                words += broker.schedule(queue, entries, group=place.name, rules=place.rules)
            pushed += words.count("scheduled")
            if place.name:
                note_grouped(of_group)
    return pushed


def _add_to_group(
    broker: Broker, queue: str, place: GroupPlace, records: list[TaskRecord], *, again: bool, confirmed: bool
) -> int:
    """Add tasks of one queue to their group; return how many."""
    if not confirmed:
        records = _confirmed(records)
    if not records:
        return 0
    entries = [_entry(record, again=again) for record in records]
    groups = Groups(broker.role, broker.alias)
    words = groups.add(queue, place.name, entries, rules=place.rules, again=again)
    if "duplicate" in words:
        words += groups.add(queue, place.name, _without_locks(entries, words), rules=place.rules, again=again)
    note_grouped(records)
    return words.count("grouped")


def _make_pending(broker: Broker, queue: str, records: list[TaskRecord], *, again: bool, confirmed: bool) -> int:
    """Make tasks of one queue pending; return how many. confirmed: their slots are confirmed already."""
    entries = [_entry(record, again=again, confirmed=confirmed) for record in records]
    words = broker.enqueue(queue, entries, again=again)
    if "duplicate" in words:
        # Another program has taken the lock meanwhile. The row is committed, so it runs, without the lock.
        words += broker.enqueue(queue, _without_locks(entries, words), again=again)
    pushed = words.count("queued")
    if "no_slot" in words:
        kept = _confirmed([record for record, word in zip(records, words, strict=False) if word == "no_slot"])
        pushed += _make_pending(broker, queue, kept, again=again, confirmed=True) if kept else 0
    return pushed


def _without_locks(entries: Sequence[Entry], words: Sequence[str]) -> list[Entry]:
    """Return the entries whose lock another program holds, without it."""
    return [entry._replace(unique_key="") for entry, word in zip(entries, words, strict=True) if word == "duplicate"]


def _confirmed(records: list[TaskRecord]) -> list[TaskRecord]:
    """Confirm the slots of tasks; park the tasks whose slot is lost at a full gate, and return the others."""
    if not records:
        return records
    lost = gates.confirm(records)
    failpoints.reach("dispatch.slots_confirmed")
    if not lost:
        return records
    park([record for record in records if record.id in lost], timedelta(seconds=GATE_RETRY_SECONDS))
    return [record for record in records if record.id not in lost]


def park_lost(records: Sequence[TaskRecord]) -> None:
    """Make the provisional slots of QUEUED tasks last; park those whose slot was lost meanwhile at a full gate.

    Raises: GateUnavailable, BrokerUnavailable.
    """
    _confirmed(list(records))


def _entry(record: TaskRecord, *, again: bool, confirmed: bool = True) -> Entry:
    of_gate = gates.keys_for(record) if record.gate and not confirmed else None
    return entry_of(record, fence=later_fence(record) if again else record.fence, gate=of_gate)


def by_queue(broker: Broker, records: Sequence[TaskRecord]) -> Iterator[tuple[Broker, str, list[TaskRecord]]]:
    """Group tasks by alias and queue: one script call each. broker: of any alias; yields that of the group's alias."""
    groups: dict[tuple[str, str], list[TaskRecord]] = {}
    for record in records:
        groups.setdefault((record.backend, record.queue_name), []).append(record)
    for (alias, queue), group in groups.items():
        yield broker.of_alias(alias), queue, group


def park(records: Sequence[TaskRecord], delay: timedelta) -> None:
    """Put queued tasks that lost their gate slot aside; they are retried when it has a free slot, or after `delay`.

    | check    | only rows that are still QUEUED                              |
    | row      | QUEUED → RETRYING (FAILED with `retry_at`), reason GATE_FULL |
    | Redis    | asynq's retry set; `gates.confirm` has let them wait         |
    | announce | `task_state_changed`                                         |

    If we die in between, the reconciler puts the row's entry into the retry set.
    """
    if not records:
        return
    retry_at = database_clock.now() + delay
    changed = rows_of(TaskRecord).filter(as_check(state=TaskState.QUEUED), id__in=[record.id for record in records])
    changed.update(state=TaskState.FAILED, reason=FailureReason.GATE_FULL, retry_at=retry_at)
    failpoints.reach("park.row_written")
    for record in records:
        record.state, record.reason, record.retry_at = TaskState.FAILED, FailureReason.GATE_FULL, retry_at
    for broker, queue, group in by_queue(Broker("producer", records[0].backend), records):
        broker.park(queue, [entry_of(record) for record in group])
    announce(records, TaskState.QUEUED, TaskState.FAILED)

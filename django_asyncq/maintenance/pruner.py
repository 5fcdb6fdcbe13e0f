"""What has been kept for long enough goes: ended tasks, occurrences, start-up runs, and what Go workers completed.

Runs beside live traffic, so it never does much at a time: pages are walked along the primary key, a batch is one short
transaction, and a pass is followed by a rest. Nothing goes early; how late it goes is a matter of load.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.db import router
from django.db.models import BooleanField, Case, Exists, ExpressionWrapper, OuterRef, Q, QuerySet, Value, When
from django.utils import timezone

from .. import conf, lifecycle, registry
from ..broker import Broker
from ..definitions.retention_policy import Outcome, Retention, Rules, current_rules
from ..models import Occurrence, StartupRun, TaskRecord, TaskState

logger = logging.getLogger("django_asyncq.maintenance.pruner")

# Of PostgreSQL's primary key 5,000 rows are read in some ms; a row that stays costs about a microsecond.
ROWS_PER_PAGE = 5000
# 500 rows are gone in about 15 ms: so long is anybody kept waiting who wants one of them (on SQLite: who writes).
ROWS_PER_BATCH = 500
COMPLETED_PER_CALL = 100
# The caller reconciles in the same thread, and must be able to stop; neither may wait for long.
BUDGET_SECONDS = 0.2
# A pass that works for 10 s is followed by 200 s of rest: pruning takes no more than a twentieth of one connection.
REST_FACTOR = 20

OUTCOMES: tuple[tuple[TaskState, Outcome], ...] = ((TaskState.SUCCEEDED, "succeeded"), (TaskState.FAILED, "failed"))
LOWEST_ID = UUID(int=0)
HIGHEST_ID = UUID(int=2**128 - 1)


class Pruned(NamedTuple):
    """How many of each kind went. completed: entries of Redis, not rows."""

    tasks: int = 0
    occurrences: int = 0
    startup_runs: int = 0
    completed: int = 0

    def plus(self, other: Pruned) -> Pruned:
        """Return the sums."""
        return Pruned(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Pruner:
    """Prunes a little at each occurrence; every `prune_…` can be repeated, and done by two processes at once.

    fenced: the transaction to delete rows in, where only the holder of a lock may; what it raises ends the pass.
    """

    def __init__(self, broker: Broker, *, fenced: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self.broker = broker
        self.fenced = fenced
        self._due_at = 0.0
        self._pass: Iterator[Pruned] | None = None
        self._pruned = Pruned()
        self._worked_seconds = 0.0

    def tick(self, now: float) -> Pruned:
        """Go on with the pass under way, or begin one that is due; return after about 0.2 s at most.

        now: monotonic seconds. Returns: what went in this occurrence. Raises: BrokerUnavailable, django.db.Error, and what
        `fenced` raises; a pass that fails is due again.
        """
        if self._pass is None:
            if now < self._due_at:
                return Pruned()
            self._pass, self._pruned, self._worked_seconds = self.batches(), Pruned(), 0.0
        before, begun_at = self._pruned, time.monotonic()
        batches, self._pass = self._pass, None
        for batch in batches:
            self._pruned = self._pruned.plus(batch)
            if time.monotonic() - begun_at >= BUDGET_SECONDS:
                self._pass = batches
                break
        self._worked_seconds += time.monotonic() - begun_at
        if self._pass is None:
            self._due_at = now + max(conf.current().prune_seconds, REST_FACTOR * self._worked_seconds)
            if any(self._pruned):
                logger.info("pruned in %.1f s of work: %s", self._worked_seconds, self._pruned)
        return Pruned(*(after - earlier for after, earlier in zip(self._pruned, before, strict=True)))

    def batches(self) -> Iterator[Pruned]:
        """Do one pass over everything; yield after each batch what went, often nothing."""
        for count in self.prune_tasks():
            yield Pruned(tasks=count)
        for count in self.prune_occurrences():
            yield Pruned(occurrences=count)
        for count in self.prune_startup_runs():
            yield Pruned(startup_runs=count)
        for count in self.prune_completed():
            yield Pruned(completed=count)

    def prune_tasks(self) -> Iterator[int]:
        """Delete ended tasks whose time is over; yield after each page or batch how many went."""
        rules, now = current_rules(declared_retentions()), timezone.now()
        if (shortest := rules.shortest()) is None:
            return
        yield from self.prune_over(over_condition(rules, now), now - shortest)

    def prune_over(self, over: Case, before: datetime | None = None) -> Iterator[int]:
        """Delete ended tasks of a condition; yield after each page or batch how many went.

        before: when the youngest that can fulfil it was made; None looks at all.
        """
        spans = [(LOWEST_ID, HIGHEST_ID)]
        if before is not None:
            # Ids are UUIDv7, so what is younger than the shortest retention is not even looked at. Ids that foreign
            # producers made are random: nearly all of them lie beyond those of any day to come.
            tomorrow = timezone.now() + timedelta(days=1)
            spans = [(LOWEST_ID, lowest_id_at(before)), (lowest_id_at(tomorrow), HIGHEST_ID)]
        for first, last in spans:
            for page in pages(first, last):
                ids = list(page.filter(over).values_list("id", flat=True))
                for start in range(0, len(ids), ROWS_PER_BATCH):
                    batch = ids[start : start + ROWS_PER_BATCH]
                    yield lifecycle.prune(self.broker, batch, over, fenced=self.fenced)
                if not ids:
                    yield 0

    def prune_occurrences(self) -> Iterator[int]:
        """Delete old occurrences; of each schedule the latest stays, and those whose task has not ended."""
        later = Occurrence.objects.filter(schedule=OuterRef("schedule"), occurs_at__gt=OuterRef("occurs_at"))
        live = TaskRecord.objects.filter(id=OuterRef("task_id"), finished_at=None)
        return self._prune_history(
            Occurrence.objects.filter(Exists(later), ~Exists(live)), Occurrence.objects.all(), "created_at"
        )

    def prune_startup_runs(self) -> Iterator[int]:
        """Delete old start-up runs; of each name the latest stays."""
        later = StartupRun.objects.filter(name=OuterRef("name"), id__gt=OuterRef("id"))
        return self._prune_history(StartupRun.objects.filter(Exists(later)), StartupRun.objects.all(), "begun_at")

    def _prune_history(self, spare: QuerySet[Any], every: QuerySet[Any], moment: str) -> Iterator[int]:
        """Delete what is spare and older than failed tasks get. Ids rise with time, so a young page is the last."""
        keep = current_rules({}).default_for("failed")
        if keep is None:
            return
        before, last = timezone.now() - keep, 0
        while page := list(every.filter(id__gt=last).order_by("id").values_list("id", moment)[:ROWS_PER_BATCH]):
            first, last = page[0][0], page[-1][0]
            old = spare.filter(id__gte=first, id__lte=last, **{f"{moment}__lt": before})
            ids = list(old.values_list("id", flat=True))
            if ids:
                with self.fenced():
                    every.filter(id__in=ids).delete()
            yield len(ids)
            if page[-1][1] >= before:
                return

    def prune_completed(self) -> Iterator[int]:
        """Delete what Go workers completed with a retention that is over, in every queue."""
        for queue in sorted(self.broker.queues()):
            while count := self.broker.prune_completed(queue, COMPLETED_PER_CALL):
                yield count


def declared_retentions() -> dict[str, Retention]:
    """Return what registered tasks say of their own retention, by name."""
    declared = {name: registry.registered(name).retention for name in registry.registered_names()}
    return {name: retention for name, retention in declared.items() if retention is not None}


def over_condition(rules: Rules, now: datetime) -> Case:
    """Return the condition on a row of having been kept for long enough; false for what has not ended.

    It is a CASE so that no database takes it for a reason to leave the primary key for the index on states.
    """
    whens: list[When] = []
    for state, outcome in OUTCOMES:
        for rule in rules.of(outcome):
            chosen = Q(state=state, **{f"{rule.field}__in": rule.names}) if rule.field else Q(state=state)
            whens.append(When(chosen, then=_ended_before(now, rule.keep)))
    return Case(*whens, default=Value(False), output_field=BooleanField())


def ended_condition(states: Collection[TaskState], now: datetime, keep: timedelta) -> Case:
    """Return the condition on a row of having ended in one of some states, longer ago than `keep`."""
    whens = [When(Q(state=state), then=_ended_before(now, keep)) for state in states]
    return Case(*whens, default=Value(False), output_field=BooleanField())


def _ended_before(now: datetime, keep: timedelta | None) -> Any:
    if keep is None:
        return Value(False)
    # For two leases a worker, or whoever succeeds it, may still have to acknowledge the end and then looks at the row.
    # Host clocks that differ by minutes can shorten this; the entry is then parked without a row, and that is all.
    keep = max(keep, 2 * timedelta(seconds=conf.current().lease_seconds))
    return ExpressionWrapper(Q(finished_at__lte=now - keep), output_field=BooleanField())


def pages(first: UUID, last: UUID) -> Iterator[QuerySet[TaskRecord]]:
    """Yield the tasks between two ids in pages, in their order; a page is bounded by its last id, not by a LIMIT.

    So each statement looks at 5,000 rows at most, however few of them are over.
    """
    rows = TaskRecord.objects.using(router.db_for_write(TaskRecord)).order_by("id")
    while True:
        ahead = rows.filter(id__gt=first)
        # No upper bound here: with two, PostgreSQL sorts all that lies between for as long as it has no statistics of
        # the table (a million rows: 33 s in place of 1 s).
        end = ahead.values_list("id", flat=True)[ROWS_PER_PAGE - 1 : ROWS_PER_PAGE].first()
        if end is None or end >= last:
            yield ahead.filter(id__lt=last)
            return
        yield ahead.filter(id__lte=end)
        first = end


def lowest_id_at(moment: datetime) -> UUID:
    """Return the lowest UUIDv7 of a millisecond."""
    return UUID(int=int(moment.timestamp() * 1000) << 80 | 0x7 << 76 | 0b10 << 62)

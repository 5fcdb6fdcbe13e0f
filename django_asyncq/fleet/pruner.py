"""Delete what has been kept for long enough: finished tasks, occurrences, start-up runs, tasks Go workers completed.

Pruning runs beside live traffic, so it never does much at once: pages are read along the primary key, a batch is one
short transaction, and a pass is followed by a pause. Nothing is deleted early; how late it is deleted depends on load.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connections
from django.db.models import BooleanField, Case, Exists, ExpressionWrapper, OuterRef, Q, QuerySet, Value, When

from .. import conf, lifecycle
from ..broker import Broker
from ..broker.access import queues_with
from ..core import registry
from ..core.aliases import one_alias_per_prefix
from ..core.guard import get_logger
from ..core.names import lowest_uuid7_at
from ..core.policies import Outcome, Retention, Rules, current_rules
from ..models import FailureReason, Occurrence, StartupRun, TaskEdge, TaskLogLine, TaskRecord, TaskState
from ..storage import database_clock
from ..storage.errors import Parts
from ..storage.isolation import MOST_AT_ONCE, each_alone, page_of, table_of
from ..storage.routing import as_check, rows_of, writing_database
from ..storage.walking import HIGHEST_ID, LOWEST_ID, pages_between

logger = get_logger("django_asyncq.fleet.pruner")

# PostgreSQL reads 5,000 rows of the primary key in some ms; a row that stays costs one or two microseconds.
ROWS_PER_PAGE = 5000
# 500 rows are deleted in about 15 ms. Another process that needs one of them waits that long (on SQLite: any writer).
ROWS_PER_BATCH = 500
COMPLETED_PER_CALL = 100
# The same thread reconciles and must be able to stop; neither may wait for long.
BUDGET_SECONDS = 0.2
# Between two passes: rows live for days, so a minute more is nothing, and an idle pass reads one page.
PRUNE_SECONDS = 60.0
# A pass that works for 10 s is followed by a pause of 200 s: pruning takes at most a twentieth of one connection.
PAUSE_FACTOR = 20

OUTCOMES: tuple[tuple[TaskState, Outcome], ...] = ((TaskState.SUCCEEDED, "succeeded"), (TaskState.FAILED, "failed"))


class Pruned(NamedTuple):
    """How many of each kind were deleted. completed: entries in Redis, not rows. log_lines, edges: without a task."""

    tasks: int = 0
    occurrences: int = 0
    startup_runs: int = 0
    completed: int = 0
    log_lines: int = 0
    edges: int = 0

    def plus(self, other: Pruned) -> Pruned:
        """Return the sums."""
        return Pruned(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Pruner:
    """Prune a little in each round. Every `prune_…` can be repeated, and is safe when two processes do it at once.

    fenced: the transaction to delete rows in; what it raises when this process may no longer write ends the pass.
    """

    def __init__(self, broker: Broker, *, fenced: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self.broker = broker
        self.fenced = fenced
        self._due_at = 0.0
        self._pass: Iterator[Pruned] | None = None
        self._pruned = Pruned()
        self._worked_seconds = 0.0
        # The last row that was looked at, of log lines and of edges.
        self._last: dict[type[TaskLogLine] | type[TaskEdge], int] = {}
        self._parts = Parts(logger)

    def tick(self, now: float) -> Pruned:
        """Continue the current pass, or begin one that is due; return after at most about 0.2 s.

        now: monotonic seconds. Returns: what was deleted in this round. Raises: BrokerUnavailable, django.db.Error, and
        what `fenced` raises; a pass that fails is due again.
        """
        if self._pass is None:
            if now < self._due_at:
                return Pruned()
            self._pass, self._pruned, self._worked_seconds = self.prune_in_batches(), Pruned(), 0.0
        before, begun_at = self._pruned, time.monotonic()
        batches, self._pass = self._pass, None
        for batch in batches:
            self._pruned = self._pruned.plus(batch)
            if time.monotonic() - begun_at >= BUDGET_SECONDS:
                self._pass = batches
                break
        self._worked_seconds += time.monotonic() - begun_at
        if self._pass is None:
            self._due_at = now + max(PRUNE_SECONDS, PAUSE_FACTOR * self._worked_seconds)
            if any(self._pruned):
                logger.info("pruned in %.1f s of work: %s", self._worked_seconds, self._pruned)
        return Pruned(*(after - earlier for after, earlier in zip(self._pruned, before, strict=True)))

    def prune_in_batches(self) -> Iterator[Pruned]:
        """Do one pass over everything; yield after each batch what was deleted, often nothing."""
        yield from self._apart("pruning of tasks", (Pruned(tasks=count) for count in self.prune_tasks()))
        occurrences = self.prune_occurrences()
        yield from self._apart("pruning of occurrences", (Pruned(occurrences=count) for count in occurrences))
        runs = self.prune_startup_runs()
        yield from self._apart("pruning of start-up runs", (Pruned(startup_runs=count) for count in runs))
        yield from self._apart("pruning of completed tasks", (Pruned(completed=n) for n in self.prune_completed()))
        lines = self.prune_leftovers(TaskLogLine, "task_id")
        yield from self._apart("pruning of log lines", (Pruned(log_lines=count) for count in lines))
        edges = self.prune_leftovers(TaskEdge, "child_id")
        yield from self._apart("pruning of edges", (Pruned(edges=count) for count in edges))

    def _apart(self, part: str, batches: Iterator[Pruned]) -> Iterator[Pruned]:
        """Yield the batches of one part; if one fails for odd data the part is over, and the next one follows."""
        while (batch := self._parts.attempt(part, lambda: next(batches, None), None)) is not None:
            yield batch

    def prune_tasks(self) -> Iterator[int]:
        """Delete finished tasks whose retention is over; yield after each page or batch how many."""
        rules = current_rules(declared_retentions())
        if (shortest := rules.shortest()) is None:
            return
        now = database_clock.now()
        yield from self.prune_matching(retention_is_over(rules, now), now - shortest)

    def prune_matching(self, condition: Case, created_before: datetime | None = None) -> Iterator[int]:
        """Delete finished tasks that match the condition; yield after each page or batch how many.

        created_before: when the youngest task that can match was created; None checks all tasks.
        """
        spans = [(LOWEST_ID, HIGHEST_ID)]
        if created_before is not None:
            # Ids are UUIDv7, so tasks younger than the shortest retention need no check. Ids made by foreign producers
            # are random: nearly all of them lie beyond those of any day to come.
            tomorrow = database_clock.now() + timedelta(days=1)
            spans = [(LOWEST_ID, lowest_uuid7_at(created_before)), (lowest_uuid7_at(tomorrow), HIGHEST_ID)]
        for first, last in spans:
            for page in pages_between(first, last, ROWS_PER_PAGE):
                ids = [id for (id,) in page_of(page.filter(condition), size=ROWS_PER_PAGE)]
                for start in range(0, len(ids), ROWS_PER_BATCH):
                    yield self._prune_batch(ids[start : start + ROWS_PER_BATCH], condition)
                if not ids:
                    yield 0

    def _prune_batch(self, ids: Sequence[UUID], condition: Case) -> int:
        def prune(part: Sequence[UUID]) -> list[int]:
            return [lifecycle.prune(self.broker, part, condition, fenced=self.fenced)]

        return sum(each_alone("pruning of tasks", ids, prune, database=writing_database(TaskRecord)))

    def prune_occurrences(self) -> Iterator[int]:
        """Delete old occurrences, except the latest of each schedule and those whose task has not finished."""
        later = rows_of(Occurrence).filter(schedule=OuterRef("schedule"), occurs_at__gt=OuterRef("occurs_at"))
        live = rows_of(TaskRecord).filter(as_check(finished_at=None), id=OuterRef("task_id"))
        prunable = rows_of(Occurrence).filter(Exists(later), ~Exists(live))
        return self._prune_history(rows_of(Occurrence), prunable, "created_at")

    def prune_startup_runs(self) -> Iterator[int]:
        """Delete old start-up runs, except the latest of each name."""
        later = rows_of(StartupRun).filter(name=OuterRef("name"), id__gt=OuterRef("id"))
        return self._prune_history(rows_of(StartupRun), rows_of(StartupRun).filter(Exists(later)), "begun_at")

    def prune_leftovers(self, model: type[TaskLogLine] | type[TaskEdge], column: str) -> Iterator[int]:
        """Delete rows that belong to tasks without a row, such as one deleted while it ran; look at one page.

        model: of log lines, or of edges. column: the id of the task. Those of tasks whose retention is over are deleted
        with them, by `prune_tasks`.
        """
        rows: QuerySet[Any] = rows_of(model)
        first = self._last.get(model, 0)
        page = page_of(rows.filter(id__gt=first).order_by("id"), size=ROWS_PER_PAGE)
        self._last[model] = page[-1][0] if len(page) >= ROWS_PER_PAGE - MOST_AT_ONCE else 0
        if page:
            task = rows_of(TaskRecord).filter(id=OuterRef(column))
            lines = rows.filter(id__gt=first, id__lte=page[-1][0])
            ids = list(lines.filter(~Exists(task)).values_list("id", flat=True))
            for start in range(0, len(ids), ROWS_PER_BATCH):
                batch = ids[start : start + ROWS_PER_BATCH]
                yield self._delete(rows, batch)[0]

    def _prune_history(self, rows: QuerySet[Any], prunable: QuerySet[Any], time_field: str) -> Iterator[int]:
        """Delete prunable rows that are older than the retention of failed tasks.

        Ids rise with time, so the first page that ends with a young row is the last page.
        """
        keep_for = current_rules({}).default_for("failed")
        if keep_for is None:
            return
        before, last = database_clock.now() - keep_for, 0
        while page := page_of(rows.filter(id__gt=last).order_by("id"), time_field, size=ROWS_PER_BATCH):
            first, last = page[0][0], page[-1][0]
            old = prunable.filter(id__gte=first, id__lte=last, **{f"{time_field}__lt": before})
            ids = list(old.values_list("id", flat=True))
            each_alone(
                f"pruning of {table_of(rows.model)}", ids, lambda part: self._delete(rows, part), database=rows.db
            )
            yield len(ids)
            if page[-1][1] >= before:
                return

    def _delete(self, rows: QuerySet[Any], ids: Sequence[Any]) -> list[int]:
        with self.fenced():
            return [rows.filter(id__in=ids).delete()[0]]

    def prune_completed(self) -> Iterator[int]:
        """Delete tasks that Go workers completed and whose retention is over, in every queue of every alias."""
        for broker in map(self.broker.of_alias, one_alias_per_prefix()):
            for queue in queues_with(broker, sorted(broker.queues()), "completed"):
                part = f"pruning of completed tasks in queue {broker.name_of(queue)}"
                prune = partial(broker.prune_completed, queue, COMPLETED_PER_CALL)
                while count := self._parts.attempt(part, prune, 0):
                    yield count


def declared_retentions() -> dict[str, Retention]:
    """Return the retention that registered tasks declare, by task name; former names too."""
    declared = {name: registry.registered(name).retention for name in registry.known_versions()}
    return {name: retention for name, retention in declared.items() if retention is not None}


def retention_is_over(rules: Rules, now: datetime) -> Case:
    """Return the condition that a row has been kept for long enough; false for unfinished tasks.

    It is a CASE so that no database leaves the primary key for the index on states.
    """
    whens: list[When] = []
    for state, outcome in OUTCOMES:
        # The first that matches decides, so a discarded task is kept as a success is.
        ended = Q(state=state) | Q(reason=FailureReason.DISCARDED) if outcome == "succeeded" else Q(state=state)
        for rule in rules.rules_for(outcome):
            chosen = ended & Q(**{f"{rule.field}__in": rule.names}) if rule.field else ended
            whens.append(When(chosen, then=_was_kept_for(rule.keep_for, now)))
    return Case(*whens, default=Value(False), output_field=BooleanField())


def finished_long_ago(states: Collection[TaskState], now: datetime, keep_for: timedelta) -> Case:
    """Return the condition that a task finished in one of these states longer than `keep_for` ago."""
    whens = [When(Q(state=state), then=_was_kept_for(keep_for, now)) for state in states]
    return Case(*whens, default=Value(False), output_field=BooleanField())


def _was_kept_for(keep_for: timedelta | None, now: datetime) -> Any:
    if keep_for is None:
        return Value(False)
    # For two leases a worker, or the process that recovers its tasks, may still have to acknowledge the outcome, and
    # reads the row to do so.
    keep_for = max(keep_for, 2 * timedelta(seconds=conf.current().lease_seconds))
    # The row of a throttled task is what refuses others until its time is over.
    clock = database_clock.expression(connections[writing_database(TaskRecord)])
    is_over = Q(unique_until=None) | Q(unique_until__lte=clock) | Q(unique_slot=None)
    # The tasks of a workflow are kept together: one that runs may need the value of each, and a person sees all of it.
    others = rows_of(TaskRecord).filter(workflow_id=OuterRef("workflow_id"))
    is_live, is_younger = others.filter(finished_at=None), others.filter(finished_at__gt=now - keep_for)
    is_alone = Q(workflow_id=None) | ~Q(Exists(is_live)) & ~Q(Exists(is_younger))
    return ExpressionWrapper(Q(finished_at__lte=now - keep_for) & is_over & is_alone, output_field=BooleanField())

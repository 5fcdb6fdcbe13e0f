"""The filters of the task list.

No filter reads the whole task table for its choices; that of the last error reads the latest failed rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from django.conf import settings
from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..aliases import is_redis_used
from ..broker import Broker
from ..exceptions import BrokerUnavailable
from ..models import FailureReason, Gate, TaskRecord, TaskState
from ..prefixes import one_alias_per_prefix
from ..storage import database_clock
from ..storage.bounded_reads import names
from ..storage.routing import rows_of
from .code import known_names, known_task
from .fleet import MOST_RUNNING, fleet_of

if TYPE_CHECKING:
    from django.utils.functional import _StrOrPromise

    from ..models import TaskRecordQuerySet

MAX_CHOICES = 100
# Read along the index of states, in about a millisecond.
ROWS_FOR_CHOICES = 500


STATES = {
    "queued": TaskState.QUEUED,
    "running": TaskState.RUNNING,
    "succeeded": TaskState.SUCCEEDED,
    "failed": TaskState.FAILED,
}


class StateFilter(admin.SimpleListFilter):
    """Filter by state. RETRYING is a choice of its own, and so are the running tasks that nobody seems to run."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, _StrOrPromise]]:
        """Return the choices."""
        return [
            ("queued", TaskState.QUEUED.label),
            ("running", TaskState.RUNNING.label),
            ("succeeded", TaskState.SUCCEEDED.label),
            ("retrying", _("Retrying")),
            ("failed", _("Failed (final)")),
            ("stuck", _("Stuck")),
        ]

    def queryset(self, request: HttpRequest, queryset: QuerySet[TaskRecord]) -> QuerySet[TaskRecord]:
        """Return the rows in the chosen state."""
        chosen = self.value()
        if chosen is None:
            return queryset
        if chosen not in {name for name, _label in self.lookup_choices}:
            raise IncorrectLookupParameters
        if chosen == "stuck":
            return queryset.filter(pk__in=list(fleet_of(request).stuck()))
        if chosen == "retrying":
            # There is an index of these alone, which SQLite uses only for the very condition that it has.
            return queryset.filter(state=TaskState.FAILED, retry_at__isnull=False)
        # A range, so that `queries.in_order` can name the state in the order too (see there). Together with "= number"
        # SQLite would sort all rows of the state.
        number = STATES[chosen]
        rows = queryset.filter(state__gte=number, state__lte=number)
        return rows.filter(retry_at=None) if chosen == "failed" else rows


class ValueFilter(admin.SimpleListFilter, ABC):
    """Filter a column by known values. The value in the URL is always a choice, known or not."""

    column: str

    @abstractmethod
    def known(self) -> Iterable[str]:
        """Return the values to choose from."""

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, _StrOrPromise]]:
        """Return at most `MAX_CHOICES` choices."""
        self.request = request
        known = set(self.known())
        chosen = self.value()
        listed = sorted(known)[:MAX_CHOICES]
        if chosen and chosen not in listed:
            listed.insert(0, chosen)
        return [(value, value) for value in listed]

    def queryset(self, request: HttpRequest, queryset: QuerySet[TaskRecord]) -> QuerySet[TaskRecord]:
        """Return the rows with the chosen value."""
        chosen = self.value()
        if not chosen:
            return queryset
        # PostgreSQL raises an error for a NUL character, and no row contains one.
        return queryset.none() if "\x00" in chosen else self.matching(queryset, chosen)

    def matching(self, queryset: QuerySet[TaskRecord], chosen: str) -> QuerySet[TaskRecord]:
        """Return the rows with this value."""
        return queryset.filter(**{self.column: chosen})


class QueueFilter(ValueFilter):
    """Filter by queue. The choices are the queues of `TASKS`, of the registered tasks, and of Redis."""

    title = _("queue")
    parameter_name = "queue"
    column = "queue_name"

    def known(self) -> Iterable[str]:
        """Return the names of queues; only those of the settings and the code when Redis is unreachable."""
        aliases = getattr(settings, "TASKS", {})
        declared = {queue for options in aliases.values() for queue in options.get("QUEUES", ())}
        declared |= {known_task(name).queue_name for name in known_names()}
        if not is_redis_used():
            return declared
        try:
            return declared.union(*(Broker("producer", alias).queues() for alias in one_alias_per_prefix()))
        except BrokerUnavailable:
            return declared


class NameFilter(ValueFilter):
    """Filter by task. The choices are the registered tasks, and those that rows have."""

    title = _("task")
    parameter_name = "name"
    column = "name"

    def known(self) -> Iterable[str]:
        """Return the names of tasks."""
        return {*known_names(), *names()}


class ReasonFilter(admin.SimpleListFilter):
    """Filter by why a task is FAILED or RETRYING."""

    title = _("reason of failure")
    parameter_name = "reason"
    reasons = {reason.name.lower(): reason for reason in FailureReason if reason is not FailureReason.NONE}

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, _StrOrPromise]]:
        """Return the choices."""
        return [(name, reason.label) for name, reason in self.reasons.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[TaskRecord]) -> QuerySet[TaskRecord]:
        """Return the rows with the chosen reason. The state is named because an index is on it."""
        chosen = self.value()
        if chosen is None:
            return queryset
        if chosen not in self.reasons:
            raise IncorrectLookupParameters
        return queryset.filter(state=TaskState.FAILED, reason=self.reasons[chosen])


class LastErrorFilter(ValueFilter):
    """Filter the FAILED and RETRYING tasks by the class of their last error."""

    title = _("last error")
    parameter_name = "error"
    column = "last_exception"

    def known(self) -> Iterable[str]:
        """Return the last errors of the latest failed tasks."""
        failed = rows_of(TaskRecord).filter(state=TaskState.FAILED).order_by("-id")
        return set(failed.values_list("last_exception", flat=True)[:ROWS_FOR_CHOICES]) - {""}

    def matching(self, queryset: QuerySet[TaskRecord], chosen: str) -> QuerySet[TaskRecord]:
        """Return the failed rows with this error. The state is named because the index holds only such rows."""
        return super().matching(queryset, chosen).filter(state=TaskState.FAILED)


class GateFilter(ValueFilter):
    """Filter by gate. The choices are the gates that have a row."""

    title = _("gate (admission limit)")
    parameter_name = "gate"
    column = "gate"

    def known(self) -> Iterable[str]:
        """Return the names of gates."""
        return rows_of(Gate).order_by("name").values_list("name", flat=True)[:MAX_CHOICES]

    def matching(self, queryset: QuerySet[TaskRecord], chosen: str) -> QuerySet[TaskRecord]:
        """Return the rows at the gate."""
        return cast("TaskRecordQuerySet", queryset).at_gate(chosen)


class WorkerFilter(ValueFilter):
    """Filter the running tasks by the worker process that runs them. The choices are those that are alive."""

    title = _("worker")
    parameter_name = "worker"
    column = "worker_ids"

    def known(self) -> Iterable[str]:
        """Return the ids of worker processes."""
        return [each.id for each in fleet_of(self.request).own_workers]

    def matching(self, queryset: QuerySet[TaskRecord], chosen: str) -> QuerySet[TaskRecord]:
        """Return the rows that say so. RUNNING rows are as many as there are slots, so they are looked at here."""
        running = rows_of(TaskRecord).filter(state=TaskState.RUNNING).order_by("-id")
        found = running.values_list("pk", "worker_ids")[:MOST_RUNNING]
        return queryset.filter(pk__in=[pk for pk, ids in found if isinstance(ids, list) and ids[-1:] == [chosen]])


class EnqueuedFilter(admin.SimpleListFilter):
    """Filter by how recently a task was enqueued."""

    title = _("enqueued within")
    parameter_name = "within"
    spans = {
        "15m": (timedelta(minutes=15), _("15 minutes")),
        "1h": (timedelta(hours=1), _("1 hour")),
        "24h": (timedelta(hours=24), _("24 hours")),
        "7d": (timedelta(days=7), _("7 days")),
    }

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, _StrOrPromise]]:
        """Return the choices."""
        return [(name, label) for name, (_span, label) in self.spans.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[TaskRecord]) -> QuerySet[TaskRecord]:
        """Return the rows enqueued within the chosen time."""
        chosen = self.value()
        if chosen is None:
            return queryset
        if chosen not in self.spans:
            raise IncorrectLookupParameters
        return cast("TaskRecordQuerySet", queryset).enqueued_since(database_clock.now() - self.spans[chosen][0])

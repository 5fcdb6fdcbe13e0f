"""The filters of the task list. None asks the table which values there are: that would read all of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from ..broker import Broker
from ..exceptions import BrokerUnavailable
from ..models import Gate, TaskRecord, TaskState
from .code import known_names, known_task

if TYPE_CHECKING:
    from django.utils.functional import _StrOrPromise

MOST_CHOICES = 100


class StateFilter(admin.SimpleListFilter):
    """The states; failed tasks that will be tried again are a choice of their own."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, _StrOrPromise]]:
        """Return the choices."""
        return [
            ("queued", TaskState.QUEUED.label),
            ("running", TaskState.RUNNING.label),
            ("succeeded", TaskState.SUCCEEDED.label),
            ("retrying", _("Failed, retrying")),
            ("failed", _("Failed for good")),
        ]

    def queryset(self, request: HttpRequest, queryset: QuerySet[TaskRecord]) -> QuerySet[TaskRecord]:
        """Return the rows in the state chosen."""
        chosen = self.value()
        if chosen is None:
            return queryset
        if chosen not in {name for name, _label in self.lookup_choices}:
            raise IncorrectLookupParameters
        rows: QuerySet[TaskRecord] = getattr(queryset, chosen)()
        return rows


class ValueFilter(admin.SimpleListFilter, ABC):
    """A column and the values known for it; one in the address is a choice even if nobody knows it."""

    column: str

    @abstractmethod
    def known(self) -> Iterable[str]:
        """Return the values to choose from."""

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, _StrOrPromise]]:
        """Return the choices, at most `MOST_CHOICES`."""
        known = set(self.known())
        chosen = self.value()
        listed = sorted(known)[:MOST_CHOICES]
        if chosen and chosen not in listed:
            listed.insert(0, chosen)
        return [(value, value) for value in listed]

    def queryset(self, request: HttpRequest, queryset: QuerySet[TaskRecord]) -> QuerySet[TaskRecord]:
        """Return the rows that have the value chosen."""
        chosen = self.value()
        if not chosen:
            return queryset
        # PostgreSQL refuses to compare with a NUL, and no row has one.
        return queryset.none() if "\x00" in chosen else queryset.filter(**{self.column: chosen})


class QueueFilter(ValueFilter):
    """The queues of TASKS, of the registered tasks, and those Redis knows."""

    title = _("queue")
    parameter_name = "queue"
    column = "queue_name"

    def known(self) -> Iterable[str]:
        """Return the names of queues; without Redis, those of the settings and the code."""
        aliases = getattr(settings, "TASKS", {})
        declared = {queue for options in aliases.values() for queue in options.get("QUEUES", ())}
        declared |= {known_task(name).queue_name for name in known_names()}
        try:
            return declared | Broker("producer").queues()
        except BrokerUnavailable:
            return declared


class NameFilter(ValueFilter):
    """The registered tasks."""

    title = _("task")
    parameter_name = "name"
    column = "name"

    def known(self) -> Iterable[str]:
        """Return the names of tasks."""
        return known_names()


class GateFilter(ValueFilter):
    """The gates that have a row."""

    title = _("gate")
    parameter_name = "gate"
    column = "gate"

    def known(self) -> Iterable[str]:
        """Return the names of gates."""
        return Gate.objects.order_by("name").values_list("name", flat=True)[:MOST_CHOICES]


class EnqueuedFilter(admin.SimpleListFilter):
    """How long ago the task was enqueued, at most."""

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
        """Return the rows enqueued since."""
        chosen = self.value()
        if chosen is None:
            return queryset
        if chosen not in self.spans:
            raise IncorrectLookupParameters
        return queryset.filter(enqueued_at__gte=timezone.now() - self.spans[chosen][0])

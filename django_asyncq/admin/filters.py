"""The filters of the task list.

No filter reads the whole task table for its choices; that of the last error reads the latest failed rows.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.utils import quote
from django.contrib.admin.views.main import ChangeList
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import CharField, Func, Q, QuerySet, TextField
from django.db.models.functions import Cast, Right
from django.db.models.lookups import Exact
from django.db.models.sql.compiler import SQLCompiler
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern
from django.utils.text import capfirst
from django.utils.translation import gettext_lazy

from ..core.names import time_of_uuid7
from ..exceptions import InvalidOption
from ..models import FailureReason, Gate, TaskRecord, TaskState
from ..observe.fleet import MOST_RUNNING, Fleet
from ..observe.why import whys_not_running
from ..storage import database_clock
from ..storage.matching import KEYS
from ..storage.routing import ids_called, names, rows_of, writing_database
from .addresses import own_urls
from .base import AnyModelAdmin, Text, moment_text, url_of, uuid_of, visible, written
from .code import known_names, known_task
from .fleet import fleet_of
from .history import in_readers_language

MAX_CHOICES = 100
# Read along the index of states, in about a millisecond.
ROWS_FOR_CHOICES = 500


STATES = {state.name.lower(): state for state in TaskState}
# Keys of `storage.matching` that an address has under another name, and what people call each.
NAMES = {"last_exception": "error", "queue_name": "queue", "batch_id": "batch", "workflow_id": "workflow"}
LABELS: dict[str, Any] = {
    "state": gettext_lazy("state"),
    "reason": gettext_lazy("reason of failure"),
    "name": gettext_lazy("task"),
    "queue_name": gettext_lazy("queue"),
    "backend": gettext_lazy("backend"),
    "gate": gettext_lazy("gate"),
    "last_exception": gettext_lazy("last error"),
    "group": gettext_lazy("group"),
    "batch_id": gettext_lazy("batch"),
    "workflow_id": gettext_lazy("workflow"),
    "enqueued_since": gettext_lazy("enqueued since"),
    "enqueued_until": gettext_lazy("enqueued before"),
    "finished_since": gettext_lazy("finished since"),
    "finished_until": gettext_lazy("finished before"),
    "ids": gettext_lazy("ids"),
}


class ChoiceFilter(admin.SimpleListFilter, ABC):
    """Filter by words that are known beforehand; any other word in the address is an error."""

    choices_of: Mapping[str, Text]

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        """Return the choices."""
        return list(self.choices_of.items())

    def queryset(self, request: HttpRequest, queryset: QuerySet[TaskRecord]) -> Any:
        """Return the rows of the chosen word."""
        chosen = self.value()
        if chosen is None:
            return queryset
        if chosen not in self.choices_of:
            raise IncorrectLookupParameters
        return self.matching(request, queryset, chosen)

    @abstractmethod
    def matching(self, request: HttpRequest, queryset: Any, chosen: str) -> Any:
        """Return the rows of this word."""


class StateFilter(ChoiceFilter):
    """Filter by state. RETRYING is a choice of its own, and so are the running tasks that nobody seems to run."""

    title = LABELS["state"]
    parameter_name = "state"
    choices_of = {
        "queued": TaskState.QUEUED.label,
        "running": TaskState.RUNNING.label,
        "succeeded": TaskState.SUCCEEDED.label,
        "retrying": gettext_lazy("Retrying"),
        "failed": gettext_lazy("Failed (final)"),
        "stuck": gettext_lazy("Stuck"),
    }

    def matching(self, request: HttpRequest, queryset: Any, chosen: str) -> Any:
        """Return the rows in the chosen state."""
        if chosen == "stuck":
            return queryset.filter(pk__in=list(fleet_of(request).stuck()))
        if chosen == "retrying":
            # There is an index of these alone, which SQLite uses only for the very condition that it has.
            return queryset.filter(state=TaskState.FAILED, retry_at__isnull=False)
        # A range, so that `in_order` can name the state in the order too (see there). Together with "= number"
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

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
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

    def matching(self, queryset: Any, chosen: str) -> Any:
        """Return the rows with this value."""
        return queryset.filter(**{self.column: chosen})


class QueueFilter(ValueFilter):
    """Filter by queue. The choices are the queues of `TASKS`, of the registered tasks, and of Redis."""

    title = LABELS["queue_name"]
    parameter_name = "queue"
    column = "queue_name"

    def known(self) -> Iterable[str]:
        """Return the names of queues; only those of the settings and the code when Redis is unreachable."""
        aliases = getattr(settings, "TASKS", {})
        declared = {queue for options in aliases.values() for queue in options.get("QUEUES", ())}
        declared |= {known_task(name).queue_name for name in known_names()}
        return declared | fleet_of(self.request).queues


class NameFilter(ValueFilter):
    """Filter by task. The choices are the registered tasks, and those that rows have."""

    title = LABELS["name"]
    parameter_name = "name"
    column = "name"

    def known(self) -> Iterable[str]:
        """Return the names of tasks."""
        return {*known_names(), *names()}


class ReasonFilter(ChoiceFilter):
    """Filter by why a task is FAILED or RETRYING."""

    title = LABELS["reason"]
    parameter_name = "reason"
    choices_of = {reason.name.lower(): reason.label for reason in FailureReason if reason is not FailureReason.NONE}

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        """Return the choices, and the several that an address may name."""
        several = [word for word in (self.value() or "").split(",") if word in self.choices_of]
        shown = [(self.value(), ", ".join(str(self.choices_of[word]) for word in several))] if len(several) > 1 else []
        return [*shown, *super().lookups(request, model_admin)]

    def queryset(self, request: HttpRequest, queryset: QuerySet[TaskRecord]) -> Any:
        """Return the rows with one of the reasons. The state is named because an index holds only such rows."""
        words = self.value()
        if words is None:
            return queryset
        if unknown := set(words.split(",")) - self.choices_of.keys():
            raise IncorrectLookupParameters(unknown)
        return self.matching(request, queryset.filter(state=TaskState.FAILED), words)

    def matching(self, request: HttpRequest, queryset: Any, chosen: str) -> Any:
        """Return the rows with one of these reasons."""
        return queryset.filter(reason__in=[FailureReason[word.upper()] for word in chosen.split(",")])


class LastErrorFilter(ValueFilter):
    """Filter the FAILED and RETRYING tasks by the class of their last error."""

    title = LABELS["last_exception"]
    parameter_name = "error"
    column = "last_exception"

    def known(self) -> Iterable[str]:
        """Return the last errors of the latest failed tasks."""
        failed = rows_of(TaskRecord).filter(state=TaskState.FAILED).order_by("-id")
        return set(failed.values_list("last_exception", flat=True)[:ROWS_FOR_CHOICES]) - {""}

    def matching(self, queryset: Any, chosen: str) -> Any:
        """Return the failed rows with this error. The state is named because the index holds only such rows."""
        return super().matching(queryset, chosen).filter(state=TaskState.FAILED)


class GateFilter(ValueFilter):
    """Filter by gate. The choices are the gates that have a row."""

    title = gettext_lazy("gate (admission limit)")
    parameter_name = "gate"
    column = "gate"

    def known(self) -> Iterable[str]:
        """Return the names of gates."""
        return rows_of(Gate).order_by("name").values_list("name", flat=True)[:MAX_CHOICES]

    def matching(self, queryset: Any, chosen: str) -> Any:
        """Return the rows at the gate."""
        return queryset.at_gate(chosen)


class WorkerFilter(ValueFilter):
    """Filter the running tasks by the worker process that runs them. The choices are those that are alive."""

    title = gettext_lazy("worker")
    parameter_name = "worker"
    column = "worker_ids"

    def known(self) -> Iterable[str]:
        """Return the ids of worker processes."""
        return [each.id for each in fleet_of(self.request).own_workers]

    def matching(self, queryset: Any, chosen: str) -> Any:
        """Return the rows that say so. RUNNING rows are as many as there are slots, so they are looked at here."""
        running = rows_of(TaskRecord).filter(state=TaskState.RUNNING).order_by("-id")
        found = running.values_list("pk", "worker_ids")[:MOST_RUNNING]
        return queryset.filter(pk__in=[pk for pk, ids in found if isinstance(ids, list) and ids[-1:] == [chosen]])


class EnqueuedFilter(ChoiceFilter):
    """Filter by how recently a task was enqueued."""

    title = gettext_lazy("enqueued within")
    parameter_name = "within"
    spans = {
        "15m": timedelta(minutes=15),
        "1h": timedelta(hours=1),
        "24h": timedelta(hours=24),
        "7d": timedelta(days=7),
    }
    choices_of = {
        "15m": gettext_lazy("15 minutes"),
        "1h": gettext_lazy("1 hour"),
        "24h": gettext_lazy("24 hours"),
        "7d": gettext_lazy("7 days"),
    }

    def matching(self, request: HttpRequest, queryset: Any, chosen: str) -> Any:
        """Return the rows enqueued within the chosen time."""
        return queryset.enqueued_since(database_clock.now() - self.spans[chosen])


class BackendFilter(ValueFilter):
    """Filter by alias of TASKS, where there are several."""

    title = LABELS["backend"]
    parameter_name = "backend"
    column = "backend"

    def known(self) -> Iterable[str]:
        """Return the aliases."""
        aliases = getattr(settings, "TASKS", {})
        return aliases if len(aliases) > 1 else ()


class AddressFilter(ValueFilter):
    """Filter by what only an address says: the number of another page leads to the tasks that it has counted.

    parameter_name: a key of `storage.matching.KEYS`, too. Shown while the address has it.
    """

    def known(self) -> Iterable[str]:
        """Return no other choice."""
        return ()

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        """Return the one that is chosen."""
        chosen = self.value()
        return [(chosen, moment_text(chosen))] if chosen else []

    def matching(self, queryset: Any, chosen: str) -> Any:
        """Return the rows that an action with this key is about."""
        key = KEYS[self.column]
        try:
            return queryset.filter(key.condition(key.read(self.column, chosen)))
        except InvalidOption as error:
            raise IncorrectLookupParameters(error) from error


def _by_address(column: str) -> type[AddressFilter]:
    values = {"title": LABELS[column], "parameter_name": NAMES.get(column, column), "column": column}
    return type(f"Filter_{column}", (AddressFilter,), values)


IN_ADDRESS = (
    "group", "batch_id", "workflow_id", "enqueued_since", "enqueued_until", "finished_since", "finished_until",
)  # fmt: skip
ADDRESS_FILTERS = [_by_address(column) for column in IN_ADDRESS]


# --- Queries of the pages: from the database that is written to, only what is shown, and never all of a large table.

# A shorter text of hexadecimal digits may also be part of a task's name, such as "add".
CERTAIN_ID_DIGITS = 8
# Messages of errors are in no index, so only those of the latest failures are searched.
FAILURES_SEARCHED = 2_000
BEFORE, AFTER = "before", "after"
SHOWN_ID_CHARACTERS, LONGEST_TERM = 8, 200
SHOWN_IN_LIST = (
    "id", "name", "queue_name", "state", "reason", "last_exception", "gate", "other_gates", "run_after", "retry_at",
    "attempt", "max_attempts", "crash_count", "enqueued_at", "started_at", "finished_at", "backend", "is_remote",
    "worker_ids", "last_attempted_at", "timeout_seconds", "after_id", "batch_id", "waits_for", "version",
)  # fmt: skip


class RoutedAdmin(AnyModelAdmin):
    """Reads the rows of all pages and actions from the database that is written to.

    missing: what is said of a row that was deleted meanwhile. masked_columns: a lookup in the URL, such as
    ?kwargs__password__startswith=a, would reveal their masked values letter by letter.
    """

    missing: Text = ""
    masked_columns: Collection[str] = ()

    class Media:
        css = {"all": ["django_asyncq/admin.css"]}

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Refuse lookups into masked columns."""
        allowed: bool = super().lookup_allowed(lookup, value, request)  # type: ignore[arg-type]
        return allowed and lookup.partition("__")[0] not in self.masked_columns

    def url_to(self, view: str, row: Any = None) -> str:
        """Return the address of a view, or of one of a row."""
        return url_of(self, view, *(() if row is None else (quote(row.pk),)))

    def response_delete(self, request: HttpRequest, obj_display: str, obj_id: Any) -> HttpResponse:
        """Return to the list, where Django would send a user without change permission to the admin index."""
        response = super().response_delete(request, obj_display, obj_id)
        if isinstance(response, HttpResponseRedirect) and self.has_view_permission(request):
            return HttpResponseRedirect(self.url_to("changelist"))
        return response

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows that the user may see."""
        return super().get_queryset(request).using(writing_database(self.model))

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Return the change list that is called by the name of its rows."""
        return NamedChangeList

    def get_urls(self) -> list[URLPattern]:
        """Add the addresses of the views that are not Django's, before Django's: the last of those takes any path."""
        return [*own_urls(self), *super().get_urls()]

    def title_of(self, obj: Any) -> str:
        """Return the title of the page of a row."""
        return str(obj)

    def add_to_page(self, request: HttpRequest, context: dict[str, Any], obj: Any) -> None:
        """Add what the template of the page of a row shows."""

    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: Any = None,
    ) -> HttpResponse:
        """Show the page of a row, under its own name."""
        if obj is not None:
            self.add_to_page(request, context, obj)
            context |= {"title": self.title_of(obj), "subtitle": None}
        return super().render_change_form(request, context, add, change, form_url, obj)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the list, or the question of an action."""
        view = super().changelist_view
        return visible(written(request, lambda: view(request, extra_context), request.get_full_path()))

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Show the page of a row."""
        view = super().changeform_view
        return visible(written(request, lambda: view(request, *args, **kwargs), request.get_full_path()))

    def delete_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Ask before a row is deleted."""
        view = super().delete_view
        return visible(written(request, lambda: view(request, *args, **kwargs), request.get_full_path()))

    def history_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Show what people have done to a row."""
        response = super().history_view(request, *args, **kwargs)
        for entry in getattr(response, "context_data", {}).get("action_list", ()):
            entry.change_message = in_readers_language(entry)
        return visible(response)


class ReadOnlyAdmin(RoutedAdmin):
    """Shows rows that the package alone writes: they say what has happened, and the package prunes them.

    may_delete: whether those who have the permission may delete a row.
    """

    may_delete = False

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Allow nobody to add a row by hand."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Allow nobody to edit a row by hand."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Allow nobody to delete a row by hand, except where the class says so."""
        return self.may_delete and super().has_delete_permission(request, obj)

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return no fields, because the page shows the row instead of a form."""
        return ()


class NamedChangeList(ChangeList):
    """A change list whose title is what it lists: "Tasks", not "Select task to change"."""

    def __init__(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        super().__init__(request, *args, **kwargs)
        self.title = str(capfirst(self.opts.verbose_name_plural))


class LastError(Func):
    """Extract one text of the last entry of `errors` in the database, so that no traceback is fetched."""

    output_field = TextField()

    def __init__(self, key: str) -> None:
        super().__init__("errors")
        self.key = key

    def as_sqlite(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **extra: Any) -> Any:
        """Use `#-1`, the last element in SQLite."""
        template = f"JSON_EXTRACT(%(expressions)s, '$[#-1].{self.key}')"
        return self.as_sql(compiler, connection, template=template)

    def as_postgresql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **extra: Any) -> Any:
        """Use -1, the last element in PostgreSQL."""
        return self.as_sql(compiler, connection, template=f"(%(expressions)s #>> '{{-1,{self.key}}}')")

    def as_mysql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **extra: Any) -> Any:
        """Compute the index of the last element: MySQL refuses a path with -1, and MariaDB does not know `last`."""
        sql, params = compiler.compile(self.source_expressions[0])
        path = f"CONCAT('$[', GREATEST(JSON_LENGTH({sql}), 1) - 1, '].{self.key}')"
        return f"JSON_UNQUOTE(JSON_EXTRACT({sql}, {path}))", (*params, *params)


def as_listed(rows: QuerySet[TaskRecord]) -> QuerySet[TaskRecord]:
    """Fetch the rows without arguments, results and tracebacks, but with the last message of each."""
    return rows.only(*SHOWN_IN_LIST).annotate(last_message=LastError("message"))


def with_why(rows: list[TaskRecord], fleet: Fleet) -> list[TaskRecord]:
    """Let each row say why it does not run, for the columns of the list; return them."""
    found = whys_not_running(rows, fleet)
    for row in rows:
        row.why = found[row.id]  # type: ignore[attr-defined]
    return rows


class TaskChangeList(NamedChangeList):
    """The change list of tasks: pages by the ids at their ends, so each page costs the same, however deep it is.

    No row is skipped or shown twice while tasks arrive. There are no page numbers, and nothing is counted.
    looked_until: when the last task was enqueued that a page has looked at, where it could not look at all.
    """

    newer = older = ""
    looked_until: datetime | None = None

    def __init__(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        super().__init__(request, *args, **kwargs)
        # The form of the search carries these on, and a new search begins at the first page.
        self.params = {name: value for name, value in self.params.items() if name not in (BEFORE, AFTER)}

    def get_filters_params(self, params: Any = None) -> Any:
        """Return what filters the list; the ends of a page are no filters."""
        found: Any = super().get_filters_params(params)
        return {name: value for name, value in found.items() if name not in (BEFORE, AFTER)}

    def get_query_string(self, new_params: Any = None, remove: Any = None) -> str:
        """Return the query of a link; a link that names no end of a page leads to the first page."""
        ends = dict.fromkeys((BEFORE, AFTER))
        return super().get_query_string({**ends, **(new_params or {})}, remove)

    def get_queryset(
        self, request: HttpRequest, exclude_parameters: list[str | None] | None = None
    ) -> QuerySet[TaskRecord]:
        """Return the filtered rows with only the columns that the list shows."""
        return as_listed(super().get_queryset(request, exclude_parameters))

    def get_results(self, request: HttpRequest) -> None:
        """Read one page, and one row more to know whether another follows."""
        is_rising = self.queryset.query.order_by[:1] == ("id",)
        before, after = uuid_of(request.GET.get(BEFORE)), uuid_of(request.GET.get(AFTER))
        ends = Q(id__lt=before) if before is not None else Q(id__gt=after) if after is not None else Q()
        # A page before the one that was shown is read backwards.
        reads_rising = is_rising if before is after is None else before is None
        rows = self.queryset.filter(ends)
        last = last_looked_at(request, ends, rising=reads_rising)
        if last is not None:
            rows = rows.filter(id__lte=last) if reads_rising else rows.filter(id__gte=last)
        found = list(in_order(rows, request, rising=reads_rising)[: self.list_per_page + 1])
        is_more, page = len(found) > self.list_per_page, found[: self.list_per_page]
        if is_more:
            last = page[-1].pk
        elif last is not None:
            self.looked_until = time_of_uuid7(last)
        if reads_rising != is_rising:
            page.reverse()
        self._link(page, last, reads_on=reads_rising == is_rising, is_first=before is after is None)
        self.result_list = with_why(page, fleet_of(request))
        self.result_count = len(page)
        # Equal numbers: Django's search form would say how many results a page has.
        self.full_result_count = len(page)
        self.show_full_result_count = False
        self.show_admin_actions = True
        self.can_show_all = self.multi_page = False

    def _link(self, page: list[TaskRecord], last: UUID | None, *, reads_on: bool, is_first: bool) -> None:
        """Set the queries of the links to the pages around this one; "" where there is none.

        last: the last row that was read, when there are more behind it.
        """
        is_rising = self.queryset.query.order_by[:1] == ("id",)
        on, back = (AFTER, BEFORE) if is_rising else (BEFORE, AFTER)
        older = last if reads_on else page[-1].pk if page else None
        newer = last if not reads_on else page[0].pk if page and not is_first else None
        self.older = self.get_query_string({on: str(older)}) if older else ""
        self.newer = self.get_query_string({back: str(newer)}) if newer else ""


# How many rows a page looks through for a filter that no index knows. The next page looks further.
ROWS_LOOKED_THROUGH = 50_000
WITHOUT_INDEX = {"queue", "backend", "group", "finished_since", "finished_until"}
WITH_INDEX = {"name", "error", "reason", "batch", "workflow", "worker"}


def last_looked_at(request: HttpRequest, ends: Q, *, rising: bool) -> UUID | None:
    """Return the last of the rows that a page looks through, in its order; None when it can look at all.

    ends: where the page begins.
    """
    given, state = {name for name, value in request.GET.items() if value}, request.GET.get("state")
    is_along_the_key = WITHOUT_INDEX & given or _is_end_of_id(request.GET.get("q", ""))
    if not is_along_the_key or WITH_INDEX & given or state in ("retrying", "stuck"):
        return None
    rows = rows_of(TaskRecord).filter(ends)
    if state in STATES:
        rows = rows.filter(state__gte=STATES[state], state__lte=STATES[state])
    ids = in_order(rows, request, rising=rising).values_list("pk", flat=True)
    return next(iter(ids[ROWS_LOOKED_THROUGH - 1 : ROWS_LOOKED_THROUGH]), None)


def in_order(rows: QuerySet[TaskRecord], request: HttpRequest, *, rising: bool = False) -> QuerySet[TaskRecord]:
    """Return rows by id. Those of one state are read along the index of states.

    A database that expects many of them would walk the primary key instead, and pass over a million rows of other
    states where the ones it looks for are old. Only the index of states has both columns in order.
    """
    # RETRYING has an index of its own.
    has_state = request.GET.get("state") in STATES
    columns = ("state", "id") if has_state else ("id",)
    return rows.order_by(*(column if rising else f"-{column}" for column in columns))


# --- search


def search(term: str) -> Q:
    """Return the condition for a search, by what the term looks like; none of them reads the whole table.

    An id, its beginning, or else the eight characters at its end, which the list shows; the whole of what another
    program calls the task; a part of the task's name; a part of the class or of the message of the last error, among
    the latest 2,000 failures.
    """
    term = term.strip().replace("\x00", "")
    called = ids_called(term)
    found = _by_id_or_text(term)
    return found | Q(pk__in=called) if called else found


def _by_id_or_text(term: str) -> Q:
    shown = term.rpartition("…")[2].strip() if "…" in term else term
    digits = shown.replace("-", "").lower()
    if not re.fullmatch(r"[0-9a-f]{1,32}", digits):
        return _by_text(term)
    if len(digits) == 32:
        return Q(pk=UUID(digits))
    by_id = _ids_from(digits)
    if _is_end_of_id(term):
        return Q(Exact(Right(Cast("id", CharField()), SHOWN_ID_CHARACTERS), digits))
    return by_id if len(digits) >= CERTAIN_ID_DIGITS else by_id | _by_text(term)


def _ids_from(digits: str) -> Q:
    """Return the condition for ids with this beginning."""
    # PostgreSQL compares UUIDs, SQLite and MySQL their 32 hexadecimal digits; the order is the same.
    return Q(pk__range=(UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f"))))


def _is_end_of_id(term: str) -> bool:
    """Whether a term is the end of an id, as the list shows it, and no id begins with it. Costs one query, if any."""
    found = re.fullmatch(rf"(?:.*…)?\s*([0-9a-f]{{{SHOWN_ID_CHARACTERS}}})\s*", term.lower())
    return found is not None and not rows_of(TaskRecord).filter(_ids_from(found[1])).exists()


def _by_text(term: str) -> Q:
    if not 0 < len(term) <= LONGEST_TERM:
        return Q(pk__in=[])
    wanted = term.lower()
    return Q(name__in=[name for name in names() if wanted in name.lower()]) | Q(pk__in=_failures_with(wanted))


def _failures_with(wanted: str) -> list[UUID]:
    """Return the latest failures whose last error has a text in it."""
    latest = rows_of(TaskRecord).filter(state__gte=TaskState.FAILED).order_by("-state", "-id")
    texts = latest.annotate(message=LastError("message")).values_list("pk", "last_exception", "message")
    return [pk for pk, kind, message in texts[:FAILURES_SEARCHED] if wanted in f"{kind} {message or ''}".lower()]

"""Queries of the pages: from the database that is written to, only what is shown, and never all of a large table."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.contrib.admin import ModelAdmin
from django.contrib.admin.views.main import ChangeList
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Func, Q, QuerySet, TextField
from django.db.models.sql.compiler import SQLCompiler
from django.http import HttpRequest, HttpResponse
from django.utils.text import capfirst

from ..models import TaskRecord, TaskState
from ..storage.bounded_reads import ids_ending_with, names
from ..storage.routing import rows_of, writing_database
from .fleet import fleet_of
from .visible_text import visible

if TYPE_CHECKING:
    AnyModelAdmin = ModelAdmin[Any]
else:
    AnyModelAdmin = ModelAdmin

# A shorter text of hexadecimal digits may also be part of a task's name, such as "add".
CERTAIN_ID_DIGITS = 8
# Messages of errors are in no index, so only those of the latest failures are searched.
FAILURES_SEARCHED = 2_000
BEFORE, AFTER = "before", "after"
SHOWN_ID_CHARACTERS, LONGEST_TERM = 8, 200
SHOWN_IN_LIST = (
    "id",
    "name",
    "queue_name",
    "state",
    "reason",
    "last_exception",
    "gate",
    "run_after",
    "retry_at",
    "attempt",
    "max_attempts",
    "crash_count",
    "enqueued_at",
    "started_at",
    "finished_at",
    "backend",
    "is_remote",
    "worker_ids",
    "last_attempted_at",
    "timeout_seconds",
)


class RoutedAdmin(AnyModelAdmin):
    """Reads the rows of all pages and actions from the database that is written to."""

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows that the user may see."""
        return super().get_queryset(request).using(writing_database(self.model))

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Return the change list that is called by the name of its rows."""
        return NamedChangeList

    def title_of(self, obj: Any) -> str:
        """Return the title of the page of a row."""
        return str(obj)

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
            context |= {"title": self.title_of(obj), "subtitle": None}
        return super().render_change_form(request, context, add, change, form_url, obj)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the list, or the question of an action."""
        return visible(super().changelist_view(request, extra_context))

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Show the page of a row."""
        return visible(super().changeform_view(request, *args, **kwargs))

    def delete_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Ask before a row is deleted."""
        return visible(super().delete_view(request, *args, **kwargs))

    def history_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Show what people have done to a row."""
        return visible(super().history_view(request, *args, **kwargs))


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


class TaskChangeList(NamedChangeList):
    """The change list of tasks: pages by the ids at their ends, so each page costs the same, however deep it is.

    No row is skipped or shown twice while tasks arrive. There are no page numbers, and nothing is counted.
    """

    newer = older = ""

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
        before, after = _id_of(request.GET.get(BEFORE)), _id_of(request.GET.get(AFTER))
        rows = self.queryset
        if before is not None:
            rows = rows.filter(id__lt=before)
        elif after is not None:
            rows = rows.filter(id__gt=after)
        # A page before the one that was shown is read backwards.
        reads_rising = is_rising if before is after is None else before is None
        found = list(in_order(rows, request, rising=reads_rising)[: self.list_per_page + 1])
        is_more, page = len(found) > self.list_per_page, found[: self.list_per_page]
        if reads_rising != is_rising:
            page.reverse()
        self._link(page, is_more=is_more, reads_on=reads_rising == is_rising, is_first=before is after is None)
        fleet = fleet_of(request)
        for row in page:
            # What the columns show of the fleet, which is read once for all rows.
            row.why_stuck, row.queue_pause = fleet.why_stuck(row), fleet.queue_pause(row.backend, row.queue_name)  # type: ignore[attr-defined]
        self.result_list = page
        self.result_count = len(page)
        # Equal numbers: Django's search form would say how many results a page has.
        self.full_result_count = len(page)
        self.show_full_result_count = False
        self.show_admin_actions = True
        self.can_show_all = self.multi_page = False

    def _link(self, page: list[TaskRecord], *, is_more: bool, reads_on: bool, is_first: bool) -> None:
        """Set the queries of the links to the pages around this one; "" where there is none."""
        is_rising = self.queryset.query.order_by[:1] == ("id",)
        on, back = (AFTER, BEFORE) if is_rising else (BEFORE, AFTER)
        if page and (is_more if reads_on else True):
            self.older = self.get_query_string({on: str(page[-1].pk)})
        if page and not is_first and (is_more if not reads_on else True):
            self.newer = self.get_query_string({back: str(page[0].pk)})


def in_order(rows: QuerySet[TaskRecord], request: HttpRequest, *, rising: bool = False) -> QuerySet[TaskRecord]:
    """Return rows by id. Those of one state are read along the index of states.

    A database that expects many of them would walk the primary key instead, and pass over a million rows of other
    states where the ones it looks for are old. Only the index of states has both columns in order.
    """
    has_state = request.GET.get("state") in READ_BY_STATE
    columns = ("state", "id") if has_state else ("id",)
    return rows.order_by(*(column if rising else f"-{column}" for column in columns))


# The choices of the filter by state that are a range of one number. RETRYING has an index of its own.
READ_BY_STATE = {"queued", "running", "succeeded", "failed"}


def _id_of(text: str | None) -> UUID | None:
    try:
        return UUID(text) if text else None
    except ValueError:
        return None


# --- search


def search(term: str) -> Q:
    """Return the condition for a search, by what the term looks like; none of them reads the whole table.

    An id, its beginning, or the eight characters at its end, which the list shows; a part of the task's name; a part
    of the class or of the message of the last error, among the latest 2,000 failures.
    """
    term = term.strip().replace("\x00", "")
    shown = term.rpartition("…")[2].strip() if "…" in term else term
    digits = shown.replace("-", "").lower()
    if not re.fullmatch(r"[0-9a-f]{1,32}", digits):
        return _by_text(term)
    if len(digits) == 32:
        return Q(pk=UUID(digits))
    # PostgreSQL compares UUIDs, SQLite and MySQL their 32 hexadecimal digits; the order is the same.
    by_id = Q(pk__range=(UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f"))))
    if len(digits) == SHOWN_ID_CHARACTERS and (ids := ids_ending_with(digits)):
        by_id |= Q(pk__in=ids)
    return by_id if len(digits) >= CERTAIN_ID_DIGITS else by_id | _by_text(term)


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

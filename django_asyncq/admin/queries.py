"""Queries of the pages: from the database that is written to, only what is shown, and never all of a large table."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.contrib.admin import ModelAdmin
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Func, Q, QuerySet, TextField
from django.db.models.sql.compiler import SQLCompiler
from django.http import HttpRequest
from django.utils.functional import cached_property

from ..models import TaskRecord
from ..storage.routing import writing_database

if TYPE_CHECKING:
    AnyModelAdmin = ModelAdmin[Any]
    PaginatorBase = Paginator[TaskRecord]
else:
    AnyModelAdmin = ModelAdmin
    PaginatorBase = Paginator

# PostgreSQL counts five million rows in a second and ten thousand in a millisecond. Nobody turns 200 pages.
MAX_LISTED = 10_000
# A shorter text of hexadecimal digits may also be part of a task's name, such as "add".
CERTAIN_ID_DIGITS = 8
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
)


class RoutedAdmin(AnyModelAdmin):
    """Reads the rows of all pages and actions from the database that is written to."""

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows that the user may see."""
        return super().get_queryset(request).using(writing_database(self.model))


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


class TaskChangeList(ChangeList):
    """The change list of tasks."""

    max_listed = MAX_LISTED

    @property
    def is_cut(self) -> bool:
        """Whether there may be more tasks than the list shows."""
        return self.result_count >= MAX_LISTED

    def get_queryset(
        self, request: HttpRequest, exclude_parameters: list[str | None] | None = None
    ) -> QuerySet[TaskRecord]:
        """Return the filtered rows with only the columns that the list shows."""
        return as_listed(super().get_queryset(request, exclude_parameters))


class BoundedPaginator(PaginatorBase):
    """Paginate the first `MAX_LISTED` rows, and count no further."""

    @cached_property
    def count(self) -> int:
        """The number of rows that are listed."""
        rows: Any = self.object_list
        found: int = rows.order_by().values("pk")[:MAX_LISTED].count()
        return found


def search(term: str) -> Q:
    """Return the condition for a search by id, by the beginning of an id, or by a part of the task's name.

    The beginning of an id becomes a range over the primary key. PostgreSQL compares UUIDs, SQLite and MySQL their 32
    hexadecimal digits; the order is the same.
    """
    term = term.strip()
    digits = term.replace("-", "").lower()
    by_name = Q(name__icontains=term)
    if not re.fullmatch(r"[0-9a-f]{1,32}", digits):
        return by_name
    if len(digits) == 32:
        return Q(pk=UUID(digits))
    by_id = Q(pk__range=(UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f"))))
    return by_id if len(digits) >= CERTAIN_ID_DIGITS else by_id | by_name

"""How the task list reads the table: only what it shows, never all of a large one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Func, Q, QuerySet, TextField
from django.db.models.sql.compiler import SQLCompiler
from django.http import HttpRequest
from django.utils.functional import cached_property

from ..models import TaskRecord

if TYPE_CHECKING:
    PaginatorBase = Paginator[TaskRecord]
else:
    PaginatorBase = Paginator

# Counting five million rows takes PostgreSQL a second, ten thousand a millisecond; nobody turns 200 pages.
MOST_LISTED = 10_000
# Shorter texts of the letters a to f may as well be part of a task's name, such as "add".
CERTAIN_ID_DIGITS = 8
SHOWN_IN_LIST = (
    "id",
    "name",
    "queue_name",
    "state",
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


class LastError(Func):
    """One text of the last entry of `errors`, taken out by the database: tracebacks stay where they are."""

    output_field = TextField()

    def __init__(self, key: str) -> None:
        super().__init__("errors")
        self.key = key

    def as_sqlite(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **extra: Any) -> Any:
        """SQLite: `#-1` is the last one."""
        template = f"JSON_EXTRACT(%(expressions)s, '$[#-1].{self.key}')"
        return self.as_sql(compiler, connection, template=template)

    def as_postgresql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **extra: Any) -> Any:
        """PostgreSQL: -1 is the last one."""
        return self.as_sql(compiler, connection, template=f"(%(expressions)s #>> '{{-1,{self.key}}}')")

    def as_mysql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **extra: Any) -> Any:
        """MySQL has `last`, MariaDB -1; both can count. A path with -1 is an error in MySQL."""
        sql, params = compiler.compile(self.source_expressions[0])
        path = f"CONCAT('$[', GREATEST(JSON_LENGTH({sql}), 1) - 1, '].{self.key}')"
        return f"JSON_UNQUOTE(JSON_EXTRACT({sql}, {path}))", (*params, *params)


def as_listed(rows: QuerySet[TaskRecord]) -> QuerySet[TaskRecord]:
    """Read the rows without arguments, results and tracebacks, but with the last error of each."""
    return rows.only(*SHOWN_IN_LIST).annotate(last_exception=LastError("exception"), last_message=LastError("message"))


class TaskChangeList(ChangeList):
    """The list of tasks."""

    most_listed = MOST_LISTED

    @property
    def is_cut(self) -> bool:
        """Whether there may be more tasks than are listed."""
        return self.result_count >= MOST_LISTED

    def get_queryset(
        self, request: HttpRequest, exclude_parameters: list[str | None] | None = None
    ) -> QuerySet[TaskRecord]:
        """Return the filtered rows with the columns that the list shows."""
        return as_listed(super().get_queryset(request, exclude_parameters))


class BoundedPaginator(PaginatorBase):
    """Pages over the first `MOST_LISTED` rows: counts no further."""

    @cached_property
    def count(self) -> int:
        """How many rows are listed."""
        rows: Any = self.object_list
        found: int = rows.order_by().values("pk")[:MOST_LISTED].count()
        return found


def search(term: str) -> Q:
    """Return the condition for a search: an id, its beginning, or a part of the task's name.

    An id is found by a range over the primary key: PostgreSQL compares UUIDs, SQLite and MySQL their 32
    hexadecimal digits, in the same order.
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

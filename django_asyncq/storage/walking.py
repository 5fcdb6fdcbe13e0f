"""Go through the tasks that an index leads to, page by page in its order, without reading a row twice.

A page is what lies between two places in the index, and never a LIMIT on all that is left: while PostgreSQL knows
nothing of a table, or knows it as it was before a backlog, it believes that hardly any row is left, and sorts all of
them for each page. So the end of a page is found first, in steps of one row or a few, which can only be looks into the
index. Conditions that lead nowhere are checks (`routing.as_check`). SQLite and MySQL read with a LIMIT.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connections
from django.db.models import BooleanField, Q, QuerySet
from django.db.models.expressions import RawSQL

from ..models import TaskRecord, TaskState
from .isolation import MOST_AT_ONCE, page_of
from .routing import as_check, rows_of, writing_database


class Way(NamedTuple):
    """An index that leads to tasks: in the order of their ids, or of another time before that.

    condition: which of them it holds, or begins with; `where`: the same in SQL. by: the column before the id.
    step: how many rows a step to the end of a page passes. More than one only where PostgreSQL, whatever it knows,
    believes that far more are left.
    """

    condition: Q
    where: str
    by: str = ""
    step: int = 1


# 20 of the primary key: of a table that PostgreSQL does not know it expects some 3,000 rows in 60 pages to be left.
EVERY = Way(Q(), "TRUE", step=20)
QUEUED = Way(Q(state=TaskState.QUEUED), f"state = {TaskState.QUEUED.value}")
RUNNING = Way(Q(state=TaskState.RUNNING), f"state = {TaskState.RUNNING.value}")
# Where the state is no check, all that have failed may be read.
TO_RETRY = Way(Q(retry_at__isnull=False), "retry_at IS NOT NULL", by="retry_at")

LOWEST_ID = UUID(int=0)
HIGHEST_ID = UUID(int=2**128 - 1)
BY_ID = """
    WITH RECURSIVE steps (id, number) AS (
        SELECT CAST(%s AS uuid), 0
        UNION ALL
        SELECT found.id, number + 1 FROM steps, LATERAL (
            SELECT id FROM {table} WHERE {where} AND id > steps.id ORDER BY id OFFSET {passed} LIMIT 1
        ) AS found WHERE number < {steps}
    )
    SELECT id FROM steps WHERE number = {steps}
"""
BY_TIME = """
    WITH RECURSIVE steps ({by}, id, number) AS (
        SELECT CAST(%s AS timestamp with time zone), CAST(%s AS uuid), 0
        UNION ALL
        SELECT found.{by}, found.id, number + 1 FROM steps, LATERAL (
            SELECT {by}, id FROM {table} WHERE {where} AND ({by}, id) > (steps.{by}, steps.id)
            ORDER BY {by}, id OFFSET {passed} LIMIT 1
        ) AS found WHERE number < {steps}
    )
    SELECT CAST({by} AS text), id FROM steps WHERE number = {steps}
"""


def pages(
    way: Way, *columns: str, size: int, check: Q | None = None, behind: UUID | None = None
) -> Iterator[list[tuple[Any, ...]]]:
    """Yield primary keys and some columns of the tasks along a way, page by page, as `page_of` returns them.

    check: a condition that those tasks meet as well. size: of a page, before the check; an empty page is not yielded.
    behind: an id, for a way in the order of ids: only tasks behind it.
    """
    rows = rows_of(TaskRecord).filter(way.condition)
    if behind is not None:
        rows = rows.filter(pk__gt=behind)
    if check is not None:
        rows = rows.filter(as_check(check))
    if connections[rows.db].vendor != "postgresql":
        yield from _limited_pages(rows, *columns, size=size, by=way.by)
        return
    place = Place("-infinity" if way.by else "", behind or LOWEST_ID)
    while True:
        end = _end_of_page(way, place, size)
        page = _between(rows, way, place, end or Place("infinity" if way.by else "", HIGHEST_ID))
        if found := page_of(page, *columns, size=None):
            yield found
        if end is None:
            return
        place = end


class Place(NamedTuple):
    """A place in the order of a way. time: of its column, as text, because Python cannot hold each; "" without one."""

    time: str
    id: UUID


def _end_of_page(way: Way, place: Place, size: int) -> Place | None:
    """Return the place of the last row of a full page behind a place; None when fewer rows are left."""
    connection = connections[writing_database(TaskRecord)]
    table = connection.ops.quote_name(TaskRecord._meta.db_table)
    step = way.step if size % way.step == 0 else 1
    names = {"table": table, "where": way.where, "by": way.by, "passed": step - 1, "steps": size // step}
    with connection.cursor() as cursor:
        if way.by:
            cursor.execute(BY_TIME.format(**names), [place.time, place.id])
        else:
            cursor.execute(BY_ID.format(**names), [place.id])
        found = cursor.fetchone()
    return None if found is None else Place(found[0] if way.by else "", found[-1])


def _between(rows: QuerySet[TaskRecord], way: Way, place: Place, end: Place) -> QuerySet[TaskRecord]:
    """Return the rows behind a place, up to another one. With one bound only, all rows might be read."""
    if not way.by:
        return rows.filter(pk__gt=place.id, pk__lte=end.id).order_by("pk")
    # The index compares both columns at once; by the first alone, PostgreSQL knows how few rows that leaves.
    rows = rows.filter(**{f"{way.by}__gte": _time(place), f"{way.by}__lte": _time(end)})
    return rows.filter(_compared(way, ">", place), _compared(way, "<=", end)).order_by(way.by, "pk")


def _compared(way: Way, sign: str, place: Place) -> RawSQL:
    sql = f"({way.by}, id) {sign} (CAST(%s AS timestamp with time zone), CAST(%s AS uuid))"
    return RawSQL(sql, [place.time, place.id], output_field=BooleanField())  # noqa: S611 - of constants


def _time(place: Place) -> RawSQL:
    return RawSQL("CAST(%s AS timestamp with time zone)", [place.time])


def _limited_pages(rows: QuerySet[TaskRecord], *columns: str, size: int, by: str) -> Iterator[list[tuple[Any, ...]]]:
    rows = rows.order_by(by, "pk") if by else rows.order_by("pk")
    rest = rows
    while page := page_of(rest, *columns, *([by] if by else []), size=size):
        yield page
        last = page[-1][0]
        if by:
            value = page[-1][-1]
            rest = rows.filter(~Q(**{by: value, "pk__lte": last}), **{f"{by}__gte": value})
        else:
            rest = rows.filter(pk__gt=last)


def pages_between(first: UUID, last: UUID, size: int) -> Iterator[QuerySet[TaskRecord]]:
    """Yield the tasks between two ids, without both, in pages of so many, in the order of their ids.

    Each statement reads at most so many rows, however few of them meet what the caller adds as a check.
    """
    rows = rows_of(TaskRecord).order_by("id")
    while True:
        end = _end_of_span(rows.filter(id__gt=first), first, size)
        if end is None or end >= last:
            yield rows.filter(id__gt=first, id__lt=last)
            return
        yield rows.filter(id__gt=first, id__lte=end)
        first = end


def _end_of_span(rest: QuerySet[TaskRecord], first: UUID, size: int) -> UUID | None:
    """Return the last id of a full page; None when fewer rows are left."""
    if connections[rest.db].vendor == "postgresql":
        end = _end_of_page(EVERY, Place("", first), size)
        return None if end is None else end.id
    try:
        return rest.values_list("id", flat=True)[size - 1 : size].first()
    except ValueError:
        # This one id is none. The page then ends at the last one that is.
        ids = page_of(rest, size=size)
        return ids[-1][0] if len(ids) > size - MOST_AT_ONCE else None

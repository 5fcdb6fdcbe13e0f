"""One UPDATE statement for a batch of tasks, fenced, on each database.

Django's `bulk_update` cannot say which rows it changed and has no guard for each row, so the statement is written here
from the model's own fields. It only writes what `lifecycle` gives it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Field

from .models import TaskRecord

# All that a run may change of its row.
COLUMNS = (
    "state",
    "fence",
    "attempt",
    "crash_count",
    "started_at",
    "last_attempted_at",
    "finished_at",
    "retry_at",
    "return_value",
    "errors",
    "worker_ids",
)
# 13 values a row; SQLite allows 32,766 in a statement.
ROWS_PER_STATEMENT = 500

# The run that holds the row, or one that was taken before the row said so.
GUARD = "(t.state = 1 AND t.fence = v.held_fence) OR (t.state = 0 AND t.fence < v.held_fence)"


class FencedWrite(NamedTuple):
    """A record as it shall stand, and the fence its run holds now (the record's may already be raised)."""

    record: TaskRecord
    held_fence: int


def write_fenced(writes: Sequence[FencedWrite], database: str) -> set[UUID]:
    """Write the records whose run still holds its row; return their ids.

    A write that had already been done by the same run (its reply was lost) counts as done.
    """
    accepted: set[UUID] = set()
    for start in range(0, len(writes), ROWS_PER_STATEMENT):
        accepted |= _write_chunk(writes[start : start + ROWS_PER_STATEMENT], database)
    return accepted


def _write_chunk(writes: Sequence[FencedWrite], database: str) -> set[UUID]:
    connection = connections[database]
    if connection.vendor == "mysql":
        sql, parameters = _joined_update(writes, connection)
        with connection.cursor() as cursor:
            cursor.execute(sql, parameters)
        return _already_written(writes, database)
    sql, parameters = _returning_update(writes, connection)
    identity = TaskRecord._meta.get_field("id")
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        accepted = {identity.to_python(row[0]) for row in cursor.fetchall()}
    refused = [write for write in writes if write.record.id not in accepted]
    return accepted | _already_written(refused, database) if refused else accepted


def _already_written(writes: Sequence[FencedWrite], database: str) -> set[UUID]:
    """Return the ids of rows that stand as their write wanted, fence and state."""
    wanted = {write.record.id: (write.record.fence, write.record.state) for write in writes}
    rows = TaskRecord.objects.using(database).filter(id__in=wanted).values_list("id", "fence", "state")
    return {id for id, fence, state in rows if wanted[id] == (fence, state)}


def _fields() -> list[Field[Any, Any]]:
    meta = TaskRecord._meta
    return [meta.get_field("id"), *(meta.get_field(name) for name in COLUMNS)]  # type: ignore[list-item]


def _rows(writes: Sequence[FencedWrite], connection: BaseDatabaseWrapper) -> Iterator[list[Any]]:
    fields = _fields()
    for write in writes:
        values = [
            field.get_db_prep_save(getattr(write.record, field.attname), connection=connection) for field in fields
        ]
        yield [*values, write.held_fence]


def _returning_update(writes: Sequence[FencedWrite], connection: BaseDatabaseWrapper) -> tuple[str, list[Any]]:
    """PostgreSQL and SQLite 3.35: UPDATE … FROM a list of values, RETURNING what was changed."""
    rows = list(_rows(writes, connection))
    plain_row = f"({', '.join(['%s'] * len(rows[0]))})"
    first_row = plain_row
    if connection.vendor == "postgresql":
        # The first row gives the types of all; NULLs and text literals alone would have none.
        types = [field.db_type(connection) for field in _fields()] + ["bigint"]
        first_row = f"({', '.join(f'CAST(%s AS {type})' for type in types)})"
    assignments = ", ".join(f"{column} = v.{column}" for column in COLUMNS)
    sql = (  # only names of the model's own; every value is a parameter
        f"WITH v (task_id, {', '.join(COLUMNS)}, held_fence) AS "
        f"(VALUES {', '.join([first_row] + [plain_row] * (len(rows) - 1))}) "
        f"UPDATE {connection.ops.quote_name(TaskRecord._meta.db_table)} AS t SET {assignments} "
        f"FROM v WHERE t.id = v.task_id AND ({GUARD}) RETURNING id"
    )
    return sql, [value for row in rows for value in row]


def _joined_update(writes: Sequence[FencedWrite], connection: BaseDatabaseWrapper) -> tuple[str, list[Any]]:
    """MySQL and MariaDB: UPDATE … JOIN a derived table; neither can return what was changed."""
    rows = list(_rows(writes, connection))
    names = ["id", *COLUMNS, "held_fence"]
    first_row = "SELECT " + ", ".join(f"%s AS {name}" for name in names)
    plain_row = "SELECT " + ", ".join(["%s"] * len(names))
    assignments = ", ".join(f"t.{column} = v.{column}" for column in COLUMNS)
    sql = (
        f"UPDATE {connection.ops.quote_name(TaskRecord._meta.db_table)} AS t "
        f"JOIN ({' UNION ALL '.join([first_row] + [plain_row] * (len(rows) - 1))}) AS v ON t.id = v.id "
        f"SET {assignments} WHERE {GUARD}"
    )
    return sql, [value for row in rows for value in row]

"""Read the rows of a batch with one SELECT, and write them with one fenced UPDATE, on each database.

Django's `bulk_update` cannot report which rows it changed, and has no condition per row. So the UPDATE is built here
from the model's fields. Only `lifecycle` calls this module.

PostgreSQL gets a batch as one parameter. With a parameter for each value, 500 rows take the client 75 µs each and the
server 29 µs; as one JSON text 10 and 19 µs. Reading 200 rows takes 35 µs each through the ORM, and 15 to 20 µs here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Field, JSONField

from ..definitions.stored_json import StoredJSONEncoder
from ..models import TaskRecord
from .isolation import each_alone, table_of

# The columns that a run may change.
COLUMNS = (
    "state",
    "reason",
    "fence",
    "attempt",
    "crash_count",
    "is_suspect",
    "started_at",
    "last_attempted_at",
    "finished_at",
    "retry_at",
    "return_value",
    "errors",
    "last_exception",
    "worker_ids",
)
WRITTEN = ("id", *COLUMNS, "held_fence")
_values_of = attrgetter("id", *COLUMNS)
# 16 values a row; SQLite allows 32,766 in a statement.
ROWS_PER_STATEMENT = 500

FIELDS: tuple[Field[Any, Any], ...] = tuple(TaskRecord._meta.concrete_fields)
NAMES = [field.attname for field in FIELDS]
DOCUMENTS = [index for index, field in enumerate(FIELDS) if isinstance(field, JSONField)]
_json = StoredJSONEncoder(default=str, check_circular=False)
EMPTY: dict[str, Callable[[], Any]] = {"[]": list, "{}": dict}

# The run that holds a RUNNING row, or a run that was claimed while the row still says QUEUED.
GUARD = "(t.state = 1 AND t.fence = v.held_fence) OR (t.state = 0 AND t.fence < v.held_fence)"


class FencedWrite(NamedTuple):
    """A row to write, and the fence that its run holds (`record.fence` may be higher already)."""

    record: TaskRecord
    held_fence: int


def read_rows(ids: Sequence[str], database: str) -> list[TaskRecord]:
    """Return the rows of these ids that exist. ids: UUIDs in their usual text form."""
    connection = connections[database]
    if connection.vendor != "postgresql":
        return list(TaskRecord.objects.using(database).filter(id__in=ids))
    with connection.cursor() as cursor:
        cursor.execute(_select(database), [f"{{{','.join(ids)}}}"])
        rows = cursor.fetchall()
    return [TaskRecord.from_db(database, NAMES, _decoded(row)) for row in rows]


@cache
def _select(database: str) -> str:
    """Return PostgreSQL's SELECT, which gets the ids as one array."""
    quoted = connections[database].ops.quote_name
    names = ", ".join(quoted(str(field.column)) for field in FIELDS)
    return f"SELECT {names} FROM {quoted(TaskRecord._meta.db_table)} WHERE id = ANY(%s::uuid[])"  # names from the model


def _decoded(row: Sequence[Any]) -> list[Any]:
    """Decode the JSON values of a row; most are empty."""
    values = list(row)
    for index in DOCUMENTS:
        text = values[index]
        if text is not None:
            empty = EMPTY.get(text)
            values[index] = empty() if empty else json.loads(text)
    return values


def write_fenced(writes: Sequence[FencedWrite], database: str) -> set[UUID]:
    """Write the rows that their run still holds; return their ids.

    A write that is in the row already, because an earlier reply was lost, counts as done.
    """
    accepted: set[UUID] = set()
    for start in range(0, len(writes), ROWS_PER_STATEMENT):
        accepted |= _write_chunk(writes[start : start + ROWS_PER_STATEMENT], database)
    return accepted


def write_usable(writes: Sequence[FencedWrite], database: str) -> set[UUID]:
    """Do what `write_fenced` does, but set aside the rows that the database refuses; their ids are not returned."""

    def write(part: Sequence[FencedWrite]) -> list[UUID]:
        return list(write_fenced(part, database))

    return set(each_alone(table_of(TaskRecord), writes, write, key=lambda write: write.record.id, database=database))


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
    """Return the ids of rows that already have the fence and the state of their write."""
    wanted = {write.record.id: (write.record.fence, write.record.state) for write in writes}
    rows = TaskRecord.objects.using(database).filter(id__in=wanted).values_list("id", "fence", "state")
    return {id for id, fence, state in rows if wanted[id] == (fence, state)}


@cache
def _fields() -> tuple[Field[Any, Any], ...]:
    meta = TaskRecord._meta
    return (meta.get_field("id"), *(meta.get_field(name) for name in COLUMNS))  # type: ignore[arg-type]


def _returning_update(writes: Sequence[FencedWrite], connection: BaseDatabaseWrapper) -> tuple[str, list[Any]]:
    """Return the UPDATE … FROM a list of rows RETURNING the changed ids, for PostgreSQL and SQLite 3.35."""
    if connection.vendor == "postgresql":
        return _update_from_json(connection.alias), [_json_of(writes)]
    rows, parameters = _values(writes, connection)
    return _update_from(rows, connection), parameters


@cache
def _update_from_json(database: str) -> str:
    """Return PostgreSQL's statement, which gets the rows as one JSON text and reads it with the columns' types."""
    connection = connections[database]
    types = [field.db_type(connection) for field in _fields()] + ["bigint"]
    columns = ", ".join(f"{name} {type}" for name, type in zip(WRITTEN, types, strict=True))
    return _update_from(f"SELECT * FROM json_to_recordset(%s) AS r ({columns})", connection)


def _update_from(rows: str, connection: BaseDatabaseWrapper) -> str:
    assignments = ", ".join(f"{column} = v.{column}" for column in COLUMNS)
    return (  # only names from the model; every value is a parameter
        f"WITH v (task_id, {', '.join(COLUMNS)}, held_fence) AS ({rows}) "
        f"UPDATE {connection.ops.quote_name(TaskRecord._meta.db_table)} AS t SET {assignments} "
        f"FROM v WHERE t.id = v.task_id AND ({GUARD}) RETURNING id"
    )


def _json_of(writes: Sequence[FencedWrite]) -> str:
    rows = [dict(zip(WRITTEN, (*_values_of(write.record), write.held_fence), strict=True)) for write in writes]
    return _json.encode(rows)


def _values(writes: Sequence[FencedWrite], connection: BaseDatabaseWrapper) -> tuple[str, list[Any]]:
    rows = list(_rows(writes, connection))
    row = f"({', '.join(['%s'] * len(rows[0]))})"
    return f"VALUES {', '.join([row] * len(rows))}", [value for row in rows for value in row]


def _joined_update(writes: Sequence[FencedWrite], connection: BaseDatabaseWrapper) -> tuple[str, list[Any]]:
    """Return the UPDATE … JOIN a derived table, for MySQL and MariaDB, which cannot return the changed ids."""
    rows = list(_rows(writes, connection))
    first_row = "SELECT " + ", ".join(f"%s AS {name}" for name in WRITTEN)
    plain_row = "SELECT " + ", ".join(["%s"] * len(WRITTEN))
    assignments = ", ".join(f"t.{column} = v.{column}" for column in COLUMNS)
    sql = (
        f"UPDATE {connection.ops.quote_name(TaskRecord._meta.db_table)} AS t "
        f"JOIN ({' UNION ALL '.join([first_row] + [plain_row] * (len(rows) - 1))}) AS v ON t.id = v.id "
        f"SET {assignments} WHERE {GUARD}"
    )
    return sql, [value for row in rows for value in row]


def _rows(writes: Sequence[FencedWrite], connection: BaseDatabaseWrapper) -> Iterator[list[Any]]:
    """Yield the values of each row as the database driver takes them."""
    fields = _fields()
    for write in writes:
        values = [
            field.get_db_prep_save(getattr(write.record, field.attname), connection=connection) for field in fields
        ]
        yield [*values, write.held_fence]

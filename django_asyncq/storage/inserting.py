"""The INSERT of new tasks, with one statement for up to ROWS_PER_STATEMENT rows.

It names only the columns in which a row differs from the database's defaults: for a plain task without arguments two
of more than forty. `enqueued_at` is a default too, the database's own time, so that no producer's clock decides it.
A time that counts from there is added by the statement (`TaskRecord.delays`), and read back from it.

Django's `save` takes half as long again for one row, and `bulk_create` twice as long for many. PostgreSQL gets many
rows as one JSON text: with a parameter for each value a row takes 110 µs, as JSON 24. Only `lifecycle` calls this
module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import NOT_PROVIDED, Field
from django.db.models.signals import post_save, pre_save

from ..core.fields import AFTER_NOW, MICROSECOND, StoredJSONEncoder, as_stored, sql_after_now
from ..core.payload import check_depth
from ..core.time import Delay
from ..models import TaskEdge, TaskRecord
from . import database_clock

ROWS_PER_STATEMENT = 1000
EDGES_PER_STATEMENT = 5000
# MariaDB calls JSON with 32 levels invalid, measured with 10.11; its error would not say what to do.
MARIADB_LEVELS = 31

FIELDS: dict[str, Field[Any, Any]] = {field.attname: field for field in TaskRecord._meta.concrete_fields}
# The value of each column that an INSERT does not name; None for NULL.
DEFAULTS = {name: None if field.db_default is NOT_PROVIDED else field.db_default for name, field in FIELDS.items()}

_json = StoredJSONEncoder(ensure_ascii=False, allow_nan=False, default=str)

# The values of a task by attribute, which are the names of the columns.
Row = dict[str, Any]
Columns = tuple[str, ...]
Statement = tuple[str, list[Any]]


def insert_missing(records: Sequence[TaskRecord], connection: BaseDatabaseWrapper) -> None:
    """Insert the tasks of other programs whose rows do not exist yet; no signal of a model is sent.

    Which of them another process has inserted meanwhile nobody can tell: the caller reads the rows. Raises: as
    `insert`.
    """
    if connection.vendor == "mysql":
        _check_depth(records, connection)
    has_default = _note_time(records, connection)
    _execute(_statements(records, connection, _unless_there(connection), has_default=has_default), connection)


def insert(records: Sequence[TaskRecord], connection: BaseDatabaseWrapper) -> list[TaskRecord]:
    """Insert new tasks, all or none, in the caller's transaction if there is one; return those inserted.

    Only a task whose unique slot another row holds is not inserted: then the others are, and nothing is raised. While
    another transaction has taken that slot and is open, the statement waits until it commits or rolls back.

    The database notes its own time as `enqueued_at`; in memory a new task keeps that of its host, unless it has times
    that count from there. Where the column's default is not right for the connection, it gets the database's time here.
    On SQLite the two are one.
    As with Django's `save` and `bulk_create`, `pre_save` and `post_save` are sent for a single task, not for several.
    Raises: django.db.Error; the caller's transaction can then only be rolled back. InvalidArguments, before anything is
    written, for arguments that MariaDB cannot store.
    """
    database = connection.alias
    if connection.vendor == "mysql":
        _check_depth(records, connection)
    announced = records if len(records) == 1 else []
    for record in announced if pre_save.receivers else []:
        pre_save.send(TaskRecord, instance=record, raw=False, using=database, update_fields=None)
    has_default = _note_time(records, connection)
    are_unique = bool([record for record in records if record.unique_slot is not None])
    are_timed = has_default and bool([record for record in records if record.delays])
    is_read = are_unique or are_timed
    ending = _unless_taken(database, are_unique, are_timed) if is_read else ""
    statements = _statements(records, connection, ending, has_default=has_default)
    returned = _execute(statements, connection, records if is_read else ())
    inserted = [record for record in records if record.id in returned] if are_unique else list(records)
    if are_timed:
        for record in inserted:
            _settle(record, returned[record.id])
    for record in inserted:
        record._state.adding, record._state.db = False, database
    for record in announced if inserted and post_save.receivers else []:
        post_save.send(TaskRecord, instance=record, created=True, raw=False, using=database, update_fields=None)
    return inserted


def _check_depth(records: Sequence[TaskRecord], connection: BaseDatabaseWrapper) -> None:
    """Refuse arguments that MariaDB cannot store. Raises: InvalidArguments."""
    if getattr(connection, "mysql_is_mariadb", False):
        for record in records:
            check_depth(record.args, "args", MARIADB_LEVELS, "MariaDB stores")
            check_depth(record.kwargs, "kwargs", MARIADB_LEVELS, "MariaDB stores")


def _note_time(records: Sequence[TaskRecord], connection: BaseDatabaseWrapper) -> bool:
    """Give tasks the database's time where the statement cannot; return whether it can."""
    if database_clock.is_column_default(connection):
        return True
    now = None if connection.vendor == "sqlite" else database_clock.now(connection.alias)
    for record in records:
        if now is not None:
            record.enqueued_at = now
        if record.delays:
            # Now, and not when the row was made: it may have waited for its gate, or for another task's slot.
            _settle(record, now or database_clock.of_host())
    return False


def _settle(record: TaskRecord, moment: datetime) -> None:
    """Note the row's moment, and the times that count from it, as the row has them."""
    record.enqueued_at = moment
    for name, delay in record.delays.items():
        setattr(record, name, delay.after(moment))


def _execute(
    statements: Sequence[Statement], connection: BaseDatabaseWrapper, returning: Sequence[TaskRecord] = ()
) -> dict[Any, Any]:
    """Execute the INSERT statements, all or none; return what they return: the id of an inserted task → its moment.

    returning: the tasks, if the statements return something.
    """
    if len(statements) > 1 or not connection.get_autocommit():
        with transaction.atomic(connection.alias, savepoint=False):
            return _executed(statements, connection, returning)
    # One statement is atomic by itself; BEGIN and COMMIT around it would be two more round trips.
    return _executed(statements, connection, returning)


def _executed(
    statements: Sequence[Statement], connection: BaseDatabaseWrapper, returning: Sequence[TaskRecord]
) -> dict[Any, Any]:
    returned: dict[Any, Any] = {}
    identity = TaskRecord._meta.pk
    with connection.cursor() as cursor:
        for sql, parameters in statements:
            cursor.execute(sql, parameters)
            if returning and connection.vendor != "mysql":
                returned.update({identity.to_python(row[0]): row[-1] for row in cursor.fetchall()})
    if returning and connection.vendor == "mysql":
        # It returns nothing, and the count of changed rows says nothing: Django has it count found rows. Own writes
        # are always seen.
        rows = TaskRecord.objects.using(connection.alias).filter(id__in=[record.id for record in returning])
        returned.update(rows.values_list("id", "enqueued_at"))
    return returned


def _statements(
    records: Sequence[TaskRecord], connection: BaseDatabaseWrapper, ending: str, *, has_default: bool
) -> list[Statement]:
    """Return the statements, each with its parameters.

    ending: of each. has_default: whether they leave `enqueued_at` to the database.
    """
    rows = [record.__dict__ for record in records]
    delayed: Columns = ()
    if has_default and [record for record in records if record.delays]:
        rows = [_with_delays(record, row) for record, row in zip(records, rows, strict=True)]
        delayed = tuple([name for name in FIELDS if any(type(row[name]) is Delay for row in rows)])
    columns = _differing(rows)
    if has_default and not delayed:
        columns = tuple([name for name in columns if name != "enqueued_at"])
    use_json = connection.vendor == "postgresql" and len(rows) > 1
    size = ROWS_PER_STATEMENT
    if len(rows) > 1 and not use_json:
        # Django's limit is that of the parameters; JSON is one.
        size = min(size, connection.ops.bulk_batch_size([FIELDS[name] for name in columns], rows))
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    made = [
        _from_json(part, columns, delayed, connection) if use_json else _from_values(part, columns, delayed, connection)
        for part in parts
    ]
    return [(sql + ending, parameters) for sql, parameters in made] if ending else made


def _with_delays(record: TaskRecord, row: Row) -> Row:
    """Return the values of a task with its delays in the place of its times, and that of its moment, which is none."""
    return {**row, "enqueued_at": database_clock.AT_ONCE, **record.delays}


def _differing(rows: Sequence[Row]) -> Columns:
    """Return the columns in which some row differs from the database's default."""
    found = {
        name for row in rows for name, default in DEFAULTS.items() if row[name] is not default and row[name] != default
    }
    return tuple([name for name in FIELDS if name in found])


def _from_values(rows: Sequence[Row], columns: Columns, delayed: Columns, connection: BaseDatabaseWrapper) -> Statement:
    """Return an INSERT with a parameter for each value, on any database."""
    insert_into = _insert_into(connection.alias, columns)
    if delayed:
        cells = [[_cell(name, row[name], connection) for name in columns] for row in rows]
        tuples = ", ".join(f"({', '.join(sql for sql, _ in row)})" for row in cells)
        return f"{insert_into} VALUES {tuples}", [value for row in cells for _, values in row for value in values]
    placeholders = f"({', '.join(['%s'] * len(columns))})"
    fields = [(name, FIELDS[name]) for name in columns]
    parameters = [as_stored(field, row[name], connection) for row in rows for name, field in fields]
    return f"{insert_into} VALUES {', '.join([placeholders] * len(rows))}", parameters


def _cell(name: str, value: Any, connection: BaseDatabaseWrapper) -> tuple[str, list[Any]]:
    if type(value) is Delay:
        return sql_after_now(value, connection)
    return "%s", [as_stored(FIELDS[name], value, connection)]


def _from_json(rows: Sequence[Row], columns: Columns, delayed: Columns, connection: BaseDatabaseWrapper) -> Statement:
    """Return PostgreSQL's INSERT of rows that come as one JSON text."""
    objects = [
        {name: value if type(value := row[name]) is not bytes else f"\\x{value.hex()}" for name in columns}
        for row in rows
    ]
    for name in delayed:
        for each, row in zip(objects, rows, strict=True):
            if type(delay := row[name]) is Delay:
                each.update({name: delay.latest, f"{name}_wait": delay.wait // MICROSECOND})
    sql = f"{_insert_into(connection.alias, columns)} {_select_from_json(connection.alias, columns, delayed)}"
    return sql, [_json.encode(objects)]


@lru_cache(maxsize=64)
def _insert_into(database: str, columns: Columns) -> str:
    quote = connections[database].ops.quote_name
    names = ", ".join(quote(name) for name in columns)
    return f"INSERT INTO {quote(TaskRecord._meta.db_table)} ({names})"


@lru_cache(maxsize=64)
def _select_from_json(database: str, columns: Columns, delayed: Columns) -> str:
    connection = connections[database]
    quote = connection.ops.quote_name
    names = [quote(name) for name in columns]
    # Without their length, so that PostgreSQL refuses a text that is too long, and does not cut it.
    types = [str(FIELDS[name].db_type(connection)).split("(")[0] for name in columns]
    waits = {name: quote(f"{name}_wait") for name in delayed}
    shape = ", ".join(
        [f"{name} {type}" for name, type in zip(names, types, strict=True)]
        + [f"{wait} bigint" for wait in waits.values()]
    )
    # A row without a delay has a moment, or neither: LEAST passes over what is NULL.
    after = AFTER_NOW["postgresql"]
    values = [
        f"LEAST({quoted}, {after.replace('%s', waits[name])})" if name in waits else quoted
        for quoted, name in zip(names, columns, strict=True)
    ]
    return f"SELECT {', '.join(values)} FROM json_to_recordset(%s) AS rows ({shape})"


@lru_cache(maxsize=64)
def _unless_taken(database: str, are_unique: bool, are_timed: bool) -> str:
    """Return what ends the INSERT of unique or timed tasks: a slot that is taken is no error, and what it returns.

    It names the index, so that a clash of ids is an error as ever. MySQL cannot name it; its INSERT IGNORE would also
    cut a text that is too long.
    """
    connection = connections[database]
    quote = connection.ops.quote_name
    slot, id = quote("unique_slot"), quote("id")
    if connection.vendor == "mysql":
        return f" ON DUPLICATE KEY UPDATE {id} = {id}" if are_unique else ""
    unless = f" ON CONFLICT ({slot}) WHERE {slot} IS NOT NULL DO NOTHING" if are_unique else ""
    return f"{unless} RETURNING {id}" + (f", {quote('enqueued_at')}" if are_timed else "")


def _unless_there(connection: BaseDatabaseWrapper) -> str:
    """Return what ends an INSERT of rows that may exist, by their ids."""
    id = connection.ops.quote_name("id")
    return (
        f" ON DUPLICATE KEY UPDATE {id} = {id}" if connection.vendor == "mysql" else f" ON CONFLICT ({id}) DO NOTHING"
    )


def insert_edges(records: Iterable[TaskRecord], connection: BaseDatabaseWrapper) -> None:
    """Insert what new tasks wait for, in the caller's transaction. No signal of a model is sent."""
    edges = [
        (edge.parent.id, record.id, edge.name, edge.position, edge.runs_anyway)
        for record in records
        for edge in record.edges
    ]
    names = ("parent_id", "child_id", "name", "position", "runs_anyway")
    if connection.vendor != "postgresql":
        made = [TaskEdge(**dict(zip(names, edge, strict=True))) for edge in edges]
        TaskEdge.objects.using(connection.alias).bulk_create(made, batch_size=EDGES_PER_STATEMENT)
        return
    types = [str(TaskEdge._meta.get_field(name).db_type(connection)).split("(")[0] for name in names]
    shape = ", ".join(f"{name} {type}" for name, type in zip(names, types, strict=True))
    sql = (
        f"INSERT INTO {connection.ops.quote_name(TaskEdge._meta.db_table)} ({', '.join(names)}) "
        f"SELECT {', '.join(names)} FROM json_to_recordset(%s) AS rows ({shape})"
    )
    with connection.cursor() as cursor:
        for start in range(0, len(edges), EDGES_PER_STATEMENT):
            part = edges[start : start + EDGES_PER_STATEMENT]
            cursor.execute(sql, [_json.encode([dict(zip(names, edge, strict=True)) for edge in part])])

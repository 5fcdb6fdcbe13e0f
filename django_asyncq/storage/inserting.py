"""The INSERT of new tasks, with one statement for up to ROWS_PER_STATEMENT rows.

It names only the columns in which a row differs from the database's defaults: for a plain task without arguments two
of more than forty. `enqueued_at` is a default too, the database's own time, so that no producer's clock decides it.

Django's `save` takes half as long again for one row, and `bulk_create` twice as long for many. PostgreSQL gets many
rows as one JSON text: with a parameter for each value a row takes 110 µs, as JSON 24. Only `lifecycle` calls this
module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache
from operator import attrgetter
from typing import Any

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import NOT_PROVIDED, Field
from django.db.models.signals import post_save, pre_save

from ..definitions.payload import check_depth
from ..definitions.stored_json import StoredJSONEncoder
from ..models import TaskRecord
from . import database_clock

ROWS_PER_STATEMENT = 1000
# MariaDB calls JSON with 32 levels invalid, measured with 10.11; its error would not say what to do.
MARIADB_LEVELS = 31

FIELDS: tuple[Field[Any, Any], ...] = tuple(TaskRecord._meta.concrete_fields)
NAMES = tuple(str(field.column) for field in FIELDS)
# The value of each column that an INSERT does not name; None for NULL.
DEFAULTS = tuple([None if field.db_default is NOT_PROVIDED else field.db_default for field in FIELDS])
_values_of = attrgetter(*(field.attname for field in FIELDS))
ENQUEUED_AT = NAMES.index("enqueued_at")
UNIQUE_SLOT = NAMES.index("unique_slot")

_json = StoredJSONEncoder(ensure_ascii=False, allow_nan=False, default=str)

Row = tuple[Any, ...]
Columns = tuple[int, ...]
Statement = tuple[str, list[Any]]


def insert_missing(records: Sequence[TaskRecord], connection: BaseDatabaseWrapper) -> None:
    """Insert the tasks of other programs whose rows do not exist yet; no signal of a model is sent.

    Which of them another process has inserted meanwhile nobody can tell: the caller reads the rows. Raises: as
    `insert`.
    """
    _check_depth(records, connection)
    has_default = database_clock.is_column_default(connection)
    if not has_default and connection.vendor != "sqlite":
        now = database_clock.now(connection.alias)
        for record in records:
            record.enqueued_at = now
    statements = [
        (sql + _unless_there(connection), parameters)
        for sql, parameters in _statements(records, connection, has_default=has_default)
    ]
    _execute(statements, records, connection)


def insert(records: Sequence[TaskRecord], connection: BaseDatabaseWrapper) -> list[TaskRecord]:
    """Insert new tasks, all or none, in the caller's transaction if there is one; return those inserted.

    Only a task whose unique slot another row holds is not inserted: then the others are, and nothing is raised. While
    another transaction has taken that slot and is open, the statement waits until it commits or rolls back.

    The database notes its own time as `enqueued_at`; in memory a new task keeps that of its host. Where the column's
    default is not right for the connection, it gets the database's time here. On SQLite the two are one.
    As with Django's `save` and `bulk_create`, `pre_save` and `post_save` are sent for a single task, not for several.
    Raises: django.db.Error; the caller's transaction can then only be rolled back. InvalidArguments, before anything is
    written, for arguments that MariaDB cannot store.
    """
    database = connection.alias
    _check_depth(records, connection)
    announced = records if len(records) == 1 else []
    for record in announced:
        pre_save.send(TaskRecord, instance=record, raw=False, using=database, update_fields=None)
    has_default = database_clock.is_column_default(connection)
    if not has_default and connection.vendor != "sqlite":
        now = database_clock.now(database)
        for record in records:
            record.enqueued_at = now
    statements = list(_statements(records, connection, has_default=has_default))
    inserted = _execute(statements, records, connection)
    for record in inserted:
        record._state.adding, record._state.db = False, database
    for record in announced if inserted else []:
        post_save.send(TaskRecord, instance=record, created=True, raw=False, using=database, update_fields=None)
    return inserted


def _check_depth(records: Sequence[TaskRecord], connection: BaseDatabaseWrapper) -> None:
    """Refuse arguments that MariaDB cannot store. Raises: InvalidArguments."""
    if connection.vendor == "mysql" and getattr(connection, "mysql_is_mariadb", False):
        for record in records:
            check_depth(record.args, "args", MARIADB_LEVELS, "MariaDB stores")
            check_depth(record.kwargs, "kwargs", MARIADB_LEVELS, "MariaDB stores")


def _execute(
    statements: Sequence[Statement], records: Sequence[TaskRecord], connection: BaseDatabaseWrapper
) -> list[TaskRecord]:
    """Execute the INSERT statements, all or none; return the tasks that they inserted."""
    database = connection.alias
    are_unique = any(record.unique_slot is not None for record in records)
    # One statement is atomic by itself; BEGIN and COMMIT around it would be two more round trips.
    is_atomic = len(statements) == 1 and transaction.get_autocommit(database)
    ids: set[Any] = set()
    identity = TaskRecord._meta.pk
    with nullcontext() if is_atomic else transaction.atomic(database, savepoint=False), connection.cursor() as cursor:
        for sql, parameters in statements:
            cursor.execute(sql, parameters)
            if are_unique and connection.vendor != "mysql":
                ids.update(identity.to_python(id) for (id,) in cursor.fetchall())
        if not are_unique:
            return list(records)
        if connection.vendor == "mysql":
            # The count of changed rows says nothing: Django has it count found rows. Own writes are always seen.
            rows = TaskRecord.objects.using(database).filter(id__in=[record.id for record in records])
            ids.update(rows.values_list("id", flat=True))
    return [record for record in records if record.id in ids]


def _statements(
    records: Sequence[TaskRecord], connection: BaseDatabaseWrapper, *, has_default: bool
) -> Iterator[Statement]:
    """Yield the statements, each with its parameters. has_default: whether they leave `enqueued_at` to the database."""
    rows = [_values_of(record) for record in records]
    columns = _differing(rows)
    if has_default:
        columns = tuple([index for index in columns if index != ENQUEUED_AT])
    use_json = connection.vendor == "postgresql" and len(rows) > 1
    # Django's limit is that of the parameters; JSON is one.
    most = (
        ROWS_PER_STATEMENT if use_json else connection.ops.bulk_batch_size([FIELDS[index] for index in columns], rows)
    )
    size = min(most, ROWS_PER_STATEMENT)
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        yield _from_json(part, columns, connection) if use_json else _from_values(part, columns, connection)


def _differing(rows: Sequence[Row]) -> Columns:
    """Return the columns in which some row differs from the database's default."""
    by_column = zip(*rows, strict=True)
    return tuple([index for index, values in enumerate(by_column) if values.count(DEFAULTS[index]) < len(rows)])


def _from_values(rows: Sequence[Row], columns: Columns, connection: BaseDatabaseWrapper) -> Statement:
    """Return an INSERT with a parameter for each value, on any database."""
    placeholders = f"({', '.join(['%s'] * len(columns))})"
    parameters = [
        FIELDS[index].get_db_prep_save(row[index], connection=connection) for row in rows for index in columns
    ]
    sql = f"{_insert_into(connection.alias, columns)} VALUES {', '.join([placeholders] * len(rows))}"
    return sql + _unless_taken(connection.alias, columns), parameters


def _from_json(rows: Sequence[Row], columns: Columns, connection: BaseDatabaseWrapper) -> Statement:
    """Return PostgreSQL's INSERT of rows that come as one JSON text."""
    named = [(NAMES[index], index) for index in columns]
    text = _json.encode([{name: _as_json(row[index]) for name, index in named} for row in rows])
    sql = f"{_insert_into(connection.alias, columns)} {_select_from_json(connection.alias, columns)}"
    return sql + _unless_taken(connection.alias, columns), [text]


def _as_json(value: Any) -> Any:
    """Return bytes as PostgreSQL writes them in a text; any other value unchanged."""
    return f"\\x{value.hex()}" if type(value) is bytes else value


@lru_cache(maxsize=64)
def _insert_into(database: str, columns: Columns) -> str:
    quote = connections[database].ops.quote_name
    names = ", ".join(quote(NAMES[index]) for index in columns)
    return f"INSERT INTO {quote(TaskRecord._meta.db_table)} ({names})"


@lru_cache(maxsize=64)
def _select_from_json(database: str, columns: Columns) -> str:
    connection = connections[database]
    names = [connection.ops.quote_name(NAMES[index]) for index in columns]
    # Without their length, so that PostgreSQL refuses a text that is too long, and does not cut it.
    types = [str(FIELDS[index].db_type(connection)).split("(")[0] for index in columns]
    shape = ", ".join(f"{name} {type}" for name, type in zip(names, types, strict=True))
    return f"SELECT {', '.join(names)} FROM json_to_recordset(%s) AS rows ({shape})"


@lru_cache(maxsize=64)
def _unless_taken(database: str, columns: Columns) -> str:
    """Return what ends the INSERT of unique tasks: a slot that is taken is no error. "" for tasks without a slot.

    It names the index, so that a clash of ids is an error as ever. MySQL cannot name it; its INSERT IGNORE would also
    cut a text that is too long.
    """
    if UNIQUE_SLOT not in columns:
        return ""
    connection = connections[database]
    quote = connection.ops.quote_name
    slot, id = quote(NAMES[UNIQUE_SLOT]), quote("id")
    if connection.vendor == "mysql":
        return f" ON DUPLICATE KEY UPDATE {id} = {id}"
    return f" ON CONFLICT ({slot}) WHERE {slot} IS NOT NULL DO NOTHING RETURNING {id}"


def _unless_there(connection: BaseDatabaseWrapper) -> str:
    """Return what ends an INSERT of rows that may exist, by their ids."""
    id = connection.ops.quote_name("id")
    return (
        f" ON DUPLICATE KEY UPDATE {id} = {id}" if connection.vendor == "mysql" else f" ON CONFLICT ({id}) DO NOTHING"
    )

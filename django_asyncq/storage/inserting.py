"""The INSERT of new tasks: one statement for many, written from the model's own fields.

Django's `save` and `bulk_create` make a parameter of each field of each row. Most of a task's fields have their
default: those stand in the statement as they are, and NULL is left out. It only writes what `lifecycle` gives it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from operator import attrgetter
from typing import Any
from uuid import UUID

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import CharField, DateTimeField, Field, FloatField, IntegerField, JSONField, UUIDField
from django.db.models.signals import post_save, pre_save

from ..models import TaskRecord

ROWS_PER_STATEMENT = 1000

Columns = tuple[int, ...]

_FIELDS: tuple[Field[Any, Any], ...] = tuple(TaskRecord._meta.concrete_fields)
_values_of = attrgetter(*(field.attname for field in _FIELDS))
# What PostgreSQL's driver takes as it is; a subclass, such as an enumeration's, is Django's to prepare.
_TAKEN_AS_THEY_ARE = (
    (CharField, {str}),
    (DateTimeField, {datetime}),
    (FloatField, {float, int}),
    (IntegerField, {int}),
    (UUIDField, {UUID}),
)
_TAKEN_AS_IT_IS = tuple(
    next((types for kind, types in _TAKEN_AS_THEY_ARE if isinstance(field, kind)), set()) for field in _FIELDS
)
# No two rows share an id, and none need share a time.
_DEFAULTS = tuple(None if field.name in ("id", "enqueued_at") else field.get_default() for field in _FIELDS)
_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=str)


def insert(records: Sequence[TaskRecord], connection: BaseDatabaseWrapper) -> None:
    """Insert new tasks, all or none, in the caller's transaction where there is one.

    As with Django's `save` and `bulk_create`, `pre_save` and `post_save` tell of a task alone, not of several.
    """
    database = connection.alias
    told = records if len(records) == 1 else []
    for record in told:
        pre_save.send(TaskRecord, instance=record, raw=False, using=database, update_fields=None)
    statements = list(_statements(records, connection))
    if len(statements) == 1:
        # One statement is atomic by itself; BEGIN and COMMIT around it would be two round trips more.
        _execute(statements, connection)
    else:
        with transaction.atomic(database, savepoint=False):
            _execute(statements, connection)
    for record in records:
        record._state.adding, record._state.db = False, database
    for record in told:
        post_save.send(TaskRecord, instance=record, created=True, raw=False, using=database, update_fields=None)


def _execute(statements: Sequence[tuple[str, list[Any]]], connection: BaseDatabaseWrapper) -> None:
    with transaction.mark_for_rollback_on_error(connection.alias), connection.cursor() as cursor:
        for sql, parameters in statements:
            cursor.execute(sql, parameters)


def _statements(records: Sequence[TaskRecord], connection: BaseDatabaseWrapper) -> Iterator[tuple[str, list[Any]]]:
    """Yield the statements, each with its parameters."""
    if len(records) == 1:
        # Most calls are for one task, and pay for nothing that only many need.
        values = _values_of(records[0])
        columns = tuple([index for index, value in enumerate(values) if value != _DEFAULTS[index]])
        head, row_sql = _from_values(connection.alias, columns)
        yield head + row_sql, [_prepared(index, values[index], connection) for index in columns]
        return
    by_field = list(zip(*map(_values_of, records), strict=True))
    columns = tuple(index for index, values in enumerate(by_field) if values.count(_DEFAULTS[index]) < len(values))
    rows = list(zip(*(by_field[index] for index in columns), strict=True))
    fields = [_FIELDS[index] for index in columns]
    size = min(connection.ops.bulk_batch_size(fields, rows), ROWS_PER_STATEMENT)
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        if connection.vendor == "postgresql":
            names = [field.column for field in fields]
            yield (
                _from_json(connection.alias, columns),
                [_json.encode([dict(zip(names, row, strict=True)) for row in part])],
            )
        else:
            head, row_sql = _from_values(connection.alias, columns)
            parameters = [
                _prepared(index, value, connection) for row in part for index, value in zip(columns, row, strict=True)
            ]
            yield head + ", ".join([row_sql] * len(part)), parameters


def _prepared(index: int, value: Any, connection: BaseDatabaseWrapper) -> Any:
    """Return a field's value as the database's driver takes it."""
    if connection.vendor == "postgresql":
        if type(value) in _TAKEN_AS_IT_IS[index]:
            return value
        if value is not None and isinstance(_FIELDS[index], JSONField):
            # It parses the text; other databases keep it, and Django then compares it with its own.
            return _json.encode(value)
    return _FIELDS[index].get_db_prep_save(value, connection=connection)


@lru_cache(maxsize=64)
def _from_values(database: str, columns: Columns) -> tuple[str, str]:
    """Return INSERT … VALUES, and what stands there for one row."""
    constants = _constants(columns)
    placeholders = ["%s"] * len(columns) + list(constants.values())
    return f"{_into(database, columns, constants)} VALUES ", f"({', '.join(placeholders)})"


@lru_cache(maxsize=64)
def _from_json(database: str, columns: Columns) -> str:
    """Return PostgreSQL's INSERT of rows that come as one JSON text, which costs it a third of a list of VALUES."""
    connection = connections[database]
    constants = _constants(columns)
    names = [connection.ops.quote_name(str(_FIELDS[index].column)) for index in columns]
    # Without the length, so that what is too long is refused and not cut.
    types = [str(_FIELDS[index].db_type(connection)).split("(")[0] for index in columns]
    shape = ", ".join(f"{name} {type}" for name, type in zip(names, types, strict=True))
    return (  # only names and defaults of the model's own
        f"{_into(database, columns, constants)} SELECT {', '.join(names + list(constants.values()))} "
        f"FROM json_to_recordset(%s) AS v ({shape})"
    )


def _into(database: str, columns: Columns, constants: dict[int, str]) -> str:
    quote = connections[database].ops.quote_name
    names = ", ".join(quote(str(_FIELDS[index].column)) for index in [*columns, *constants])
    return f"INSERT INTO {quote(TaskRecord._meta.db_table)} ({names})"


def _constants(columns: Columns) -> dict[int, str]:
    """Return the defaults of the other columns as SQL, without those that are NULL."""
    return {
        index: _literal(default)
        for index, default in enumerate(_DEFAULTS)
        if index not in columns and default is not None
    }


def _literal(default: Any) -> str:
    if isinstance(default, int):
        return str(int(default))
    return f"'{default if isinstance(default, str) else json.dumps(default)}'"

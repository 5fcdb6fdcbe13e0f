"""A column for names that the database compares as Python and Redis do: by case, accents and all.

The collation of a MySQL or MariaDB database usually ignores case. The task `Mail` would then be found as `mail`, and a
gate would count the tasks of another.
"""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from decimal import Decimal
from enum import IntEnum
from types import NoneType
from typing import TYPE_CHECKING, Any

from django.db import models
from django.db.models import DateTimeField, Expression, F, Field, Func, JSONField, Q
from django.db.models.expressions import Combinable
from django.db.models.functions import Now
from django.db.models.lookups import Exact, IContains, Lookup

from .several_gates import marked
from .time import Delay

# Both exist in each version of MySQL and MariaDB, and need four bytes a character: an index of 200 takes 800 of 3,072.
EXACT = "utf8mb4_bin"
WITHOUT_CASE = "utf8mb4_unicode_ci"
# Of a text that may have thousands of characters; an entry of PostgreSQL's index has room for 2,704 bytes.
INDEXED_CHARACTERS = 100
BEGINNING = f"SUBSTR(%s, 1, {INDEXED_CHARACTERS})"

# Django's classes cannot be subscripted; only their stubs can.
if TYPE_CHECKING:
    CharField = models.CharField[str | Combinable, str]
    TextField = models.TextField[str | Combinable | None, str | None]
else:
    CharField, TextField = models.CharField, models.TextField


# Of a column that is no JSON, a value of one of these types goes to every database as it is.
UNCHANGED = (str, int, float, bool, NoneType)


def as_stored(field: Field[Any, Any], value: Any, connection: Any) -> Any:
    """Return a value of a column as the driver gets it; the field's own way makes ten calls more for each.

    For the fields of this package, whose plain texts and numbers need no preparation.
    """
    if type(field) is JSONField:
        return None if value is None else connection.ops.adapt_json_value(value, field.encoder)
    kind = type(value)
    if kind in UNCHANGED:
        return value
    if kind is datetime and value.tzinfo is not None:
        return connection.ops.adapt_datetimefield_value(value)
    if isinstance(value, IntEnum):
        return int(value)
    return field.get_db_prep_save(value, connection=connection)


class Exactly:
    """The part of a field whose values are equal only if all their characters are."""

    def db_parameters(self, connection: Any) -> Any:
        """Name the collation on MySQL and MariaDB; PostgreSQL and SQLite compare exactly by themselves."""
        parameters = super().db_parameters(connection)  # type: ignore[misc]
        return {**parameters, "collation": EXACT} if connection.vendor == "mysql" else parameters


class ExactCharField(Exactly, CharField):
    """A CharField of names."""


class ExactTextField(Exactly, TextField):
    """A TextField of names, which a `BeginningIndex` finds."""


@ExactTextField.register_lookup
class ExactByBeginning(Exact):
    """`exact`, which names the beginning too: PostgreSQL and SQLite use an index on an expression only for that."""

    def as_sql(self, compiler: Any, connection: Any) -> Any:
        """Return the SQL; MySQL and MariaDB compare a whole text along an index on its beginning."""
        sql, parameters = super().as_sql(compiler, connection)
        if connection.vendor == "mysql":
            return sql, parameters
        left, of_left = self.process_lhs(compiler, connection)
        right, of_right = self.process_rhs(compiler, connection)
        return f"({sql} AND {BEGINNING % left} = {BEGINNING % right})", (*parameters, *of_left, *of_right)


@ExactCharField.register_lookup
class ContainsWithoutCase(IContains):
    """`icontains`, which on MySQL and MariaDB leaves the case to the column's collation."""

    def process_lhs(self, compiler: Any, connection: Any, lhs: Any = None) -> Any:
        """Compare with a collation that ignores case."""
        sql, parameters = super().process_lhs(compiler, connection, lhs)
        return (f"{sql} COLLATE {WITHOUT_CASE}" if connection.vendor == "mysql" else sql), parameters


class OtherGatesField(ExactCharField):
    """The gates of a task after the first, as `several_gates` writes them."""


@OtherGatesField.register_lookup
class HasGate(Lookup):
    """`has_gate`: whether one of some gates is among them, exactly; LIKE ignores case on SQLite.

    It says that the text is not empty: a database uses an index of such rows only for a query that repeats this.
    """

    lookup_name = "has_gate"
    prepare_rhs = False
    # SQLite takes an expression of a thousand levels at most, and each OR is one.
    GATES_PER_LEVEL = 50

    def as_sql(self, compiler: Any, connection: Any) -> Any:
        """Return the SQL. The right side is a list of names that is not empty."""
        left, of_left = self.process_lhs(compiler, connection)
        names, size = list(self.rhs), self.GATES_PER_LEVEL
        term = f"{'STRPOS' if connection.vendor == 'postgresql' else 'INSTR'}({left}, %s) > 0"
        parameters: list[Any] = [*of_left]
        for name in names:
            parameters += [*of_left, marked(name)]
        parts = [len(names[start : start + size]) for start in range(0, len(names), size)]
        found = " OR ".join(f"({' OR '.join([term] * count)})" for count in parts)
        return f"(NOT ({left} = '') AND ({found}))", parameters


# --- The JSON text of the columns that hold a user's values. Every database returns it with type and sign.
#
# PostgreSQL keeps the numbers of its `jsonb` as `numeric`, which knows neither exponents nor a negative zero. So
# `1e+16` comes back as `10000000000000000`, an int, and `-0.0` as `0.0`. Only such numbers are spelled otherwise
# here. Every reader of JSON reads the same number, so nothing has to be undone.

# A text, which is left as it is, or a float that PostgreSQL would change. Python writes an exponent from 1e16 on.
_TEXT_OR_NUMBER = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|-0\.0(?!\d)|-?\d[\d.]*e\+\d+')
# Smaller than every float but 0, so that it is read as the float -0.0, while `numeric` keeps its sign.
_NEGATIVE_ZERO = "-1e-400"


class StoredJSONEncoder(json.JSONEncoder):
    """Encode JSON so that every database returns the same types and numbers."""

    def encode(self, o: Any) -> str:
        """Encode a value."""
        text = super().encode(o)
        # Nearly no text has either; looking for them takes 0.1 µs.
        if "e+" in text or "-0.0" in text:
            return _TEXT_OR_NUMBER.sub(_respelled, text)
        return text


def _respelled(match: re.Match[str]) -> str:
    found = match[0]
    if found[0] == '"':
        return found
    return _NEGATIVE_ZERO if found == "-0.0" else f"{Decimal(found):f}.0"


# --- Indexes that cover only some rows where the database can, and all rows on MySQL and MariaDB.
#
# Django omits an index with a condition on MySQL, and its checks warn about it. These have no `condition` for the
# checks, and are created as Django creates its own.


class PartialIndex(models.Index):
    """An index on the rows for which `where` holds."""

    def __init__(self, *, where: Q, **options: Any) -> None:
        super().__init__(**options)
        self.where = where

    def deconstruct(self) -> Any:
        """Add `where` for migrations."""
        path, expressions, options = super().deconstruct()
        return path, expressions, {**options, "where": self.where}

    def create_sql(self, model: Any, schema_editor: Any, using: str = "", **options: Any) -> Any:
        """Return the CREATE INDEX, with the condition where the database has such indexes."""
        condition = self.where if schema_editor.connection.features.supports_partial_indexes else None
        created = models.Index(fields=self.fields, name=self.name, condition=condition)
        return created.create_sql(model, schema_editor, using, **options)


class BeginningIndex(PartialIndex):
    """A PartialIndex on the beginning of the texts of one column, an `ExactTextField`."""

    def create_sql(self, model: Any, schema_editor: Any, using: str = "", **options: Any) -> Any:
        """Return the CREATE INDEX: of an expression, and on MySQL, where MariaDB has no such index, of a length."""
        (column,) = self.fields
        if schema_editor.connection.vendor == "mysql":
            created = models.Index(fields=self.fields, name=self.name)
            # What follows the name of the column: "DESC" in other indexes.
            created.fields_orders = [(column, f"({INDEXED_CHARACTERS})")]
        else:
            beginning = Func(F(column), template=BEGINNING % "%(expressions)s")
            created = models.Index(beginning, name=self.name, condition=self.where)
        return created.create_sql(model, schema_editor, using, **options)


class UniqueUnlessNull(models.UniqueConstraint):
    """A unique constraint on one nullable column, whose index does not hold the rows that have no value.

    An `INSERT … ON CONFLICT` must name the condition: `(column) WHERE column IS NOT NULL`. On MySQL the index holds all
    rows; several NULLs are distinct there too.
    """

    def __init__(self, *, field: str, name: str) -> None:
        super().__init__(fields=[field], name=name)

    def deconstruct(self) -> Any:
        """Return the arguments of this class for migrations."""
        path, expressions, _options = super().deconstruct()
        return path, expressions, {"field": self.fields[0], "name": self.name}

    def constraint_sql(self, model: Any, schema_editor: Any) -> Any:
        """Return the constraint for CREATE TABLE, or have the index created after it."""
        return self._created(schema_editor).constraint_sql(model, schema_editor)

    def create_sql(self, model: Any, schema_editor: Any) -> Any:
        """Return the statement that adds it to a table."""
        return self._created(schema_editor).create_sql(model, schema_editor)

    def remove_sql(self, model: Any, schema_editor: Any) -> Any:
        """Return the statement that removes it."""
        return self._created(schema_editor).remove_sql(model, schema_editor)

    def _created(self, schema_editor: Any) -> models.UniqueConstraint:
        is_partial = schema_editor.connection.features.supports_partial_indexes
        condition = Q(**{f"{self.fields[0]}__isnull": False}) if is_partial else None
        return models.UniqueConstraint(fields=self.fields, name=self.name, condition=condition)


# --- The database's own clock, as the default of a column and in statements. Hosts of a fleet may disagree about the
# time.
#
# Where Django stores times in another zone than UTC, or the clock is the host's, it is wrong: queries get it from
# `storage.database_clock.expression`, which knows.

# The moment of the statement, the same wherever it stands in it, plus microseconds. PostgreSQL's days would be those of
# the session's time zone.
MICROSECOND = timedelta(microseconds=1)
AFTER_NOW = {
    "postgresql": "STATEMENT_TIMESTAMP() + %s * INTERVAL '1 microsecond'",
    "mysql": "UTC_TIMESTAMP(6) + INTERVAL %s MICROSECOND",
}
# MySQL compares a time with a text as texts.
PARAMETER = {"postgresql": "%s", "mysql": "CAST(%s AS DATETIME(6))"}


def sql_after_now(delay: Delay, connection: Any) -> tuple[str, list[Any]]:
    """Return the SQL of a time that counts from the statement, and its parameters."""
    after = AFTER_NOW[connection.vendor]
    wait = [delay.wait // MICROSECOND]
    if delay.latest is None:
        return after, wait
    latest = connection.ops.adapt_datetimefield_value(delay.latest)
    return f"LEAST({after}, {PARAMETER[connection.vendor]})", [*wait, latest]


class AfterNow(Expression):
    """A time that counts from the UPDATE that writes it."""

    def __init__(self, delay: Delay) -> None:
        super().__init__(output_field=DateTimeField())
        self.delay = delay

    def as_sql(self, compiler: Any, connection: Any) -> Any:
        """Return the SQL."""
        sql, parameters = sql_after_now(self.delay, connection)
        return sql, tuple(parameters)


class DatabaseNow(Now):
    """Read the database's time: not that of the transaction's start, and in UTC even on MySQL."""

    def as_postgresql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """Return the SQL for PostgreSQL."""
        return self.as_sql(compiler, connection, template="CLOCK_TIMESTAMP()", **context)

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """Return the SQL for MySQL and MariaDB, whose session may have another time zone."""
        return self.as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **context)

"""Read the tables that another app left in a database, whatever its version, and whether or not it is still installed.

No model is imported. Only columns that the table has are read, so an older or newer version of the app is read too.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.db import connections
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from .old import CannotImport, shown

Row = dict[str, Any]


def existing(database: str, tables: Sequence[str]) -> set[str]:
    """Return those of these tables that a database has. Raises: django.db.Error."""
    connection = connections[database]
    return set(connection.introspection.table_names()) & set(tables)


def read(database: str, table: str, columns: Sequence[str], order: str = "id") -> list[Row]:
    """Return the rows of a table; a column that it does not have is None. Raises: django.db.Error.

    order: a column by which they are sorted, so that a second look finds them in the same order.
    """
    connection = connections[database]
    quote = connection.ops.quote_name
    with connection.cursor() as cursor:
        known = {each.name for each in connection.introspection.get_table_description(cursor, table)}
        found = [name for name in columns if name in known]
        # As expressions, SQLite's columns come as they are: one value that Django cannot convert would end the read.
        as_it_is = "+" if connection.vendor == "sqlite" else ""
        listed = ", ".join(as_it_is + quote(name) for name in found)
        cursor.execute(f"SELECT {listed} FROM {quote(table)} ORDER BY {quote(order)}")  # noqa: S608 - names of ours
        return [dict.fromkeys(columns) | dict(zip(found, row, strict=True)) for row in cursor.fetchall()]


def moment(row: Row, column: str, database: str) -> datetime | None:
    """Return a column as an aware datetime; None for NULL. Raises: CannotImport for what is no time.

    SQLite gives a text, MariaDB a time without a zone, which is that of the connection.
    """
    value = row[column]
    if value is None:
        return None
    try:
        found = parse_datetime(value) if isinstance(value, str) else value
        if isinstance(found, datetime):
            zone = connections[database].timezone or timezone.get_default_timezone()
            return found if timezone.is_aware(found) else timezone.make_aware(found, zone)
    except (ValueError, OverflowError):
        pass
    raise CannotImport(f"its {column} is no time: {shown(value)}")


def text(row: Row, column: str) -> str:
    """Return a column of text; "" for NULL. Raises: CannotImport, since SQLite keeps any value in any column."""
    value = row[column]
    if value is not None and not isinstance(value, str):
        raise CannotImport(f"its {column} is no text: {shown(value)}")
    return value or ""


def number(row: Row, column: str) -> int | None:
    """Return a column of whole numbers; None for NULL. Raises: CannotImport."""
    value = row[column]
    if value is not None and not isinstance(value, int):
        raise CannotImport(f"its {column} is no whole number: {shown(value)}")
    return value


def label(row: Row, *columns: str) -> str:
    """Return the first of these columns that says something, as text, for a row that may hold anything."""
    return next((str(row[name]) for name in columns if row[name] not in (None, "")), "")

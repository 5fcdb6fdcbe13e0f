"""Find out whether the database has the tables and columns of this code, without reading a row."""

from __future__ import annotations

from django.apps import apps
from django.db import connections

from .routing import writing_database


def check_tables() -> None:
    """Name every column of every model in a query that finds nothing. Raises: django.db.Error.

    A missing table, a missing column and a missing privilege are then errors of the kind NOT_SET_UP.
    """
    for model in apps.get_app_config("django_asyncq").get_models():
        connection = connections[writing_database(model)]
        quote = connection.ops.quote_name
        table = quote(model._meta.db_table)
        # With the table's name, because SQLite takes a quoted column that it does not know for a text.
        columns = ", ".join(f"{table}.{quote(str(field.column))}" for field in model._meta.concrete_fields)
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {columns} FROM {table} WHERE 1 = 0")  # noqa: S608 - from models

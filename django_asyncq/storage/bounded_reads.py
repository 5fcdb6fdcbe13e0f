"""Reads of a large table of tasks that stay short: counts up to a limit, names by a loose scan, ids by their end.

No function reads all of the table: each says how far it looks. Each sends one statement.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.db import connections

from ..models import TaskRecord
from .routing import writing_database

# A page says "about" above that.
MOST_COUNTED = 10_000
# Names of tasks are as many as a project has functions.
MOST_NAMES = 500
# The end of an id is no beginning of an index: PostgreSQL compares a million in 0.3 s.
NEWEST_SEARCHED = 1_000_000
STATES = {
    "queued": "state = 0",
    "running": "state = 1",
    "succeeded": "state = 2",
    "failed": "state = 3 AND retry_at IS NULL",
    "retrying": "state = 3 AND retry_at IS NOT NULL",
}
NEWEST_IDS = "SELECT id FROM (SELECT id FROM {table} ORDER BY id DESC LIMIT %s) AS newest WHERE "
# The last characters of an id, whatever type the column has.
END_OF_ID = {
    "postgresql": NEWEST_IDS + "RIGHT(id::text, %s) = %s LIMIT 10",
    "sqlite": NEWEST_IDS + "SUBSTR(id, -%s) = %s LIMIT 10",
    "mysql": NEWEST_IDS + "RIGHT(CAST(id AS CHAR), %s) = %s LIMIT 10",
}


def counts_by_state() -> dict[str, int]:
    """Count the tasks of each state, RETRYING apart, each up to `MOST_COUNTED` + 1."""
    template = "(SELECT COUNT(*) FROM (SELECT 1 AS one FROM {{table}} WHERE {where} LIMIT {most}) AS {state}_rows)"
    counts = [template.format(where=where, most=MOST_COUNTED + 1, state=state) for state, where in STATES.items()]
    (row,) = _rows("SELECT " + ", ".join(counts))
    return dict(zip(STATES, row, strict=True))


def names() -> list[str]:
    """Return the names that tasks have, the first `MOST_NAMES` in order: for each name one look into the index."""
    statement = """
        WITH RECURSIVE found (name, number) AS (
            SELECT MIN(name), 1 FROM {table}
            UNION ALL
            SELECT (SELECT MIN(name) FROM {table} WHERE name > found.name), number + 1
            FROM found WHERE found.name IS NOT NULL AND number < %s
        )
        SELECT name FROM found WHERE name IS NOT NULL
    """
    return [name for (name,) in _rows(statement, MOST_NAMES)]


def ids_ending_with(end: str) -> list[UUID]:
    """Return the ids with this end, among the newest `NEWEST_SEARCHED`; hardly ever more than one. end: hexadecimal."""
    statement = END_OF_ID[connections[writing_database(TaskRecord)].vendor]
    found = (value for (value,) in _rows(statement, NEWEST_SEARCHED, len(end), end.lower()))
    return [value if isinstance(value, UUID) else UUID(str(value)) for value in found]


def _rows(statement: str, *values: Any) -> list[tuple[Any, ...]]:
    connection = connections[writing_database(TaskRecord)]
    table = connection.ops.quote_name(TaskRecord._meta.db_table)
    with connection.cursor() as cursor:
        cursor.execute(statement.format(table=table), values)
        found: list[tuple[Any, ...]] = cursor.fetchall()
    return found

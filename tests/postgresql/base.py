"""Django's backend for PostgreSQL, with another way to empty the tables of a test.

Django truncates them, which makes new files of all tables and indexes, and then creates all permissions again: 180 ms
for each test with real transactions. A DELETE of the few rows that a test leaves takes 1 ms, and permissions are what
`migrate` made of them: no test changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db.backends.postgresql import base, operations

# What `migrate` has written, and nobody else writes.
KEPT = {"django_content_type", "auth_permission"}


class DatabaseOperations(operations.DatabaseOperations):
    """The operations of PostgreSQL; a flush that resets no sequences deletes rows."""

    def sql_flush(
        self, style: Any, tables: Sequence[str], *, reset_sequences: bool = False, allow_cascade: bool = False
    ) -> list[str]:
        """Return the statements, which Django runs in one transaction: it checks the foreign keys at the end."""
        if reset_sequences:
            return super().sql_flush(style, tables, reset_sequences=True, allow_cascade=allow_cascade)
        return [f"DELETE FROM {self.quote_name(table)}" for table in tables if table not in KEPT]


class DatabaseWrapper(base.DatabaseWrapper):
    """A connection to PostgreSQL."""

    ops_class = DatabaseOperations

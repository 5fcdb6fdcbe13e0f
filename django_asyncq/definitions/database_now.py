"""The database's own clock, as the default of a column. Hosts of a fleet may disagree about the time.

Queries do not use it: Django takes it for a time in the zone of the connection, which on MySQL and SQLite is another
one than UTC when `DATABASES` names it. They get the time of `storage.database_clock`.
"""

from __future__ import annotations

from typing import Any

from django.db.models.functions import Now


class DatabaseNow(Now):
    """Read the database's time: not that of the transaction's start, and in UTC even on MySQL."""

    def as_postgresql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """Return the SQL for PostgreSQL."""
        return self.as_sql(compiler, connection, template="CLOCK_TIMESTAMP()", **context)

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """Return the SQL for MySQL and MariaDB, whose session may have another time zone."""
        return self.as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **context)

"""The database's own clock, as an expression for queries. Hosts of a fleet may disagree about the time."""

from __future__ import annotations

from typing import Any

from django.db.models.functions import Now


class DatabaseNow(Now):
    """Read the database's time, in UTC even on a MySQL whose session has another time zone."""

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """Return the SQL for MySQL and MariaDB."""
        return self.as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **context)

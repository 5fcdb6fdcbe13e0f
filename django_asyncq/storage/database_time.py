"""The current time by the database's own clock."""

from __future__ import annotations

from typing import Any

from django.db.models.functions import Now


class DatabaseNow(Now):
    """The database's time, in UTC also on a MySQL whose session has another zone."""

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """Return the SQL for MySQL and MariaDB."""
        return self.as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **context)

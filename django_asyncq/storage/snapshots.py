"""Whether a transaction sees what others commit while it is open."""

from __future__ import annotations

from django.db.backends.base.base import BaseDatabaseWrapper

# The levels at which each statement sees what was committed before it.
SEEING_LEVELS = {"READ COMMITTED", "READ UNCOMMITTED"}


def sees_commits(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the open transaction of a connection sees what others commit meanwhile; costs one statement.

    A transaction of SQLite never does.
    """
    if connection.vendor == "postgresql":
        statement = "SHOW transaction_isolation"
    elif connection.vendor == "mysql":
        # MariaDB has had the name of MySQL only since 11.1.
        is_mariadb = getattr(connection, "mysql_is_mariadb", False)
        statement = "SELECT @@tx_isolation" if is_mariadb else "SELECT @@transaction_isolation"
    else:
        return False
    with connection.cursor() as cursor:
        cursor.execute(statement)
        (level,) = cursor.fetchone()
    return str(level).upper().replace("-", " ") in SEEING_LEVELS

"""Statements that are sent ahead: the database works on one while its sender goes on (PostgreSQL through psycopg 3).

Who inserts a row in a transaction needs nothing back but that it was done. To wait for that took two fifths of an
`enqueue` (188 of 441 µs): two processes fall asleep and wake. So the statement is only sent, and whoever uses the
connection next reads its reply first. All that psycopg does on a connection, COMMIT and ROLLBACK too, it does while
it holds the connection's lock; until the reply is read, `Unread` stands in the lock's place. If the statement has
failed, that is where its error is raised, and the transaction can only be rolled back. A transaction's first
statement is waited for: BEGIN is to be answered before it can be sent.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

# The module of Django's own cursors: nobody has put himself around one to see what it does.
HOME = "django.db.backends.postgresql.base"
# libpq's PGTransactionStatusType, in a transaction that has not failed: a statement is being worked on, or none.
BEGUN = (1, 2)

# What psycopg's cursor does for a statement; it yields where it would have to wait.
Statement = Generator[Any, Any, Any]


class Unread:
    """A statement that was sent. Stands in the place of its connection's lock until the reply is read."""

    def __init__(self, driver: Any, statement: Statement, alias: str) -> None:
        """driver: psycopg's connection, whose lock is held. alias: of the database."""
        self._driver = driver
        self._statement = statement
        self._alias = alias
        self._lock = driver.lock

    def __enter__(self) -> None:
        """Take the lock and read the reply. Raises: the statement's error, and the lock is free again."""
        self._lock.acquire()
        if self._driver.lock is not self:
            return  # another thread came first
        self._driver.lock = self._lock
        try:
            # Past the instance: there it may be `send` that waits for nothing.
            type(self._driver).wait(self._driver, self._statement)
        except BaseException:
            self._lock.release()
            # Whoever it is raised to need not know that nothing of the transaction can be committed now.
            with transaction.mark_for_rollback_on_error(self._alias):
                raise

    def __exit__(self, *error: object) -> None:
        """Release the lock."""
        self._lock.release()


def send(connection: BaseDatabaseWrapper, cursor: Any, sql: str, parameters: Sequence[Any]) -> None:
    """Send a statement of which nothing is asked back by Django's cursor; where that cannot be, execute it.

    Raises: django.db.Error of this statement, or of the one that was sent before.
    """
    driver: Any = connection.connection
    if not _can_send(connection, cursor):
        cursor.execute(sql, parameters)
        return

    def begin(statement: Statement, *args: Any, **kwargs: Any) -> None:
        # In the place of `wait`, once: up to where it would wait, if it does not end before.
        if next(statement, driver) is not driver:
            driver.lock = Unread(driver, statement, connection.alias)

    driver.wait = begin
    try:
        cursor.execute(sql, parameters)
    finally:
        del driver.wait


def _can_send(connection: BaseDatabaseWrapper, cursor: Any) -> bool:
    """Whether this is psycopg 3, nobody looks at what cursor or connection do, and no pipeline sends by itself."""
    driver = connection.connection
    return (
        type(cursor) is CursorWrapper
        and type(cursor.cursor).__module__ == HOME
        and not connection.execute_wrappers
        and hasattr(driver, "wait")
        and "wait" not in vars(driver)
        and driver.pgconn.transaction_status in BEGUN
        and not driver.pgconn.pipeline_status
    )

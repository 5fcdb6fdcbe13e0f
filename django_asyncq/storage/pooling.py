"""Return a thread's connections to Django's pools (`OPTIONS["pool"]`) as soon as a piece of work is finished.

A pool is shared by all threads of a process, and a thread that sleeps with one of its connections takes it from the
tasks. Without a pool a connection stays open between pieces of work, since a new one for each would cost more than the
work.
"""

from __future__ import annotations

from typing import Any

from django.db import connections


def is_pooled(database: dict[str, Any]) -> bool:
    """Whether an entry of DATABASES uses a pool of Django's: psycopg's, or Oracle's."""
    return bool(database.get("OPTIONS", {}).get("pool"))


def return_connections() -> None:
    """Return all pooled connections of this thread; leave others, and those within a transaction, as they are.

    Called by each thread of this package between pieces of work. It costs no statement.
    """
    for connection in connections.all(initialized_only=True):
        is_open = connection.connection is not None and not connection.in_atomic_block
        if is_open and is_pooled(connection.settings_dict):
            connection.close()

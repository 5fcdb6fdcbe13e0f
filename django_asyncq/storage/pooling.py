"""Return a thread's connections to Django's pools (`OPTIONS["pool"]`) as soon as a piece of work is finished.

A pool is shared by all threads of a process, and a thread that sleeps with one of its connections takes it from the
tasks. Without a pool a connection stays open between pieces of work, since a new one for each would cost more than the
work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from django.conf import settings
from django.db import connections

from ..models import TaskRecord
from .routing import writing_database

# The main thread of a worker process reads what it has claimed, and its reporter writes outcomes.
OWN_THREADS = 2
# psycopg_pool's default of `min_size`, and `max_size` is the same unless it is set.
DEFAULT_SIZE = 4


class SmallPool(NamedTuple):
    """A pool in which tasks wait for each other. text, remedy: a sentence each."""

    text: str
    remedy: str


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


def small_pools(concurrency: int, processes: int) -> Iterator[SmallPool]:
    """Yield the pools of psycopg that are smaller than what one worker process may use at a time; opens no connection.

    concurrency: the slots of a process. processes: the worker processes of a host.
    """
    own = writing_database(TaskRecord)
    databases: dict[str, Any] = dict(settings.DATABASES)
    for alias, database in databases.items():
        if not is_pooled(database) or "postg" not in str(database.get("ENGINE")):
            continue
        size = _size_of(database["OPTIONS"]["pool"])
        needed = concurrency + (OWN_THREADS if alias == own else 0)
        if size is not None and size < needed:
            threads = f" and {OWN_THREADS} threads of its own" if alias == own else ""
            yield SmallPool(
                f"DATABASES[{alias!r}] has a pool of {size} connections, and a worker process has {concurrency} "
                f"slots{threads} that may use one each: tasks wait for each other",
                f"Set OPTIONS['pool'] = {{'max_size': {needed}}} or more, or lower the concurrency to "
                f"{max(size - needed + concurrency, 1)}; `async def` tasks have as many slots again. Each process has "
                f"a pool of its own: with the supervisor's the server needs {needed * (processes + 1)} connections.",
            )


def _size_of(pool: Any) -> int | None:
    """Return how many connections a pool may have; None when its options are not valid, which Django says."""
    options = pool if isinstance(pool, dict) else {}
    size = options.get("max_size")
    if size is None:
        size = options.get("min_size", DEFAULT_SIZE)
    return size if isinstance(size, int) else None

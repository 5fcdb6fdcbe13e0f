"""Database connections that the threads of this package keep between pieces of work, and for how long.

A new connection for each round of a loop costs the server more than the round, and one for each thread is one that
nobody uses most of the time. So the threads that repeat such rounds lend one connection to each other, and every thread
closes what it has not used for IDLE_SECONDS. Pooled connections (`OPTIONS["pool"]`) are no part of this:
`routing.return_connections` gives them back after each piece of work.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from .routing import is_pooled

# Longer than the rounds of a leader are apart, so that it opens none anew; and far shorter than the minutes after which
# firewalls drop a connection without a word.
IDLE_SECONDS = 10.0
# How long a round waits for a connection that another one has, before it opens one more. A round of an idle fleet takes
# some milliseconds; beside a long sweep this is lost once, since the second connection is then kept too.
WAIT_SECONDS = 0.1


def close_connections() -> None:
    """Close the connections of this thread, except within a transaction."""
    for connection in _open_connections():
        if not connection.in_atomic_block:
            connection.close()


def close_dead_connections() -> None:
    """Close those of this thread that the next piece of work could not use, or for which they are too old.

    Does what Django does at the begin of a request, and notices without a statement what the server has closed. Only
    that a CONN_MAX_AGE of 0, Django's default, means the end of a request, and so nothing to a loop.
    """
    for connection in _open_connections():
        if connection.in_atomic_block:
            continue
        if connection.settings_dict["CONN_MAX_AGE"] != 0:
            connection.close_if_unusable_or_obsolete()
        elif connection.get_autocommit() != connection.settings_dict["AUTOCOMMIT"]:
            connection.close()
        if connection.connection is not None and _may_be_cut(connection) and not connection.is_usable():
            connection.close()


def _open_connections() -> list[BaseDatabaseWrapper]:
    return [each for each in connections.all(initialized_only=True) if each.connection is not None]


def _may_be_cut(connection: Any) -> bool:
    """Whether the server may have closed a connection: between statements it sends nothing else.

    True also for a driver that does not tell its socket. SQLite has none.
    """
    if connection.vendor == "sqlite":
        return False
    fileno = getattr(connection.connection, "fileno", None)
    if fileno is None:
        return True
    found = select.poll()
    try:
        found.register(fileno(), select.POLLIN)
    except Exception:  # noqa: BLE001 - each driver has an error of its own for a closed connection
        return True
    return bool(found.poll(0))


@contextmanager
def _watched() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether this thread has sent a statement since, or has opened a connection."""
    before, was_used = _open_connections(), False

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal was_used
        was_used = True
        return execute(sql, params, many, context)

    with ExitStack() as stack:
        for each in before:
            stack.enter_context(each.execute_wrapper(note))
        yield lambda: was_used or any(each not in before for each in _open_connections())


class OwnConnections:
    """Those of a thread that seldom needs one: it keeps its own, and closes it when it has not used it for a while."""

    def __init__(self) -> None:
        self._used_at = 0.0

    @contextmanager
    def round(self) -> Iterator[None]:
        """Use them for one round in the block."""
        with _watched() as was_used:
            try:
                yield
            finally:
                if was_used():
                    self._used_at = time.monotonic()
        if time.monotonic() - self._used_at >= IDLE_SECONDS:
            close_connections()


class _Parked(NamedTuple):
    """A connection that no thread has. used_at: monotonic seconds."""

    connection: BaseDatabaseWrapper
    used_at: float


class SharedConnections:
    """Those of threads that need one in each round, or in many: they lend them to each other, for one round at a time.

    The one that was used last is lent first, so one that an idle process does not need stays unused, and is closed.
    """

    def __init__(self) -> None:
        self._returned = threading.Condition()
        self._parked: list[_Parked] = []
        # How many rounds have one, or may open one.
        self._lent = 0

    @contextmanager
    def round(self) -> Iterator[None]:
        """Lend this thread a connection for one round in the block, if there is one; afterwards keep what it has open.

        Waits for at most WAIT_SECONDS for the round of another thread. The borrower calls `close_dead_connections`.
        """
        lent = self._take()
        try:
            with _watched() as was_used:
                try:
                    yield
                finally:
                    if was_used():
                        lent.clear()
        finally:
            self._give_back(lent)

    def close(self) -> None:
        """Close what no thread has."""
        with self._returned:
            parked, self._parked = self._parked, []
        for each in parked:
            each.connection.close()

    def _take(self) -> dict[str, float]:
        """Take one connection to each database; return when they were used, by alias."""
        own = {each.alias for each in _open_connections()}
        with self._returned:
            if self._lent and not self._parked:
                self._returned.wait(WAIT_SECONDS)
            self._lent += 1
            lent = {each.connection.alias: each for each in self._parked if each.connection.alias not in own}
            self._parked = [each for each in self._parked if lent.get(each.connection.alias) is not each]
        for alias, each in lent.items():
            connections[alias] = each.connection
        return {alias: each.used_at for alias, each in lent.items()}

    def _give_back(self, unused: dict[str, float]) -> None:
        """Keep what this thread has open. unused: when those were used that have not been since."""
        now, kept = time.monotonic(), list[_Parked]()
        for connection in _open_connections():
            if connection.in_atomic_block or is_pooled(connection.settings_dict):
                continue
            if not connection.allow_thread_sharing:
                connection.inc_thread_sharing()
            del connections[connection.alias]
            kept.append(_Parked(connection, unused.get(connection.alias, now)))
        with self._returned:
            self._lent -= 1
            parked = sorted([*self._parked, *kept], key=lambda each: each.used_at)
            self._parked = [each for each in parked if now - each.used_at < IDLE_SECONDS]
            self._returned.notify()
        for each in parked:
            if now - each.used_at >= IDLE_SECONDS:
                each.connection.close()

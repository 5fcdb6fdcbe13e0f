"""Threads lend database connections to each other, close those that nobody uses, and notice one that was cut."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connection, connections, transaction

from django_asyncq.fleet.leader import Loop
from django_asyncq.models import Gate
from django_asyncq.storage import connections as kept
from django_asyncq.storage.connections import (
    OwnConnections,
    SharedConnections,
    close_connections,
    close_dead_connections,
)

from ..clock import Clock

pytestmark = pytest.mark.django_db(transaction=True)

has_server = pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no server that could cut it")
THIS_SESSION = {"postgresql": "SELECT pg_backend_pid()", "mysql": "SELECT CONNECTION_ID()"}
CUT = {"postgresql": "SELECT pg_terminate_backend(%s, 5000)", "mysql": "KILL CONNECTION %s"}


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedConnections]:
    """Connections that threads lend to each other, for as long as a round of another thread takes."""
    monkeypatch.setattr(kept, "WAIT_SECONDS", 20.0)
    found = SharedConnections()
    yield found
    found.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The monotonic clock by which connections are idle."""
    found = Clock()
    monkeypatch.setattr(kept.time, "monotonic", found)
    return found


def in_thread(act: Callable[[], Any]) -> Any:
    """Call a function in a thread of its own, whose connections are closed at the end; return what it returns."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(act())
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert found, "it has failed, or hangs"
    return found[0]


def used() -> Any:
    """Use the database; return the driver's connection."""
    Gate.objects.count()
    return connection.connection


def round_of(shared: SharedConnections) -> Callable[[], Any]:
    """Return one round of a thread, which returns the connection that it has used."""

    def one() -> Any:
        with shared.round():
            close_dead_connections()
            return used()

    return one


@contextmanager
def max_age(seconds: int | None) -> Iterator[None]:
    """Set CONN_MAX_AGE for connections that are opened in the block."""
    settings = connection.settings_dict
    before, settings["CONN_MAX_AGE"] = settings["CONN_MAX_AGE"], seconds
    try:
        yield
    finally:
        settings["CONN_MAX_AGE"] = before


def test_rounds_of_different_threads_use_one_connection(shared: SharedConnections) -> None:
    """Whatever CONN_MAX_AGE says of requests."""
    one = round_of(shared)
    found = [in_thread(one) for _ in range(3)]
    assert found[0] is not None and found[0] is found[1] is found[2]


def test_a_round_waits_for_one_that_is_under_way(shared: SharedConnections) -> None:
    """So that two loops that wake at the same moment need one connection."""
    begun, goes_on, one = threading.Event(), threading.Event(), round_of(shared)

    def long_round() -> Any:
        with shared.round():
            found = used()
            begun.set()
            goes_on.wait(20)
            return found

    found: list[Any] = []
    threads = [threading.Thread(target=lambda act=act: found.append(in_thread(act))) for act in (long_round, one)]
    threads[0].start()
    begun.wait(20)
    threads[1].start()
    goes_on.set()
    for thread in threads:
        thread.join(30)
    assert len(found) == 2 and found[0] is found[1]


def test_what_is_not_needed_any_more_is_closed(
    shared: SharedConnections, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a long round another one opens a second connection, which stays for a while, and not for ever."""
    monkeypatch.setattr(kept, "WAIT_SECONDS", 0.0)
    one = round_of(shared)

    def long_round() -> tuple[Any, Any]:
        with shared.round():
            first = used()
            second = in_thread(one)
            clock.now += kept.IDLE_SECONDS / 2
            assert in_thread(one) is second, "it was kept"
            return first, second

    first, second = in_thread(long_round)
    assert second is not first
    for _ in range(3):
        clock.now += kept.IDLE_SECONDS / 2
        assert in_thread(one) is first, "the last one that came back is lent first"
    if connection.vendor == "postgresql":
        assert second.closed and not first.closed


def test_one_that_is_lent_and_not_used_does_not_stay_for_that(shared: SharedConnections, clock: Clock) -> None:
    """A round that has found no work keeps nothing open, though it might have used it."""
    found = round_of(shared)
    first = in_thread(found)

    def idle_round() -> Any:
        with shared.round():
            return connection.connection

    clock.now += kept.IDLE_SECONDS / 2
    assert in_thread(idle_round) is first
    clock.now += kept.IDLE_SECONDS / 2
    assert in_thread(idle_round) is first
    assert in_thread(idle_round) is None


def test_a_thread_that_seldom_uses_one_closes_it_after_a_while(clock: Clock) -> None:
    """It keeps it while there is work."""
    connections.close_all()
    own, drivers = OwnConnections(), list[Any]()
    for act in (used, used, lambda: None, lambda: None):
        with own.round():
            act()
        drivers.append(connection.connection)
        clock.now += kept.IDLE_SECONDS * 0.6
    assert drivers[0] is not None and drivers[0] is drivers[1] is drivers[2]
    assert drivers[3] is None


def test_a_connection_within_a_transaction_stays_where_it_is(shared: SharedConnections) -> None:
    """That of a test case, around everything."""
    with transaction.atomic():
        found = used()
        close_connections()
        assert round_of(shared)() is found
        assert connection.connection is found
    close_connections()
    assert connection.connection is None


def session() -> Any:
    """Return what the server calls the connection of this thread."""
    with connection.cursor() as cursor:
        cursor.execute(THIS_SESSION[connection.vendor])
        return cursor.fetchone()[0]


def cut(number: Any) -> None:
    """Have the server end a connection, and wait until it has."""
    with connection.cursor() as cursor:
        cursor.execute(CUT[connection.vendor], [number])
        if connection.vendor == "mysql":
            while True:
                cursor.execute("SELECT COUNT(*) FROM information_schema.processlist WHERE id = %s", [number])
                if not cursor.fetchone()[0]:
                    return


@has_server
def test_a_connection_that_the_server_has_cut_is_replaced_before_it_is_used(
    shared: SharedConnections, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop neither fails nor logs anything; that it asks is no statement."""
    found: list[Any] = []

    def step() -> float:
        found.append(session())
        return 0.0

    loop = Loop("repairs", step)

    def one() -> float | None:
        with shared.round():
            return loop.tick()

    for _ in range(2):
        in_thread(one)
        cut(found[-1])
    in_thread(one)
    assert len(set(found)) == 3
    assert not [record for record in caplog.records if record.levelno >= logging.INFO]


@pytest.mark.parametrize(("seconds", "is_kept"), [(0, True), (None, True), (600, True), (-1, False)])
def test_the_age_that_a_project_allows_counts_for_loops(seconds: int | None, is_kept: bool) -> None:
    """Only 0 does not: it means the end of a request. Here a negative age stands for one that is over."""
    connections.close_all()
    with max_age(seconds):
        found = used()
        close_dead_connections()
        assert (connection.connection is found) is is_kept


def test_a_connection_whose_autocommit_was_changed_is_not_kept() -> None:
    """Django does the same: who knows what else the project's code has done to it."""
    used()
    transaction.set_autocommit(False)
    close_dead_connections()
    assert connection.connection is None

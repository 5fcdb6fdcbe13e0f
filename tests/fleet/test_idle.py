"""What a fleet that has nothing to do asks the database, and how many connections it holds."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from django.db import connection

from django_asyncq import conf
from django_asyncq.fleet import leader
from django_asyncq.models import TaskRecord
from django_asyncq.storage.connections import IDLE_SECONDS

from .. import tasks
from ..leading import leading
from ..settings import PERIODS
from ..workers import wait_until, workers

MINUTES = 2
# In all: of a supervisor that leads, and so of a fleet, because idle worker processes ask nothing.
MOST_PER_SECOND = 1.0
# Of one statement of one loop; rounds are 4 s apart at least.
MOST_PER_MINUTE = 15


def in_short(sql: str) -> str:
    """Return a statement without the names of its columns."""
    return re.sub(r"SELECT .*? FROM", "SELECT … FROM", sql).replace('"', "").replace("`", "")[:150]


@pytest.fixture
def defaults(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The periods that a project has; those of the tests are shorter."""
    settings.ASYNCQ = {key: value for key, value in settings.ASYNCQ.items() if key not in PERIODS}
    monkeypatch.setattr(conf, "RECONCILE_SECONDS", 5.0)
    monkeypatch.setattr(conf, "SWEEP_SECONDS", 60.0)
    monkeypatch.setattr(leader, "FORWARD_SECONDS", 5.0)


@pytest.mark.django_db
def test_an_idle_leader_asks_the_database_less_than_once_a_second(
    defaults: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no loop asks the same more often than each four seconds."""
    with leading(monkeypatch) as leads:
        leads.pass_seconds(60)
        leads.sent.clear()
        leads.pass_seconds(60 * MINUTES)
        found = Counter((each.loop, in_short(each.sql)) for each in leads.sent)
    table = "\n".join(f"{count / MINUTES:6.1f} a minute  {loop}: {sql}" for (loop, sql), count in found.most_common())
    assert {each: count for each, count in found.items() if count / MINUTES > MOST_PER_MINUTE} == {}, table
    assert found.total() / (60 * MINUTES) < MOST_PER_SECOND, table
    print(f"\n{found.total() / (60 * MINUTES):.2f} statements a second\n{table}")


# --- a fleet of processes, as PostgreSQL sees it

WINDOW_SECONDS = 12
# What a leader does once a minute may all fall into it, with the statements of the test.
OF_A_MINUTE = 25


class Seen(NamedTuple):
    """What PostgreSQL has counted. statements: each is a transaction, outside of those of tasks."""

    statements: int
    connections: int


def seen() -> Seen:
    """Return what it has counted so far in the database of this test."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT xact_commit, sessions FROM pg_stat_database WHERE datname = current_database()")
        return Seen(*cursor.fetchone())


def sessions() -> dict[int, str]:
    """Return the connections of other processes: the process id at the server, and the latest statement."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid, query FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        return dict(cursor.fetchall())


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(connection.vendor != "postgresql", reason="PostgreSQL counts connections and transactions")
def test_an_idle_fleet_holds_one_connection_and_opens_none(tmp_path: Path) -> None:
    """That of its leader. When it is cut the next one takes its place unnoticed, and a task is run as ever."""
    patience = 4 * IDLE_SECONDS + 20
    with workers(tmp_path, "--processes", "2", ASYNCQ_TEST_PERIODS="default") as running:
        first = tasks.counts_and_naps.enqueue(0.0)
        wait_until(lambda: TaskRecord.objects.get(id=first.id).finished_at, "end of the task")
        wait_until(lambda: len(sessions()) == 1, "closing of what is not used", patience)
        before, held = seen(), sessions()
        time.sleep(WINDOW_SECONDS)
        after = seen()
        assert sessions().keys() == held.keys()
        assert after.connections == before.connections
        most = WINDOW_SECONDS * MOST_PER_SECOND + OF_A_MINUTE
        assert after.statements - before.statements <= most, sessions()
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [next(iter(held))])
        wait_until(lambda: len(sessions()) == 1, "next connection of the leader")
        second = tasks.counts_and_naps.enqueue(0.0)
        wait_until(lambda: TaskRecord.objects.get(id=second.id).finished_at, "end of the task")
        assert running.stop() == 0
    assert "WARNING" not in running.output() and "ERROR" not in running.output()

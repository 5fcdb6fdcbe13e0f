"""PostgreSQL: connections cut in the middle of transactions that complete a run."""

from __future__ import annotations

import time

from django.db import connection, connections

from .. import checker
from ..rig import Fleet, Report, Rig

# Some hundred of a minute's runs are in their transaction when one of the connections is cut.
TASKS_PER_CUT = 20
LONGEST_MS = 300
SLOTS = 8
EFFECTS = "chaos_effects"
TERMINATE_ONE = """
    SELECT pid, pg_terminate_backend(pid) FROM (
        SELECT pid FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL
        ORDER BY pid OFFSET floor(random() * (
            SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL)) LIMIT 1
    ) AS one
"""


def in_transactions(rig: Rig, report: Report, scale: float) -> None:
    """Cut two connections a second, each in a transaction, while atomic tasks run that have one attempt.

    Halfway the whole server is stopped (-m immediate) and started again.
    """
    from django_asyncq import conf
    from django_asyncq.models import TaskRecord

    times = max(12, round(240 * scale))
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE TABLE {EFFECTS} (task text NOT NULL)")
    with rig.redis(), rig.fleet(2, SLOTS // 2) as fleet:
        rig.wait_ready(fleet, 2)
        _enqueue(rig, times * TASKS_PER_CUT)
        cut = _cut(times // 2)
        _restart(rig, fleet)
        cut += _cut(times - times // 2)
        is_settled = rig.settle(15 if rig.mutant else 120)
        _note_faults(rig, cut)
        report.goal("connections cut", len(cut), at_least=times / 2)
        report.goal("settled", int(is_settled), at_least=1)
        rig.check(report)
    rows = TaskRecord.objects.all()
    report.goal("runs cut", sum(rows.values_list("crash_count", flat=True)), at_least=0 if rig.mutant else times / 4)
    # On a busy machine one cut after the other may hit the same task: after MAX_CRASHES of them it has failed.
    given_up = rows.failed().filter(crash_count__gte=conf.current().max_crashes).count()
    report.figure("cut MAX_CRASHES times", given_up)
    report.goal("tasks failed", rows.failed().count() - given_up, at_most=0)
    report.goal("runs repeated", checker.extra_executions(rig.history()), at_most=len(cut) + SLOTS)
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*), count(DISTINCT task) FROM {EFFECTS}")
        effects, tasks = cursor.fetchone()
    report.goal("effects committed twice", effects - tasks, at_most=0)
    report.goal("tasks without an effect", rows.count() - given_up - tasks, at_most=0)


def _enqueue(rig: Rig, count: int) -> None:
    from .. import tasks

    results = tasks.has_an_effect.enqueue_many([(rig.random.uniform(0, LONGEST_MS),) for _ in range(count)])
    rig.note("committed", ids=[str(result.id) for result in results])


def _cut(times: int) -> list[tuple[float, int]]:
    """Cut a connection each 0.5 s; return when, and the server's process of each."""
    found = []
    for _ in range(times):
        time.sleep(0.5)
        with connection.cursor() as cursor:
            cursor.execute(TERMINATE_ONE)
            found += [(time.monotonic(), pid) for pid, is_done in cursor.fetchall() if is_done]
    return found


def _restart(rig: Rig, fleet: Fleet) -> None:
    """Stop the server and start it again: all transactions are rolled back, and all connections are cut."""
    connections.close_all()
    rig.cluster.stop()
    rig.note("fault", kind="restart", pids=fleet.workers())
    rig.cluster.start()


def _note_faults(rig: Rig, cut: list[tuple[float, int]]) -> None:
    """Note which worker process each cut has hit; the bodies have noted the connections that they used."""
    pids = {line["backend"]: line["pid"] for line in rig.history() if "backend" in line}
    for at, backend in cut:
        if backend in pids:
            rig.note("fault", kind="cut", pids=[pids[backend]], at=at)

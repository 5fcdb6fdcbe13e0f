"""PostgreSQL: stopped while tasks finish, and terminated connections."""

from __future__ import annotations

import time

from django.db import connection, connections

from tests.workers import wait_until

from .. import checker
from ..rig import Report, Rig


def stopped(rig: Rig, report: Report, scale: float) -> None:
    """Stop PostgreSQL for 10 s (-m immediate) while a hundred running tasks finish."""
    from django_asyncq.models import TaskRecord

    count, down = max(20, round(100 * scale)), max(4.0, 10 * scale)
    with rig.redis(), rig.fleet(2, count // 2) as fleet:
        rig.wait_ready(fleet, 2)
        rig.ended_well(rig.producer("load", count, 2000, 0, rig.seed, "", 3))
        wait_until(lambda: TaskRecord.objects.running().count() >= count * 0.6, "running tasks", 30)
        before = rig.count("end")
        connections.close_all()
        rig.cluster.stop()
        time.sleep(down)
        ended = rig.count("end") - before
        rig.cluster.start()
        back = time.monotonic()
        is_settled = rig.settle(15 if rig.mutant else 60)
        report.figure("down s", down)
        report.goal("tasks that finished meanwhile", ended, at_least=5)
        report.figure("s from the return to the last outcome", time.monotonic() - back)
        report.goal("settled", int(is_settled), at_least=1)
        rig.check(report)
    report.goal("runs repeated", checker.extra_executions(rig.history()), at_most=0)
    report.goal("tasks failed", TaskRecord.objects.failed().count(), at_most=0)


def terminated(rig: Rig, report: Report, scale: float) -> None:
    """Terminate every connection except the rig's each 0.5 s for a minute, under load."""
    from django_asyncq.models import TaskRecord

    times = max(6, round(120 * scale))
    with rig.redis(), rig.fleet(2, 4) as fleet:
        rig.wait_ready(fleet, 2)
        rig.ended_well(rig.producer("bulk", times * 100, 20, rig.seed))
        terminations = 0
        for _ in range(times):
            time.sleep(0.5)
            with connection.cursor() as cursor:
                cursor.execute(
                    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
                terminations += cursor.fetchone()[0]
        is_settled = rig.settle(15 if rig.mutant else 60)
        report.goal("connections terminated", terminations, at_least=times)
        report.goal("settled", int(is_settled), at_least=1)
        rig.check(report)
    report.goal("runs repeated", checker.extra_executions(rig.history()), at_most=0)
    report.goal("tasks failed", TaskRecord.objects.failed().count(), at_most=0)

"""The leader is killed again and again while it does an action on many tasks: each task is changed exactly once."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from uuid import UUID

import pytest
from django.db import connections
from django.utils import timezone

from django_asyncq.control import start_bulk
from django_asyncq.models import BulkAction, BulkState, FailureReason, TaskRecord, TaskState
from django_asyncq.storage import database_clock
from django_asyncq.testing import crash_at
from django_asyncq.testing.crashes import CRASH_MARK_VARIABLE, CRASH_VARIABLE

from ..workers import ROOT, environment

pytestmark = pytest.mark.django_db(transaction=True)

LEADER = """
import time
import django
django.setup()
from django_asyncq.fleet.leader import MaintenanceService
from django_asyncq.models import BulkAction, BulkState
from tests import tasks
service = MaintenanceService([], single_instance=True)
while BulkAction.objects.filter(state=BulkState.RUNNING).exists():
    service.seek_leadership()
    time.sleep(service.run_bulk_actions() if service.coordinator.is_held(service.lock_name) else 0.05)
"""
POINTS = itertools.cycle(["bulk.page_changed", "bulk.page_committed", "retry.slot_acquired"])


class FailAgain(threading.Thread):
    """Has each task that is queued again fail again at once, and counts how often each was queued."""

    def __init__(self) -> None:
        super().__init__()
        self.queued: Counter[UUID] = Counter()
        self.is_over = threading.Event()

    def run(self) -> None:
        """Look every 50 ms, and at the end until none is left."""
        try:
            while not self.is_over.wait(0.05):
                self.look()
            while self.look():
                pass
        finally:
            connections.close_all()

    def look(self) -> bool:
        """Count what is queued, at most 500, and let it fail; return whether there was anything."""
        found = list(TaskRecord.objects.filter(state=TaskState.QUEUED).values_list("id", flat=True)[:500])
        self.queued.update(found)
        TaskRecord.objects.filter(id__in=found).update(
            state=TaskState.FAILED, reason=FailureReason.EXCEPTION, finished_at=database_clock.now()
        )
        return bool(found)


@pytest.mark.parametrize(
    ("kills", "tasks", "kind"),
    [
        (10, 2000, "retry"),
        pytest.param(20, 5000, "delete", marks=pytest.mark.long),
        pytest.param(100, 20_000, "retry", marks=pytest.mark.long),
    ],
)
def test_each_task_is_changed_once_whatever_leader_is_killed(tmp_path: Path, kills: int, tasks: int, kind: str) -> None:
    """At each step of a page: before its commit nothing of it is counted, behind it all of it."""
    now = timezone.now()
    rows = [
        TaskRecord(name="tests.tasks.add", state=TaskState.FAILED, reason=FailureReason.EXCEPTION, finished_at=now)
        for _ in range(tasks)
    ]
    TaskRecord.objects.bulk_create(rows, batch_size=500)
    action = start_bulk(kind, {"name": "tests.tasks.add"}, rows_per_second=10_000)
    assert action.total == tasks
    failing = FailAgain()
    failing.start()
    try:
        for number in range(kills):
            point = "bulk.page_committed" if kind == "delete" and number % 2 else next(POINTS)
            if kind == "delete" and point.startswith("retry"):
                point = "bulk.page_changed"
            armed = crash_at(point, mark=tmp_path / str(number))
            leader = lead({name: armed[name] for name in (CRASH_VARIABLE, CRASH_MARK_VARIABLE)})
            assert leader.returncode == -signal.SIGKILL, (point, leader.stderr)
        assert lead({}).returncode == 0
    finally:
        failing.is_over.set()
        failing.join()
    action.refresh_from_db()
    assert (action.state, action.done, action.refused, action.left) == (BulkState.FINISHED, tasks, 0, 0)
    if kind == "delete":
        assert not TaskRecord.objects.exists()
    else:
        assert failing.queued == Counter(row.id for row in rows)
    assert BulkAction.objects.count() == 1


def lead(variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a leader until the action is over, or it is killed."""
    return subprocess.run(
        [sys.executable, "-c", LEADER],
        env={**environment(), **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

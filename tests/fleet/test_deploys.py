"""What a deploy changes, with workers and producers of the code before and after it: the rows of the guide's table."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from django_asyncq import lifecycle
from django_asyncq.broker import servers
from django_asyncq.models import FailureReason, Schedule, TaskRecord, TaskState

from ..workers import ROOT, Workers, environment, history, wait_until, workers

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("own_keys"),
    pytest.mark.slow,
    pytest.mark.timeout(180),
]
OLD, NEW = "old", "new"
PRODUCE = """
import json, sys, django
django.setup()
from tests import deploy_tasks
for name, calls in json.loads(sys.argv[1]).items():
    getattr(deploy_tasks, name).enqueue_many([tuple(call) for call in calls])
"""


STREAM = """
import sys, time, django
django.setup()
from tests import deploy_tasks
renamed = getattr(deploy_tasks, "send_receipt", None) or deploy_tasks.send
for number in range(int(sys.argv[1])):
    deploy_tasks.greet.enqueue(str(number))
    renamed.enqueue(number)
    time.sleep(0.05)
"""


class Project:
    """A project that is deployed: its producers and workers of either code."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.path = folder / "history.jsonl"
        self._stack = stack

    def enqueue(self, code: str, **calls: list[list[Any]]) -> None:
        """Enqueue calls by task, as a web process with this code."""
        command = [sys.executable, "-c", PRODUCE, json.dumps(calls)]
        more = {"ASYNCQ_TEST_DEPLOY": code, "DJANGO_SETTINGS_MODULE": "tests.settings"}
        done = subprocess.run(
            command, env=environment(**more), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr

    def stream(self, code: str, calls: int) -> subprocess.Popen[bytes]:
        """Enqueue that many calls of a task that is renamed and of one that is not, twenty of each in a second."""
        more = {"ASYNCQ_TEST_DEPLOY": code, "DJANGO_SETTINGS_MODULE": "tests.settings"}
        return subprocess.Popen([sys.executable, "-c", STREAM, str(calls)], env=environment(**more), cwd=ROOT)

    def start(self, code: str) -> Workers:
        """Start workers with this code; return when they are shown."""
        before = len(servers.workers())
        folder = self.folder / f"{code}{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        more = {"ASYNCQ_TEST_DEPLOY": code, "ASYNCQ_TEST_HISTORY": str(self.path)}
        found = self._stack.enter_context(workers(folder, "--queues", "default=1,shared=1", **more))
        wait_until(lambda: len(servers.workers()) > before, f"the {code} workers")
        return found

    def ran(self, task: str) -> list[tuple[str, Any]]:
        """What has run of a task: the code and the arguments, in order."""
        found = history(self.path) if self.path.exists() else []
        return [(each["code"], tuple(each["values"])) for each in found if each["task"] == task]

    def wait_for(self, task: str, total: int) -> list[tuple[str, Any]]:
        """Return what has run of a task, once that many have."""
        wait_until(lambda: len(self.ran(task)) >= total, f"{total} of {task}", 60)
        return self.ran(task)


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    with ExitStack() as stack:
        yield Project(tmp_path, stack)


def states(name: str = "") -> Counter[int]:
    rows = TaskRecord.objects.all()
    return Counter((rows.filter(name__endswith=name) if name else rows).values_list("state", flat=True))


def test_a_rename_is_rolled_out_back_and_out_again_with_a_thousand_queued(project: Project) -> None:
    """Nothing is lost, nothing fails, and each runs once; what only new code knows waits while there is none."""
    project.enqueue(OLD, send=[[number] for number in range(1000)])
    new = project.start(NEW)
    project.wait_for("send", 100)
    project.enqueue(NEW, send_receipt=[[number] for number in range(1000, 1200)])
    new.stop()
    # Rolled back: the old code runs what it knows; the rest waits without an end.
    old = project.start(OLD)
    project.enqueue(OLD, send=[[number] for number in range(1200, 1300)])
    known = TaskRecord.objects.filter(name="tests.deploy_tasks.send", state=TaskState.QUEUED)
    wait_until(lambda: not known.exists(), "all that old code knows")
    assert states().keys() <= {TaskState.QUEUED, TaskState.SUCCEEDED, TaskState.RUNNING}
    # Out again.
    project.start(NEW)
    project.wait_for("send", 1300)
    old.stop()
    wait_until(lambda: states() == {TaskState.SUCCEEDED: 1300}, "all rows")
    assert sorted(values for _, (values,) in project.ran("send")) == list(range(1300))


def test_other_arguments_are_upgraded_and_wait_for_new_code_after_a_rollback(project: Project) -> None:
    """Old calls run on new code; new calls never run on old code, which is idle beside them."""
    project.enqueue(OLD, charge=[[1, 250, "EUR"]])
    new = project.start(NEW)
    assert project.wait_for("charge", 1) == [(NEW, (1, 250, "EUR"))]
    old = project.start(OLD)
    project.enqueue(NEW, charge=[[2, {"amount": 300, "currency": "USD"}]] * 20)
    assert Counter(project.wait_for("charge", 21)) == {(NEW, (1, 250, "EUR")): 1, (NEW, (2, 300, "USD")): 20}
    new.stop()
    project.enqueue(NEW, charge=[[3, {"amount": 1, "currency": "GBP"}]])
    project.enqueue(OLD, charge=[[4, 5, "EUR"]])
    assert project.wait_for("charge", 22)[-1] == (OLD, (4, 5, "EUR"))
    old.stop()
    project.start(NEW)
    assert project.wait_for("charge", 23)[-1] == (NEW, (3, 1, "GBP"))
    wait_until(lambda: states() == {TaskState.SUCCEEDED: 23}, "all rows")


def test_an_argument_with_a_default_needs_nothing(project: Project) -> None:
    """Old calls get the default, and calls without it run on either code."""
    project.enqueue(OLD, greet=[["Ada"]])
    project.start(NEW)
    assert project.wait_for("greet", 1) == [(NEW, ("Ada", "en"))]
    project.enqueue(NEW, greet=[["Ada", "de"]])
    assert project.wait_for("greet", 2)[1] == (NEW, ("Ada", "de"))


def test_a_removed_task_waits_until_a_person_cancels_it(project: Project) -> None:
    """Or until the code is back."""
    project.enqueue(OLD, remind=[[1], [2]])
    project.enqueue(NEW, fresh=[[1]])
    new = project.start(NEW)
    project.wait_for("fresh", 1)
    wait_until(lambda: "2 of task tests.deploy_tasks.remind wait" in new.output(), "the line about removed tasks")
    first, second = TaskRecord.objects.filter(name="tests.deploy_tasks.remind").order_by("id")
    assert lifecycle.cancel([first.pk], by="somebody").cancelled == 1
    project.start(OLD)
    assert project.wait_for("remind", 1) == [(OLD, (second.args[0],))]
    first.refresh_from_db()
    assert (first.state, first.reason) == (TaskState.FAILED, FailureReason.CANCELLED)


def test_another_gate_and_another_queue_hold_for_new_calls(project: Project) -> None:
    """Old calls keep their gate and their queue, which new workers must still take."""
    project.enqueue(OLD, export=[[1], [2]], archive=[[1]])
    project.enqueue(NEW, export=[[3]], archive=[[2]])
    project.start(NEW)
    assert len(project.wait_for("export", 3)) == 3
    project.wait_for("archive", 2)
    wait_until(lambda: states() == {TaskState.SUCCEEDED: 5}, "all rows")
    assert Counter(TaskRecord.objects.values_list("gate", "queue_name")) == {
        ("old-gate", "default"): 2,
        ("new-gate", "default"): 1,
        ("", "default"): 1,
        ("", "shared"): 1,
    }


def test_a_schedule_of_a_renamed_task_goes_on(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a name of its own, so it is one schedule before and after."""
    monkeypatch.setenv("ASYNCQ_TEST_SWEEP", "1")
    old = project.start(OLD)
    project.wait_for("sweep", 1)
    old.stop()
    project.start(NEW)
    wait_until(lambda: (NEW, ()) in project.ran("sweep"), "the new code's sweep", 30)
    row = Schedule.objects.get()
    assert (row.name, row.task, row.retired_at) == ("sweep", "tests.deploy_tasks.sweep_up", None)
    assert TaskState.FAILED not in states()


@pytest.mark.long
def test_a_renamed_task_waits_no_longer_than_another(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """Both are enqueued before, during and after one deploy: workers, then web processes, then the old workers go."""
    old = project.start(OLD)
    before = project.stream(OLD, 200)
    wait_until(lambda: len(project.ran("greet")) > 50, "a stream")
    project.start(NEW)
    after = project.stream(NEW, 200)
    assert before.wait(60) == 0
    old.stop()
    assert after.wait(60) == 0
    wait_until(lambda: states() == {TaskState.SUCCEEDED: 800}, "all rows")
    waits: dict[str, list[float]] = {"greet": [], "send": []}
    for name, enqueued_at, began_at in TaskRecord.objects.values_list("name", "enqueued_at", "started_at"):
        assert began_at is not None
        task = "send" if "send" in name else "greet"
        waits[task].append((began_at - enqueued_at).total_seconds())
    with capsys.disabled():
        for task, found in waits.items():
            found.sort()
            middle, most = found[len(found) // 2], found[len(found) * 19 // 20]
            print(f"\n{task}: {len(found)} waited {middle:.3f} s, p95 {most:.3f} s, at most {found[-1]:.3f} s")

"""A copy of a database does not do its original's tasks: `asyncq adopt --new-identity`, and the notice before it."""

from __future__ import annotations

import json
import shutil
import sqlite3
import uuid
from contextlib import closing
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_asyncq import control, lifecycle
from django_asyncq.broker import keys
from django_asyncq.fleet.leader import PrefixOwnership, notice_of_copy
from django_asyncq.models import BulkAction, FailureReason, Occurrence, Schedule, TaskRecord, TaskState
from django_asyncq.scheduling.scheduler import Scheduler
from django_asyncq.storage import identity
from django_asyncq.storage.routing import writing_database

from .. import tasks
from ..broker.test_prefix_ownership import SCHEDULE, adopt, manage, run_python, set_owner
from ..workers import start_workers

# What production has at the moment of the dump: a queued task, a delayed one that is due, one that is not, one that is
# retried, one that runs, and a schedule that is due.
MIGRATE = """
import django; django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
"""
FILL = """
import django; django.setup()
from datetime import timedelta
from django.utils import timezone
from django_asyncq.models import Schedule, TaskRecord, TaskState
from tests import tasks
now = timezone.now()
tasks.add.enqueue(1)
tasks.add.using(run_after=now + timedelta(hours=1)).enqueue(2)
late = tasks.add.using(run_after=now + timedelta(hours=1)).enqueue(3)
TaskRecord.objects.filter(id=late.id).update(run_after=now)
retried = tasks.add.using(max_attempts=2).enqueue(4)
TaskRecord.objects.filter(id=retried.id).update(
    state=TaskState.FAILED, reason=1, retry_at=now, attempt=1, fence=1, max_attempts=2)
running = tasks.add.enqueue(5)
TaskRecord.objects.filter(id=running.id).update(state=TaskState.RUNNING, attempt=1, fence=1, last_attempted_at=now)
Schedule(name="each second", task="tests.tasks.add", args=[6], interval_seconds=1, next_occurrence_at=now).save()
TaskRecord.objects.update(enqueued_at=now - timedelta(hours=1))
"""


def in_file(path: str, statement: str) -> list[Any]:
    """Send a statement to a database file, and return its rows."""
    with closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(statement).fetchall()


@pytest.mark.django_db(transaction=True)
def test_copied_file_runs_nothing_unless_it_is_to(tmp_path: Path, redis_client: Any, key_prefix: str) -> None:
    """Production's Redis is not touched, though the copy's tasks have the same ids."""
    production, copy, kept = (f"{tmp_path}/{name}.sqlite3" for name in ("production", "copy", "kept"))
    original = {"DATABASE_URL": f"sqlite:///{production}", "ASYNCQ_TEST_PREFIX": f"{key_prefix}-production"}
    run_python("-c", f"{MIGRATE}{FILL}", **original)
    shutil.copy(production, copy)
    shutil.copy(production, kept)
    # A burst would wait for the sweep that finds lost runs.
    in_file(kept, f"DELETE FROM django_asyncq_taskrecord WHERE state = {TaskState.RUNNING.value}")
    with_prefix = f"*{key_prefix}-production*"
    entries = {key: redis_client.dump(key) for key in redis_client.keys(with_prefix)}
    assert any(key.endswith(b":pending") for key in entries)
    for path, option, ran in ((copy, [], set()), (kept, ["--keep-waiting"], {1, 3, 4})):
        name = Path(path).stem
        history = tmp_path / f"{name}.history"
        own = {
            "DATABASE_URL": f"sqlite:///{path}",
            "ASYNCQ_TEST_PREFIX": f"{key_prefix}-{name}",
            "ASYNCQ_TEST_ROUTER": "",
            "ASYNCQ_TEST_HISTORY": str(history),
            "ASYNCQ_TEST_LOCK_DIR": str(tmp_path / name),
        }
        said = manage("asyncq", "adopt", "--new-identity", "--yes", *option, **own).stdout
        assert ("4 tasks kept" if option else "5 tasks cancelled") in said, said
        assert "manage.py asyncq schedules resume --all" in said
        done = start_workers("--burst", **own)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in history.read_text().splitlines()] if history.exists() else []
        assert {line["a"] for line in lines if line["event"] == "add"} == ran, (lines, done.stderr)
        assert in_file(path, "SELECT id FROM django_asyncq_occurrence") == []
        if not option:
            states = in_file(path, "SELECT state, reason FROM django_asyncq_taskrecord")
            assert states == [(TaskState.FAILED, FailureReason.CANCELLED)] * 5
    assert {key: redis_client.dump(key) for key in redis_client.keys(with_prefix)} == entries


def state_of(id: str) -> tuple[int, int]:
    row = TaskRecord.objects.get(id=id)
    return row.state, row.reason


CLOSED = (TaskState.FAILED, FailureReason.CANCELLED)


@pytest.mark.django_db(transaction=True)
def test_whatever_waits_is_closed_in_rows_alone(redis_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pages, interrupted and repeated; slots of unique tasks are free, and what had finished stays."""
    monkeypatch.setattr("django_asyncq.lifecycle.copies.ROWS_PER_PAGE", 2)
    results = [tasks.add.enqueue(number) for number in range(5)]
    unique = tasks.add.using(unique=True).enqueue(7)
    TaskRecord.objects.filter(id=results[0].id).update(state=TaskState.RUNNING, attempt=1, started_at=timezone.now())
    TaskRecord.objects.filter(id=results[1].id).update(is_remote=True)
    TaskRecord.objects.filter(id=results[2].id).update(state=TaskState.SUCCEEDED, finished_at=timezone.now())
    action = control.start_bulk("cancel", {"name": ["tests.tasks.add"]})
    first = identity.ensure()
    before = redis_client.lrange(keys.keys_of("default").pending, 0, -1)
    # Interrupted after the first page: the identity is still the old one, and no schedule fires.
    closing = lifecycle.close_copied

    def interrupted(by: str) -> Any:
        yield next(closing(by))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lifecycle, "close_copied", interrupted)
        with pytest.raises(CommandError, match="Interrupted"):
            adopt("--new-identity", "--yes")
    assert identity.read() == first and identity.schedules_paused_at() is not None
    found = adopt("--new-identity", "--yes")
    assert found["cancelled"] == 3 and found["kept"] == 0 and found["schedules_paused"]
    assert [state_of(each.id) for each in (*results, unique)].count(CLOSED) == 5
    assert TaskRecord.objects.get(id=results[2].id).state == TaskState.SUCCEEDED
    assert redis_client.lrange(keys.keys_of("default").pending, 0, -1) == before
    assert BulkAction.objects.get(pk=action.pk).state == "stopped"
    row = TaskRecord.objects.get(id=unique.id)
    assert row.unique_slot is None and row.cancelled_by == "manage.py asyncq adopt"
    assert "a copy" in row.errors[-1]["message"]


@pytest.mark.parametrize(("answers", "kept"), [(["y", ""], 0), (["y", "k"], 1), (["y", "keep"], 1), (["y", "x"], 0)])
@pytest.mark.django_db(transaction=True)
def test_it_counts_and_asks_and_enter_cancels(
    answers: list[str], kept: int, redis_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a terminal. `--yes` takes the default."""
    result = tasks.add.enqueue(1)
    asked: list[str] = []

    def answer(question: str) -> str:
        asked.append(question)
        return answers.pop(0)

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", answer)
    found = adopt("--new-identity")
    assert "1 task waits in this copy, 1 is due" in asked[1]
    assert found["kept"] == kept and (state_of(result.id) == CLOSED) is not bool(kept)


@pytest.mark.django_db(transaction=True)
def test_it_is_refused_where_workers_of_the_identity_run(redis_client: Any) -> None:
    """That may be production. `--force` does it; options that belong to it are refused without it."""
    result = tasks.add.enqueue(1)
    set_owner(redis_client, identity.ensure(), alive=True)
    with pytest.raises(CommandError, match="Nothing was changed"):
        adopt("--new-identity", "--yes")
    assert state_of(result.id) == (TaskState.QUEUED, FailureReason.NONE) and identity.schedules_paused_at() is None
    assert adopt("--new-identity", "--yes", "--force")["cancelled"] == 1
    with pytest.raises(CommandError, match="are for --new-identity"):
        adopt("--keep-waiting")


@pytest.mark.django_db(transaction=True)
def test_paused_schedules_fire_when_they_are_resumed() -> None:
    """Also those of the code, and those that come later; a beat costs no statement more, and nothing is made up for."""
    old = timezone.now() - timedelta(hours=1)
    identity.ensure()
    Schedule(**SCHEDULE, missed="all", next_occurrence_at=old).save()
    database = writing_database(Schedule)
    with CaptureQueriesContext(connections[database]) as statements:
        Scheduler().fire_due()
    Occurrence.objects.all().delete()
    identity.pause_schedules()
    Scheduler().sync()
    Schedule.objects.update(next_occurrence_at=old)
    with CaptureQueriesContext(connections[database]) as paused:
        assert Scheduler().fire_due().fired == []
    assert len(paused) <= len(statements)
    assert not Occurrence.objects.exists()
    out = StringIO()
    call_command("asyncq", "schedules", "list", stdout=out)
    assert "All schedules are paused" in out.getvalue()
    call_command("asyncq", "schedules", "resume", "--all", stdout=out)
    assert "All schedules are running." in out.getvalue() and identity.schedules_paused_at() is None
    assert not Schedule.objects.firing().filter(next_occurrence_at__lte=old).exists()
    assert Schedule.objects.firing().exists()
    call_command("asyncq", "schedules", "resume", "--all", stdout=out)
    assert "already" in out.getvalue()


@pytest.mark.django_db(transaction=True)
def test_admin_says_that_all_schedules_are_paused_and_resumes_them() -> None:
    """With the right to change schedules; the button asks by POST."""
    identity.ensure()
    identity.pause_schedules()
    Schedule(**SCHEDULE, is_declared=True, next_occurrence_at=timezone.now() - timedelta(hours=1)).save()
    client = Client()
    client.force_login(User.objects.create_superuser("ann"))
    address = "/admin/django_asyncq/schedule/"
    page = client.get(address).content.decode()
    assert "All schedules are paused" in page and "Paused with all schedules" in page and "Overdue" not in page
    assert client.get(f"{address}resume/").status_code == 405
    done = client.post(f"{address}resume/", follow=True).content.decode()
    assert "All schedules fire again." in done and "All schedules are paused" not in done
    assert identity.schedules_paused_at() is None
    user = User.objects.create_user("bob", is_staff=True)
    client.force_login(user)
    assert client.post(f"{address}resume/").status_code == 403


@pytest.mark.django_db(transaction=True)
def test_first_workers_of_what_may_be_a_copy_say_so(redis_client: Any) -> None:
    """Not at a first start, nor where Redis was just emptied or knows the database."""
    waiting, finished = tasks.add.enqueue(1), tasks.add.enqueue(2)
    old = timezone.now() - timedelta(hours=1)
    TaskRecord.objects.update(enqueued_at=old)
    assert notice_of_copy() == ""
    TaskRecord.objects.filter(id=finished.id).update(state=TaskState.SUCCEEDED, finished_at=old)
    text = notice_of_copy()
    assert "1 task waits in this copy, 1 is due" in text and "adopt --new-identity --keep-waiting" in text
    TaskRecord.objects.filter(id=waiting.id).update(enqueued_at=timezone.now())
    TaskRecord.objects.filter(id=finished.id).update(enqueued_at=timezone.now())
    assert notice_of_copy() == ""
    TaskRecord.objects.update(enqueued_at=old)
    PrefixOwnership().tick(has_read_rows=True)
    assert notice_of_copy() == ""
    set_owner(redis_client, uuid.uuid4())
    assert notice_of_copy() == ""

"""`manage.py asyncq <noun> <verb>`: what each shows, changes and refuses."""

from __future__ import annotations

import io
import json
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_asyncq import gates, lifecycle
from django_asyncq.broker import Broker, ownership, redis_clock
from django_asyncq.broker.foreign import rejected_document
from django_asyncq.broker.inspection import Inspection
from django_asyncq.core import registry
from django_asyncq.core.redaction import MASK
from django_asyncq.exceptions import AsyncqError, InvalidOption, QueueFull, StillRunning
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.models import FailureReason, Gate, Pause, Schedule, TaskRecord, TaskState
from django_asyncq.observe import still_running
from django_asyncq.observe.inspector import Inspector, TaskFilter
from django_asyncq.storage import database_clock, identity
from django_asyncq.testing import EmbeddedRedis

from .. import inbox_tasks, tasks

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)


def run(*arguments: str) -> str:
    """Run the command and return what it prints."""
    out = io.StringIO()
    call_command("asyncq", *arguments, stdout=out, stderr=io.StringIO())
    return out.getvalue()


def found(*arguments: str) -> Any:
    """Run the command with --json and return what it prints."""
    return json.loads(run(*arguments, "--json"))


def note_supervisor() -> None:
    """Note a supervisor that has just reported."""
    token = ownership.token_of("host", 1, redis_clock.seconds())
    ownership.note_supervisor(identity.ensure(), token, alive_ms=ownership.ALIVE_MS, may_take=True)


def failed(count: int = 1, **more: Any) -> list[TaskRecord]:
    """Tasks that failed for good; Redis knows none of them."""
    values = {
        "name": "tests.tasks.add",
        "args": [1],
        "state": TaskState.FAILED,
        "reason": FailureReason.EXCEPTION,
        "last_exception": "tests.tasks.Glitch",
        "finished_at": database_clock.now(),
        "attempt": 1,
    }
    return TaskRecord.objects.bulk_create([TaskRecord(**{**values, **more}) for _ in range(count)])


# --- tasks


def test_a_list_shows_the_newest_tasks_page_by_page() -> None:
    """Those that match all filters; the JSON says how to go on."""
    ids = [tasks.add.enqueue(number).id for number in range(5)]
    (row,) = failed()
    first = found("tasks", "list", "--limit", "4")
    assert [each["id"] for each in first["tasks"]] == [str(row.id), *reversed(ids[2:])]
    rest = found("tasks", "list", "--limit", "4", "--before", first["next"])
    assert [each["id"] for each in rest["tasks"]] == list(reversed(ids[:2]))
    assert rest["next"] is None
    assert [each["id"] for each in found("tasks", "list", "--state", "failed", "--error", "Glitch")["tasks"]] == [
        str(row.id)
    ]
    for filters in (["--task", "add"], ["--task", "tests.tasks.add"], ["--since", "1h"], ["--queue", "default"]):
        assert len(found("tasks", "list", *filters)["tasks"]) == 6
    for filters in (["--task", "tests.tasks.nap"], ["--gate", "g"], ["--error", "Fatal"], ["--since", "2999-01-01"]):
        assert run("tasks", "list", *filters) == "no tasks\n"
    assert f"--before {ids[4]}" in run("tasks", "list", "--limit", "2")


def test_a_list_shows_what_is_unusual_about_a_task() -> None:
    """Its priority, that it runs alone, that it is another program's, its gate."""
    tasks.add.using(priority=7).enqueue(1)
    TaskRecord.objects.update(suspicion=2)
    TaskRecord.objects.create(name="go.task", is_remote=True, gate="own")
    lines = run("tasks", "list").splitlines()
    assert lines[1].endswith("of another program, at gate own")
    assert lines[2].endswith("runs alone next")
    assert " 7 " in lines[2]


def test_failures_are_counted_by_name_and_error() -> None:
    """The largest group first, with its newest task."""
    newest = failed(3)[-1]
    failed(1, last_exception="tests.tasks.Fatal")
    failed(1, state=TaskState.FAILED, retry_at=database_clock.now(), finished_at=None)
    groups = found("tasks", "failures")["failures"]
    assert [(each["count"], each["error"]) for each in groups] == [(3, "tests.tasks.Glitch"), (1, "tests.tasks.Fatal")]
    assert groups[0]["latest"] == str(newest.id)
    assert run("tasks", "failures", "--queue", "none") == "no failed tasks\n"


def test_show_masks_secrets_unless_asked(settings: Any) -> None:
    """In arguments by the name of the parameter, in keyword arguments, headers and errors."""
    (row,) = failed(
        name="tests.tasks.login",
        args=["me", "s3cret"],
        kwargs={"api_token": "t0ken"},
        headers={"authorization": "b3arer"},
        errors=[{"exception": "builtins.ValueError", "message": "password=hunter2", "traceback": "", "attempt": 1}],
    )
    for text in (run("tasks", "show", str(row.id)), run("tasks", "show", str(row.id), "--json")):
        assert MASK in text
        assert "s3cret" in text or "login" in text
        for secret in ("t0ken", "b3arer", "hunter2"):
            assert secret not in text
    text = run("tasks", "show", str(row.id), "--unmasked")
    for secret in ("s3cret", "t0ken", "b3arer", "hunter2"):
        assert secret in text
    assert found("tasks", "show", str(row.id)[:13])["id"] == str(row.id)


def test_show_says_where_redis_has_the_task(own_redis: EmbeddedRedis, own_keys: None) -> None:
    """None when Redis is unreachable: the row is shown all the same."""
    id = tasks.add.using(run_after=HOUR).enqueue(1).id
    assert found("tasks", "show", id)["redis_state"] == "scheduled"
    own_redis.stop()
    assert found("tasks", "show", id)["redis_state"] is None


def test_a_wrong_id_is_an_error() -> None:
    """It says what an id is, or that there is none."""
    for text in ("x", "0123", "01234567"):
        with pytest.raises(CommandError, match=r"^No task is called .+ 8 hexadecimal digits"):
            run("tasks", "show", text)


def test_enqueue_takes_all_that_using_takes() -> None:
    """Arguments, queue, time, priority, headers."""
    answer = found(
        "tasks", "enqueue", "tests.tasks.add", "--args", "[1]", "--kwargs", '{"b": 2}', "--queue", "other",
        "--in", "1h", "--priority", "5", "--header", "trace=abc",
    )  # fmt: skip
    row = TaskRecord.objects.get(id=answer["id"])
    assert (row.args, row.kwargs, row.queue_name, row.priority, row.headers) == (
        [1], {"b": 2}, "other", 5, {"trace": "abc"},
    )  # fmt: skip
    assert row.run_after is not None
    assert abs((row.run_after - database_clock.now()) - HOUR) < timedelta(minutes=1)
    assert Inspection().sizes("other")["scheduled"] == 1


def test_a_bad_call_is_an_error_before_anything_is_written() -> None:
    """It names what is wrong."""
    for arguments, text in (
        (["tests.tasks.missing"], "declares no task missing"),
        (["tests.tasks.ad"], r"declares no task ad; .+\. Did you mean .*'tests\.tasks\.add'"),
        (
            ["add"],
            r"^No task is called 'add'\. Did you mean .*'tests\.tasks\.add'.*\? Give the whole path, such as shop",
        ),
        (["os.system", "--args", '["true"]'], "no task named 'os.system'"),
        (["tests.tasks.add", "--args", "{}"], "give a JSON list"),
        (["tests.tasks.add", "--kwargs", "nonsense"], "is not JSON"),
        (["tests.tasks.add", "--header", "x"], "trace=abc"),
        (["tests.tasks.add", "--in", "soon"], "90s, 5m"),
        (["tests.tasks.add", "--at", "soon"], "2026-11-26T18:00"),
        (["tests.tasks.add", "--queue", "a b", "--args", "[1]"], "queue"),
    ):
        with pytest.raises(CommandError, match=text):
            run("tasks", "enqueue", *arguments)
    assert not TaskRecord.objects.exists()


def test_run_lets_delayed_and_failed_tasks_run_now() -> None:
    """Others are refused, each with the reason."""
    delayed = tasks.add.using(run_after=HOUR).enqueue(1).id
    due = tasks.add.enqueue(2).id
    (row,) = failed()
    (over,) = failed(state=TaskState.SUCCEEDED, reason=FailureReason.NONE)
    answer = found("tasks", "run", delayed, due, str(row.id), str(over.id))
    assert answer == {"chosen": 4, "done": 2, "refused": {"it is due already": 1, "it has succeeded": 1}}
    run_after = TaskRecord.objects.get(id=delayed).run_after
    assert run_after is not None and run_after <= database_clock.now()
    assert Inspection().sizes("default") == {"pending": 3, "active": 0, "scheduled": 0, "retry": 0, "archived": 0}
    with pytest.raises(CommandError, match="No task was queued to run now"):
        run("tasks", "run", due)


def test_a_rolled_back_run_leaves_the_task_delayed() -> None:
    """Redis is changed after the commit."""
    id = tasks.add.using(run_after=HOUR).enqueue(1).id
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        run("tasks", "run", id)
        raise ZeroDivisionError
    assert TaskRecord.objects.get(id=id).run_after is not None
    assert Inspection().sizes("default")["scheduled"] == 1


def test_retry_of_many_needs_yes_without_a_terminal() -> None:
    """Of one it does not. A full gate refuses those that it has no slot for."""
    Gate.objects.create(name="small", limit=2)
    rows = failed(3, gate="small") + failed(1, name="tests.tasks.nap")
    with pytest.raises(CommandError, match="give --yes to retry"):
        run("tasks", "retry", "--task", "tests.tasks.add")
    assert not TaskRecord.objects.queued().exists()
    answer = found("tasks", "retry", "--task", "tests.tasks.add", "--yes")
    assert answer == {"chosen": 3, "done": 2, "refused": {"its gate small is full": 1}}
    assert found("tasks", "retry", str(rows[-1].id))["done"] == 1
    assert Inspection().sizes("default")["pending"] == 3
    with pytest.raises(CommandError, match="No task was queued again"):
        run("tasks", "retry", str(rows[-1].id))


def test_a_verb_needs_to_know_which_tasks() -> None:
    """Ids or filters, never nothing, and not both; only states that it can change. Such an error exits with 2."""
    (row,) = failed()
    for arguments in (["retry"], ["retry", str(row.id), "--all"], ["retry", "--state", "queued"]):
        with pytest.raises(CommandError) as caught:
            run("tasks", *arguments, "--yes")
        assert caught.value.returncode == 2
    assert found("tasks", "retry", "--all")["done"] == 1


def test_cancel_says_what_became_of_each() -> None:
    """Waiting ones are cancelled, with the reason in their error; those that have finished are over."""
    id = tasks.add.enqueue(1).id
    (row,) = failed()
    with pytest.raises(CommandError, match="--yes"):
        run("tasks", "cancel", id, str(row.id))
    answer = found("tasks", "cancel", id, str(row.id), "--reason", "not needed", "--yes")
    assert answer == {"chosen": 2, "cancelled": 1, "asked": 0, "over": 1, "missing": 0, "refused": {}}
    assert TaskRecord.objects.get(id=id).errors[-1]["message"] == "asyncq: not needed"
    with pytest.raises(CommandError, match="No task was cancelled"):
        run("tasks", "cancel", id)


def test_delete_takes_finished_tasks_only() -> None:
    """It always asks. One that waits stays."""
    id = tasks.add.enqueue(1).id
    failed(3)
    with pytest.raises(CommandError, match="--yes"):
        run("tasks", "delete", "--state", "failed")
    assert found("tasks", "delete", "--state", "failed", "--yes")["done"] == 3
    with pytest.raises(CommandError, match="No task was deleted"):
        run("tasks", "delete", id, "--yes")
    assert TaskRecord.objects.count() == 1


def test_a_person_is_asked_with_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any answer other than yes changes nothing."""
    failed(2)
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "")
    with pytest.raises(CommandError, match="Nothing was deleted"):
        run("tasks", "delete", "--all")
    assert asked == ["Delete 2 tasks? This cannot be undone. [y/N] "]
    assert TaskRecord.objects.count() == 2


# --- queues


def test_queues_are_listed_with_what_both_stores_hold() -> None:
    """Also tasks with a priority and suspects, which asynq's tools do not show."""
    tasks.add.enqueue(1)
    tasks.add.using(priority=5).enqueue(1)
    tasks.add.using(queue_name="other", run_after=HOUR).enqueue(1)
    failed(2)
    default, other = found("queues", "list")["queues"]
    assert (default["queue"], default["queued"], default["pending"], default["priority"]) == ("default", 2, 2, 1)
    assert (other["queue"], other["scheduled"], other["oldest_waiting_seconds"]) == ("other", 1, None)
    assert default["oldest_waiting_seconds"] is not None
    assert not default["is_paused"]
    assert run("queues", "list").splitlines()[1].split()[:2] == ["default", "2"]


@pytest.mark.parametrize("again", ["retried by its time", "let in by its gate", "retried by a person", "run now"])
def test_a_task_that_is_queued_again_has_waited_since_then(again: str) -> None:
    """Not since it was enqueued, which would page somebody."""
    long_ago = database_clock.now() - timedelta(hours=3)
    if again == "run now":
        task = tasks.add.using(run_after=HOUR).enqueue(1)
        TaskRecord.objects.filter(id=task.id).update(enqueued_at=long_ago)
        lifecycle.hurry([task.id])
    else:
        retry_at = {"retried by its time": timedelta(), "let in by its gate": HOUR}.get(again)
        (row,) = failed(
            enqueued_at=long_ago,
            last_attempted_at=None if again == "let in by its gate" else long_ago,
            retry_at=None if retry_at is None else database_clock.now() + retry_at,
            finished_at=database_clock.now() if retry_at is None else None,
        )
        assert lifecycle.retry([row.id], by_person=retry_at is None).retried
    assert Inspector().queues.get("default").oldest_waiting_seconds == pytest.approx(0, abs=30)
    assert Inspector().health(max_age_seconds=60).is_healthy
    assert found("stats")["queues"][0]["oldest_waiting_seconds"] == pytest.approx(0, abs=30)


def test_a_task_whose_run_was_lost_has_waited_since_its_attempt() -> None:
    """That is the latest time that is known."""
    tasks.add.enqueue(1)
    now = database_clock.now()
    TaskRecord.objects.update(enqueued_at=now - timedelta(hours=3), last_attempted_at=now - timedelta(seconds=40))
    assert Inspector().queues.get("default").oldest_waiting_seconds == pytest.approx(40, abs=20)


def test_a_queue_is_shown_with_what_was_rejected(redis_client: Any) -> None:
    """Secrets are masked unless asked for. A queue that nobody has used is empty."""
    key = Broker().keys("default").rejected
    redis_client.lpush(key, rejected_document("inbox", "x", b'{"password": "s3cret"}', "not valid", 1.0))
    shown = found("queues", "show", "default", "--rejected")
    assert shown["rejected"] == 1
    assert shown["rejected_items"][0]["reason"] == "not valid"
    assert "s3cret" not in run("queues", "show", "default", "--rejected")
    assert "s3cret" in run("queues", "show", "default", "--rejected", "--unmasked")
    assert found("queues", "show", "nobody")["queued"] == 0
    with pytest.raises(CommandError, match="queue name"):
        run("queues", "show", "a b")


def test_a_queue_with_an_inbox_shows_where_to_push(own_redis: EmbeddedRedis, own_keys: None) -> None:
    """A person who pushes documents compares key and server. Other queues have no such lines."""
    key = Broker().keys("pushed").inbox
    assert key.endswith("{pushed}:inbox") and "inbox key" not in run("queues", "show", "pushed")
    Broker().client.lpush(key, b"{}")
    shown = found("queues", "show", "pushed")
    assert (shown["inbox_key"], shown["inbox"]) == (key, 1)
    assert f"127.0.0.1:{own_redis.port}" in shown["redis"]
    assert f"{key}\n" in run("queues", "show", "pushed")
    # Of a task with inbox=True, before anything is pushed.
    assert found("queues", "show", inbox_tasks.QUEUE)["inbox_key"] == Broker().keys(inbox_tasks.QUEUE).inbox
    assert "inbox_key" not in found("queues", "show", "default")


def test_history_shows_asynqs_counters(redis_client: Any) -> None:
    """The newest day first."""
    today = found("queues", "history", "default")["days"][0]["day"]
    redis_client.set(Broker().keys("default").processed_on(today), 7)
    assert found("queues", "history", "default", "--days", "2")["days"][0] == {
        "day": today, "processed": 7, "failed": 0,
    }  # fmt: skip
    assert run("queues", "history", "default").splitlines()[1].split() == [today, "7", "0"]


def test_purge_deletes_what_waits_in_one_queue(redis_client: Any) -> None:
    """Or what failed, or what was rejected. Other queues keep theirs."""
    for number in range(3):
        tasks.add.enqueue(number)
    tasks.add.using(queue_name="other").enqueue(1)
    failed(2)
    with pytest.raises(CommandError, match="--yes"):
        run("queues", "purge", "default")
    assert found("queues", "purge", "default", "--yes") == {
        "queue": "default", "state": "waiting", "found": 3, "deleted": 3,
    }  # fmt: skip
    assert Inspection().sizes("default")["pending"] == 0
    assert (TaskRecord.objects.failed().count(), TaskRecord.objects.queued().count()) == (2, 1)
    assert found("queues", "purge", "default", "--state", "failed", "--yes")["deleted"] == 2
    redis_client.lpush(Broker().keys("default").rejected, b"x", b"y")
    assert found("queues", "purge", "default", "--state", "rejected", "--yes")["deleted"] == 2
    assert found("queues", "purge", "default", "--yes")["found"] == 0


def test_groups_are_listed(redis_client: Any) -> None:
    """With the number of messages in each."""
    tasks.add.enqueue(1)
    keys = Broker().keys("default")
    redis_client.sadd(keys.groups, "mail")
    redis_client.zadd(keys.group("mail"), {"a": 1, "b": 2})
    assert found("groups", "list")["groups"] == [{"backend": "default", "queue": "default", "group": "mail", "size": 2}]
    redis_client.srem(keys.groups, "mail")
    assert run("groups", "list") == "no groups\n"


# --- schedules and gates


def test_schedules_are_listed_run_and_switched() -> None:
    """By name. A second switch changes nothing, and says so."""
    Schedule.objects.create(name="nightly", task="tests.tasks.tally", args=["eu"], cron="0 3 * * *")
    assert found("schedules", "disable", "nightly") == {"schedule": "nightly", "enabled": False, "changed": True}
    assert run("schedules", "disable", "nightly") == "nightly: already disabled.\n"
    Schedule.objects.update(next_occurrence_at=database_clock.now() - HOUR)
    head, row = run("schedules", "list").splitlines()[:2]
    assert row[head.index("next occurrence") :].startswith("- ")
    (shown,) = found("schedules", "list")["schedules"]
    assert (shown["name"], shown["timing"], shown["enabled"], shown["latest"]) == ("nightly", "0 3 * * *", False, None)
    assert found("schedules", "enable", "nightly")["changed"]
    (shown,) = found("schedules", "list")["schedules"]
    assert shown["next_occurrence_at"] is not None
    id = found("schedules", "run", "nightly")["task"]
    assert TaskRecord.objects.get(id=id).args == ["eu"]
    (occurrence,) = found("schedules", "history", "nightly")["occurrences"]
    assert (occurrence["outcome"], occurrence["by_person"], occurrence["task"]) == ("queued", True, id)
    with pytest.raises(CommandError, match="no schedule is called 'daily'"):
        run("schedules", "run", "daily")
    with pytest.raises(CommandError, match="Did you mean 'nightly'"):
        run("schedules", "run", "nightli")


def test_gates_are_listed_shown_set_and_repaired() -> None:
    """A new limit takes effect at once; a slot without a row is removed."""
    assert found("gates", "set", "own", "--limit", "1")["limit"] == 1
    id = tasks.gated.enqueue("own").id
    shown = found("gates", "show", "own")
    assert (shown["limit"], shown["occupancy"], shown["live"]) == (1, 1, 1)
    assert shown["slots"][0]["id"] == id
    with pytest.raises(QueueFull):
        tasks.gated.enqueue("own")
    run("gates", "set", "own", "--limit", "2", "--expected", "5m")
    tasks.gated.enqueue("own")
    assert Gate.objects.get().expected_seconds == 300
    TaskRecord.objects.filter(id=id).delete()
    gates.release_ids("own", [slot.id for slot in gates.slots("own")])
    assert found("gates", "audit", "own", "--dry-run") == {"gate": "own", "dry_run": True, "added": 1, "removed": 0}
    assert found("gates", "audit", "own")["added"] == 1
    assert [each["gate"] for each in found("gates", "list")["gates"]] == ["own"]
    for arguments, text in (
        (["show", "nothing"], "no gate is called"),
        (["show", "owns"], "Did you mean 'own'"),
        (["audit", "owns"], "Did you mean 'own'"),
        (["audit", "owns", "--dry-run"], "no gate is called 'owns'"),
        (["set", "own"], "Give --limit"),
        (["set", "new", "--expected", "5s"], "has no row"),
        (["set", "a b", "--limit", "1"], "gate name"),
        (["set", "own", "--limit", "99999999999999999999"], "cannot be set"),
    ):
        with pytest.raises(CommandError, match=text):
            run("gates", *arguments)


def test_a_new_row_of_a_gate_expects_what_its_tasks_say(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    """With the default, Retry-After would multiply. Live tasks know best, then the task declared with the very name."""
    settings.ASYNCQ = {**settings.ASYNCQ, "EXPECTED_SECONDS": 45}
    declared = [tasks.add.using(gate=gate) for gate in ("exact", "{model}-slow", "{model}-{size}-slow")]
    for task, seconds in zip(declared, (3, 8, 9), strict=True):
        object.__setattr__(task, "expected_seconds", seconds)
    monkeypatch.setattr(registry, "_registry", {str(number): task for number, task in enumerate(declared)})
    for name, seconds in (("exact", 3), ("a-slow", 8), ("a-b-slow", 9), ("slow", 45), ("other", 45)):
        assert found("gates", "set", name, "--limit", "5")["expected_seconds"] == seconds, name
    assert found("gates", "set", "given", "--limit", "5", "--expected", "7s")["expected_seconds"] == 7
    tasks.add.using(gate="live", queue_limit=5, expected_seconds=2).enqueue(1)
    assert found("gates", "set", "live", "--limit", "5")["expected_seconds"] == 2
    Gate.objects.filter(name="live").update(expected_seconds=12)
    assert found("gates", "set", "live", "--limit", "6")["expected_seconds"] == 12


def test_a_list_without_gates_says_what_a_gate_is_listed_for() -> None:
    """Tasks may declare gates that have no slot taken."""
    assert run("gates", "list") == "no gate has a row, a slot or a waiting task\n"


# --- health


def test_health_says_by_its_code_whether_tasks_run(own_redis: EmbeddedRedis, own_keys: None) -> None:
    """Each limit is a problem of its own; an unreachable Redis always is one, and so are workers that do not run."""
    with pytest.raises(CommandError, match="no supervisor is known: no workers run"):
        run("health")
    note_supervisor()
    assert run("health").startswith("healthy: 0 tasks waiting, 1 supervisor running")
    tasks.add.enqueue(1)
    TaskRecord.objects.update(enqueued_at=database_clock.now() - HOUR)
    assert run("health", "--max-age", "2h", "--max-waiting", "1")
    for limit, text in (
        (["--max-age", "5m"], "a task has been waiting for 36"),
        (["--max-waiting", "0"], "1 tasks are waiting"),
    ):
        with pytest.raises(CommandError, match=text) as caught:
            run("health", *limit)
        assert caught.value.returncode == 1
    assert found("health")["waiting"] == 1
    own_redis.stop()
    with pytest.raises(CommandError, match="a store is unreachable: Redis"):
        run("health")


def test_health_says_in_which_queue_the_oldest_task_waits(own_redis: EmbeddedRedis, own_keys: None) -> None:
    """And why, as far as that is known; nothing more is read while all is well."""
    tasks.add.using(queue_name="mails").enqueue(1)
    tasks.add.enqueue(1)
    TaskRecord.objects.filter(queue_name="mails").update(enqueued_at=database_clock.now() - HOUR)

    def problem() -> str:
        (text,) = Inspector().health(max_age_seconds=60).problems
        return text

    assert problem().endswith("s, longer than 60 s, in queue mails, which no worker serves")
    with CaptureQueriesContext(connection) as more:
        problem()
    with CaptureQueriesContext(connection) as fewer:
        assert Inspector().health(max_age_seconds=7200).is_healthy
    assert ["_pause" in str(queries.captured_queries) for queries in (more, fewer)] == [True, False]
    Inspector().queues.pause("mails")
    assert problem().endswith("s, in queue mails, which is paused")
    TaskRecord.objects.filter(queue_name="mails").update(backend="other")
    assert problem().endswith(" s, in queue mails of TASKS['other'], which no worker serves")


# --- what holds for all


def test_reading_changes_nothing(redis_client: Any, key_prefix: str) -> None:
    """Neither a row nor a key."""
    tasks.gated.enqueue("g")
    id = tasks.add.using(priority=3).enqueue(1).id
    failed(2)

    def state() -> Any:
        rows = list(TaskRecord.objects.order_by("id").values())
        return rows, {key: redis_client.dump(key) for key in redis_client.scan_iter(f"*{key_prefix}*")}

    note_supervisor()
    before = state()
    for arguments in (
        ["tasks", "list"], ["tasks", "failures"], ["tasks", "show", id], ["queues", "list"],
        ["queues", "show", "default", "--rejected"], ["queues", "history", "default"], ["groups", "list"],
        ["schedules", "list"], ["gates", "list"], ["gates", "show", "g"], ["gates", "audit", "g", "--dry-run"],
        ["health"], ["stats"],
    ):  # fmt: skip
        run(*arguments)
    assert state() == before


def test_an_inspector_of_one_backend_sees_its_own_tasks_only() -> None:
    """And an alias without Redis, or that TASKS does not name, is refused."""
    tasks.add.enqueue(1)
    TaskRecord.objects.create(name="tests.tasks.add", backend="gone")
    assert Inspector("default").tasks.count() == 1
    assert Inspector().tasks.count() == 2
    with pytest.raises(CommandError, match="no alias 'gone'"):
        run("tasks", "list", "--backend", "gone")


def test_a_pause_says_what_workers_have_and_waits_until_they_have_nothing() -> None:
    """The ids of what was taken before, of a queue, a task and a gate; `--wait` ends with 1 while there are any."""
    queued, gated = tasks.add.enqueue(1), tasks.gated.enqueue("own")
    (held,) = [run for run in lifecycle.claim(Broker(), "default", "w", 1, "default").runs if run.lease.id == queued.id]
    expected = {"queues": ("default", queued.id), "tasks": ("tests.tasks.add", queued.id), "gates": ("own", gated.id)}
    for noun, (name, id) in expected.items():
        assert found(noun, "pause", name)["held"] == [id]
        assert f"1 task {'hold' if noun == 'gates' else 'were'}" in run(noun, "pause", name)
        with pytest.raises(CommandError, match=f"still have 1 of its tasks.*{id}"):
            run(noun, "pause", name, "--wait", "0.1")
    with pytest.raises(StillRunning) as caught:
        Inspector().queues.pause("default", wait=0.1)
    assert caught.value.ids == [queued.id]
    lifecycle.requeue(Broker(), "w", [held])
    lifecycle.cancel([UUID(gated.id)])
    for noun in ("queues", "gates"):
        assert "None of its tasks runs, and none begins." in run(noun, "pause", expected[noun][0], "--wait", "5")
    with pytest.raises(StillRunning, match="may not have noticed it"):
        # A worker reads the names of paused tasks each five seconds.
        Inspector().tasks.pause("tests.tasks.add", wait=0.1)
    with transaction.atomic(), pytest.raises(InvalidOption, match="not valid in a transaction"):
        Inspector().queues.pause("default", wait=1)


def test_a_wait_does_not_return_when_somebody_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was resumed meanwhile may have begun."""
    before = still_running.held_of

    def late(*of: str) -> set[str]:
        Inspector().queues.resume("default")
        return before(*of)

    monkeypatch.setattr(still_running, "held_of", late)
    with pytest.raises(AsyncqError, match="was resumed"):
        Inspector().queues.pause("default", wait=5)


def test_ids_do_not_include_tasks_of_the_meantime() -> None:
    """Work on all that match ends, however many are enqueued while it goes on."""
    first = tasks.add.enqueue(1).id
    pages = Inspector().tasks.ids(TaskFilter())
    found_ids = [str(id) for id in next(pages)]
    tasks.add.enqueue(2)
    assert found_ids == [first]
    assert list(pages) == []


def test_queues_tasks_and_gates_are_paused_and_resumed() -> None:
    """Who did it, and why, stands in the row. A second pause says that it was paused."""
    Gate.objects.create(name="own", limit=5)
    for noun, name, kind in (
        ("queues", "default", "queue"),
        ("tasks", "tests.tasks.add", "task"),
        ("gates", "own", "gate"),
    ):
        assert found(noun, "pause", name, "--note", "incident 7") == {
            kind: name,
            "paused": True,
            "changed": True,
            "held": [],
        }
        row = Pause.objects.get(kind=kind)
        assert (row.name, row.paused_by, row.note) == (name, "manage.py asyncq", "incident 7")
        assert run(noun, "pause", name) == f"{kind} {name}: already paused.\n"
    shown = found("queues", "show", "default")
    assert (shown["is_paused"], shown["paused_by"]) == (True, "manage.py asyncq")
    assert found("gates", "show", "own")["is_paused"]
    assert Inspector().tasks.paused() == ["tests.tasks.add"]
    with pytest.raises(QueueFull):
        tasks.gated.enqueue("own")
    for noun, name in (("queues", "default"), ("tasks", "tests.tasks.add"), ("gates", "own")):
        assert found(noun, "resume", name)["changed"]
    assert not Pause.objects.exists()
    assert not found("queues", "show", "default")["is_paused"]
    tasks.gated.enqueue("own")
    with pytest.raises(CommandError, match="queue name"):
        run("queues", "pause", "a b")


@pytest.mark.parametrize("by", ["a person", "the leader"])
def test_an_emptied_redis_learns_of_pauses_before_any_task_is_pushed(
    own_redis: EmbeddedRedis, own_keys: None, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Otherwise the workers of a paused queue would run what a rebuild pushes."""
    tasks.add.enqueue(1)
    TaskRecord.objects.update(enqueued_at=database_clock.now() - HOUR)
    run("queues", "pause", "default")
    broker = Broker()
    broker.client.flushall()
    seen: list[bool] = []
    push = Broker.enqueue

    def noting(self: Broker, *args: Any, **options: Any) -> Any:
        seen.append(bool(broker.client.exists(broker.keys("default").paused)))
        return push(self, *args, **options)

    monkeypatch.setattr(Broker, "enqueue", noting)
    if by == "a person":
        run("rebuild")
    else:
        Reconciler(broker).tick(0.0)
    assert seen == [True]
    assert Inspection().sizes("default")["pending"] == 1

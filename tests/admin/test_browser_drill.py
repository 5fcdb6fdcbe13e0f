"""An operator's day in the browser, against real workers: twenty steps, from the alarm to the clean table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from django_asyncq.models import BulkAction, BulkState, Gate, Pause, Schedule, TaskRecord, TaskState
from django_asyncq.observe.inspector import Inspector
from django_asyncq.testing import EmbeddedRedis

from .. import tasks
from ..browsing import Person, in_browser
from ..workers import wait_until, workers

pytestmark = [*in_browser, pytest.mark.timeout(300)]

FAILING = "tests.tasks.fail_until"
DEFAULT = "Pause queue default"


def wait_for_state(state: TaskState, *ids: Any) -> None:
    """Wait until tasks are in a state."""
    rows = TaskRecord.objects.filter(pk__in=ids)
    wait_until(lambda: {row.state for row in rows.all()} == {state}, f"{state.label} task of {len(ids)}")


def wait_for_action(kind: str, count: int) -> None:
    """Wait until the leader has worked off an action on many tasks."""
    rows = BulkAction.objects.filter(kind=kind, state=BulkState.FINISHED)
    wait_until(lambda: rows.count() == count, f"the {kind} of many tasks")


def workers_are(count: int, is_so: Callable[[Any], bool] = lambda worker: True) -> Callable[[], bool]:
    return lambda: sum(map(is_so, Inspector().workers.all())) == count


def test_an_operators_day_in_the_browser(own_redis: EmbeddedRedis, person: Person, tmp_path: Path) -> None:
    """Each step shows what it did, and no task is lost."""
    Gate.objects.create(name="own", limit=5)
    Schedule.objects.create(name="nightly", task="tests.tasks.tally", args=["eu"], cron="0 3 1 1 *")
    failing = [tasks.fail_until.enqueue(99, True).id for _ in range(4)]
    # 1: the alarm.
    person.open("")
    assert "No worker is running." in person.text(".asyncq-banner")
    with workers(tmp_path, "--processes", "1", "--concurrency", "4"):
        wait_until(workers_are(1), "the heartbeat")
        wait_for_state(TaskState.FAILED, *failing)
        look_and_stop(person)
        mend(person, failing)
        let_go_on(person)
        drain(person)
        lose_redis(person, own_redis)
        clean_up(person)


def look_and_stop(person: Person) -> None:
    """2 to 6: who works, what fails and why; pause its queue, lower a gate."""
    person.open("")
    assert "1 worker is alive." in person.text("#content")
    person.open("taskrecord/failures/")
    row = person.text("#asyncq-failures tbody tr")
    assert "Fatal" in row and "fail_until" in row and "4" in row
    person.press("#asyncq-failures tbody th a")
    person.press("#result_list tbody tr th a")
    assert "attempt 1" in person.text(".asyncq-pre-error")
    person.open("taskrecord/queues/")
    person.press_button(DEFAULT)
    person.one("#asyncq-reason").send_keys("fail_until fails")
    person.press("form.asyncq-section button")
    assert "Paused by ann" in person.text("#asyncq-queues") and "fail_until fails" in person.text("body")
    person.open("gate/")
    person.type("form-0-limit", "1")
    person.press("[name=_save]")
    assert Gate.objects.get().limit == 1


def mend(person: Person, failing: list[str]) -> None:
    """7 to 11: retry one, then its group; cancel one with a reason, then all that match."""
    person.open(f"taskrecord/{failing[0]}/change/")
    person.press_button("Retry")
    assert person.text(".asyncq-state") == "Queued"
    person.open("taskrecord/failures/")
    person.press_button("Retry group: Fatal in fail_until")
    assert "Retry 3 failed tasks?" in person.text("h1")
    person.press("form.asyncq-section button")
    wait_for_action("retry", 1)
    person.open("taskrecord/?state=queued")
    assert len(person.all("#result_list tbody tr")) == 4
    person.open(f"taskrecord/{failing[0]}/change/")
    person.press_button("Cancel task")
    person.one("#asyncq-reason").send_keys("broken")
    person.press("form.asyncq-section button")
    assert "1 task was cancelled." in person.messages()
    person.open(f"taskrecord/?state=queued&name={FAILING}")
    person.press(".asyncq-bulk a[href*='kind=cancel']")
    person.one("#asyncq-reason").send_keys("broken too")
    person.press("form.asyncq-section button")
    wait_for_action("cancel", 1)
    assert TaskRecord.objects.filter(state=TaskState.FAILED).count() == 4


def let_go_on(person: Person) -> None:
    """12 to 15: resume; enqueue a task that waits an hour, run it now; run a schedule, switch it off and on."""
    person.open("taskrecord/queues/")
    person.press_button("Resume queue default")
    assert not Pause.objects.exists()
    person.open("taskrecord/enqueue/")
    person.choose("name", "tests.tasks.tally")
    person.type("args", '["us"]')
    person.type("delay_seconds", "3600")
    person.press_button("Enqueue")
    task = TaskRecord.objects.get(name="tests.tasks.tally")
    person.press_button("Run now")
    wait_for_state(TaskState.SUCCEEDED, task.pk)
    person.open(f"schedule/{Schedule.objects.get().pk}/change/")
    person.press_button("Run now")
    scheduled = TaskRecord.objects.filter(name="tests.tasks.tally").latest("id")
    wait_for_state(TaskState.SUCCEEDED, scheduled.pk)
    person.press_button("Disable")
    assert not Schedule.objects.get().enabled
    person.press_button("Enable")
    assert Schedule.objects.get().enabled and "Fired" in person.text("#content")


def drain(person: Person) -> None:
    """16 and 17: stop the only worker from taking tasks, so that one waits; let it take tasks again."""
    (worker,) = Inspector().workers.all()
    person.open("taskrecord/workers/")
    person.press_button(f"Stop taking tasks: {worker.id}")
    person.press("form.asyncq-section button")
    wait_until(workers_are(1, lambda worker: worker.is_draining), "the request")
    person.open("taskrecord/workers/")
    assert "quiet" in person.text("#asyncq-workers")
    waiting = tasks.add.enqueue(1)
    person.open("taskrecord/queues/")
    assert person.text("#asyncq-queues tbody td.asyncq-number a") == "1"
    person.open("taskrecord/workers/")
    person.press_button(f"Take tasks again: {worker.id}")
    wait_for_state(TaskState.SUCCEEDED, waiting.id)


def lose_redis(person: Person, server: EmbeddedRedis) -> None:
    """18: Redis loses its memory while a task waits at a paused queue; it runs once the queue is resumed."""
    waiting = tasks.add.using(queue_name="later").enqueue(2)
    person.open("taskrecord/queues/")
    person.press_button("Pause queue later")
    person.press("form.asyncq-section button")
    client = redis.Redis.from_url(server.url)
    client.flushall()
    client.close()
    wait_until(lambda: Inspector().queues.get("later").is_paused, "the pause is there again")
    person.open("taskrecord/queues/")
    person.press_button("Resume queue later")
    wait_for_state(TaskState.SUCCEEDED, waiting.id)


def clean_up(person: Person) -> None:
    """19 and 20: a colleague sees what was done; delete what has failed."""
    person.open("")
    done = person.text("#asyncq-panels")
    assert "ann" in done and "Let take tasks again." in done and "Resumed." in done
    person.open("taskrecord/?state=failed")
    person.press(".asyncq-bulk a[href*='kind=delete']")
    person.one("#asyncq-reason").send_keys("of no use")
    person.press("form.asyncq-section button")
    wait_for_action("delete", 1)
    assert {row.state for row in TaskRecord.objects.all()} == {TaskState.SUCCEEDED}

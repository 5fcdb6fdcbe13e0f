"""Fair shares as a project sees them: declared, pushed, lost and pushed again, run by the test kit and by workers."""

from __future__ import annotations

import json
import re
from collections import Counter
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.management import call_command
from django.utils import timezone

from django_asyncq import Batch, lifecycle, task
from django_asyncq.broker import Broker
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.core import fairness, registry
from django_asyncq.core.compat import InvalidTask
from django_asyncq.core.fairness import UNIT, Share, share_of, share_of_call
from django_asyncq.exceptions import InvalidOption
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.observe.fleet import Fleet
from django_asyncq.observe.inspector import FairKeyInfo, Inspector
from django_asyncq.observe.why import Keeper, why_not_running
from django_asyncq.testing import run_tasks

from .. import fair_tasks, tasks
from ..admin_cases import LIST, client_with
from ..workers import wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)

STORE = {"default": {"BACKEND": "django_asyncq.testing.TestBackend", "QUEUES": []}}


def calls(tenant: str, count: int) -> list[tuple[str, int]]:
    return [(tenant, number) for number in range(count)]


def claimed(count: int) -> list[str]:
    """The tenants of the next tasks, in the order in which a worker gets them."""
    runs = lifecycle.claim(Broker(), "default", "w", count, "default").runs
    return [run.record.args[0] for run in runs]


def field(result: Any) -> bytes | None:
    """What Redis holds of a task's share."""
    found = Broker().client.hget(QueueKeys("default").task(result.id), "fair")
    assert found is None or isinstance(found, bytes)
    return found


def function(tenant: Any, number: int = 0) -> None:
    pass


def takes_name(tenant: Any) -> None:
    pass


def renamed(tenant: str) -> None:
    pass


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test declares is gone after it."""
    monkeypatch.setattr(fairness, "declared", dict(fairness.declared))
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    monkeypatch.setattr(registry, "_former", dict(registry._former))


# --- what may be declared


@pytest.mark.parametrize(
    "options, text",
    [
        ({"fair": ""}, "fair='' is not valid: give a format"),
        ({"fair": 7}, "fair=7 is not valid: give a format"),
        ({"fair": "{tenant}", "fair_weight": 0}, "fair_weight=0 is not valid: give a number from 0.01 to 100"),
        ({"fair": "{tenant}", "fair_weight": 101}, "fair_weight=101 is not valid"),
        ({"fair": "{tenant}", "fair_weight": True}, "fair_weight=True is not valid"),
        ({"fair": "{tenant}", "fair_weight": float("nan")}, "fair_weight=nan is not valid"),
        ({"fair_weight": 2}, "fair_weight=2 is not valid: it needs fair="),
        ({"fair": "{tenant}", "batch": Batch()}, "calls of a batch run together"),
    ],
)
def test_what_can_never_work_is_refused(options: dict[str, Any], text: str) -> None:
    """Where it is declared, with the remedy."""
    with pytest.raises(InvalidOption, match=re.escape(text)):
        task(function, **options)


def test_a_key_belongs_to_the_declaration() -> None:
    """It is computed anew at each push, and the row does not say it."""
    with pytest.raises(TypeError, match=r"write @task\(fair=…\)"):
        tasks.add.using(fair="x")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "options, text",
    [
        ({"fair": "{nobody}"}, "fair='{nobody}' cannot be filled"),
        ({"fair": lambda tenant: ""}, "gave '': the key is a text, not empty"),
        ({"fair": lambda tenant: 1 / 0}, "fair raised ZeroDivisionError"),
        ({"fair": "{tenant}", "fair_weight": lambda tenant: 1000}, "fair_weight gave 1000: give a number"),
    ],
)
@pytest.mark.usefixtures("own_registry")
def test_a_call_whose_share_cannot_be_computed_is_refused(options: dict[str, Any], text: str) -> None:
    """The caller gets the error, and nothing is written."""
    declared: Any = task(function, **options)
    with pytest.raises(InvalidOption, match=re.escape(text)):
        declared.enqueue("a")
    assert not TaskRecord.objects.exists()


def test_a_share_has_a_key_that_can_be_shown() -> None:
    """A long one, or one that would break a terminal, is replaced by its digest."""
    assert share_of_call(fair_tasks.export, ["acme"], {}) == Share("acme", UNIT)
    assert share_of_call(fair_tasks.weighted, [], {"tenant": "heavy", "number": 1}) == Share("tenant heavy", 2731)
    for odd in ("x" * 201, "a\nb", "\ud800", " "):
        share = share_of_call(fair_tasks.export, [odd], {})
        assert re.fullmatch("[0-9a-f]{64}", share.key)


@pytest.mark.usefixtures("own_registry")
def test_a_callable_gets_copies() -> None:
    """What it does to the arguments is not done to the task."""
    declared: Any = task(takes_name, fair=lambda tenant: tenant.pop("name"))
    result = declared.enqueue({"name": "acme"})
    assert TaskRecord.objects.get().args == [{"name": "acme"}]
    assert field(result) == b"8192 8192 acme"


# --- pushed, and pushed again


def test_each_gets_a_share_whoever_came_first() -> None:
    """Also of `enqueue_many`, and of plain tasks in between."""
    fair_tasks.export.enqueue_many(calls("a", 400))
    fair_tasks.plain.enqueue_many(calls("p", 20))
    fair_tasks.export.enqueue_many(calls("b", 3))
    assert Counter(claimed(12)) == {"a": 4, "b": 3, "p": 5}


def test_a_delayed_task_keeps_its_key() -> None:
    """It is in the hash from the beginning, and gets its place when it is due."""
    later = fair_tasks.export.using(run_after=timedelta(hours=1), priority=2).enqueue("a")
    assert field(later) == b"0 8192 a"
    lifecycle.hurry([TaskRecord.objects.get().id])
    assert field(later) == b"8192 8192 a"
    assert claimed(1) == ["a"]


@pytest.mark.usefixtures("own_registry")
def test_a_renamed_task_keeps_its_key() -> None:
    """Rows of the former name, with arguments of an older version, wait under the key of the new one."""

    def upgrade(args: list[Any], kwargs: dict[str, Any], from_version: int) -> tuple[list[Any], dict[str, Any]]:
        return [], {"tenant": args[0]}

    task(renamed, fair="{tenant}", aliases="shop.tasks.former", version=2, upgrade=upgrade)
    row = TaskRecord(name="shop.tasks.former", args=["acme", 9, 9], kwargs={}, version=1)
    assert share_of(row) == Share("acme", UNIT)


def test_a_row_whose_share_cannot_be_computed_is_pushed_as_a_plain_task(caplog: pytest.LogCaptureFixture) -> None:
    """The code has changed since it was enqueued: it runs all the same, and the log says so."""
    row = TaskRecord.objects.create(name="tests.fair_tasks.export", args=[], kwargs={"other": 1})
    assert lifecycle.dispatch([row]) == 1
    assert "queued without its fair key" in caplog.text
    assert Broker().client.lrange(QueueKeys("default").pending, 0, -1) == [str(row.id).encode()]


def test_after_redis_was_emptied_all_is_pushed_and_fair_again(own_redis: Any) -> None:
    """Nothing is lost: the keys come from the rows and the code."""
    reconciler = Reconciler(Broker())
    reconciler.tick(1000.0)
    fair_tasks.export.enqueue_many(calls("a", 300))
    fair_tasks.export.enqueue_many(calls("b", 5))
    fair_tasks.plain.enqueue_many(calls("p", 5))
    assert Counter(claimed(3)) == {"a": 1, "b": 1, "p": 1}
    reconciler.broker.client.flushdb()
    assert reconciler.tick(2000.0).pushed == 310
    assert Counter(claimed(15)) == {"a": 5, "b": 5, "p": 5}
    rest = [tenant for _ in range(2) for tenant in claimed(200)]
    assert rest == ["a"] * 295


def test_lost_and_retried_tasks_keep_the_order_sane() -> None:
    """Those of a lost worker are the next; a retry waits behind its own key."""
    fair_tasks.export.enqueue_many(calls("a", 50))
    fair_tasks.export.enqueue_many(calls("b", 50))
    broker = Broker()
    runs = lifecycle.claim(broker, "default", "w", 6, "default").runs
    lost, failed = runs[:4], runs[4]
    lifecycle.recover(broker, "default", "w", [run.lease for run in lost], reason="lost")
    assert claimed(4) == [run.record.args[0] for run in lost]
    assert broker.retry("default", "w", [(failed.lease, b"m", 1.0)]) == ["retried"]
    TaskRecord.objects.filter(id=failed.record.id).update(run_after=None)
    lifecycle.dispatch([TaskRecord.objects.get(id=failed.record.id)], again=True)
    ids = [run.record.id for run in lifecycle.claim(broker, "default", "w", 80, "default").runs]
    assert failed.record.id not in ids
    assert failed.record.id in [run.record.id for run in lifecycle.claim(broker, "default", "w", 80, "default").runs]


# --- the test kit


def test_the_test_kit_runs_in_the_order_of_a_worker(settings: Any) -> None:
    """The same calls, claimed one by one from Redis and run by the kit."""

    def enqueue() -> None:
        fair_tasks.export.enqueue_many(calls("a", 12))
        fair_tasks.plain.enqueue_many(calls("p", 6))
        fair_tasks.weighted.enqueue_many(calls("heavy", 12))
        fair_tasks.export.using(priority=5).enqueue_many(calls("c", 3))
        fair_tasks.plain.using(priority=5).enqueue_many(calls("q", 3))
        fair_tasks.export.enqueue_many(calls("b", 4))

    enqueue()
    of_worker = [claimed(1)[0] for _ in range(40)]
    assert claimed(1) == []
    TaskRecord.objects.all().delete()
    settings.TASKS = STORE
    enqueue()
    assert [result.return_value[0] for result in run_tasks()] == of_worker
    assert of_worker[:6] in (list("qcqcqc"), list("cqcqcq"))


def test_the_test_kit_runs_plain_tasks_as_ever(settings: Any) -> None:
    """By priority, then by age."""
    settings.TASKS = STORE
    fair_tasks.plain.enqueue("a")
    fair_tasks.plain.using(priority=1).enqueue("b")
    fair_tasks.plain.enqueue("c")
    assert [result.return_value[0] for result in run_tasks()] == ["b", "a", "c"]


# --- seen


def test_a_task_says_its_key_and_its_place() -> None:
    """On its page and on the command line; plain tasks of its priority come in between."""
    fair_tasks.export.enqueue_many(calls("a", 5))
    results = fair_tasks.export.enqueue_many(calls("acme", 3))
    fair_tasks.plain.enqueue_many(calls("p", 9))
    row = TaskRecord.objects.get(id=results[2].id)
    fleet = Fleet(timezone.now(), error="not asked")
    why = why_not_running(row, fleet, with_place=True)
    assert why is not None and (why.keeper, why.subject, why.place) == (Keeper.DUE, "acme", None)
    assert why.text(fleet.now) == "it waits for a free worker, under the fair key acme"
    order = [claimed(1)[0] for _ in range(17)]
    # Nine come before it: three of each of the others, of which the next plain one comes first, and two of its own.
    assert order.index("acme") == 2 and [at for at, each in enumerate(order) if each == "acme"][2] == 8


def test_its_place_is_the_one_at_which_a_worker_gets_it() -> None:
    """For every task that waits, of several priorities."""
    fair_tasks.weighted.enqueue_many(calls("heavy", 9))
    fair_tasks.plain.enqueue_many(calls("p", 7))
    fair_tasks.export.using(priority=-3).enqueue_many(calls("low", 4))
    fair_tasks.plain.using(priority=-3).enqueue_many(calls("lowest", 2))
    fair_tasks.export.using(priority=3).enqueue_many(calls("high", 4))
    fair_tasks.plain.using(priority=3).enqueue_many(calls("higher", 6))
    fair_tasks.export.enqueue_many(calls("b", 5))
    plain = set(TaskRecord.objects.filter(name="tests.fair_tasks.plain").values_list("id", flat=True))
    ids = list(TaskRecord.objects.values_list("id", flat=True))
    # With a priority a plain task has a place too.
    expected = {id: place for id, place in Inspector().tasks.places_in_line(ids).items() if id not in plain}
    runs = lifecycle.claim(Broker(), "default", "w", 200, "default").runs
    places = {run.record.id: number for number, run in enumerate(runs, 1) if run.record.id not in plain}
    assert places == expected
    assert Inspector().tasks.places_in_line(ids) == {}


def test_a_key_that_is_a_secret_is_masked() -> None:
    """As the arguments are."""
    result = fair_tasks.secret.enqueue("hunter2-long")
    text = client_with("view_taskrecord").get(f"{LIST}{result.id}/change/").content.decode()
    assert "hunter2-long" not in text


def test_the_keys_with_most_tasks_are_listed() -> None:
    """On the command line and by the Inspector: at most 10, those with most first."""
    for number in range(12):
        fair_tasks.export.enqueue_many(calls(f"t{number:02}", number + 1))
    fair_tasks.weighted.enqueue_many(calls("heavy", 30))
    fair_tasks.export.using(priority=3).enqueue_many(calls("t11", 5))
    found = Inspector().queues.fair_keys("default")
    assert len(found) == 10
    assert found[:3] == [FairKeyInfo("tenant heavy", 30), FairKeyInfo("t11", 17), FairKeyInfo("t10", 11)]
    out = StringIO()
    call_command("asyncq", "queues", "show", "default", "--json", stdout=out)
    assert json.loads(out.getvalue())["fair_keys"][0] == {"key": "tenant heavy", "waiting": 30}
    out = StringIO()
    call_command("asyncq", "queues", "show", "default", stdout=out)
    assert re.search(r"^key\s+waiting$", out.getvalue(), re.MULTILINE)
    client = client_with("view_taskrecord")
    text = client.get(f"{LIST}queue/?queue=default").content.decode()
    assert "Fair keys with most tasks" in text and "tenant heavy" in text
    assert len(claimed(30)) == 30
    assert sum(each.waiting for each in Inspector().queues.fair_keys("default")) <= 12 * 13 / 2 + 5


# --- real workers


def started() -> list[str]:
    """The tenants of what was begun, in that order."""
    rows = TaskRecord.objects.filter(state=TaskState.SUCCEEDED).order_by("started_at")
    return [args[0] for args in rows.values_list("args", flat=True)]


@pytest.mark.slow
def test_a_flood_of_one_hardly_delays_another(tmp_path: Path) -> None:
    """5,000 of one tenant, then ten of another: the last of these is begun within 25 starts."""
    fair_tasks.export.enqueue_many(calls("a", 5000))
    fair_tasks.export.enqueue_many(calls("b", 10))
    ours = TaskRecord.objects.filter(args__0="b", state=TaskState.SUCCEEDED)
    with workers(tmp_path, "--processes", "1", "--concurrency", "2"):
        wait_until(lambda: ours.count() == 10 and len(started()) > 40, "ten tasks")
    last = max(at for at, tenant in enumerate(started()) if tenant == "b")
    assert last < 25


@pytest.mark.slow
def test_weights_of_three_to_one_are_three_to_one(tmp_path: Path) -> None:
    """Within 10 %, over what two processes begin."""
    fair_tasks.weighted.enqueue_many(calls("light", 400))
    fair_tasks.weighted.enqueue_many(calls("heavy", 400))
    with workers(tmp_path, "--processes", "2", "--concurrency", "2"):
        wait_until(lambda: len(started()) >= 320, "tasks")
    found = Counter(started()[:200])
    assert 135 <= found["heavy"] <= 165


@pytest.mark.slow
def test_a_flushed_redis_loses_nothing_and_stays_fair(own_redis: Any, tmp_path: Path) -> None:
    """While workers run: all tasks are run, and those of the small tenant long before the flood is over."""
    client = redis.Redis.from_url(own_redis.url, protocol=2)
    fair_tasks.export.enqueue_many(calls("a", 2000))
    fair_tasks.export.enqueue_many(calls("b", 40))
    with workers(tmp_path, "--processes", "1", "--concurrency", "1"):
        wait_until(lambda: len(started()) > 20, "first tasks")
        client.flushall()
        wait_until(lambda: len(started()) == 2040, "all tasks")
    client.close()
    last = max(at for at, tenant in enumerate(started()) if tenant == "b")
    assert last < 1500
    assert not TaskRecord.objects.exclude(state=TaskState.SUCCEEDED).exists()


def test_an_ambiguous_task_is_no_fair_one() -> None:
    """A task that is refused leaves nothing behind."""
    before = dict(fairness.declared)
    with pytest.raises((InvalidOption, InvalidTask)):
        task(lambda tenant: None, fair="{tenant}")
    assert fairness.declared == before

"""What a deploy changes of a task: former names, and arguments of an older version."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from django_asyncq import Batch, BatchItem, Retention, lifecycle, task
from django_asyncq.core import registry
from django_asyncq.core.compat import InvalidTask
from django_asyncq.exceptions import InvalidOption, TaskNotRegistered
from django_asyncq.fleet.pruner import declared_retentions
from django_asyncq.models import FailureReason, Schedule, TaskRecord, TaskState
from django_asyncq.scheduling import occurrences
from django_asyncq.testing import run_tasks

from .. import tasks

CALLS: list[tuple[Any, ...]] = []


def renamed(order: int, *, currency: str) -> list[Any]:
    CALLS.append((order, currency))
    return [order, currency]


def gathers(items: list[BatchItem]) -> None:
    CALLS.extend((item.args[0], item.kwargs.get("currency")) for item in items)


def to_named_currency(args: list[Any], kwargs: dict[str, Any], from_version: int) -> tuple[list[Any], dict[str, Any]]:
    """Version 1 had a text of order and currency; 2 the order alone, in euros."""
    if from_version == 1:
        order, currency = args.pop().split()
        return [int(order)], {"currency": currency}
    return args, {**kwargs, "currency": "EUR"}


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test declares is gone after it."""
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    monkeypatch.setattr(registry, "_former", dict(registry._former))
    CALLS.clear()
    yield


def declared(**options: Any) -> Any:
    return task(renamed, **options)


def newest(**more: Any) -> Any:
    return declared(aliases="shop.tasks.send", version=3, upgrade=to_named_currency, **more)


def row(name: str, version: int, *args: Any, **kwargs: Any) -> TaskRecord:
    """A row as code of that version has made it."""
    group = kwargs.pop("group", "")
    return TaskRecord.objects.create(name=name, version=version, args=list(args), kwargs=kwargs, group=group)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"aliases": "a b"}, "give the former name"),
        ({"aliases": [1]}, "give the former name"),
        ({"aliases": ("tests.core.test_versions.renamed",)}, "not the present one"),
        ({"aliases": ("a.b", "a.b")}, "each former name once"),
        ({"version": 0}, "a whole number from 1"),
        ({"version": True}, "a whole number from 1"),
        ({"version": 30_001}, "30,000"),
        ({"upgrade": to_named_currency}, "it needs version=2 or more"),
        ({"version": 2, "upgrade": "shop.upgrade"}, "give a `def`"),
    ],
)
def test_what_can_never_work_is_refused_at_the_declaration(options: dict[str, Any], said: str) -> None:
    """The error names the option and the remedy, and the task does not exist."""
    with pytest.raises(InvalidOption, match=said):
        declared(**options)
    assert registry.find("tests.core.test_versions.renamed") is None


def test_a_name_belongs_to_one_task() -> None:
    """A former name that is a task, one that two tasks claim, and a task whose name is a former one."""
    declared(aliases="shop.tasks.send")
    for function, aliases in ((to_named_currency, "shop.tasks.send"), (to_named_currency, tasks.add.module_path)):
        with pytest.raises(InvalidTask, match="remove it in one of both"):
            task(function, aliases=aliases)
    registry._registry.pop("tests.core.test_versions.renamed")
    registry._former.clear()
    task(to_named_currency, aliases="tests.core.test_versions.renamed")
    with pytest.raises(InvalidTask, match=r"aliases of tests\.core\.test_versions\.to_named_currency has this name"):
        declared()


def test_what_a_code_knows_and_by_what_it_is_told_from_others() -> None:
    """Former names and versions are part of both; a newer version than the code's is not known."""
    before = registry.names_digest()
    newest()
    assert registry.names_digest() != before
    known = registry.known_versions()
    assert (known["shop.tasks.send"], known["tests.core.test_versions.renamed"]) == (3, 3)
    assert "shop.tasks.send" not in registry.registered_names()
    assert registry.runnable("shop.tasks.send", 3) is registry.registered("tests.core.test_versions.renamed")
    with pytest.raises(TaskNotRegistered, match="version 4 of its arguments, and this code has version 3"):
        registry.runnable("shop.tasks.send", 4)


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("own_keys")
class TestRuns:
    """Through the test kit, which takes the steps of a worker."""

    @pytest.fixture(autouse=True)
    def kit(self, settings: Any) -> None:
        settings.TASKS = {"default": {"BACKEND": "django_asyncq.testing.TestBackend", "QUEUES": []}}

    def test_each_version_is_upgraded_once_and_the_row_says_so(self) -> None:
        """Also under the former name; what the body got is in the row of the success."""
        newest()
        rows = [row("shop.tasks.send", 1, "7 USD"), row("tests.core.test_versions.renamed", 2, 8)]
        rows.append(row("shop.tasks.send", 3, 9, currency="GBP"))
        run_tasks()
        assert CALLS == [(7, "USD"), (8, "EUR"), (9, "GBP")]
        for record, call in zip(rows, CALLS, strict=True):
            record.refresh_from_db()
            assert (record.state, record.version) == (TaskState.SUCCEEDED, 3)
            assert (record.args, record.kwargs) == ([call[0]], {"currency": call[1]})

    def test_a_new_call_has_the_version_of_its_code(self) -> None:
        """A plain task's row has 1, which no INSERT names."""
        newest().enqueue(1, currency="EUR")
        assert TaskRecord.objects.get().version == 3
        registry._registry.clear()
        declared().enqueue(1, currency="EUR")
        assert sorted(TaskRecord.objects.values_list("version", flat=True)) == [1, 3]

    @pytest.mark.parametrize(
        ("upgrade", "said"),
        [
            (lambda args, kwargs, version: args.pop().no, "AttributeError"),
            (lambda args, kwargs, version: None, "return .args, kwargs."),
            (lambda args, kwargs, version: (1, 2), "return a list and a dictionary"),
            (lambda args, kwargs, version: ([1, 2, 3], {}), "cannot be passed"),
            (lambda args, kwargs, version: ([1], {"currency": object()}), "cannot be passed"),
        ],
    )
    def test_a_failing_upgrade_fails_the_task_and_keeps_its_arguments(self, upgrade: Any, said: str) -> None:
        """With a reason of its own, and never again by itself; a person can retry it when the code is mended."""
        declared(version=2, upgrade=upgrade, max_attempts=5)
        record = row("tests.core.test_versions.renamed", 1, "7 USD")
        run_tasks()
        record.refresh_from_db()
        assert (record.state, record.reason) == (TaskState.FAILED, FailureReason.UPGRADE_FAILED)
        assert (record.args, record.version, record.retry_at) == (["7 USD"], 1, None)
        assert record.last_exception == "django_asyncq.exceptions.UpgradeFailed"
        assert re.search(said, record.errors[-1]["message"])
        registry._registry.pop("tests.core.test_versions.renamed")
        newest()
        lifecycle.retry([record.id], by_person=True)
        run_tasks()
        record.refresh_from_db()
        assert (record.state, record.args) == (TaskState.SUCCEEDED, [7])

    def test_one_call_of_a_batch_that_cannot_be_upgraded_fails_alone(self) -> None:
        """The function gets the others, as the code takes them."""
        task(gathers, batch=Batch(size=10, within=60), version=3, upgrade=to_named_currency)
        name = "tests.core.test_versions.gathers"
        rows = [row(name, 1, text, group=name) for text in ("7 USD", "8", "9 GBP")]
        run_tasks(until=timedelta(minutes=5))
        assert CALLS == [(7, "USD"), (9, "GBP")]
        for record in rows:
            record.refresh_from_db()
        assert [record.state for record in rows] == [TaskState.SUCCEEDED, TaskState.FAILED, TaskState.SUCCEEDED]
        assert [record.reason for record in rows][1] == FailureReason.UPGRADE_FAILED
        assert [record.args for record in rows] == [[7], ["8"], [9]]
        assert [record.version for record in rows] == [3, 1, 3]

    def test_calls_of_a_renamed_batch_run_together(self) -> None:
        """And its finished rows are kept for as long as the task says."""
        old = Retention(succeeded=timedelta(days=90))
        task(gathers, batch=Batch(size=10, within=60), aliases="shop.tasks.gathers", retention=old)
        for order in (7, 8):
            row("shop.tasks.gathers", 1, order, group="shop.tasks.gathers")
        run_tasks(until=timedelta(minutes=5))
        assert TaskRecord.objects.filter(batch_size=2, state=TaskState.SUCCEEDED).count() == 1
        assert declared_retentions()["shop.tasks.gathers"] == old

    def test_calls_of_two_versions_are_two_batches(self) -> None:
        """Older code takes that of its own version, and leaves the other to newer code."""
        name = "tests.core.test_versions.gathers"
        rows = [row(name, version, "7 USD", group=name) for version in (1, 3, 1, 3)]
        batches = lifecycle.make_batches(rows)
        assert [(batch.version, batch.batch_size) for batch in batches] == [(1, 2), (3, 2)]
        assert {batch.version for batch in TaskRecord.objects.filter(batch_size=2)} == {1, 3}

    def test_a_schedule_of_older_code_fires_with_new_arguments(self) -> None:
        """By the task's former name; the row of the schedule keeps what a person has entered."""
        newest(schedulable=True)
        schedule = Schedule(name="nightly", task="shop.tasks.send", args=["7 USD"], interval_seconds=3600)
        schedule.save()
        occurrences.enqueue(schedule)
        record = TaskRecord.objects.get()
        assert (record.name, record.version) == ("tests.core.test_versions.renamed", 3)
        assert (record.args, record.kwargs) == ([7], {"currency": "USD"})
        schedule.refresh_from_db()
        assert (schedule.args, schedule.version) == (["7 USD"], 1)

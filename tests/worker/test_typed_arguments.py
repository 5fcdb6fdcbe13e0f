"""Functions get typed arguments as themselves, and instances of models as the rows that they are now."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.core.management import call_command
from django.db import connections, models
from django.test.utils import CaptureQueriesContext

from django_asyncq import chain, every, previous, remote, task
from django_asyncq.core import fairness
from django_asyncq.core.typed import KEY, ModelReference
from django_asyncq.core.versions import upgraded
from django_asyncq.exceptions import DuplicateTask, InvalidOption
from django_asyncq.interop.inbox import read_call
from django_asyncq.lifecycle import replacing, running
from django_asyncq.models import FailureReason, Schedule, TaskRecord, TaskState
from django_asyncq.observe.deploying import check_deploy
from django_asyncq.scheduling import scheduler
from django_asyncq.scheduling.occurrences import run_now
from django_asyncq.storage.routing import writing_database
from django_asyncq.testing import assert_enqueued, run_tasks

from .. import inbox_tasks, kit_tasks
from .. import typed_tasks as tasks
from ..workers import run_workers

DAY, MOMENT = date(2026, 11, 30), datetime(2026, 11, 30, 10, 5, tzinfo=UTC)
KEYS = uuid.UUID(int=7)
VALUES = [DAY, MOMENT, timedelta(hours=2), Decimal("12.50"), KEYS, [{"day": DAY}], 7, "text", None]
DESCRIBED = [
    "date 2026-11-30",
    "datetime 2026-11-30 10:05:00+00:00",
    "timedelta 2:00:00",
    "Decimal 12.50",
    f"UUID {KEYS}",
    [{"day": "date 2026-11-30"}],
    "int 7",
    "str text",
    "NoneType None",
]
SINGLE = [tasks.plain, tasks.in_the_loop, tasks.atomic, tasks.isolated, tasks.isolated_coroutine]


@pytest.mark.django_db(transaction=True)
def test_in_a_worker(redis_client: Any) -> None:
    """In a thread, in the event loop, in a transaction, in a process of its own, and in a batch."""
    group = Group.objects.create(name="before")
    found = [each.enqueue(*VALUES, group=group) for each in SINGLE]
    together = tasks.batched.enqueue_many([(DAY, group), (1, [group])])
    context = tasks.with_context.enqueue(group, DAY)
    # A function gets the row as it is now.
    Group.objects.update(name="after")
    run_workers("--processes", "1")
    for result in found:
        result.refresh()
        assert result.return_value == [DESCRIBED, {"group": "Group after"}], result.task.module_path
        assert result.args == VALUES
        assert result.kwargs == {"group": ModelReference("auth.group", group.pk)}
    for result in together:
        result.refresh()
    assert [result.return_value for result in together] == [
        [["date 2026-11-30", "Group after"], {}],
        [["int 1", ["Group after"]], {}],
    ]
    context.refresh()
    assert context.return_value == [
        [["Group after", "date 2026-11-30"], {}],
        f"[<auth.group {group.pk}>, datetime.date(2026, 11, 30)]",
    ]


@pytest.mark.django_db(transaction=True)
def test_a_row_that_is_gone(redis_client: Any) -> None:
    """The error is the model's own: a failure, a retry, or no failure at all, as the task says of such errors."""
    group = Group.objects.create(name="before")
    found = [each.enqueue(group) for each in SINGLE]
    fails = tasks.strict.enqueue(group)
    stays = Group.objects.create(name="stays")
    together = tasks.batched.enqueue_many([(group,), (stays,)])
    group.delete()
    run_workers("--processes", "1")
    for result in [*found, together[0]]:
        record = TaskRecord.objects.get(pk=result.id)
        assert (record.state, record.reason) == (TaskState.FAILED, FailureReason.DISCARDED), record.name
        assert "does not exist any more: the task was enqueued with it" in record.errors[0]["message"]
    record = TaskRecord.objects.get(pk=fails.id)
    assert (record.state, record.reason) == (TaskState.FAILED, FailureReason.EXCEPTION)
    assert record.last_exception == "django.contrib.auth.models.Group.DoesNotExist"
    together[1].refresh()
    assert together[1].return_value == [["Group stays"], {}]


@pytest.fixture
def kit(settings: Any) -> None:
    """`run_tasks` runs what is enqueued."""
    settings.TASKS = {"default": {"BACKEND": "django_asyncq.testing.TestBackend", "QUEUES": []}}


@pytest.mark.django_db
@pytest.mark.usefixtures("kit")
class TestWithTheKit:
    """What does not depend on the process."""

    def test_a_row_without_them_is_as_ever(self) -> None:
        """The option costs a call that does not use it nothing in the row."""
        tasks.plain.enqueue(1, {"a": [None]})
        record = TaskRecord.objects.get()
        assert (record.args, record.has_typed_arguments) == ([1, {"a": [None]}], False)

    def test_what_a_row_says_decides_not_the_present_code(self, settings: Any) -> None:
        """A worker whose code has no typed arguments yet, or no longer, runs the call all the same."""
        settings.ASYNCQ = {**settings.ASYNCQ, "TYPED_ARGUMENTS": True}
        tasks.untyped.enqueue(DAY)
        settings.ASYNCQ = {**settings.ASYNCQ, "TYPED_ARGUMENTS": False}
        # Here such a dict is only a dict.
        tasks.untyped.enqueue({KEY: ["date", "2026-11-30"]})
        values = [result.return_value for result in run_tasks()]
        assert values == [["date 2026-11-30"], [{KEY: ["str date", "str 2026-11-30"]}]]

    def test_many_instances_are_one_query(self) -> None:
        """Of each model, for each function."""
        groups = [Group.objects.create(name=f"g{number}") for number in range(20)]
        tasks.plain.enqueue(groups, first=groups[0])
        with CaptureQueriesContext(connections[writing_database(Group)]) as queries:
            (result,) = run_tasks()
        assert result.return_value[0] == [[f"Group g{number}" for number in range(20)]]
        assert len([each for each in queries if "auth_group" in each["sql"]]) == 1

    def test_a_model_that_is_gone(self) -> None:
        """It fails with a reason, and nothing else is hurt."""
        tasks.plain.enqueue(ModelReference("auth.group", 1))
        TaskRecord.objects.update(args=[{KEY: ["instance", "shop.order", 1]}])
        (result,) = run_tasks()
        assert "an instance of the model 'shop.order', which this project does not have" in result.errors[0].traceback

    @pytest.mark.parametrize("pk", ["no number", None, [1, 2], {"a": 1}], ids=str)
    def test_a_key_that_the_model_cannot_have(self, pk: Any) -> None:
        """A row that was written by hand: as one that is gone."""
        tasks.strict.enqueue(ModelReference("auth.group", 1))
        TaskRecord.objects.update(args=[{KEY: ["instance", "auth.group", pk]}])
        (result,) = run_tasks()
        assert result.errors[0].exception_class_path == "django.contrib.auth.models.Group.DoesNotExist"

    def test_what_a_result_shows_can_be_enqueued_again(self) -> None:
        """So can what a row holds."""
        group = Group.objects.create(name="a")
        result = tasks.plain.enqueue(DAY, group)
        tasks.plain.enqueue(*result.args)
        tasks.plain.enqueue(*TaskRecord.objects.order_by("id")[0].args)
        assert [each.return_value for each in run_tasks()] == 3 * [[["date 2026-11-30", "Group a"], {}]]

    def test_assertions_take_the_values(self) -> None:
        """As they were passed."""
        group = Group.objects.create(name="a")
        tasks.plain.enqueue(DAY, group=group)
        assert_enqueued(tasks.plain, DAY, group=group)
        assert_enqueued(tasks.plain, tasks.plain.arguments(DAY, group=ModelReference("auth.group", group.pk)))
        with pytest.raises(AssertionError):
            assert_enqueued(tasks.plain, date(2026, 12, 1), group=group)

    def test_options_see_the_values(self) -> None:
        """Gates, groups of a batch, keys of uniqueness, rates and fair shares; an instance by its `pk`."""
        group = Group.objects.create(name="a")
        by_row = tasks.plain.using(gate="g-{group.pk}-{day:%Y}", queue_limit=2, unique="{group.pk} {day:%m}")
        by_row.enqueue(day=DAY, group=group)
        by_row.using(unique=lambda day, group: f"{group.pk} {day:%m}").enqueue(day=date(2026, 12, 1), group=group)
        with pytest.raises(DuplicateTask):
            by_row.enqueue(day=date(2025, 11, 1), group=group)
        assert {row.gate for row in TaskRecord.objects.all()} == {f"g-{group.pk}-2026"}
        # A form is seen as the value too; and what is not in the row is seen by nobody.
        by_row.using(unique=False).enqueue(day={KEY: ["date", "2024-01-01"]}, group=group)
        assert TaskRecord.objects.filter(gate=f"g-{group.pk}-2024").exists()
        with pytest.raises(InvalidOption, match=r"gate='g-\{group.name\}' cannot be filled"):
            by_row.using(gate="g-{group.name}").enqueue(day=DAY, group=group)
        shared = SimpleNamespace(
            fair=lambda day: f"{day:%Y}",
            fair_weight=1,
            module_path="a.b",
            upgrade=None,
            version=1,
            typed_arguments=True,
        )
        row = TaskRecord(args=[{KEY: ["date", "2026-11-30"]}], kwargs={}, has_typed_arguments=True)
        assert fairness._share_now(shared, row).key == "2026"

    def test_values_of_tasks_that_went_before(self) -> None:
        """They are JSON; beside them a call has its own typed arguments."""
        chain(kit_tasks.add.step(1, 2), tasks.plain.using(after={"total": previous}).step(day=DAY)).enqueue()
        assert run_tasks()[-1].return_value == [[], {"day": "date 2026-11-30", "total": "int 3"}]

    def test_an_upgrade_gets_and_returns_them(self) -> None:
        """The row has the new ones afterwards, and says whether they are typed."""
        newer = SimpleNamespace(
            module_path="a.b",
            typed_arguments=True,
            version=2,
            upgrade=lambda args, kwargs, version: ([args[0] + timedelta(days=1)], {"group": args[1]}),
            func=lambda day, group: None,
            takes_context=False,
            batch=None,
        )
        form = {KEY: ["instance", "auth.group", 7]}
        record = TaskRecord(args=[{KEY: ["date", "2026-11-30"]}, form], kwargs={}, has_typed_arguments=True)
        running.upgrade(record, newer)
        assert (record.args, record.kwargs) == ([{KEY: ["date", "2026-12-01"]}], {"group": form})
        assert record.has_typed_arguments
        newer.upgrade = lambda args, kwargs, version: ([str(args[0]), 7], {})
        newer.version = 3
        running.upgrade(record, newer)
        assert (record.args, record.has_typed_arguments) == (["2026-12-01", 7], False)
        assert upgraded(newer, [1], {}, 3) == ([1], {})

    def test_a_call_that_replaces_another_brings_its_own(self) -> None:
        """Whether they are typed, too."""
        unique = tasks.plain.using(unique=lambda *args: "one", on_duplicate="replace")
        unique.enqueue(1)
        unique.enqueue(DAY)
        assert TaskRecord.objects.get().has_typed_arguments
        unique.enqueue(2)
        assert not TaskRecord.objects.get().has_typed_arguments
        assert "has_typed_arguments" in replacing.FROM_CALL

    def test_a_schedule_has_them(self) -> None:
        """That of the code, and one that a person writes with the form."""
        row = Schedule(
            name="typed", task=tasks.plain.module_path, args=[{KEY: ["date", "2026-11-30"]}], interval_seconds=60,
            zone="UTC", starts_at=MOMENT, is_declared=True,
        )  # fmt: skip
        row.plan_next(MOMENT)
        row.save()
        run_now(row)
        assert [each.return_value for each in run_tasks()] == [[["date 2026-11-30"], {}]]


@pytest.mark.django_db
def test_a_schedule_of_the_code_declares_them() -> None:
    """Once; the scheduler then finds nothing to change."""
    declared = every(minutes=1, name="typed in code", args=[DAY], kwargs={"due": MOMENT})
    row = Schedule()
    for name, value in scheduler._changes(row, tasks.plain, declared).items():
        setattr(row, name, value)
    assert row.args == [{KEY: ["date", "2026-11-30"]}]
    assert not {"args", "kwargs"} & scheduler._changes(row, tasks.plain, declared).keys()


@pytest.mark.django_db
def test_a_program_that_is_not_python_sees_the_form() -> None:
    """In the message of a task that it runs."""
    charge = remote("typed:charge", queue_name="go", typed_arguments=True)
    payload, shown = charge.wire_payload([], {"amount": Decimal("1.50")})
    assert json.loads(payload) == shown.kwargs == {"amount": {KEY: ["decimal", "1.50"]}}


@pytest.mark.django_db
def test_a_document_in_an_inbox_has_dates_but_no_rows() -> None:
    """Whoever may write to Redis may not choose a row of any model."""
    # On the queue that has an inbox in any case: the process knows the task from now on.
    open_to_all = task(typed_arguments=True, inbox=True, queue_name=inbox_tasks.QUEUE)(_noted)
    document = {"task": open_to_all.module_path, "args": [{KEY: ["date", "2026-11-30"]}]}
    call = read_call("default", "1", json.dumps(document).encode())
    assert call.row.has_typed_arguments
    document["args"] = [[{KEY: ["instance", "auth.group", 1]}]]
    with pytest.raises(InvalidOption, match="an instance of a model is no argument in a document"):
        read_call("default", "2", json.dumps(document).encode())


def _noted(value: Any) -> None:
    pass


@pytest.mark.django_db(transaction=True)
def test_the_command_and_the_check_of_a_deploy_know_them(capsys: pytest.CaptureFixture[str]) -> None:
    """A form in JSON is an argument of the command; live rows with forms are fit for the code."""
    call_command(
        "asyncq", "tasks", "enqueue", tasks.plain.module_path, "--args", json.dumps([{KEY: ["uuid", str(KEYS)]}])
    )
    assert TaskRecord.objects.get().has_typed_arguments
    assert check_deploy().mistakes == []


class Line(models.Model):
    """A model whose key has two columns. The tests have its table because this module is imported before theirs."""

    pk = models.CompositePrimaryKey("order", "number")
    order = models.IntegerField()
    number = models.IntegerField()

    class Meta:
        app_label = "tests"

    def __str__(self) -> str:
        return f"{self.order}-{self.number}"


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("kit")
def test_a_key_of_two_columns() -> None:
    """It is a list in the form."""
    line = Line.objects.create(order=1, number=2)
    tasks.plain.enqueue([line])
    assert TaskRecord.objects.get().args == [[{KEY: ["instance", "tests.line", [1, 2]]}]]
    assert [each.return_value for each in run_tasks()] == [[[["Line 1-2"]], {}]]

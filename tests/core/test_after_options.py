"""What a call may wait for, and what the errors say."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import override_settings

from django_asyncq import chain, group, previous
from django_asyncq.core import after
from django_asyncq.exceptions import DuplicateTask, InvalidArguments, InvalidOption
from django_asyncq.models import TaskEdge, TaskRecord

from .. import tasks as others
from .. import workflow_tasks as tasks

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ("a", "after='a' is not valid: give a list of results, or a dict"),
        (["a"], "after holds 'a', which is no result: give what enqueue"),
        ({"rows": 7}, r"after\['rows'\] holds 7, which is no result"),
        ({"no name": None}, "the name is that of a parameter"),
        ([previous], "after holds `previous` in a list: give it alone"),
        ({"rows": [previous]}, r"after\['rows'\] holds `previous` in a list"),
    ],
)
def test_what_cannot_be_waited_for_is_refused(wanted: Any, text: str) -> None:
    """The error says what to give."""
    with pytest.raises(InvalidOption, match=text):
        tasks.total.using(after=wanted)


def test_names_are_checked_against_the_function() -> None:
    """When the call is made; and a value is given once."""
    parent = tasks.load.enqueue(1)
    with pytest.raises(InvalidArguments, match=r"cannot be called with these arguments: .* it takes \(rows"):
        tasks.total.using(after={"row": parent}).enqueue()
    with pytest.raises(InvalidArguments, match="'rows' is given in the call and in after=…: give it once"):
        tasks.total.using(after={"rows": [parent]}).enqueue(rows=[1])
    with pytest.raises(InvalidArguments, match="multiple values for argument 'rows'"):
        tasks.total.using(after={"rows": [parent]}).enqueue([1])
    assert TaskRecord.objects.count() == 1


def test_previous_needs_a_step_before() -> None:
    """In a plain call, and in the first step of a chain, there is none."""
    wants = tasks.double.using(after={"value": previous})
    for enqueue in (wants.enqueue, chain(wants.step()).enqueue, group([wants.step()]).enqueue):
        with pytest.raises(InvalidOption, match=r"after=\{'value': previous\} stands for the step before"):
            enqueue()
    assert not TaskRecord.objects.exists()


def test_an_answer_to_a_failure_needs_something_that_may_fail() -> None:
    """And is one of two."""
    with pytest.raises(InvalidOption, match="after_failure='run' needs after=…"):
        tasks.note.using(after_failure="run").enqueue()
    with pytest.raises(InvalidOption, match=r"after_failure='no' is not valid: give one of 'fail', 'run'"):
        tasks.note.using(after_failure="no")  # type: ignore[call-overload]


@pytest.mark.parametrize("on_duplicate", ["replace", "follow"])
def test_a_call_that_waits_replaces_and_follows_no_other(on_duplicate: Any) -> None:
    """An existing task has its own order."""
    parent = tasks.load.enqueue(1)
    with pytest.raises(InvalidOption, match=f"on_duplicate='{on_duplicate}' does not go with after=…"):
        tasks.keyed.using(after=[parent], on_duplicate=on_duplicate).enqueue("a")
    with pytest.raises(InvalidOption, match="whose steps are all new"):
        chain(tasks.note.step(), tasks.keyed.using(on_duplicate="return").step("a")).enqueue()


def test_a_workflow_with_a_taken_key_is_refused_whole() -> None:
    """Nothing of it is written."""
    tasks.keyed.enqueue("a")
    with pytest.raises(DuplicateTask):
        chain(tasks.note.step(), tasks.keyed.step("a")).enqueue()
    with pytest.raises(DuplicateTask):
        group([tasks.keyed.step("b"), tasks.keyed.step("b")]).enqueue()
    assert (TaskRecord.objects.count(), TaskEdge.objects.count()) == (1, 0)


def test_too_many_parents_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is written, and with what to do."""
    monkeypatch.setattr(after, "MOST_PARENTS", 2)
    parents = tasks.load.enqueue_many([(number,) for number in range(3)])
    with pytest.raises(InvalidOption, match="has 3 results, more than 2: have tasks between"):
        tasks.note.using(after=parents)
    from django_asyncq import workflows

    monkeypatch.setattr(workflows, "MOST_PARENTS", 2)
    steps = [tasks.note.step() for _ in range(3)]
    with pytest.raises(InvalidOption, match="waits for 3 tasks, more than 2"):
        group(steps, then=tasks.note.step()).enqueue()
    monkeypatch.setattr(workflows, "MOST_PARENTS", 10)
    monkeypatch.setattr(workflows, "MOST_EDGES", 8)
    with pytest.raises(InvalidOption, match="wait for each other 9 times, more than 8: put a step between"):
        chain(group(steps), group(steps)).enqueue()


@pytest.mark.parametrize("parts", [(), ("a",), (tasks.note,)])
def test_a_workflow_takes_steps(parts: Any) -> None:
    """Not calls, results or tasks."""
    for make in (lambda: chain(*parts), lambda: group(parts)):
        with pytest.raises(InvalidOption, match=r"(of nothing: give at least one step|takes task\.step)"):
            make()


def test_values_of_another_backend_or_program_are_refused() -> None:
    """What has no row here, and what cannot get an argument later."""
    with override_settings(
        TASKS={
            "default": {"BACKEND": "django_asyncq.backend.AsyncqBackend"},
            "other": {"BACKEND": "django_asyncq.backend.AsyncqBackend", "OPTIONS": {"prefix": "other"}},
            "now": {"BACKEND": f"{_framework()}.backends.immediate.ImmediateBackend"},
        }
    ):
        there = tasks.note.using(backend="other").enqueue()
        with pytest.raises(InvalidOption, match=r"of the backend 'other', and this one is of 'default'"):
            tasks.note.using(after=[there]).enqueue()
        with pytest.raises(InvalidOption, match="of the backend 'other', and the first step of 'default'"):
            chain(tasks.note.step(), tasks.note.using(backend="other").step()).enqueue()
        here = tasks.note.enqueue()
        with pytest.raises(InvalidOption, match="after=… needs rows, and the backend of 'now' has none"):
            tasks.note.using(after=[here], backend="now").enqueue()
        with pytest.raises(InvalidOption, match=r"chain\(\) and group\(\) need rows"):
            chain(tasks.note.using(backend="now").step()).enqueue()


def _framework() -> str:
    from django_asyncq.core import compat

    return "django.tasks" if compat.HAS_DJANGO_TASKS else "django_tasks"


def test_a_task_of_another_program_waits_without_values() -> None:
    """Its message is written at the call."""
    from django_asyncq import remote

    mail = remote("mail:send", queue_name="go")
    parent = tasks.load.enqueue(1)
    assert TaskRecord.objects.get(id=mail.using(after=[parent]).enqueue(to="a").id).waits_for == 1
    with pytest.raises(InvalidOption, match="whose message is written now"):
        mail.using(after={"to": parent}).enqueue()


async def _enqueued() -> Any:
    return await chain(others.add.step(1), tasks.note.step("x")).aenqueue()


def test_a_workflow_in_asynchronous_code() -> None:
    """In the thread that has the connection."""
    from asgiref.sync import async_to_sync

    result = async_to_sync(_enqueued)()
    assert TaskRecord.objects.get(id=result.id).waits_for == 1

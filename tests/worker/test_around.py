"""ASYNCQ["AROUND"]: context managers of the project around the body of every task."""

from __future__ import annotations

import json
from typing import Any

import pytest

from django_asyncq import checks
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.testing import run_tasks

from .. import around_managers as own
from ..workers import run_workers

pytestmark = pytest.mark.django_db(transaction=True)


def around(*names: str) -> list[str]:
    """Return the setting with these managers."""
    return [f"tests.around_managers.{name}" for name in names]


def run(*names: str) -> None:
    """Run what is due in a worker, with these managers."""
    run_workers(ASYNCQ_TEST_AROUND=json.dumps(around(*names)))


def row(result: Any) -> TaskRecord:
    """Return the row of a result."""
    return TaskRecord.objects.get(id=result.id)


def test_managers_surround_each_body_where_it_runs() -> None:
    """In order, in the thread, the loop or the process of the body, and in its transaction; they see the context."""
    results = {
        each: each.using(headers={"tenant": "7"}).enqueue()
        for each in (own.body, own.abody, own.atomic_body, own.isolated_abody)
    }
    run("outer", "inner")
    for each, result in results.items():
        name, path, knows_itself, outside, second, inside = row(result).return_value
        assert (name, path, knows_itself, second) == ("outer", each.module_path, True, "inner 7")
        assert outside == inside, "the same thread; the loop; the transaction"
        is_coroutine, is_atomic = inside[1:]
        assert (is_coroutine, is_atomic) == (each in (own.abody, own.isolated_abody), each is own.atomic_body)


def test_asynchronous_managers_are_for_coroutines() -> None:
    """A `def` cannot enter one, and its error says so; it is not retried."""
    async_result, result = own.abody.enqueue(), own.body.using(max_attempts=3).enqueue()
    run("outer", "asynchronous")
    assert row(async_result).return_value[4] == "asynchronous"
    (error,) = row(result).errors
    assert error["exception"] == "django_asyncq.exceptions.TaskNotRunnable"
    assert error["message"] == (
        "tests.around_managers.asynchronous of ASYNCQ['AROUND'] returned a _AsyncGeneratorContextManager: "
        "a `def` task enters only a context manager that is not asynchronous"
    )


def test_timeout_and_errors_are_the_tasks_own() -> None:
    """A factory that raises fails the attempt; the timeout reaches a coroutine within its managers."""
    late = own.abody.using(timeout=0.2).enqueue(60)
    run("outer")
    assert row(late).errors[0]["exception"] == "django_asyncq.exceptions.TaskTimeout"
    results = [own.body.enqueue(), own.abody.enqueue()]
    run("outer", "fails")
    for result in results:
        (error,) = row(result).errors
        assert (error["exception"], error["message"]) == ("builtins.LookupError", "no such tenant")
        assert "in fails" in error["traceback"]


@pytest.mark.parametrize("mode", ["store", "immediate"])
def test_the_kit_enters_them_too(mode: str, settings: Any) -> None:
    """In both modes; what a manager swallows has succeeded; what gives no manager names itself."""
    backend = {"BACKEND": "django_asyncq.testing.TestBackend", "QUEUES": [], "OPTIONS": {"mode": mode}}
    settings.TASKS = {"default": backend}
    settings.ASYNCQ = {**settings.ASYNCQ, "AROUND": around("outer", "swallows")}
    results = own.body.enqueue(), own.body.enqueue(fails=True), own.abody.enqueue()
    run_tasks()
    assert [row(result).state for result in results] == [TaskState.SUCCEEDED] * 3
    found, nothing, coroutine = (row(result).return_value for result in results)
    assert (found[0], nothing, coroutine[0]) == ("outer", None, "outer")
    settings.ASYNCQ = {**settings.ASYNCQ, "AROUND": around("returns_none")}
    results = own.body.enqueue(), own.abody.enqueue(), own.body.enqueue()
    run_tasks()
    for result in results:
        assert "returns_none of ASYNCQ['AROUND'] returned a NoneType" in row(result).errors[0]["message"]


@pytest.mark.parametrize("bad", ["tests.around_managers.outer", ["tests.nothing.at_all"], [5], ["tests.tasks"]])
def test_paths_are_checked_at_the_start(bad: Any, settings: Any) -> None:
    """A list of what can be imported and called, before the first task."""
    settings.ASYNCQ = {**settings.ASYNCQ, "AROUND": around("outer")}
    assert not list(checks.check_settings(None))
    settings.ASYNCQ = {**settings.ASYNCQ, "AROUND": bad}
    (found,) = checks.check_settings(None)
    assert found.id == "asyncq.E178" and "context manager" in (found.hint or "")

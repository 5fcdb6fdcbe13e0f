"""What a task accepts, and what its errors say: durations, exception classes, arguments, queues."""

from __future__ import annotations

import functools
import math
import os
import pydoc
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from datetime import date, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core import checks

import django_asyncq
from django_asyncq import InvalidArguments, conf, cron, every, startup_task, task
from django_asyncq.context import TaskContext
from django_asyncq.core import compat, registry, schedules
from django_asyncq.core.time import is_duration, seconds_of
from django_asyncq.exceptions import InvalidOption, RetryRequested
from django_asyncq.models import TaskRecord
from django_asyncq.tasks import Task

from .. import tasks

BACKEND = "django_asyncq.backend.AsyncqBackend"
NOT_DURATIONS = [-1, "3", True, math.nan, math.inf, timedelta(seconds=-1), timedelta(days=40_000), 4e9]


def plain(a: int, b: int = 0, *, c: int = 0) -> int:
    """Return a sum."""
    return a + b + c


def positional(a: int, /, b: int) -> None:
    """A parameter that has no name for callers."""


def gathering(a: int, *rest: int, **others: int) -> None:
    """A function that takes any number of arguments."""


def with_context(context: TaskContext, a: int) -> None:
    """A function that gets a context."""


def giving_a_connection(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function so that callers do not pass its first argument."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function("connection", *args, **kwargs)

    return wrapper


@giving_a_connection
def given_a_connection(connection: str, a: int) -> str:
    """Return both."""
    return f"{connection} {a}"


def taking_two(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function so that callers pass one argument more."""

    @functools.wraps(function)
    def wrapper(first: int, second: int) -> Any:
        return function(first + second)

    return wrapper


@taking_two
def summed(a: int) -> int:
    """Return what it gets."""
    return a


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declare nothing for other tests."""
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))


# --- durations


def test_durations_are_seconds_or_a_timedelta() -> None:
    """A task keeps seconds, whole ones as an int."""
    declared = task(gate="g", timeout=timedelta(minutes=1), expected_seconds=timedelta(milliseconds=1500))(plain)
    assert (declared.timeout, declared.expected_seconds) == (60, 1.5)
    assert type(declared.timeout) is int
    changed = declared.using(timeout=timedelta(seconds=2), expected_seconds=3)
    assert (changed.timeout, changed.expected_seconds) == (2, 3)
    assert hash(declared.using(timeout=60)) == hash(declared)


@pytest.mark.parametrize("value", NOT_DURATIONS)
@pytest.mark.parametrize("option", ["timeout", "expected_seconds", "backoff"])
def test_what_is_no_duration_is_refused_in_one_wording(option: str, value: Any) -> None:
    """The error names the task, the option, the value and what to give."""
    expected = rf"task tests\.core\.test_contract\.plain: {option}=.* is not valid: give seconds or a timedelta"
    with pytest.raises(InvalidOption, match=expected):
        task(**{option: value})(plain)


@pytest.mark.parametrize("value", [value for value in NOT_DURATIONS if value is not True])
def test_time_of_retry_is_a_duration(value: Any) -> None:
    """Of 0 or more, in a context too."""
    context = TaskContext(task_result=None, record=None)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match=r"retry\(in_=.* give seconds or a timedelta"):
        context.retry(in_=value)
    with pytest.raises(RetryRequested) as asked:
        context.retry(in_=timedelta(minutes=2))
    assert asked.value.delay_seconds == 120


def test_zero_is_a_duration_where_waiting_is_optional() -> None:
    """A backoff may be none; a timeout may not."""
    assert task(backoff=timedelta(0))(plain).backoff == timedelta(0)
    assert is_duration(0, or_zero=True)
    assert not is_duration(0)
    assert seconds_of("3") == "3"


def test_intervals_are_durations() -> None:
    """As an argument without a name, beside the named units; whole seconds."""
    assert every(90).interval_seconds == 90
    assert every(timedelta(minutes=5)).interval_seconds == 300
    assert every(timedelta(minutes=5), seconds=3, jitter_seconds=timedelta(minutes=1)).interval_seconds == 303
    assert cron("* * * * *", jitter_seconds=timedelta(minutes=1)).jitter_seconds == 60
    for wrong in (timedelta(seconds=1.5), 1.5, -3, "3", timedelta(seconds=-3)):
        with pytest.raises(InvalidOption, match=r"every\(.*whole seconds"):
            every(wrong)  # type: ignore[arg-type]


def test_time_to_live_of_a_start_up_lock_is_a_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least three seconds."""
    monkeypatch.setattr(schedules, "_startup_tasks", {})
    startup_task("warm", ttl=timedelta(minutes=2))(lambda: None)
    assert schedules.startup_tasks()[0].ttl_seconds == 120
    for wrong in (2, timedelta(seconds=2), "60", True, math.inf):
        with pytest.raises(InvalidOption, match=r"ttl=.*at least 3 s"):
            startup_task("cold", ttl=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", [key for key in conf.FIELD_NAMES if key.endswith("_SECONDS")])
@pytest.mark.django_db
def test_settings_that_are_durations_may_be_timedeltas(key: str, settings: Any) -> None:
    """Each of them is turned into seconds, and checked as seconds."""
    settings.ASYNCQ = {key: timedelta(seconds=1 if key == "PUSH_BATCH_SECONDS" else 66)}
    settled = getattr(conf.current(), conf.FIELD_NAMES[key])
    assert settled == settings.ASYNCQ[key].total_seconds()
    assert type(settled) is int
    assert not [message for message in checks.run_checks() if message.msg.startswith(f"ASYNCQ[{key!r}] = datetime")]
    settings.ASYNCQ = {key: timedelta(seconds=-1)}
    assert any(key in message.msg and "is not valid" in message.msg for message in checks.run_checks())


@pytest.mark.django_db(transaction=True)
def test_options_of_an_alias_may_be_timedeltas(settings: Any) -> None:
    """The row has seconds."""
    settings.TASKS = {"default": {"BACKEND": BACKEND, "OPTIONS": {"timeout": timedelta(minutes=2)}}}
    assert not [message for message in checks.run_checks() if message.id == "asyncq.E022"]
    tasks.add.enqueue(1)
    assert TaskRecord.objects.get().timeout_seconds == 120


# --- declarations


def test_one_exception_class_needs_no_tuple() -> None:
    """The task keeps a tuple."""
    declared = task(retry_on=ValueError, give_up_on=KeyError)(plain)
    assert (declared.retry_on, declared.give_up_on) == ((ValueError,), (KeyError,))
    for wrong in ("ValueError", [ValueError], ValueError(), int, (int,)):
        with pytest.raises(InvalidOption, match=r"retry_on=.*give an exception class, or a tuple of them"):
            task(retry_on=wrong)(plain)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("declare", "remedy"),
    [
        (lambda: task("mails"), "'mails' cannot be a task: .*options are given by name"),
        (lambda: task(object()), "cannot be a task: it is of type object, not a function"),
        (lambda: task(dict), "cannot be a task: it is a class, not a function"),
        (lambda: task()(tasks.add), r"cannot be a task: it is a task already; its \.using"),
        (lambda: task(tasks.add), r"cannot be a task: it is a task already"),
    ],
)
def test_what_is_no_function_is_refused_with_the_remedy(declare: Callable[[], Any], remedy: str) -> None:
    """The framework's error, which names what was given."""
    with pytest.raises(compat.InvalidTask, match=remedy):
        declare()


def test_unknown_options_are_refused_with_a_similar_one() -> None:
    """A time is that of a call, and not of a task."""
    with pytest.raises(
        TypeError, match=r"no option 'max_attempt': did you mean 'max_attempts'\? it has aliases, atomic, "
    ):
        task(max_attempt=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"write task\.using\(run_after=…\)"):
        task(run_after=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"did you mean 'queue_name'\? .*, priority, queue_limit, queue_name, .*takes_"):
        task(queue_nam="mails")  # type: ignore[call-overload]


@pytest.mark.parametrize("value", [60, "tomorrow", date(2030, 1, 1), 1.5])
def test_time_of_a_call_is_named_in_its_error(value: Any) -> None:
    """A number could be meant as a time to wait or as a time: it is neither."""
    with pytest.raises(InvalidOption, match=r"run_after=.*give an aware datetime, or a timedelta"):
        tasks.add.using(run_after=value)


def test_error_for_an_unknown_queue_lists_those_there_are(settings: Any) -> None:
    """The framework's error, which names the setting."""
    settings.TASKS = {"default": {"BACKEND": BACKEND, "QUEUES": ["default", "mails"]}}
    with pytest.raises(compat.InvalidTask, match=r"queue 'mail' is not one of .* are 'default', 'mails'"):
        tasks.add.using(queue_name="mail")


# --- arguments


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "error"),
    [
        (plain, (1, 2), {"c": 3}, None),
        (plain, (), {"a": 3}, None),
        (plain, (), {}, "missing a required argument: 'a'"),
        (plain, (1, 2, 3), {}, "too many positional"),
        (plain, (1,), {"a": 2}, "multiple values"),
        (plain, (1,), {"d": 2}, "unexpected keyword argument 'd'"),
        (positional, (1,), {"b": 2}, None),
        (positional, (), {"a": 1, "b": 2}, "'a'"),
        (gathering, (1, 2, 3), {"d": 4}, None),
        (gathering, (), {"d": 4}, "'a'"),
        (given_a_connection, (1,), {}, None),
        (given_a_connection, (), {"a": 1}, None),
        (summed, (1, 2), {}, None),
        (summed, (1,), {}, "'second'"),
        (with_context, (1,), {}, None),
        (with_context, (), {}, "'a'"),
        (with_context, (1,), {"context": 2}, "multiple values"),
        (with_context, ("context", 1), {}, "too many positional"),
    ],
)
@pytest.mark.django_db(transaction=True)
def test_arguments_are_bound_to_the_function_at_enqueue(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], error: str | None
) -> None:
    """Before anything is written. A decorator decides what its function takes, whatever it wraps."""
    declared = task(takes_context=function is with_context)(function)
    if error is None:
        declared.enqueue(*args, **kwargs)
        declared.enqueue_many([declared.arguments(*args, **kwargs)] * 2)
        assert TaskRecord.objects.count() == 3
        return
    for call in (
        lambda: declared.enqueue(*args, **kwargs),
        lambda: declared.enqueue_many([declared.arguments(*args, **kwargs)]),
        lambda: async_to_sync(declared.aenqueue_many)([declared.arguments(*args, **kwargs)]),
    ):
        with pytest.raises(InvalidArguments, match=f"(?s)cannot be called with these arguments: .*{error}") as refused:
            call()
        assert isinstance(refused.value, TypeError)
        assert refused.value.path == ""
    assert TaskRecord.objects.count() == 0


def test_error_for_arguments_shows_what_the_function_takes() -> None:
    """Without the context."""
    with pytest.raises(InvalidArguments, match=r"it takes \(a: 'int'\) -> 'None'"):
        task(takes_context=True)(with_context).enqueue()  # type: ignore[call-arg]


# --- Django's own backends


@pytest.fixture(params=["immediate.ImmediateBackend", "dummy.DummyBackend"])
def framework_backend(request: pytest.FixtureRequest, settings: Any) -> str:
    """The class of one of Django's own backends, which is the only one in TASKS."""
    package = "django.tasks" if compat.HAS_DJANGO_TASKS else "django_tasks"
    settings.TASKS = {"default": {"BACKEND": f"{package}.backends.{request.param}"}}
    return str(request.param).split(".")[0]


def asks(context: TaskContext, what: str) -> Any:
    """Use the context as a worker's."""
    if what == "retry":
        context.retry(in_=3)
    with context.complete_on_commit("ignored") as ending:
        ending.result = what
    return [context.attempt, context.should_stop, context.record]


async def asks_async(context: TaskContext) -> Any:
    """Do the same in a coroutine."""
    return [context.attempt, context.should_stop]


@pytest.mark.django_db(transaction=True)
def test_django_s_own_backends_drop_no_option(framework_backend: str) -> None:
    """The task has them, `using` takes them, and wrong ones are refused as in production."""
    declared = task(max_attempts=3, gate="{a}", queue_limit=2, timeout=timedelta(seconds=3))(tasks.add.func)
    assert (declared.max_attempts, declared.gate, declared.queue_limit, declared.timeout) == (3, "{a}", 2, 3)
    changed = declared.using(gate="other", max_attempts=4, priority=5)
    assert (changed.gate, changed.max_attempts, changed.priority) == ("other", 4, 5)
    with pytest.raises(InvalidOption, match="max_attempts=0"):
        declared.using(max_attempts=0)
    with pytest.raises(InvalidArguments, match="cannot be called"):
        declared.enqueue(1, 2, 3)
    with pytest.raises(InvalidArguments, match="cannot be called"):
        declared.enqueue_many([(1, 2, 3)])
    results = [declared.enqueue(1), *declared.enqueue_many([(1,), declared.arguments(1)])]
    results += async_to_sync(declared.aenqueue_many)([(1,)])
    assert [result.args for result in results] == [[1]] * 4
    assert [result.task.gate for result in results] == ["{a}"] * 4
    if framework_backend == "immediate":
        assert [result.return_value for result in results] == [1] * 4


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("framework_backend", ["immediate.ImmediateBackend"], indirect=True)
def test_a_body_gets_this_package_s_context_under_the_immediate_backend(framework_backend: str) -> None:
    """Also that of a coroutine. There is no row, and a retry makes the task fail."""
    declared = task(takes_context=True)(asks)
    assert declared.enqueue("go on").return_value == [1, False, None]
    failed = declared.enqueue("retry")
    assert failed.errors[0].exception_class_path == "django_asyncq.exceptions.RetryRequested"
    assert task(takes_context=True)(asks_async).enqueue().return_value == [1, False]


def test_a_backend_that_cannot_defer_says_so(framework_backend: str) -> None:
    """The immediate backend refuses a time, and asks no database for the present one; the dummy backend stores it."""
    declared = task(tasks.add.func)
    if framework_backend == "immediate":
        with pytest.raises(compat.InvalidTask, match="run_after"):
            declared.using(run_after=timedelta(seconds=3))
    else:
        assert declared.using(run_after=timedelta(seconds=3)).enqueue(1).task.run_after is not None


@pytest.mark.django_db
def test_a_project_that_chose_django_s_backends_is_not_warned(framework_backend: str) -> None:
    """It knows that they run no task in a worker."""
    assert [message for message in checks.run_checks() if message.id == "asyncq.W013"] == []


def test_a_project_that_forgot_its_backend_is_warned() -> None:
    """Django's default is the immediate backend."""
    apps = ["django.contrib.contenttypes", "django_asyncq"] + ([] if compat.HAS_DJANGO_TASKS else ["django_tasks"])
    script = (
        "import django; from django.conf import settings; from django.core import checks\n"
        f"settings.configure(INSTALLED_APPS={apps!r}, SECRET_KEY='x'); django.setup()\n"
        "print([message.id for message in checks.run_checks()])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert "asyncq.W013" in done.stdout


# --- what a shell shows


def test_the_package_lists_its_public_names() -> None:
    """Those that are imported at their first use too."""
    assert set(django_asyncq.__all__) <= set(dir(django_asyncq))
    assert "import_module" not in dir(django_asyncq)


def test_help_of_a_task_is_that_of_its_function() -> None:
    """Its text and what a call takes; the class keeps its own text."""
    assert tasks.add.__doc__ == "Return a sum."
    shown = pydoc.plain(pydoc.render_doc(tasks.add))
    assert "<Task tests.tasks.add(a, b=0)>" in shown
    assert "Return a sum." in shown
    with_options = task(takes_context=True, max_attempts=3)(with_context).using(priority=5)
    assert repr(with_options) == "<Task tests.core.test_contract.with_context(a) priority=5 max_attempts=3>"
    assert (Task.__doc__ or "").startswith("A task of Django's framework")
    assert "gate: the name of an admission limit" in pydoc.plain(pydoc.render_doc(Task))
    options = {field.name for field in fields(Task)} - {field.name for field in fields(compat.Task)}
    options -= {"deadline", "headers", "group", "after", "after_failure"}  # of one call
    text = pydoc.plain(pydoc.render_doc(task))
    assert [option for option in options if f"{option}:" not in text and f"{option}," not in text] == []


def test_a_backend_without_rows_refuses_typed_arguments(framework_backend: str) -> None:
    """With the remedy; a call without them is made."""
    declared = task(typed_arguments=True)(tasks.add.func)
    with pytest.raises(InvalidArguments, match=r"typed arguments need rows, .*TestBackend"):
        declared.enqueue(timedelta(1))
    assert declared.enqueue(1).args == [1]

"""A word of another task queue is refused with the line to write, and by no bare error of Python."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from typing import Any

import pytest

import django_asyncq
from django_asyncq import InvalidArguments, cron, every, remote, signals, task
from django_asyncq.context import TaskContext
from django_asyncq.core import compat, foreign_words, registry
from django_asyncq.core.foreign_words import OF_CONTEXT, OF_RESULT, OF_RETRY, OF_TASK, OPTIONS, options_of
from django_asyncq.core.options import TaskOptions
from django_asyncq.results import AsyncqResult
from django_asyncq.tasks import Task
from django_asyncq.testing import make_context

from .. import tasks

OF_DECLARATION = {*TaskOptions.__annotations__, "takes_context", "batch"}
OF_USING = options_of(Task.using)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declare nothing for other tests."""
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))


def anything(**options: Any) -> None:
    """A function that has all parameters."""


@pytest.mark.parametrize("word", OPTIONS)
def test_a_foreign_option_is_answered_before_its_spelling_is_compared(word: str) -> None:
    """In each place where it can be written."""
    expected = re.escape(OPTIONS[word])
    options: Any = {word: 3}
    with pytest.raises(TypeError, match=rf"task\(\) has no option '{word}': {expected}"):
        task(**options)
    with pytest.raises(TypeError, match=rf"using\(\) has no option '{word}': {expected}"):
        tasks.add.using(**options)
    with pytest.raises(TypeError, match=rf"remote\(\) has no option '{word}': {expected}"):
        remote("a:b", queue_name="default", **options)
    with pytest.raises(InvalidArguments, match=rf"'{word}' is no option here: {expected}"):
        tasks.add.enqueue(1, **options)


def test_foreign_options_of_schedules_and_of_django_s_decorator() -> None:
    """They have the same answers."""
    options: Any = {"rate_limit": "10/m"}
    for name, declare in (("cron", lambda: cron("* * * * *", **options)), ("every", lambda: every(3, **options))):
        with pytest.raises(TypeError, match=rf"{name}\(\) has no option 'rate_limit': write @task\(rate="):
            declare()
    if compat.HAS_DJANGO_TASKS:
        from django.tasks import task as of_django

        with pytest.raises(TypeError, match=r"'rate_limit': write @task|unexpected keyword"):
            of_django(**options)(tasks.tidy.func)


@pytest.mark.parametrize("option", sorted(OF_DECLARATION - OF_USING))
def test_an_option_of_the_declaration_is_none_of_a_call(option: str) -> None:
    """`using` says where it belongs."""
    with pytest.raises(TypeError, match=rf"using\(\) has no option '{option}': it belongs to the task: write @task"):
        tasks.add.using(**{option: 1})


@pytest.mark.parametrize("option", sorted(OF_USING))
def test_an_option_among_the_arguments_is_noticed(option: str) -> None:
    """Unless the function takes it."""
    with pytest.raises(InvalidArguments, match=rf"write task\.using\({option}=…\)\.enqueue"):
        tasks.add.enqueue(1, **{option: 1})


@pytest.mark.django_db(transaction=True)
def test_a_function_may_have_parameters_with_such_names() -> None:
    """They are arguments like any other."""
    assert task(anything).enqueue(countdown=1, priority=2).kwargs == {"countdown": 1, "priority": 2}


@pytest.mark.parametrize(
    ("owner", "words", "called"),
    [(tasks.add, OF_TASK, "add."), (make_context(), OF_CONTEXT, "task.")],
    ids=["task", "context"],
)
def test_a_foreign_attribute_is_answered(owner: object, words: Mapping[str, str], called: str) -> None:
    """By an AttributeError, so `hasattr` works as ever. Python adds no guess of its own. The task has its own name."""
    for word, line in words.items():
        answer = re.sub(r"\btask\.", called, line)
        with pytest.raises(AttributeError) as caught:
            getattr(owner, word)
        shown = "".join(traceback.format_exception_only(caught.value)).strip()
        assert shown == f"AttributeError: {type(owner).__name__!r} object has no attribute {word!r}: {answer}"
        assert not hasattr(owner, word)


def test_a_call_of_celery_is_answered_with_the_line_for_this_task() -> None:
    """Options that a call of `apply_async` may have are named with what they are here."""
    owner: Any = tasks.add
    with pytest.raises(AttributeError, match=r"'delay': write add\.enqueue\(…\), in asynchronous code await add\.aenq"):
        owner.delay(7)
    with pytest.raises(AttributeError) as caught:
        owner.apply_async((7,), countdown=60)
    said = str(caught.value)
    assert "write add.enqueue(7) for apply_async((7,))" in said
    assert "add.using(run_after=timedelta(seconds=60)).enqueue(7) for countdown=60" in said
    assert {"run_after", "queue_name", "expires", "priority", "headers"} <= set(re.findall(r"(\w+)=", said)) & OF_USING


def test_an_unfinished_task_has_no_endless_answer() -> None:
    """One that was made without its fields, as `copy` does, has an AttributeError as well."""
    assert not hasattr(object.__new__(Task), "delay")


@pytest.mark.django_db(transaction=True)
def test_a_foreign_attribute_of_a_result_is_answered() -> None:
    """As one of a task is. What is only misspelt has Python's own guess."""
    result = tasks.add.enqueue(1)
    for word, answer in OF_RESULT.items():
        with pytest.raises(AttributeError, match=re.escape(f"no attribute {word!r}: {answer}")):
            getattr(result, word)
    with pytest.raises(AttributeError) as caught:
        result.progres  # type: ignore[attr-defined]  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("progres", result)


@pytest.mark.parametrize("word", OF_RETRY)
def test_foreign_options_of_a_retry(word: str) -> None:
    """The same, in a run."""
    with pytest.raises(TypeError, match=rf"context\.retry\(\) has no option '{word}': {re.escape(OF_RETRY[word])}"):
        make_context().retry(**{word: 3})  # type: ignore[arg-type]


def test_no_foreign_word_is_one_of_ours() -> None:
    """Such a word would be answered by nobody, or take the place of what exists."""
    assert not set(OPTIONS) & (OF_DECLARATION | OF_USING)
    for words, kind in ((OF_TASK, Task), (OF_RESULT, AsyncqResult), (OF_CONTEXT, TaskContext)):
        assert [word for word in words if hasattr(kind, word)] == []
    assert not set(OF_RETRY) & options_of(TaskContext.retry)


def test_the_lines_to_write_are_right() -> None:
    """Each option, method and attribute in them exists."""
    tables = (OPTIONS, OF_TASK, OF_RESULT, OF_CONTEXT, OF_RETRY)
    text = "\n".join(answer for table in tables for answer in set(table.values()))
    for call, known in (("@task", OF_DECLARATION), ("using", OF_USING), (r"context\.retry", {"in_", "counted"})):
        found = re.findall(rf"{call}\(((?:[^()]|\([^()]*\))+)\)", text)
        assert found, call
        for options in found:
            names = re.findall(r"(?:^|, )(\w+)=", re.sub(r"\([^()]*\)", "", options))
            assert set(names) <= known, options
    of_result = {*dir(AsyncqResult), *compat.TaskResult.__dataclass_fields__}
    owners = {"task": dir(Task), "result": of_result, "context": dir(TaskContext)}
    for owner, name in re.findall(r"\b(task|result|context)\.([a-z]\w*)", text):
        assert name in owners[owner], f"{owner}.{name}"
    assert hasattr(signals, "task_failed") and hasattr(django_asyncq, "wait_all")
    assert foreign_words.AROUND in text

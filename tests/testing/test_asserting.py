"""The assertions of the test kit: they count rows, and a failure lists what was enqueued instead."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from django.utils import timezone

from django_asyncq.exceptions import InvalidOption
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.testing import assert_enqueued, assert_enqueues, assert_not_enqueued, enqueued

from .. import tasks

pytestmark = pytest.mark.django_db


def test_enqueued_lists_in_order_and_in_any_state() -> None:
    """All tasks, or those of one function."""
    first, second, third = tasks.add.enqueue(1), tasks.tidy.enqueue(), tasks.add.enqueue(2)
    TaskRecord.objects.filter(pk=third.id).update(state=TaskState.RUNNING)
    assert [result.id for result in enqueued()] == [first.id, second.id, third.id]
    assert [result.args for result in enqueued(tasks.add)] == [[1], [2]]


def test_arguments_match_exactly_or_not_at_all() -> None:
    """As they were given; without arguments every call counts."""
    result = tasks.add.enqueue(1, b=2)
    tasks.add.enqueue(5)
    assert [found.id for found in assert_enqueued(tasks.add, 1, b=2)] == [result.id]
    assert len(assert_enqueued(tasks.add, count=2)) == 2
    for args, kwargs in [((1,), {}), ((1, 2), {}), ((1.0,), {"b": 2}), ((True,), {"b": 2})]:
        assert_not_enqueued(tasks.add, *args, **kwargs)
        with pytest.raises(AssertionError, match=r"was enqueued 0 times, not 1 time"):
            assert_enqueued(tasks.add, *args, **kwargs)
    with pytest.raises(AssertionError, match=r"tests\.tasks\.add\(5\) was enqueued 1 time, not 0 times"):
        assert_not_enqueued(tasks.add, 5)


def test_arguments_are_normalised_as_at_the_enqueue() -> None:
    """A tuple is a list there; keyword arguments have no order."""
    tasks.statement.enqueue("north", 3, to=(1, 2), zeta=1, alpha={"b": 1, "a": (2,)})
    assert_enqueued(tasks.statement, "north", 3, alpha={"a": [2], "b": 1}, zeta=1, to=[1, 2])


def test_whole_arguments_may_be_given() -> None:
    """For a call without arguments, and for parameters that have the names of the assertion's own."""
    tasks.tidy.enqueue()
    tasks.tidy.enqueue(3)
    assert_enqueued(tasks.tidy, tasks.tidy.arguments())
    tasks.statement.enqueue("north", to="x", count=3, queue="x", run_after="never")
    call = tasks.statement.arguments("north", to="x", count=3, queue="x", run_after="never")
    assert_enqueued(tasks.statement, call)
    assert_not_enqueued(tasks.statement, call._replace(kwargs={**call.kwargs, "count": 4}))


def test_queue_and_time_narrow_what_counts() -> None:
    """run_after is a moment, or a delay from the enqueue; a task without one matches neither."""
    later = timezone.now() + timedelta(hours=1)
    tasks.add.using(queue_name="slow", run_after=later).enqueue(1)
    tasks.add.enqueue(1)
    assert_enqueued(tasks.add, 1, queue="slow")
    assert_enqueued(tasks.add, 1, queue="default")
    assert_enqueued(tasks.add, run_after=later)
    assert_enqueued(tasks.add, run_after=timedelta(hours=1))
    assert_not_enqueued(tasks.add, run_after=later + timedelta(seconds=2))
    assert_not_enqueued(tasks.add, run_after=timedelta(hours=2))
    assert_not_enqueued(tasks.add, 1, queue="slow", run_after=timedelta(0))


def test_message_lists_what_was_enqueued() -> None:
    """Each call in a line, the last twenty, long arguments shortened; or that there was nothing."""
    with pytest.raises(AssertionError, match=r"Nothing was enqueued\."):
        assert_enqueued(tasks.add)
    for number in range(25):
        tasks.add.enqueue("x" * 400 if number == 24 else number, b=number)
    with pytest.raises(AssertionError) as raised:
        assert_enqueued(tasks.tidy, 1, queue="slow")
    first, second, *lines = str(raised.value).splitlines()
    assert first == "tests.tasks.tidy(1) with queue='slow' was enqueued 0 times, not 1 time."
    assert (second, lines[0], len(lines)) == ("Enqueued were:", "  … and 5 before these", 21)
    assert lines[1] == "  tests.tasks.add(5, b=5) with queue='default', Queued"
    assert len(lines[-1]) < 400


def test_block_counts_only_its_own() -> None:
    """What was enqueued before it does not count; the list has the results after it."""
    tasks.add.enqueue(1)
    with assert_enqueues(tasks.add, 1) as found:
        result = tasks.add.enqueue(1)
        assert found == []
    assert [each.id for each in found] == [result.id]
    with assert_enqueues(tasks.add, count=0):
        tasks.tidy.enqueue()
    with pytest.raises(AssertionError, match="was enqueued 2 times, not 1 time") as raised, assert_enqueues(tasks.add):
        tasks.add.enqueue(2)
        tasks.add.enqueue(3)
    assert "add(1)" not in str(raised.value)


def test_error_in_the_block_passes() -> None:
    """It is not hidden by a failed assertion."""
    with pytest.raises(ZeroDivisionError), assert_enqueues(tasks.add):
        raise ZeroDivisionError


def test_wrong_use_is_refused() -> None:
    """A function that is no task, and a naive time."""
    with pytest.raises(InvalidOption, match="is no task"):
        assert_enqueued(print)
    with pytest.raises(InvalidOption, match="aware datetime"):
        assert_not_enqueued(tasks.add, run_after=datetime(2030, 1, 1))

"""Read by mypy and pyright, never run: what the types of tasks promise.

A wrong call stands on a line with a `type: ignore`. mypy must find the error named there, and pyright must find one:
both report an ignore that is not needed (`warn_unused_ignores`, `reportUnnecessaryTypeIgnoreComment`).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import assert_type

from django_asyncq import Retention, Step, TaskContext, chain, cron, every, group, previous, task
from django_asyncq.core.schedules import Declaration
from django_asyncq.tasks import Arguments, Task


@task
def plain(number: int, *, text: str = "") -> float:
    """A task with typed arguments."""
    return number + len(text)


@task
async def plain_async(number: int) -> int:
    """Its result is the int, not a coroutine."""
    return number


@task(takes_context=True, gate="{number}", queue_limit=3, max_attempts=2, timeout=1.5)
def with_context(context: TaskContext, number: int) -> str:
    """The context is not among the arguments of a call."""
    return str(number + context.attempt)


@task(takes_context=True)
async def with_context_async(context: TaskContext, number: int) -> bytes:
    """Both."""
    return bytes(number + context.attempt)


@task(queue_name="other", priority=5, backend="default")
def with_options(number: int) -> None:
    """Options of the framework."""


@task(atomic=False)
async def with_options_async(number: int) -> list[str]:
    """The result is the list."""
    return [str(number)]


@task(
    backoff=lambda error, result: timedelta(seconds=result.attempts),
    retry_on=(ValueError, OSError),
    give_up_on=(KeyError,),
    expected_seconds=3,
    schedule=(cron("* * * * *", name="a"), every(seconds=3, name="b")),
    schedulable=True,
    retention=Retention(succeeded=3, failed=None),
    atomic=True,
)
def with_every_option() -> None:
    """The rest of the options."""


def calls() -> None:
    """Check calls."""
    assert_type(plain.arguments(1, text="x"), Arguments)
    assert_type(plain.enqueue(1, text="x").return_value, float)
    assert_type(plain_async.enqueue(1).return_value, int)
    assert_type(with_context.enqueue(1).return_value, str)
    assert_type(with_context_async.enqueue(1).return_value, bytes)
    assert_type(with_options_async.enqueue(1).return_value, list[str])
    assert_type(plain_async.call(1), int)
    plain.enqueue("1")  # type: ignore[arg-type]
    plain.enqueue(1, test="x")  # type: ignore[call-arg]
    plain.enqueue()  # type: ignore[call-arg]
    plain_async.enqueue("1")  # type: ignore[arg-type]
    with_context.enqueue(1)
    with_context.enqueue(TaskContext, 1)  # type: ignore[arg-type,call-arg]
    with_context_async.enqueue("1")  # type: ignore[arg-type]
    changed: Task[[int], str] = with_context.using(priority=3, gate="other", run_after=timedelta(hours=1))
    changed.enqueue("1")  # type: ignore[arg-type]
    with_context.using(timeout=timedelta(minutes=1), expected_seconds=timedelta(minutes=1))
    with_context.using(run_after=60)  # type: ignore[call-overload]
    with_context.using(prio=3)  # type: ignore[call-overload]
    with_context.using(timeout="3")  # type: ignore[call-overload]
    with_context.using(schedulable=True)  # type: ignore[call-overload]


def many() -> None:
    """Check `enqueue_many`."""
    assert_type([result.return_value for result in plain.enqueue_many([(1,)])], list[float])
    for result in plain.enqueue_many([(1,), {"number": 2}], partial=True):
        str(result.return_value)  # type: ignore[union-attr]
        if result is not None:
            assert_type(result.return_value, float)
    flag = bool(plain)
    for either in plain_async.enqueue_many([plain_async.arguments(1)], partial=flag):
        str(either.return_value)  # type: ignore[union-attr]
        if either is not None:
            assert_type(either.return_value, int)
    plain.enqueue_many([3])  # type: ignore[list-item]
    plain.enqueue_many([(1,)], partly=True)  # type: ignore[call-overload]


async def many_async() -> None:
    """Check `aenqueue_many`."""
    assert_type([result.return_value for result in await plain.aenqueue_many([(1,)])], list[float])
    for result in await plain.aenqueue_many([(1,), {"number": 2}], partial=True):
        str(result.return_value)  # type: ignore[union-attr]
    await plain.aenqueue_many([3])  # type: ignore[list-item]
    await plain.aenqueue_many([(1,)], partly=True)  # type: ignore[call-overload]


def stopping(at: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
    """Check the options that stop a task or keep it single, one call a line."""

    def function() -> None: ...

    task(expires=timedelta(hours=1), soft_timeout=3, isolated=True, keep_logs=200)(function)
    task(unique=True, unique_until="start", on_duplicate="follow")(function)
    task(unique="{number}", unique_until=timedelta(minutes=5), on_duplicate="return")(function)
    task(unique=lambda number: str(number), on_duplicate="replace")(function)
    task(expires=at)(function)  # type: ignore[call-overload]
    task(deadline=at)(function)  # type: ignore[call-overload]
    task(soft_timeout="3")(function)  # type: ignore[call-overload]
    task(isolated=None)(function)  # type: ignore[call-overload]
    task(unique=3.5)(function)  # type: ignore[call-overload]
    task(unique=True, unique_until="begin")(function)  # type: ignore[call-overload]
    task(unique=True, on_duplicate="ignore")(function)  # type: ignore[call-overload]
    task(keep_logs="200")(function)  # type: ignore[call-overload]
    with_context.using(expires=at, deadline=timedelta(hours=2), soft_timeout=timedelta(seconds=3), keep_logs=5)
    with_context.using(unique=False, unique_until="end", on_duplicate="reject")
    with_context.using(deadline=60)  # type: ignore[call-overload]
    with_context.using(isolated=True)  # type: ignore[call-overload]
    with_context.using(unique_until="begin")  # type: ignore[call-overload]
    with_context.using(on_duplicate="ignore")  # type: ignore[call-overload]


def options() -> None:
    """Check the options of `@task`, one call a line."""

    def function() -> None: ...

    task(max_attempts=3)(function)
    task(attempts=3)(function)  # type: ignore[call-overload]
    task(run_after=None)(function)  # type: ignore[call-overload]
    task(max_attempts="3")(function)  # type: ignore[call-overload]
    task(priority=None)(function)  # type: ignore[call-overload]
    task(priority="high")(function)  # type: ignore[call-overload]
    task(queue_name=3)(function)  # type: ignore[call-overload]
    task(backend=None)(function)  # type: ignore[call-overload]
    task(backoff="3")(function)  # type: ignore[call-overload]
    task(backoff=lambda: 3)(function)  # type: ignore[arg-type]
    task(retry_on=ValueError, give_up_on=(KeyError, OSError))(function)
    task(retry_on="ValueError")(function)  # type: ignore[call-overload]
    task(timeout=timedelta(minutes=1), backoff=timedelta(seconds=3), expected_seconds=timedelta(seconds=3))(function)
    task(retry_on=(3,))(function)  # type: ignore[arg-type]
    task(give_up_on=[ValueError])(function)  # type: ignore[call-overload]
    task(timeout="3")(function)  # type: ignore[call-overload]
    task(gate=3)(function)  # type: ignore[call-overload]
    task(queue_limit=1.5)(function)  # type: ignore[call-overload]
    task(expected_seconds="3")(function)  # type: ignore[call-overload]
    task(schedule="* * * * *")(function)  # type: ignore[arg-type]
    task(schedule=[every(seconds=3)])(function)
    task(schedulable="yes")(function)  # type: ignore[call-overload]
    task(retention=7)(function)  # type: ignore[call-overload]
    task(atomic=None)(function)  # type: ignore[call-overload]
    task(takes_context="yes")(function)  # type: ignore[call-overload]
    task(takes_context=True)(function)  # type: ignore[arg-type]
    task(function, max_attempts=3)  # type: ignore[call-overload]
    task(3)  # type: ignore[call-overload]
    task(max_attempts=3)(3)  # type: ignore[call-overload]


def schedules(at: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
    """Check `cron` and `every`, one call a line."""
    assert_type(cron("* * * * *", timezone="UTC", starts_at=at, ends_at=None, missed="all", missed_cap=3), Declaration)
    assert_type(every(minutes=1, args=(1,), kwargs={"a": 1}, overlap="skip", jitter_seconds=3), Declaration)
    cron()  # type: ignore[call-arg]
    cron(3)  # type: ignore[arg-type]
    cron("* * * * *", "UTC")  # type: ignore[call-arg]
    cron("* * * * *", timezone=3)  # type: ignore[arg-type]
    cron("* * * * *", zone="UTC")  # type: ignore[call-arg]
    cron("* * * * *", interval_seconds=3)  # type: ignore[call-arg]
    cron("* * * * *", name=None)  # type: ignore[arg-type]
    cron("* * * * *", args=3)  # type: ignore[arg-type]
    cron("* * * * *", kwargs=[3])  # type: ignore[arg-type]
    cron("* * * * *", starts_at="2026-01-01")  # type: ignore[arg-type]
    cron("* * * * *", ends_at=3)  # type: ignore[arg-type]
    cron("* * * * *", overlap="perhaps")  # type: ignore[arg-type]
    cron("* * * * *", missed="some")  # type: ignore[arg-type]
    cron("* * * * *", missed_cap="3")  # type: ignore[arg-type]
    cron("* * * * *", jitter_seconds=0.5)  # type: ignore[arg-type]
    assert_type(every(3), Declaration)
    assert_type(every(timedelta(minutes=5), jitter_seconds=timedelta(seconds=3)), Declaration)
    every("3")  # type: ignore[arg-type]
    every(second=3)  # type: ignore[call-arg]
    every(seconds=0.5)  # type: ignore[arg-type]
    every(minutes="3")  # type: ignore[arg-type]
    every(hours=None)  # type: ignore[arg-type]
    every(days=1.5)  # type: ignore[arg-type]
    every(seconds=3, timezone="UTC")  # type: ignore[call-arg]
    every(seconds=3, overlap=True)  # type: ignore[arg-type]
    every(seconds=3, missed="never")  # type: ignore[arg-type]
    every(seconds=3, args=None)  # type: ignore[arg-type]
    every(seconds=3, interval_seconds=3)  # type: ignore[call-arg]


def waits() -> None:
    """A step is typed as a call is; a task that gets values of others takes fewer arguments than its function."""
    first = plain.enqueue(1)
    assert_type(plain.step(1), Step[float])
    plain.step("1")  # type: ignore[arg-type]
    plain.using(after=[first]).enqueue("1")  # type: ignore[arg-type]
    plain.using(after=7)  # type: ignore[call-overload]
    plain.using(after=[first], after_failure="no")  # type: ignore[call-overload]
    assert_type(plain.using(after={"number": first}).enqueue().wait(), float)
    last = plain_async.using(after={"number": previous}).step()
    assert_type(chain(plain.step(1), last).enqueue().wait(), int)
    assert_type(group([plain.step(1), plain.step(2)]).enqueue()[0].wait(), float)
    assert_type(group([plain.step(1)], then=last).enqueue().wait(), int)
    chain(plain)  # type: ignore[call-overload]

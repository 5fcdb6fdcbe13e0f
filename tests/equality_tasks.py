"""The tasks of the table of behaviours. `tests.tasks` imports them, so that workers know them.

What a task does is a function of BODIES, whose name is its first argument. What it has done is shown by its row, by
the groups that it has made, and by the signals, which are written into the history file.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asgiref.sync import sync_to_async
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Group
from django.db import IntegrityError, transaction
from django.utils import translation

from django_asyncq import Batch, BatchItem, task
from django_asyncq.context import TaskContext
from django_asyncq.core import compat
from django_asyncq.exceptions import InvalidOption, QueueFull, SoftTimeout, TaskTimeout
from django_asyncq.models import Gate, TaskRecord, TaskState
from django_asyncq.signals import task_state_changed

# By their names.
BODIES: dict[str, Callable[..., Any]] = {}


class Glitch(Exception):
    """A failure that may pass."""


class Fatal(Glitch):
    """A failure that will not."""


class Uncommon(BaseException):
    """What `except Exception` does not catch."""


class Unspeakable(Exception):
    """An error whose text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Unreadable(Sequence[Any]):
    """A result that raises while it is looked at."""

    def __getitem__(self, index: Any) -> Any:
        """Refuse."""
        raise OSError("no")

    def __len__(self) -> int:
        """Pretend to hold something."""
        return 1


@task(takes_context=True, max_attempts=1)
def plain(context: TaskContext, body: str, *args: Any) -> Any:
    """Run a body once."""
    return BODIES[body](context, *args)


@task(takes_context=True, max_attempts=1)
async def coroutine(context: TaskContext, body: str, *args: Any) -> Any:
    """Await a body once."""
    return await BODIES[body](context, *args)


@task(takes_context=True, backoff=0)
def by_settings(context: TaskContext, body: str, *args: Any) -> Any:
    """Run a body as often and as long as the settings allow."""
    return BODIES[body](context, *args)


@task(takes_context=True, max_attempts=3, backoff=0, give_up_on=Fatal, isolated=True)
def isolated(context: TaskContext, body: str, *args: Any) -> Any:
    """Run a body up to three times, in a process of its own where there are workers."""
    return BODIES[body](context, *args)


# Longer than a loaded machine takes from the start of a run to its function.
@task(takes_context=True, max_attempts=2, backoff=0, timeout=1, isolated=True)
def isolated_short(context: TaskContext, body: str, *args: Any) -> Any:
    """Run a body for a short time, in a process of its own where there are workers."""
    return BODIES[body](context, *args)


@task(takes_context=True, max_attempts=3, backoff=0, give_up_on=Fatal)
def retried(context: TaskContext, body: str, *args: Any) -> Any:
    """Run a body up to three times."""
    return BODIES[body](context, *args)


@task(takes_context=True, max_attempts=3, backoff=0)
async def coroutine_retried(context: TaskContext, body: str, *args: Any) -> Any:
    """Await a body up to three times."""
    return await BODIES[body](context, *args)


@task(takes_context=True, max_attempts=3, backoff=0, retry_on=Glitch)
def picky(context: TaskContext, body: str, *args: Any) -> Any:
    """Run a body again after one class of errors only."""
    return BODIES[body](context, *args)


@task(takes_context=True, max_attempts=3, backoff=3600)
def patient(context: TaskContext, body: str, *args: Any) -> Any:
    """Run a body again much later."""
    return BODIES[body](context, *args)


@task(batch=Batch(size=2, within=60), max_attempts=2, backoff=0, give_up_on=Fatal)
def batched(items: list[BatchItem]) -> Any:
    """Run a body with two calls at once."""
    return BODIES[items[0].args[0]](items)


def decide(exception: BaseException, result: Any) -> float | None:
    """Return, or raise, what a backoff may."""
    if result.args[-1] == "raise":
        raise Glitch("in the backoff")
    return {"none": None, "text": "soon", "first": 0.0 if result.attempts == 1 else None}[result.args[-1]]  # type: ignore[return-value]


@task(takes_context=True, max_attempts=3, backoff=decide)
def decided(context: TaskContext, body: str, *args: Any) -> Any:
    """Run a body again as a callable says."""
    return BODIES[body](context, *args)


@task(takes_context=True, max_attempts=2, backoff=0, atomic=True)
def atomic(context: TaskContext, body: str, *args: Any) -> Any:
    """Run a body in the transaction that completes it."""
    return BODIES[body](context, *args)


@task(takes_context=True, max_attempts=2, backoff=0, gate="{gate}", queue_limit=2)
def gated(context: TaskContext, body: str, gate: str, number: int = 0) -> Any:
    """Run a body behind an admission limit."""
    return BODIES[body](context, gate, number)


@task
def nested(text: str = "") -> str:
    """Be enqueued by another task."""
    return text


@task(takes_context=True, max_attempts=1, timeout=0.2)
def short(context: TaskContext, body: str, *args: Any) -> Any:
    """Run a body for a fifth of a second at most."""
    return BODIES[body](context, *args)


@task(takes_context=True, max_attempts=2, backoff=0, timeout=0.2)
async def short_coroutine(context: TaskContext, body: str, *args: Any) -> Any:
    """Await a body for a fifth of a second at most."""
    return await BODIES[body](context, *args)


@task(takes_context=True, max_attempts=1, soft_timeout=0.1)
def soft(context: TaskContext, body: str, *args: Any) -> Any:
    """Run a body that is soon asked to finish."""
    return BODIES[body](context, *args)


@task(takes_context=True, max_attempts=2, backoff=0, soft_timeout=0.1)
async def soft_coroutine(context: TaskContext, body: str, *args: Any) -> Any:
    """Await a body that is soon interrupted."""
    return await BODIES[body](context, *args)


def body(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let tasks call a function by its name."""
    BODIES[function.__name__] = function
    return function


def label(context: TaskContext, more: str = "") -> str:
    """Say which body of which task has an effect; `more` makes it the only one with this name."""
    return f"{context.record.short_name} {context.task_result.args[0]} {more}".strip()


def effect(context: TaskContext, more: str = "") -> None:
    """Leave a row that says which body wrote it. A second one with this name is refused by the database."""
    Group.objects.create(name=label(context, more))


RESULTS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "true": lambda: True,
    "integer": lambda: -7,
    "float": lambda: 0.1,
    "text": lambda: "žluťoučký ☃ 𝄞 \u2028 'quoted' \"twice\" \\",
    "list": lambda: [1, [2, None], {"a": "b"}],
    "mapping": lambda: {"key": {"inner": [1.5]}, "": ""},
    "tuple": lambda: (1, ("two",)),
    "bytes": lambda: "é".encode(),
    "large": lambda: "x" * 2_000_000,
    "set": lambda: {1},
    "not a number": lambda: float("nan"),
    "number as key": lambda: {1: 2},
    "NUL": lambda: "a\x00b",
    "surrogate": lambda: "a\ud800b",
    "huge": lambda: 2**70,
    "object": lambda: object(),
    "unreadable": Unreadable,
    "generator": lambda: (number for number in [1]),
    "coroutine": lambda: asyncio.sleep(0, "slept"),
    "coroutine of a set": lambda: asyncio.sleep(0, {1}),
}


@body
def returns(context: TaskContext, kind: str) -> Any:
    """Return one kind of value."""
    return RESULTS[kind]()


ERRORS: dict[str, Callable[[], BaseException]] = {
    "Glitch": lambda: Glitch("žluťoučký ☃"),
    "without text": Glitch,
    "Fatal": lambda: Fatal("at once"),
    "OSError": lambda: OSError(2, "nothing there"),
    "KeyError": lambda: KeyError("key"),
    "NUL in the text": lambda: ValueError("a\x00b"),
    "long text": lambda: ValueError("long " * 10_000),
    "Unspeakable": Unspeakable,
    "SystemExit": lambda: SystemExit(3),
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "Uncommon": lambda: Uncommon("rare"),
    "group": lambda: ExceptionGroup("several", [Glitch("one"), Fatal("two")]),
}


@body
def raises(context: TaskContext, kind: str, succeeds_at: int = 99) -> Any:
    """Leave an effect and raise, until the attempt that succeeds."""
    effect(context, f"{kind} {context.attempt} of {succeeds_at}")
    if context.attempt < succeeds_at:
        raise ERRORS[kind]()
    return context.attempt


@body
def answers_each(items: list[BatchItem]) -> dict[str, Any]:
    """Give one call of a batch a value, and the other a final error."""
    return {items[0].id: [items[0].args, items[0].attempt], items[1].id: Fatal("not this one")}


@body
def answers_later(items: list[BatchItem]) -> dict[str, Any]:
    """Raise at the first attempt."""
    Group.objects.create(name=f"batch {items[0].args} {items[0].attempt}")
    if items[0].attempt == 1:
        raise Glitch("not yet")
    return {item.id: item.attempt for item in items}


@body
def answers_nonsense(items: list[BatchItem]) -> Any:
    """Return no mapping."""
    return len(items)


@body
def raises_as_decided(context: TaskContext, kind: str) -> None:
    """Raise; the backoff looks at the kind."""
    raise Glitch(kind)


@body
def raises_from_another(context: TaskContext) -> None:
    """Raise because of another error."""
    try:
        raise Fatal("the cause")
    except Fatal as error:
        raise Glitch("the consequence") from error


@body
async def awaits(context: TaskContext, kind: str = "", succeeds_at: int = 99) -> Any:
    """Use the database and finish, after a while in the event loop."""
    await asyncio.sleep(0)
    await sync_to_async(effect)(context, f"{kind} {context.attempt}")
    if kind and context.attempt < succeeds_at:
        raise ERRORS[kind]()
    return context.attempt


@body
async def awaits_too_long(context: TaskContext) -> None:
    """Wait for longer than the timeout."""
    await asyncio.sleep(60)


@body
def takes_too_long(context: TaskContext, then: str = "") -> Any:
    """Notice the timeout, and finish all the same."""
    deadline = time.monotonic() + 20
    while not context.should_stop and time.monotonic() < deadline:
        time.sleep(0.01)
    effect(context, f"{then} {'stopped' if context.should_stop else 'never asked to stop'}")
    if then:
        raise ERRORS[then]()
    return "late"


@body
def reports_progress(context: TaskContext, how: str) -> str:
    """Report progress, then succeed, fail in the first attempt, or report what is no progress."""
    effect(context, f"{how}, attempt {context.attempt}")
    if how != "none in the second attempt" or context.attempt == 1:
        context.progress(1, 3, "begun")
        context.progress(2, 3, "going on", attempt=context.attempt)
    if how == "above the total":
        context.progress(4, 3)
    if how != "at once" and context.attempt == 1:
        raise Glitch(how)
    return how


@body
def stops_at_its_timeout(context: TaskContext) -> None:
    """Be stopped by `check`, or by an exception from outside; fail with an error of its own."""
    try:
        while True:
            context.check()
            time.sleep(0.01)
    except TaskTimeout:
        effect(context, f"attempt {context.attempt}")
        raise Glitch("stopped") from None


@body
def checks(context: TaskContext, then: str = "") -> Any:
    """Look whether it must stop, until it must."""
    deadline = time.monotonic() + 20
    try:
        while time.monotonic() < deadline:
            context.check()
            time.sleep(0.01)
    except SoftTimeout:
        if not then:
            raise
    effect(context, then)
    return [then, context.should_stop]


@body
async def is_interrupted(context: TaskContext, then: str = "") -> Any:
    """Wait until it is interrupted."""
    try:
        await asyncio.sleep(20)
    except SoftTimeout:
        if not then:
            raise
    await sync_to_async(effect)(context, then)
    return [then, context.should_stop]


@body
def cancels_itself(context: TaskContext) -> None:
    """Cancel its own task, at once, and look until it learns of it."""
    effect(context, context.task_result.cancel("enough"))
    checks(context)


@body
async def cancels_itself_and_waits(context: TaskContext) -> None:
    """Cancel its own task, at once, and wait until it is interrupted."""
    await context.task_result.acancel()
    await asyncio.sleep(20)


@body
def asks_for_a_retry(context: TaskContext, counted: bool, times: int, in_seconds: float | None = 0) -> Any:
    """Ask for as many retries, which are counted by the effects."""
    asked = Group.objects.filter(name__startswith=label(context, f"{counted} {times} ")).count()
    effect(context, f"{counted} {times} {asked}")
    if asked < times:
        context.retry(in_=in_seconds, counted=counted)
    return context.attempt


@body
def sees_context(context: TaskContext, *args: Any) -> dict[str, Any]:
    """Return what the context says; fail at the first attempt."""
    if context.attempt == 1:
        raise Glitch("first")
    result, record = context.task_result, context.record
    return {
        "attempt": context.attempt,
        "should_stop": context.should_stop,
        "attempts": result.attempts,
        "status": str(result.status),
        "args": list(result.args),
        "kwargs": dict(result.kwargs),
        "backend": result.backend,
        "errors": [each.exception_class_path for each in result.errors],
        "workers": len(result.worker_ids),
        "is_finished": result.is_finished,
        "times": [bool(result.enqueued_at), bool(result.started_at), bool(result.last_attempted_at)],
        "finished_at": result.finished_at,
        "task": [result.task.name, result.task.priority, result.task.queue_name],
        "row": [record.state, record.attempt, record.max_attempts, record.timeout_seconds, record.gate],
    }


@body
def writes(context: TaskContext, result: str = "none") -> Any:
    """Leave an effect."""
    effect(context, result)
    return RESULTS[result]()


@body
def breaks_at_the_commit(context: TaskContext) -> None:
    """Refer to a user that does not exist: most databases notice that at the commit."""
    effect(context, str(context.attempt))
    LogEntry.objects.create(user_id=987_654_321, action_flag=1, object_repr="", change_message="")


@body
def completes(context: TaskContext, *steps: str) -> Any:
    """Use `complete_on_commit`, with errors before, within and after it."""

    def note_step(step: str) -> None:
        effect(context, f"{' '.join(steps)}: {step}")

    if "refused before" in steps:
        try:
            with transaction.atomic(), context.complete_on_commit():
                note_step("never")
        except InvalidOption:
            note_step("refused")
    if "fails first" in steps:
        try:
            with context.complete_on_commit("first"):
                note_step("rolled back")
                raise Fatal("first")
        except Fatal:
            note_step("again")
    with context.complete_on_commit("early") as ending:
        note_step("within")
        nested.enqueue(f"completes {' '.join(steps)}")
        if "sets the result" in steps:
            ending.result = ["set", "within"]
        if "a set" in steps:
            ending.result = {1}
        if "raises within" in steps:
            raise Glitch("within")
        if "nested error" in steps:
            try:
                with transaction.atomic():
                    note_step("within")
            except IntegrityError:
                pass
    note_step("after")
    if "twice" in steps:
        with context.complete_on_commit():
            note_step("twice")
    if "raises after" in steps:
        raise Fatal("after")
    if "database error after" in steps:
        note_step("after")
    return "late"


@body
def fills_its_gate(context: TaskContext, gate: str, number: int) -> None:
    """Lower the limit of its gate, so that it is full when this task is retried."""
    row = Gate.objects.get(name=gate)
    row.limit = 1
    row.save()
    raise Glitch("its slot is lost")


@body
def meets_a_full_gate(context: TaskContext, gate: str) -> Any:
    """Enqueue more than its gate admits, and run into the error."""
    admitted = gated.enqueue_many([("writes_twice", gate, 0), ("writes_twice", gate, 1)], partial=True)
    try:
        gated.enqueue("writes_twice", gate, 2)
    except QueueFull as error:
        return [[each is not None for each in admitted], error.gate, error.limit, error.occupancy, error.waiting]
    return "not full"


@body
def writes_twice(context: TaskContext, gate: str, number: int) -> None:
    """Leave an effect at the first attempt; fail at it."""
    if context.attempt == 1:
        effect(context, f"{gate} {number}")
        raise Glitch("first")


@body
def enqueues(context: TaskContext, how: str) -> Any:
    """Enqueue another task, in autocommit or in a transaction."""
    if how == "plainly":
        nested.enqueue(how)
    elif how == "then fails":
        nested.enqueue(how)
        raise Glitch(how)
    elif how == "many":
        nested.enqueue_many([(f"{how} {number}",) for number in range(3)])
    else:
        try:
            with transaction.atomic():
                nested.enqueue(how)
                with transaction.atomic():
                    nested.enqueue(f"{how}, savepoint")
                if how == "rolled back":
                    raise Fatal(how)
        except Fatal:
            pass
    return Group.objects.filter(name=how).exists()


@body
def has_commit_hooks(context: TaskContext, *kinds: str) -> Any:
    """Register commit hooks, which enqueue or fail."""

    def enqueues_nested() -> None:
        effect(context, f"{' '.join(kinds)}, hook")
        nested.enqueue(f"from a hook of {' '.join(kinds)}")

    def fails() -> None:
        raise Glitch("in the hook")

    def violates_twice() -> None:
        effect(context, f"{' '.join(kinds)}, twice")
        effect(context, f"{' '.join(kinds)}, twice")

    hooks = {"enqueues": enqueues_nested, "fails": fails, "violates": violates_twice}
    with transaction.atomic():
        for kind in kinds:
            hook, _, robust = kind.partition(" ")
            transaction.on_commit(hooks[hook], robust=bool(robust))
    transaction.on_commit(lambda: effect(context, f"{' '.join(kinds)}, hook in autocommit"))
    return "returned"


@body
def leaves_a_transaction_open(context: TaskContext, how: str) -> str:
    """Write something that is never committed."""
    effect(context, f"{how}, committed")
    if how == "autocommit":
        transaction.set_autocommit(False)
    else:
        transaction.atomic().__enter__()
    effect(context, f"{how}, never committed")
    return how


@body
def activates(context: TaskContext) -> str:
    """Leave a language behind; return the one before."""
    before = translation.get_language()
    translation.activate("de" if before != "de" else "fr")
    return str(before)


@body
def violates(context: TaskContext, how: str) -> Any:
    """Have the database refuse a statement."""
    effect(context, how)
    if how == "caught in a block":
        try:
            with transaction.atomic():
                effect(context, how)
        except IntegrityError:
            pass
    elif how == "in a block":
        with transaction.atomic():
            effect(context, f"{how}, rolled back")
            effect(context, how)
    else:
        effect(context, how)
    return Group.objects.filter(name=label(context, how)).count()


@body
def durable(context: TaskContext) -> None:
    """Use a block that must be the outermost one."""
    with transaction.atomic(durable=True):
        effect(context)


@body
def deletes_its_row(context: TaskContext) -> None:
    """Delete the row of its own task."""
    TaskRecord.objects.filter(pk=context.record.pk).delete()


# --- signals


def note(event: str, id: str) -> None:
    """Append one line, whole, to the history."""
    descriptor = os.open(Path(os.environ["ASYNCQ_TEST_EQUALITY"]), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, (json.dumps([event, id]) + "\n").encode())
    os.close(descriptor)


def _note_started(task_result: Any, **kwargs: Any) -> None:
    note("started", task_result.id)


def _note_finished(task_result: Any, **kwargs: Any) -> None:
    note(f"finished {task_result.status}", task_result.id)


def _note_enqueued(task_result: Any, **kwargs: Any) -> None:
    note("enqueued", task_result.id)


def _note_change(records: Any, old: Any, new: Any, **kwargs: Any) -> None:
    # It depends on how long a run takes whether its row ever says RUNNING.
    if new != TaskState.RUNNING:
        for record in records:
            note(f"{old!r} → {new!r}", str(record.id))


RECEIVERS = (
    (compat.task_enqueued, _note_enqueued),
    (compat.task_started, _note_started),
    (compat.task_finished, _note_finished),
    (task_state_changed, _note_change),
)


def connect() -> None:
    """Write the signals into the history file."""
    for signal, receiver in RECEIVERS:
        signal.connect(receiver)


def disconnect() -> None:
    """Write them no more."""
    for signal, receiver in RECEIVERS:
        signal.disconnect(receiver)


if os.environ.get("ASYNCQ_TEST_EQUALITY"):
    connect()

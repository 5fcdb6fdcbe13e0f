"""A table of behaviours: after a real worker and after `run_tasks`, the rows, the effects and the signals are equal.

All behaviours are enqueued, and run once by the processes of `runworkers --burst` and once by `run_tasks`: in a
TestCase, within its transaction, and outside of one. Compared is every column except the id and the fence. Of times
and of ids of other tasks it is compared whether they are set; of `worker_ids` the number; of errors the class, the
message, the attempt and the innermost frame of the traceback.

Not in the table: KeyboardInterrupt in a body, which fails a worker's task, and stops a test.
"""

from __future__ import annotations

import json
import re
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from django.contrib.auth.models import Group
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.test import TestCase
from django.utils import timezone

from django_asyncq import lifecycle
from django_asyncq.core.aliases import uses_redis
from django_asyncq.models import Gate, Occurrence, Schedule, TaskLogLine, TaskRecord
from django_asyncq.scheduling.scheduler import Scheduler
from django_asyncq.testing import run_schedules, run_tasks, running
from django_asyncq.testing.workers import Workers

from .. import checkpoint_tasks, observed_tasks
from .. import equality_tasks as tasks
from .. import tasks as other_tasks

OPTIONS = {"max_attempts": 2, "timeout": 30}
WORKERS = {"default": {"BACKEND": "django_asyncq.backend.AsyncqBackend", "QUEUES": [], "OPTIONS": OPTIONS}}
KIT = {"default": {"BACKEND": "django_asyncq.testing.TestBackend", "QUEUES": [], "OPTIONS": OPTIONS}}

LATER = timedelta(days=1)
# Such a task would be closed before it begins; here only its row is changed, so that its run finds the deadline passed.
PASSED = datetime(2026, 1, 1, tzinfo=UTC)


# A row says RUNNING before the body begins, and not a tenth of a second later: a busy machine may be that slow.
RUNNING_AT_ONCE: dict[str, Any] = {"unique": True, "unique_until": "start"}


def one(task: Any, *args: Any) -> Callable[[], list[Any]]:
    """Enqueue one call."""
    return lambda: [task.enqueue(*args)]


def batch(body: str) -> Callable[[], list[Any]]:
    """Enqueue two calls, which run together."""
    return lambda: list(tasks.batched.using(group=body).enqueue_many([(body,), (body,)]))


def planted(task: Any, *args: Any, **columns: Any) -> Callable[[], list[Any]]:
    """Enqueue one call, and change its row by hand."""

    def enqueue() -> list[Any]:
        result = task.enqueue(*args)
        TaskRecord.objects.filter(pk=result.id).update(**columns)
        return [result]

    return enqueue


def gate_that_fills() -> list[Any]:
    """A task that fails, and cannot be retried while another, which is not due, has the only slot of its gate."""
    Gate.objects.create(name="fills", limit=2)
    waiting = tasks.gated.using(run_after=LATER).enqueue("writes_twice", "fills")
    return [tasks.gated.enqueue("fills_its_gate", "fills"), waiting]


def gate_without_limit() -> list[Any]:
    """A row that says that a gate is open wins over the limit of the task."""
    Gate.objects.create(name="open", limit=0)
    return tasks.gated.enqueue_many([("writes_twice", "open")])


def priorities() -> list[Any]:
    """In an order in which no worker runs them."""
    return [tasks.plain.using(priority=value).enqueue("returns", "none") for value in (0, -5, 100, 0, 5)]


def superseding(on_duplicate: str, *kinds: str, **options: Any) -> Callable[[], list[Any]]:
    """Enqueue calls of one key, one after the other; return the results of the rows that stand for them."""
    key = f"{on_duplicate} {kinds} {sorted(options)}"

    def enqueue() -> list[Any]:
        task = tasks.plain.using(unique=lambda *args: key, on_duplicate=on_duplicate, **options)
        return list({result.id: result for result in [task.enqueue("returns", kind) for kind in kinds]}.values())

    return enqueue


def schedule() -> list[Any]:
    """An occurrence that is due, fired by the scheduler: the leader's, or that of the kit."""
    due = timezone.now().replace(microsecond=0) - timedelta(seconds=2)
    row = Schedule(
        name="equal",
        task=other_tasks.tally.module_path,
        args=["fired"],
        interval_seconds=86_400,
        zone="UTC",
        starts_at=due,
    )
    row.plan_next(due - timedelta(seconds=1))
    row.save()
    if is_kit():
        fired = run_schedules()
        assert len(fired) == 1
    else:
        Scheduler().fire_due()
    return [Occurrence.objects.get().task]


def is_kit() -> bool:
    """Whether the tasks are enqueued for `run_tasks`."""
    return not uses_redis("default")


# What is enqueued; each returns results, or rows. The names are those of the differences that the test reports.
BEHAVIOURS: dict[str, Callable[[], list[Any]]] = {
    **{f"result: {kind}": one(tasks.plain, "returns", kind) for kind in tasks.RESULTS},
    **{f"error: {kind}": one(tasks.plain, "raises", kind) for kind in tasks.ERRORS},
    "error with a cause": one(tasks.plain, "raises_from_another"),
    "unknown body": one(tasks.plain, "unheard of"),
    "arguments that are no list": planted(tasks.retried, "writes", args={"a": 1}),
    "keyword arguments that are no object": planted(tasks.retried, "writes", kwargs=[1]),
    "arguments that the function does not take": planted(tasks.nested, args=[1, 2, 3], max_attempts=1),
    "coroutine that succeeds": one(tasks.coroutine, "awaits"),
    "coroutine that fails": one(tasks.coroutine, "awaits", "Glitch"),
    "coroutine that exits": one(tasks.coroutine, "awaits", "SystemExit"),
    "coroutine that cancels itself": one(tasks.coroutine, "awaits", "CancelledError"),
    "coroutine that is retried": one(tasks.coroutine_retried, "awaits", "Glitch", 2),
    "coroutine that passes its timeout, twice": one(tasks.short_coroutine, "awaits_too_long"),
    "def that passes its timeout": one(tasks.short, "takes_too_long"),
    "def that passes its timeout and raises": one(tasks.short, "takes_too_long", "Glitch"),
    "isolated": one(tasks.isolated, "returns", "list"),
    "isolated, a set": one(tasks.isolated, "returns", "set"),
    "isolated, retried": one(tasks.isolated, "raises", "Glitch", 3),
    "isolated, final": one(tasks.isolated, "raises", "Fatal"),
    "isolated, complete_on_commit": one(tasks.isolated, "completes", "isolated"),
    "isolated that passes its timeout": one(tasks.isolated_short, "stops_at_its_timeout"),
    "soft timeout, caught": one(tasks.soft, "checks", "finished early"),
    "soft timeout, not caught": one(tasks.soft, "checks"),
    "soft timeout of a coroutine, caught": one(tasks.soft_coroutine, "is_interrupted", "finished early"),
    "soft timeout of a coroutine, not caught": one(tasks.soft_coroutine, "is_interrupted"),
    "deadline that has passed": planted(tasks.plain, "checks", deadline=PASSED),
    "deadline that has passed, of a coroutine": planted(tasks.coroutine, "awaits_too_long", deadline=PASSED),
    "cancelled from within": one(tasks.retried.using(**RUNNING_AT_ONCE), "cancels_itself"),
    "coroutine that is cancelled from within": one(
        tasks.coroutine_retried.using(**RUNNING_AT_ONCE), "cancels_itself_and_waits"
    ),
    "retry until it succeeds": one(tasks.retried, "raises", "Glitch", 3),
    "retry until the attempts are used up": one(tasks.retried, "raises", "Glitch"),
    "retry after SystemExit": one(tasks.retried, "raises", "SystemExit", 2),
    "give_up_on": one(tasks.retried, "raises", "Fatal", 2),
    "retry_on, of another class": one(tasks.picky, "raises", "OSError", 2),
    "retry_on, of a subclass": one(tasks.picky, "raises", "Fatal", 2),
    "retry that is not due": one(tasks.patient, "raises", "Glitch", 2),
    "backoff that says None": one(tasks.decided, "raises_as_decided", "none"),
    "backoff that raises": one(tasks.decided, "raises_as_decided", "raise"),
    "backoff that says no number": one(tasks.decided, "raises_as_decided", "text"),
    "backoff that looks at the attempts": one(tasks.decided, "raises_as_decided", "first"),
    "progress": one(tasks.plain, "reports_progress", "at once"),
    "progress of a task that fails": one(tasks.plain, "reports_progress", "failing"),
    "progress of a retry": one(tasks.retried, "reports_progress", "retried"),
    "progress of a retry that reports none": one(tasks.retried, "reports_progress", "none in the second attempt"),
    "progress above its total": one(tasks.plain, "reports_progress", "above the total"),
    "progress of an atomic task": one(tasks.atomic, "reports_progress", "at once"),
    "checkpoint of a task that fails": one(checkpoint_tasks.keeps, "fails"),
    "checkpoint of a retry": one(checkpoint_tasks.keeps, "fails once"),
    "checkpoint that is rolled back": one(checkpoint_tasks.keeps, "rolled back"),
    "checkpoint in a completion": one(checkpoint_tasks.keeps, "completed"),
    "log lines": one(observed_tasks.logs, ["one", "two"]),
    "log lines of a retry": lambda: [observed_tasks.logs.enqueue(["one"], fails=1)],
    "log lines of a coroutine": one(observed_tasks.alogs, ["one"]),
    "log lines of one call": lambda: [observed_tasks.logs.using(keep_logs=1).enqueue(["one", "two"])],
    "context.retry, counted": one(tasks.retried, "asks_for_a_retry", True, 2),
    "context.retry, not counted": one(tasks.retried, "asks_for_a_retry", False, 4),
    "context.retry after the last attempt": one(tasks.plain, "asks_for_a_retry", True, 1),
    "context.retry, not counted, after the last attempt": one(tasks.plain, "asks_for_a_retry", False, 1),
    "context.retry, much later": one(tasks.retried, "asks_for_a_retry", True, 3, 3600),
    "context.retry with the backoff of the task": one(tasks.by_settings, "asks_for_a_retry", True, 5, None),
    "atomic that succeeds": one(tasks.atomic, "writes", "integer"),
    "atomic that fails and is retried": one(tasks.atomic, "raises", "Glitch", 2),
    "atomic that fails": one(tasks.atomic, "raises", "Uncommon"),
    "atomic whose result JSON cannot hold": one(tasks.atomic, "writes", "set"),
    "atomic whose result is too large": one(tasks.atomic, "writes", "large"),
    "atomic that returns a coroutine": one(tasks.atomic, "writes", "coroutine"),
    "atomic whose commit fails": one(tasks.atomic, "breaks_at_the_commit"),
    "atomic that uses complete_on_commit": one(tasks.atomic, "completes"),
    "atomic that breaks its transaction": one(tasks.atomic, "violates", "plainly"),
    "atomic that catches a database error": one(tasks.atomic, "violates", "caught in a block"),
    "atomic with commit hooks": one(tasks.atomic, "has_commit_hooks", "enqueues", "fails"),
    "complete_on_commit": one(tasks.retried, "completes"),
    "complete_on_commit with a result": one(tasks.retried, "completes", "sets the result"),
    "complete_on_commit with a set": one(tasks.plain, "completes", "a set"),
    "complete_on_commit, error after it": one(tasks.retried, "completes", "raises after"),
    "complete_on_commit, database error after it": one(tasks.retried, "completes", "database error after"),
    "complete_on_commit, error within it": one(tasks.plain, "completes", "raises within"),
    "complete_on_commit, again after an error": one(tasks.plain, "completes", "fails first"),
    "complete_on_commit twice": one(tasks.plain, "completes", "twice"),
    "complete_on_commit in a transaction": one(tasks.plain, "completes", "refused before"),
    "complete_on_commit, savepoint within it": one(tasks.plain, "completes", "nested error"),
    "gate, admitted and retried": lambda: tasks.gated.enqueue_many([("writes_twice", "first")]),
    "gate, full at the retry": gate_that_fills,
    "gate, open": gate_without_limit,
    "gate, full at an enqueue in a body": one(tasks.plain, "meets_a_full_gate", "met"),
    "gate, partial": lambda: tasks.gated.enqueue_many(
        [("writes_twice", f"part{n % 2}", n) for n in range(6)], partial=True
    ),
    "nested, in autocommit": one(tasks.plain, "enqueues", "plainly"),
    "nested, in a body that fails": one(tasks.plain, "enqueues", "then fails"),
    "nested, many": one(tasks.plain, "enqueues", "many"),
    "nested, in a transaction": one(tasks.plain, "enqueues", "committed"),
    "nested, rolled back": one(tasks.plain, "enqueues", "rolled back"),
    "commit hook that enqueues": one(tasks.plain, "has_commit_hooks", "enqueues"),
    "commit hook that fails": one(tasks.plain, "has_commit_hooks", "fails", "enqueues"),
    "robust commit hook that fails": one(tasks.plain, "has_commit_hooks", "fails robustly", "enqueues"),
    "commit hook with a database error": one(tasks.plain, "has_commit_hooks", "violates", "enqueues"),
    "robust commit hook with a database error": one(tasks.plain, "has_commit_hooks", "violates robustly", "enqueues"),
    "priorities": priorities,
    "replace, the newest of three": superseding("replace", "none", "text", "list"),
    "replace, unique until it starts": superseding("replace", "none", "text", unique_until="start"),
    "replace, a call for later": superseding("replace", "none", "text", run_after=LATER),
    "follow, the first and the last of three": superseding("follow", "none", "text", "list"),
    "follow, unique until it starts": superseding("follow", "none", "text", unique_until="start"),
    "follow, throttled": superseding("follow", "none", "text", "list", unique_until=LATER),
    "run_after in the past": lambda: [tasks.plain.using(run_after=timezone.now() - LATER).enqueue("writes")],
    "run_after in the future": lambda: [tasks.plain.using(run_after=LATER).enqueue("writes")],
    "queue of another name": lambda: [tasks.plain.using(queue_name="mail").enqueue("returns", "text")],
    "occurrence of a schedule": schedule,
    "context": one(tasks.retried, "sees_context", 1, "two", None),
    "context of a coroutine": one(tasks.coroutine_retried, "awaits", "OSError"),
    "options of the settings": one(tasks.by_settings, "sees_context"),
    "enqueue_many": lambda: tasks.nested.enqueue_many([(f"many {n}",) for n in range(5)]),
    "odd texts": one(tasks.nested, "žluťoučký ☃ 𝄞 \u2028 \x7f"),
    "transaction left open": one(tasks.plain, "leaves_a_transaction_open", "atomic"),
    "autocommit left off": one(tasks.plain, "leaves_a_transaction_open", "autocommit"),
    "language left activated": lambda: tasks.plain.enqueue_many([("activates",), ("activates",)]),
    "database error": one(tasks.plain, "violates", "plainly, again"),
    "database error in a block": one(tasks.plain, "violates", "in a block"),
    "database error that is caught": one(tasks.retried, "violates", "caught in a block"),
    "durable block": one(tasks.plain, "durable"),
    "batch: a value and a final error": batch("answers_each"),
    "batch that is retried": batch("answers_later"),
    "batch that returns no mapping": batch("answers_nonsense"),
    "row that the body deletes": one(tasks.plain, "deletes_its_row"),
}


# What cannot be equal in a TestCase, whose transaction is around everything.
# Django refuses to switch autocommit off within a transaction.
REFUSED = ("autocommit left off",)
# A database error undoes what was written before it: the transaction is broken, and the kit returns to the savepoint.
UNDONE = (
    "plain has_commit_hooks violates enqueues, twice",
    "plain has_commit_hooks violates robustly enqueues, twice",
    "plain violates plainly, again",
    "retried completes database error after: after",
)
# There is no commit that could fail. The kit has the constraints checked, and the databases say that in other words.
WORDED_DIFFERENTLY = "atomic whose commit fails"


class Snapshot(NamedTuple):
    """What a run has left. rows: columns by name, by a text that says which row it is. order: of the priorities."""

    rows: dict[str, dict[str, Any]]
    signals: dict[str, Counter[str]]
    effects: list[str]
    order: list[str]
    occurrences: list[Any]


def run_table(run: Callable[[], object], names: list[str], history: Path) -> Snapshot:
    """Enqueue the behaviours, have them run, and look."""
    history.write_text("")
    tasks.connect()
    try:
        keys = {}
        for name in names:
            for number, result in enumerate(BEHAVIOURS[name]()):
                if result is not None:
                    keys[str(result.id)] = f"{name} [{number}]"
        run()
    finally:
        tasks.disconnect()
    return snapshot(keys, [json.loads(line) for line in history.read_text().splitlines()])


def snapshot(keys: dict[str, str], events: list[list[str]]) -> Snapshot:
    """Read what is there. keys: names of the table's tasks by their ids; the others are known by their arguments."""
    records = list(TaskRecord.objects.order_by("id"))
    alike: Counter[str] = Counter()
    for record in records:
        if str(record.id) not in keys:
            text = f"{record.name}{record.args}{record.group}"
            keys[str(record.id)] = f"{text} [{alike[text]}]"
            alike[text] += 1
    signals: dict[str, Counter[str]] = {}
    for event, id in events:
        signals.setdefault(keys.get(id, "rolled back"), Counter())[event] += 1
    ran = [record for record in records if keys[str(record.id)].startswith("priorities")]
    return Snapshot(
        {keys[str(record.id)]: columns(record) for record in records},
        signals,
        sorted(Group.objects.values_list("name", flat=True)),
        [keys[str(record.id)] for record in sorted(ran, key=lambda record: record.started_at or timezone.now())],
        list(Occurrence.objects.values_list("outcome", "note", "by_person")),
    )


def columns(record: TaskRecord) -> dict[str, Any]:
    """The columns that are compared."""
    found = {field.name: getattr(record, field.name) for field in TaskRecord._meta.concrete_fields}
    del found["id"], found["fence"]
    for name, value in found.items():
        if isinstance(value, datetime | UUID):
            found[name] = "a time" if isinstance(value, datetime) else "a task"
    found["worker_ids"] = len(record.worker_ids)
    found["errors"] = [
        (error["exception"], error["message"], error["attempt"], innermost(error["traceback"]), sorted(error))
        for error in record.errors
    ]
    lines = TaskLogLine.objects.filter(task_id=record.id).order_by("fence", "number")
    found["log lines"] = list(lines.values_list("attempt", "number", "level", "logger", "text"))
    return found


def innermost(traceback: str) -> str:
    """The frame that raised; not where a `def` was that was late, which a worker sees at some moment."""
    frames = re.findall(r'^  File "(.*)", line (\d+), in (.*)$', traceback, re.MULTILINE)
    return " ".join(frames[-1]) if frames and frames[-1][2] != "takes_too_long" else ""


def differences(expected: Snapshot, found: Snapshot) -> list[str]:
    """Say what is not equal, each with the name of the behaviour."""
    said = []
    for key in sorted({*expected.rows, *found.rows}):
        ours, theirs = found.rows.get(key), expected.rows.get(key)
        if ours is None or theirs is None:
            said.append(f"{key}: {'no row' if ours is None else 'a row, which a worker does not have'}")
            continue
        said += [f"{key}: {name} {ours[name]!r}, not {theirs[name]!r}" for name in theirs if ours[name] != theirs[name]]
    for key in sorted({*expected.signals, *found.signals}):
        if (ours_sent := found.signals.get(key)) != (sent := expected.signals.get(key)):
            said.append(f"{key}: signals {ours_sent}, not {sent}")
    for part in ("effects", "order", "occurrences"):
        if (ours := getattr(found, part)) != (theirs := getattr(expected, part)):
            said.append(f"{part}: {[x for x in ours if x not in theirs]}, not {[x for x in theirs if x not in ours]}")
    return said


REFUSED_BY_THE_DATABASE = {
    "atomic that breaks its transaction",
    "atomic whose commit fails",
    "commit hook with a database error",
    "database error",
    "database error in a block",
}


def as_in_test_case(found: Snapshot) -> Snapshot:
    """Forget what cannot be equal in a TestCase."""
    rows = {key: row for key, row in found.rows.items() if not key.startswith(REFUSED)}
    for key in rows:
        if key.startswith(WORDED_DIFFERENTLY):
            rows[key] = {**rows[key], "errors": [(kind, attempt) for kind, _, attempt, *_ in rows[key]["errors"]]}
    return found._replace(
        rows=rows,
        signals={key: sent for key, sent in found.signals.items() if not key.startswith(REFUSED)},
        effects=[each for each in found.effects if each not in UNDONE and "autocommit, committed" not in each],
    )


def clear() -> None:
    """Leave nothing for the next run of the table."""
    for model in (Occurrence, Schedule, TaskRecord, Gate, Group):
        model.objects.all().delete()


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file into which receivers write, in every process."""
    path = tmp_path / "history.jsonl"
    monkeypatch.setenv("ASYNCQ_TEST_EQUALITY", str(path))
    yield path
    clear()


def in_test_case(function: Callable[[], Any]) -> Any:
    """Call a function in a TestCase, within its transaction, with commits as in `captureOnCommitCallbacks`."""
    returned = []

    class Case(TestCase):
        def runTest(self) -> None:
            returned.append(function())

    unittest.TestSuite([Case()]).debug()
    return returned[0]


def burst(folder: Path) -> None:
    """Run all tasks, one at a time. Each isolated one starts a process, which takes a loaded machine seconds."""
    Workers(folder).burst("--concurrency", "1", timeout_seconds=100)


@pytest.mark.django_db(transaction=True)
def test_table(settings: Any, history: Path) -> None:
    """What a worker leaves and what the kit leaves are equal, row by row and field by field."""
    names = list(BEHAVIOURS)
    assert len(names) >= 40
    ContentType.objects.clear_cache()
    settings.TASKS = WORKERS
    expected = run_table(partial(burst, history.parent), names, history)
    clear()
    settings.TASKS = KIT
    outside = run_table(run_tasks, names, history)
    clear()
    within = in_test_case(lambda: run_table_in_transaction([each for each in names if each not in REFUSED], history))
    said = [f"in autocommit: {line}" for line in differences(expected, outside)]
    said += [f"in a TestCase: {line}" for line in differences(as_in_test_case(expected), as_in_test_case(within))]
    assert not said, "\n".join(["", *said])
    # Two tasks never leave the same effect, so no result depends on their order.
    refused = {key for key, row in expected.rows.items() if "IntegrityError" in row["last_exception"]}
    assert {key.partition(" [")[0] for key in refused} == REFUSED_BY_THE_DATABASE


def run_table_in_transaction(names: list[str], history: Path) -> Snapshot:
    """Do the same in a TestCase, whose commit hooks run as after a commit."""
    assert connection.in_atomic_block

    def commit_and_run() -> None:
        capture.__exit__(None, None, None)
        run_tasks()

    capture = TestCase.captureOnCommitCallbacks(execute=True)
    capture.__enter__()
    return run_table(commit_and_run, names, history)


def changed_error(record: TaskRecord, name: str, value: Any) -> list[Any]:
    """The errors of a row, with another value in each."""
    return [{**error, name: value} for error in record.errors]


# What the kit may record wrongly: a column, and the wrong value for it.
MUTATIONS: dict[str, tuple[str, Callable[[TaskRecord], Any]]] = {
    "attempt": ("attempt", lambda record: record.attempt + 1),
    "number of workers": ("worker_ids", lambda record: [*record.worker_ids, "another"]),
    "return value": ("return_value", lambda record: "another"),
    "crash": ("crash_count", lambda record: 1),
    "suspect": ("suspicion", lambda record: 2),
    "last exception": ("last_exception", lambda record: "builtins.ValueError"),
    "no start": ("started_at", lambda record: None),
    "class of an error": ("errors", lambda record: changed_error(record, "exception", "builtins.ValueError")),
    "message of an error": ("errors", lambda record: changed_error(record, "message", "another")),
    "attempt of an error": ("errors", lambda record: changed_error(record, "attempt", 7)),
    "traceback of an error": ("errors", lambda record: changed_error(record, "traceback", "")),
    "one error too few": ("errors", lambda record: record.errors[1:]),
}


@pytest.mark.django_db(transaction=True)
def test_table_notices_a_change(settings: Any, history: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One column that the kit writes wrongly, or a signal that it does not send, is a difference from the worker."""
    names = ["result: list", "retry until the attempts are used up"]
    settings.TASKS = WORKERS
    expected = run_table(partial(burst, history.parent), names, history)
    settings.TASKS = KIT
    clear()
    assert differences(expected, run_table(run_tasks, names, history)) == []
    record_run = running._record
    for mutation, (column, wrong) in MUTATIONS.items():

        def record_wrongly(run: lifecycle.Run, column: str = column, wrong: Callable[..., Any] = wrong) -> Any:
            setattr(run.record, column, wrong(run.record))
            return record_run(run)

        clear()
        with monkeypatch.context() as patch:
            patch.setattr(running, "_record", record_wrongly)
            said = differences(expected, run_table(run_tasks, names, history))
        assert any(f": {column} " in line for line in said), mutation
    clear()
    with monkeypatch.context() as patch:
        patch.setattr(running.outcomes, "announce", lambda outcomes: None)
        said = differences(expected, run_table(run_tasks, names, history))
    assert all(": signals " in line for line in said) and len(said) == len(names)

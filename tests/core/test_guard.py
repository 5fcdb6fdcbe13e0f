"""The project's code that is called about a task: whatever it raises concerns that task alone."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID

import pytest
from django.utils import timezone

from django_asyncq import lifecycle
from django_asyncq.broker import Broker
from django_asyncq.core import guard
from django_asyncq.core.payload import (
    MESSAGE_CHARACTERS,
    TRACEBACK_CHARACTERS,
    class_path,
    storable_result,
    storable_text,
    text_of,
    traceback_of,
)
from django_asyncq.exceptions import InvalidResult, TaskTimeout
from django_asyncq.gates import slots
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.signals import task_state_changing

from .. import tasks
from ..runs import claimed
from ..tasks import Liar, Mute, Uncommon
from ..workers import run_workers

HOSTILE = [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, Uncommon, Mute, Liar]
EACH_HOSTILE = pytest.mark.parametrize("kind", HOSTILE, ids=lambda kind: kind.__name__)


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand for a worker process."""
    monkeypatch.setattr(guard, "_is_own_process", True)


def raiser(error: Any) -> Any:
    """Return a function that raises, whatever it is called with."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


@EACH_HOSTILE
def test_attempt_returns_what_the_code_raised(own_process: None, kind: type[BaseException]) -> None:
    """The value is None then; otherwise the error is."""
    assert type(guard.attempt(raiser(kind())).error) is kind
    assert guard.attempt(lambda: 7) == (7, None)


@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if kind is not Liar])
def test_a_block_is_outlived_and_logged(
    own_process: None, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """The log line has the text, its `extra`, and the error."""
    logger = guard.get_logger("django_asyncq.tests")
    with guard.outlives(logger, "task %s: failed", 7, extra={"task_id": "7"}):
        raise kind
    (line,) = caplog.records
    assert line.getMessage() == "task 7: failed"
    assert line.exc_info
    assert line.exc_info[0] is kind
    assert line.task_id == "7"  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, Uncommon])
def test_a_request_to_stop_passes_in_a_process_of_the_project(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A web server's: Ctrl-C, gunicorn's exit, gevent's timeout. An Exception is caught there too."""
    monkeypatch.setattr(guard, "_is_own_process", False)
    with pytest.raises(kind):
        guard.attempt(raiser(kind()))
    with pytest.raises(kind), guard.outlives(guard.get_logger("django_asyncq.tests"), "text"):
        raise kind
    assert isinstance(guard.attempt(raiser(ValueError())).error, ValueError)


def test_a_thread_of_the_package_catches_everything_in_any_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the push batcher's, in a web server."""
    monkeypatch.setattr(guard, "_is_own_process", False)
    found: list[Any] = []

    def work() -> None:
        guard.own_thread()
        found.append(guard.attempt(raiser(SystemExit())).error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert type(found[0]) is SystemExit


# --- logging


@pytest.fixture
def spoilt() -> Iterator[list[BaseException]]:
    """A logger whose filter raises the last of a list."""
    errors: list[BaseException] = []

    def spoil(record: logging.LogRecord) -> bool:
        if errors:
            raise errors[-1]
        return True

    logger = logging.getLogger("django_asyncq.tests")
    logger.addFilter(spoil)
    yield errors
    logger.removeFilter(spoil)


@EACH_HOSTILE
def test_a_filter_that_raises_costs_no_line(
    own_process: None, kind: type[BaseException], spoilt: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    """It is written to standard error, with the reason."""
    spoilt.append(kind())
    guard.get_logger("django_asyncq.tests").error("task %s: failed", 7)
    written = capsys.readouterr().err
    assert "ERROR task 7: failed" in written
    assert f"logging raised {kind.__name__}" in written


def test_a_line_names_the_module_that_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    """Not the guard; and it keeps its `extra` and its error."""
    logger = guard.get_logger("django_asyncq.tests")
    logger.warning("one", extra={"task_id": "1"})
    try:
        raise ValueError
    except ValueError:
        logger.exception("two")
    first, second = caplog.records
    assert (first.module, first.funcName, first.task_id) == (  # type: ignore[attr-defined]
        "test_guard",
        "test_a_line_names_the_module_that_logs_it",
        "1",
    )
    assert (second.module, second.exc_info and second.exc_info[0]) == ("test_guard", ValueError)


# --- in a worker


@pytest.mark.django_db(transaction=True)
def test_each_task_fails_alone_whatever_the_code_about_it_raises() -> None:
    """One process runs all of them: backoffs, exceptions and return values of every kind, and a healthy task."""
    spiteful = {
        task: [(kind, task.enqueue(kind)) for kind in tasks.SPITE]
        for task in (
            tasks.backs_off_spitefully,
            tasks.raises_spite,
            tasks.raises_spite_async,
            tasks.returns_spite_of,
        )
    }
    healthy = tasks.add.enqueue(1)
    log = run_workers("--concurrency", "2").stderr
    assert "exited unexpectedly" not in log
    rows = {str(row.id): row for row in TaskRecord.objects.all()}
    assert rows[healthy.id].state == TaskState.SUCCEEDED
    for task, results in spiteful.items():
        for kind, result in results:
            row, name = rows[result.id], tasks.SPITE[kind].__name__
            assert (row.state, row.retry_at, row.attempt, len(row.errors)) == (TaskState.FAILED, None, 1, 1)
            if task is tasks.returns_spite_of:
                assert row.errors[0]["exception"] == "builtins.TypeError"
                assert row.errors[0]["message"].endswith(f"return value could not be read: {name}")
            else:
                assert row.errors[0]["exception"].endswith(name)
    assert {row.worker_ids[0] for row in rows.values()} == {rows[healthy.id].worker_ids[0]}
    assert log.count("its backoff failed; it is not retried") == len(tasks.SPITE)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt", "Uncommon", "Mute"])
@pytest.mark.parametrize("of", ["receivers", "log filter"])
def test_receivers_and_log_filters_end_no_thread(of: str, kind: str) -> None:
    """The tasks succeed and fail as they would without them; what cannot be logged is on standard error."""
    good, bad = tasks.add.enqueue(1), tasks.raises_spite.enqueue("Uncommon")
    gated = tasks.gated.enqueue("spite")
    log = run_workers("--concurrency", "2", ASYNCQ_TEST_SPITE=kind, ASYNCQ_TEST_SPITE_OF=of).stderr
    states = dict(TaskRecord.objects.values_list("id", "state"))
    assert [states[UUID(result.id)] for result in (good, bad, gated)] == [
        TaskState.SUCCEEDED,
        TaskState.FAILED,
        TaskState.SUCCEEDED,
    ]
    assert "has died" not in log
    assert "exited unexpectedly" not in log
    assert f"{bad.id} tests.tasks.raises_spite: attempt 1 of 1 failed; it is not retried: tests.tasks.Uncommon" in log
    if of == "receivers":
        assert f"task {good.id}: a receiver of task_started failed" in log or kind == "Mute"
    else:
        assert f"logging raised {kind}" in log
    assert slots("spite") == []


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kind", HOSTILE, ids=lambda kind: kind.__name__)
def test_a_veto_of_a_retry_concerns_one_task(
    own_process: None,
    kind: type[BaseException],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A receiver of `task_state_changing` that raises for one of three due retries: the others are queued."""
    runs = [taken_by_worker() for _ in range(3)]
    spoilt = runs[1].record.id

    def veto(records: list[TaskRecord], **kwargs: Any) -> None:
        if any(record.id == spoilt for record in records):
            raise kind

    task_state_changing.connect(veto)
    try:
        ids = [str(run.record.id) for run in runs]
        assert lifecycle.retry_due(Broker(), "default", ids) == 2
    finally:
        task_state_changing.disconnect(veto)
    states = dict(TaskRecord.objects.values_list("id", "state"))
    assert [states[run.record.id] for run in runs] == [TaskState.QUEUED, TaskState.FAILED, TaskState.QUEUED]
    row = TaskRecord.objects.get(id=spoilt)
    assert row.retry_at is not None
    assert row.retry_at > timezone.now()
    # An error that no formatter can format is on standard error.
    assert f"task {spoilt}: its retry was refused" in caplog.text + capsys.readouterr().err


def taken_by_worker() -> lifecycle.Run:
    """Return a run that has failed and is to be retried now."""
    run = claimed()
    lifecycle.fail(run, ValueError(), "", timezone.now(), retry_at=timezone.now())
    lifecycle.record_runs([run])
    lifecycle.acknowledge(Broker(), "w", [run])
    return run


# --- the text of an exception


class Meta(type):
    """The class of a class without a name or a module."""

    @property
    def __module__(cls) -> Any:
        raise SystemExit(5)


class Nameless(Exception, metaclass=Meta):
    """An error whose class has no path."""


class Odd(str):
    """A text that cannot be copied."""

    def encode(self, *args: Any) -> bytes:
        """Refuse."""
        raise SystemExit(6)

    def __getitem__(self, key: Any) -> str:
        raise SystemExit(7)

    def __len__(self) -> int:
        raise SystemExit(8)


class Speaks(Exception):
    """An error with a text of a class of its own."""

    def __str__(self) -> str:
        return Odd("odd" * 5_000)


def noted(error: BaseException, *notes: Any) -> BaseException:
    """Return an error with notes."""
    error.__notes__ = list(notes)
    return error


# Made within the test: pytest asks a parameter for its class.
ODD_ERRORS: dict[str, Any] = {
    "mute": Mute,
    "liar": Liar,
    "nameless": Nameless,
    "speaks": Speaks,
    "huge": lambda: ValueError("x" * 50_000_000),
    "not storable": lambda: ValueError("\x00\ud800"),
    "noted": lambda: noted(ValueError(), Mute(), "x" * 1_000_000),
    "group": lambda: ExceptionGroup("many", [Mute() for _ in range(50)]),
}


@pytest.mark.parametrize("name", ODD_ERRORS)
def test_every_text_of_an_exception_can_be_stored(own_process: None, name: str) -> None:
    """Bounded, and in what a database and a protobuf can hold."""
    error = ODD_ERRORS[name]()
    try:
        raise error
    except BaseException:  # noqa: BLE001 - so that it has a traceback
        texts = [(text_of(error), MESSAGE_CHARACTERS), (traceback_of(error), TRACEBACK_CHARACTERS)]
    texts.append((class_path(error), 600))
    for text, characters in texts:
        assert type(text) is str
        assert len(text) <= characters + 100
        assert "\x00" not in text
        text.encode()
    assert not guard.is_a(error, TaskTimeout)


def test_texts_of_a_common_exception() -> None:
    """Its path, message and traceback as they are."""
    try:
        raise TaskTimeout("late")
    except TaskTimeout as error:
        assert class_path(error) == "django_asyncq.exceptions.TaskTimeout"
        assert text_of(error) == "late"
        assert traceback_of(error).endswith("django_asyncq.exceptions.TaskTimeout: late\n")
        assert guard.is_a(error, TaskTimeout)
    assert not guard.is_a(None, TaskTimeout)


def test_a_long_text_keeps_its_ends() -> None:
    """And says how much is missing."""
    assert storable_text("ab" * 10, 20) == "ab" * 10
    assert storable_text("a" * 50 + "\x00" * 20 + "b" * 50, 100) == (f"{'a' * 50}\n… 20 characters cut …\n{'b' * 50}")


# --- the return value


class Hostile(Sequence[Any]):
    """A sequence that raises when it is read."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __getitem__(self, index: Any) -> Any:
        """Raise."""
        raise self.error

    def __len__(self) -> int:
        """Pretend to hold something."""
        return 1


@EACH_HOSTILE
def test_a_return_value_that_raises_is_refused(own_process: None, kind: type[BaseException]) -> None:
    """With one error, whatever it raises."""
    with pytest.raises(InvalidResult, match=rf"had finished, but return value could not be read: {kind.__qualname__}"):
        storable_result(Hostile(kind()))

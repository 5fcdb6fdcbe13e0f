"""Tasks the tests run. Each run leaves a line in the history file, outside both stores."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import ctypes
import functools
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from asgiref.sync import async_to_sync, sync_to_async
from django.db import OperationalError, connections

from django_asyncq import startup_task, task
from django_asyncq.context import TaskContext, current_task
from django_asyncq.core import compat
from django_asyncq.signals import worker_started, worker_stopping

from . import (  # noqa: F401 - their tasks are registered
    around_managers,
    batch_tasks,
    checkpoint_tasks,
    context_tasks,
    discard_tasks,
    equality_tasks,
    fair_tasks,
    fleet_tasks,
    inbox_tasks,
    isolated_tasks,
    loaded_tasks,
    observed_tasks,
    paused_tasks,
    process_tasks,
    rate_tasks,
    settings_tasks,
    slot_tasks,
    stop_tasks,
    typed_tasks,
    unique_tasks,
    workflow_tasks,
)

if os.environ.get("ASYNCQ_TEST_DEPLOY"):
    from . import deploy_tasks  # noqa: F401 - only for the tests of deploys, because it is the code of one moment

if os.environ.get("ASYNCQ_TEST_OTLP"):
    from . import traced_tasks  # noqa: F401 - only for the tests of traces, because it imports OpenTelemetry

if os.environ.get("ASYNCQ_TEST_SENTRY"):
    from . import reported_tasks  # noqa: F401 - likewise, because it imports Sentry's SDK

if os.environ.get("ASYNCQ_TEST_BREAK_WORKERS") and loaded_tasks.IS_CHILD:
    raise ImportError("broken on purpose, in worker processes only")


def history_file() -> Path | None:
    """The file of this test's history, if it wants one."""
    path = os.environ.get("ASYNCQ_TEST_HISTORY")
    return Path(path) if path else None


def note(event: str, **more: Any) -> None:
    """Append one line, whole, to the history."""
    if (path := history_file()) is not None:
        line = json.dumps({"at": time.monotonic(), "pid": os.getpid(), "event": event, **more}) + "\n"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())
        os.close(descriptor)


def hear(event: str) -> Callable[..., None]:
    """Return a receiver of one of the framework's signals that writes what it hears into the history."""

    def receiver(sender: Any, task_result: Any, **kwargs: Any) -> None:
        kind = sys.exc_info()[0]
        note(event, id=task_result.id, status=task_result.status, handling=kind.__name__ if kind else None)

    return receiver


if os.environ.get("ASYNCQ_TEST_SIGNALS"):
    compat.task_started.connect(hear("started"), weak=False)
    compat.task_finished.connect(hear("finished"), weak=False)


class Glitch(Exception):
    """A failure that may pass."""


class Fatal(Glitch):
    """A failure that will not."""


@task
def noop(a: int, b: str) -> None:
    """Do nothing, with two arguments."""


@task
def add(a: int, b: int = 0) -> int:
    """Return a sum."""
    note("add", a=a, b=b)
    return a + b


@task
async def add_async(a: int, b: int = 0) -> int:
    """Return a sum, later."""
    await asyncio.sleep(0)
    return a + b


def passes_on(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate as many libraries do, without a look at what kind of function it is."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@task
@passes_on
async def decorated_async(seconds: float) -> int:
    """Return the number of rows, later, and use the database in a thread."""
    from asgiref.sync import sync_to_async

    from django_asyncq.models import TaskRecord

    await asyncio.sleep(seconds)
    rows = await sync_to_async(TaskRecord.objects.count)()
    note("decorated_async", rows=rows)
    return rows


@task(timeout=0.3)
@passes_on
async def decorated_overruns() -> None:
    """Wait longer than the timeout."""
    await asyncio.sleep(60)


@task
@passes_on
async def decorated_exits() -> None:
    """Try to take the event loop along."""
    raise SystemExit(3)


@task(atomic=True)
@passes_on
async def decorated_atomic() -> None:
    """Return a coroutine within a transaction."""


@task(max_attempts=3)
@passes_on
def decorated_generator() -> Any:
    """Yield; nothing of this runs."""
    note("decorated_generator")
    yield 1


@task(takes_context=True, max_attempts=3, backoff=0, give_up_on=(Fatal,))
def fail_until(context: TaskContext, succeeds_at: int, fatal: bool = False) -> int:
    """Fail until the given attempt."""
    note("fail_until", id=context.task_result.id, attempt=context.attempt)
    if context.attempt < succeeds_at:
        raise (Fatal if fatal else Glitch)(f"attempt {context.attempt}")
    return context.attempt


BACKOFF_SECONDS = 3


@task(takes_context=True, max_attempts=2, backoff=BACKOFF_SECONDS)
def fails_once(context: TaskContext) -> None:
    """Fail at the first attempt; the second comes after the backoff."""
    note("attempt", id=context.task_result.id, attempt=context.attempt)
    if context.attempt == 1:
        raise Glitch("attempt 1")


@task(takes_context=True)
def nap(context: TaskContext, seconds: float) -> str:
    """Sleep, leaving begin and end in the history."""
    note("begin", id=context.task_result.id)
    time.sleep(seconds)
    note("end", id=context.task_result.id)
    return "rested"


if not os.environ.get("ASYNCQ_TEST_OLD_CODE"):

    @task(takes_context=True)
    def new_task(context: TaskContext) -> None:
        """A task that the code of an old worker does not have."""
        note("begin", id=context.task_result.id)


@task
async def nap_async(seconds: float) -> str:
    """Sleep in the event loop."""
    await asyncio.sleep(seconds)
    return "rested"


@task(takes_context=True, rate="10/s", rate_per="naps", gate="{gate}", queue_limit=5)
def nap_at_a_rate(context: TaskContext, gate: str) -> None:
    """Leave a begin in the history, at most ten times a second."""
    note("begin", id=context.task_result.id)


@task(takes_context=True, gate="{gate}", queue_limit=5, expected_seconds=1)
def gated(context: TaskContext, gate: str, seconds: float = 0.0) -> None:
    """Hold a slot of a gate for a while."""
    note("begin", id=context.task_result.id)
    time.sleep(seconds)
    note("end", id=context.task_result.id)


@task
def takes_anything(*args: Any, **kwargs: Any) -> None:
    """Take every argument."""


@task
def returns_set() -> Any:
    """Return what JSON cannot carry."""
    return {1, 2, 3}


@task(takes_context=True, timeout=0.3)
def overruns(context: TaskContext, listens: bool) -> str:
    """Go on after the timeout, or stop when told."""
    note("begin", id=context.task_result.id)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if listens and context.should_stop:
            return "stopped"
        time.sleep(0.01)
    return "never"


@task(timeout=0.3)
async def overruns_async() -> None:
    """Wait longer than the timeout."""
    await asyncio.sleep(60)


@task(takes_context=True, max_attempts=1)
def asks_again(context: TaskContext, times: int) -> int:
    """Ask to be tried again without counting."""
    note("asks_again", id=context.task_result.id)
    lines = (history_file() or Path(os.devnull)).read_text().count("asks_again")
    if lines <= times:
        context.retry(in_=0, counted=False)
    return lines


@task
def holds_gil(seconds: float) -> str:
    """Keep the interpreter to itself, as a C call may."""
    note("holds_gil")
    ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))
    return "done"


@task
def kills_its_process() -> None:
    """Take the worker process along."""
    note("kills_its_process")
    os.kill(os.getpid(), 9)


@task
def reads_nowhere() -> None:
    """Take the worker process along as broken C code does."""
    note("reads_nowhere")
    ctypes.string_at(0)


def raise_in_thread(name: str, kind: type[BaseException]) -> None:
    """Raise in every thread of this name, or whose name begins so, except this one, as soon as it runs Python again."""
    for thread in threading.enumerate():
        if thread.name.startswith(name) and thread is not threading.current_thread():
            assert thread.ident is not None
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(kind))


class Uncommon(BaseException):
    """What `except Exception` does not catch."""


class Mute(Exception):
    """An error whose text ends the process of whoever asks for it."""

    def __str__(self) -> str:
        raise SystemExit(3)


class Liar(Exception):
    """An error that raises when it is asked for its class."""

    @property
    def __class__(self) -> Any:
        raise SystemExit(4)


@task
def names_itself() -> Any:
    """Return what the body knows of its task, in its own thread and in one that it awaits."""
    return [current_task(), async_to_sync(asyncio.to_thread)(current_task)]


@task
async def names_itself_async() -> Any:
    """Return what the body knows of its task, in the event loop and in threads that it awaits."""
    await asyncio.sleep(0)
    return [current_task(), await sync_to_async(current_task)(), await asyncio.to_thread(current_task)]


SPITE: dict[str, type[BaseException]] = {
    "SystemExit": SystemExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "Uncommon": Uncommon,
    "Mute": Mute,
    "Liar": Liar,
}


def spiteful_backoff(exception: BaseException, result: Any) -> float:
    """Raise what the task was told."""
    raise SPITE[result.args[0]]


@task(max_attempts=3, backoff=spiteful_backoff)
def backs_off_spitefully(kind: str) -> None:
    """Fail, and have a backoff that raises."""
    raise Glitch(kind)


@task
def raises_spite(kind: str) -> None:
    """Raise."""
    raise SPITE[kind]


@task
async def raises_spite_async(kind: str) -> None:
    """Raise in the event loop."""
    raise SPITE[kind]


class SpitefulResult(Sequence[Any]):
    """A sequence that raises when it is read."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __getitem__(self, index: Any) -> Any:
        """Raise."""
        raise SPITE[self.kind]

    def __len__(self) -> int:
        """Pretend to hold something."""
        return 1


@task
def returns_spite_of(kind: str) -> Any:
    """Return what raises when it is stored."""
    return SpitefulResult(kind)


def _receive_spitefully(**kwargs: Any) -> None:
    raise SPITE[os.environ["ASYNCQ_TEST_SPITE"]]


def _filter_spitefully(record: logging.LogRecord) -> bool:
    raise SPITE[os.environ["ASYNCQ_TEST_SPITE"]]


if os.environ.get("ASYNCQ_TEST_SPITE"):
    from django_asyncq.signals import task_state_changed

    if "receivers" in os.environ["ASYNCQ_TEST_SPITE_OF"]:
        for each in (compat.task_started, compat.task_finished, task_state_changed):
            each.connect(_receive_spitefully)
    else:
        for handler in (*logging.getLogger("django_asyncq").handlers, logging.lastResort):
            if handler is not None:
                handler.addFilter(_filter_spitefully)


@task
def ends_thread(name: str, kind: str) -> str:
    """Raise in another thread of its process, at its first run only, and wait for the end."""
    if is_first("ends_thread"):
        raise_in_thread(name, SPITE[kind])
        # A slot and the event loop sleep until there is work for them.
        if name == "slot":
            add.enqueue(1)
        elif name == "loop":
            add_async.enqueue(1)
        threading.Event().wait(30)
    return "survived"


@task
def lasts_at_first() -> str:
    """Wait for the end of its process, at its first run only."""
    if is_first("lasts_at_first"):
        threading.Event().wait(30)
    return "survived"


@task
async def exits_in_a_child(how: str) -> str:
    """End the event loop from within, at the first run only, once `lasts_at_first` runs beside it."""

    async def child() -> None:
        if how == "stop":
            asyncio.get_running_loop().stop()
        else:
            sys.exit(3)

    if is_first("exits_in_a_child"):
        while "lasts_at_first" not in (history_file() or Path(os.devnull)).read_text():
            await asyncio.sleep(0.01)
        children = [asyncio.create_task(child())]
        await asyncio.sleep(30)
        assert children
    return "survived"


def _hang(number: int, frame: Any) -> None:
    threading.Event().wait()


if os.environ.get("ASYNCQ_TEST_HANG") and loaded_tasks.IS_CHILD:
    # The main thread runs the handlers of signals.
    signal.signal(signal.SIGUSR2, _hang)


def is_first(name: str) -> bool:
    """Note a name in the history; return whether it was not there."""
    found = name not in (history_file() or Path(os.devnull)).read_text()
    note(name)
    return found


@task
def hangs_the_main_thread() -> None:
    """Have the main thread of its process wait for ever, at the first run only; then a task is due."""
    if is_first("hangs_the_main_thread"):
        os.kill(os.getpid(), signal.SIGUSR2)
        add.enqueue(1)


@task
async def blocks_the_loop(seconds: float) -> None:
    """Do blocking work in a coroutine, at the first run only; then a task for the event loop is due."""
    if is_first("blocks_the_loop"):
        threading.Thread(target=add_async.enqueue, args=(1,)).start()
        time.sleep(seconds)


@task
async def cancels_the_others() -> str:
    """Cancel every other task of the event loop."""
    for other in asyncio.all_tasks() - {asyncio.current_task()}:
        other.cancel()
    return "done"


@task(takes_context=True)
def dies(context: TaskContext, how: str = "SIGKILL", after_seconds: float = 0.5) -> None:
    """Take along the worker process, or all of the supervisor's process group, after a while."""
    note("begin", id=context.task_result.id)
    time.sleep(after_seconds)
    if how == "group":
        os.killpg(0, signal.SIGKILL)
    elif how == "SIGSEGV":
        ctypes.string_at(0)
    elif how.isdigit():
        os._exit(int(how))
    os.kill(os.getpid(), signal.SIGKILL)


@task
def counts_rows(leaves: str) -> int:
    """Use the database, and leave a transaction open in one of two ways."""
    from django.db import transaction

    from django_asyncq.models import TaskRecord

    if leaves == "autocommit":
        transaction.set_autocommit(False)
    else:
        transaction.atomic().__enter__()
    TaskRecord.objects.filter(name="tests.tasks.counts_rows").update(group="never committed")
    return TaskRecord.objects.count()


class Spiteful(Sequence[Any]):
    """A sequence that cannot be read."""

    def __getitem__(self, index: Any) -> Any:
        """Refuse."""
        raise OSError("no")

    def __len__(self) -> int:
        """Pretend to hold something."""
        return 1


@task
def returns_spite() -> Any:
    """Return what raises while it is looked at."""
    return Spiteful()


class Unspeakable(Exception):
    """An error whose text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


@task
def raises_unspeakable() -> None:
    """Fail with an error that cannot be printed."""
    raise Unspeakable


@task
def exits() -> None:
    """Try to take the slot along."""
    raise SystemExit(3)


@task(takes_context=True)
async def counts_others(context: TaskContext, seconds: float) -> None:
    """Leave begin and end in the history, asynchronously."""
    note("begin", id=context.task_result.id)
    await asyncio.sleep(seconds)
    note("end", id=context.task_result.id)


@task(schedulable=True)
def tally(region: str, pages: int = 1) -> str:
    """A small task that people may schedule."""
    return f"{region}: {pages}"


@task(schedulable=True, gate="tallies", queue_limit=1)
def gated_tally() -> None:
    """The same, at a gate."""


@task(schedulable=True, gate="regions", queue_limit=1000)
def gated_many(region: str, pages: int = 1) -> None:
    """The same, at a gate with room for many."""


@task(takes_context=True, schedulable=True)
def statement(
    context: TaskContext, region: str, /, days: int = 7, *pages: int, to: str, password: str = "", **more: Any
) -> str:
    """Stand for a task that people may schedule: parameters of every kind, one with a secret name."""
    note("statement", id=context.task_result.id, region=region, days=days)
    return f"{region}: {days} days, pages {list(pages)}, to {to}, more {sorted(more)}"


@task(schedulable=True)
def tidy(days: int = 30) -> int:
    """Stand for a task that can be scheduled without arguments."""
    note("tidy", days=days)
    return days


@task(takes_context=True, schedulable=True)
def stamp(context: TaskContext) -> None:
    """Leave the time of day at which it starts in the history."""
    note("stamp", id=context.task_result.id, wall=time.time())


if kind := os.environ.get("ASYNCQ_TEST_STARTUP"):

    @startup_task("once", ttl=600)
    async def once() -> None:
        """Once for all that start together."""
        note("once")

    @startup_task("each start", every_start=True)
    def each_start() -> None:
        """For each of them."""
        note("each start")

    def fails() -> None:
        """Fail."""
        raise RuntimeError("no luck")

    def dies() -> None:
        """End the process without a word."""
        os.kill(os.getpid(), signal.SIGKILL)

    def hangs() -> None:
        """Hang in C, deaf to signals of Python."""
        note("hangs")
        ctypes.CDLL(None).sleep(int(os.environ.get("ASYNCQ_TEST_HANG_SECONDS", "60")))

    if kind in ("fails", "dies", "hangs"):
        startup_task(kind)({"fails": fails, "dies": dies, "hangs": hangs}[kind])


if life := os.environ.get("ASYNCQ_TEST_LIFE"):
    # What a project does at the start and at the end of each worker process.

    def hear_of_a_process(event: str) -> Callable[..., None]:
        """Return a receiver; "hangs" hangs at the end, "fails" fails everywhere."""

        def receiver(signal: Any, sender: Any, **named: Any) -> None:
            note(event, **named)
            if life == "fails":
                raise SystemExit(event)
            if life == "hangs" and event == "stopping":
                time.sleep(600)

        return receiver

    worker_started.connect(hear_of_a_process("started"), weak=False)
    worker_stopping.connect(hear_of_a_process("stopping"), weak=False)
    atexit.register(note, "at exit")


def _no_gate(region: str, pages: int) -> str:
    raise KeyError("no such model")


@task(schedulable=True, gate=_no_gate, queue_limit=1)
def badly_gated(region: str, pages: int = 1) -> None:
    """A task whose gate cannot be found."""


def _spiteful_gate(kind: str) -> str:
    raise SPITE[kind]


@task(schedulable=True, gate=_spiteful_gate, queue_limit=1)
def spitefully_gated(kind: str) -> None:
    """A task whose gate raises what it is told."""


def count(name: str = "counter") -> None:
    """Leave an effect in the database: the limit of a gate that nothing uses goes up by one."""
    from django.db.models import F

    from django_asyncq.models import Gate

    Gate.objects.filter(name=name).update(limit=F("limit") + 1)


def die(*anything: Any, **more: Any) -> None:
    """End the process as a power cut would."""
    os.kill(os.getpid(), signal.SIGKILL)


def lose_answer(*, commits: bool) -> None:
    """Have the open transaction's commit fail, after it was done or without."""
    from django.db import OperationalError, connection

    commit = connection._commit

    def fail() -> None:
        del connection._commit
        if commits:
            commit()
        raise OperationalError("no answer to COMMIT")

    connection._commit = fail


def die_at(moment: str, context: TaskContext) -> None:
    """Have the first run's process killed at a moment of its last transaction; called within it."""
    from django.db import connection, transaction

    def after_the_write(execute: Callable[..., Any], sql: str, *arguments: Any) -> Any:
        answer = execute(sql, *arguments)
        if "held_fence" in sql:
            die()
        return answer

    if context.record.crash_count == 0:
        if moment == "end of body":
            die()
        elif moment == "before commit":
            connection.execute_wrappers.append(after_the_write)
        elif moment == "after commit":
            transaction.on_commit(die)
    if context.attempt == 1 and moment.startswith("answer"):
        lose_answer(commits=moment == "answer lost")


@task(atomic=True, takes_context=True, max_attempts=2, backoff=0)
def counts_once(context: TaskContext, moment: str = "", fails: int = 0, result: Any = None) -> Any:
    """Have an effect, as one commit with its success; killed or failing on the way, if told so."""
    note("counts_once", id=context.task_result.id)
    count()
    add.enqueue(1)
    die_at(moment, context)
    if context.attempt <= fails:
        raise Glitch("after the effect")
    return {1, 2} if result == "a set" else result


@task(takes_context=True, max_attempts=2, backoff=0)
def completes(context: TaskContext, moment: str = "", then: str = "") -> str:
    """The same within a block, with more to come after it."""
    from django.db import transaction

    note("completes", id=context.task_result.id)
    with context.complete_on_commit("early") as ending:
        count()
        die_at(moment, context)
        if then == "hook fails":
            transaction.on_commit(lambda: {}["no such key"])
        ending.result = "set within"
    if then == "twice":
        with context.complete_on_commit():
            count()
    if then == "raise":
        raise Glitch("after the end")
    note("after", id=context.task_result.id)
    return "not the result"


@task(max_attempts=1)
def counts_and_naps(seconds: float) -> int:
    """Use the database, then keep the connection for a while."""
    from django_asyncq.models import Gate

    found = Gate.objects.count()
    time.sleep(seconds)
    return found


@task(max_attempts=1)
def writes_before_full(text: str) -> None:
    """Have an effect, close the connections, and get no other one."""
    count()
    connections.close_all()
    raise OperationalError(text)


@task(max_attempts=1)
def writes_before_full_in_thread(text: str) -> None:
    """The same in a thread that has the context of the task."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(contextvars.copy_context().run, count).result()
        executor.submit(connections.close_all).result()
    raise OperationalError(text)


@task(max_attempts=1)
async def writes_before_full_async(text: str) -> None:
    """The same in the event loop."""
    await sync_to_async(count)()
    await sync_to_async(connections.close_all)()
    raise OperationalError(text)


@task(atomic=True, max_attempts=1)
def counts_once_and_naps(seconds: float) -> None:
    """Have an effect, then keep the connection for a while."""
    count()
    time.sleep(seconds)


@task(max_attempts=1)
async def counts_and_naps_async(seconds: float) -> int:
    """Use the database from a coroutine, then keep the connection for a while."""
    from django_asyncq.models import Gate

    found: int = await Gate.objects.acount()
    await asyncio.sleep(seconds)
    return found


# How an idle transaction is ended soon, and how long one must be idle for that.
IDLE_TIMEOUTS = {
    "postgresql": ("idle_in_transaction_session_timeout = '50ms'", 0.3),
    "mysql": ("SESSION idle_transaction_timeout = 1", 2.5),
}


def cut_connection() -> None:
    """Have the server end this thread's connection; PostgreSQL, MySQL and MariaDB."""
    from django.db import connection

    statements = {"postgresql": "SELECT pg_terminate_backend(pg_backend_pid())", "mysql": "KILL CONNECTION_ID()"}
    with connection.cursor() as cursor:
        cursor.execute(statements[connection.vendor])


def cut_at_commit(*, commits: bool) -> None:
    """Have the server end the connection at the open transaction's commit, after it was done or before."""
    from django.db import connection

    commit = connection._commit

    def fail() -> None:
        del connection._commit
        if commits:
            commit()
        cut_connection()

    connection._commit = fail


def cut_at(how: str) -> None:
    """Have the connection of the open transaction cut in one of many ways."""
    from django.db import Error, connection

    if how == "statement":
        cut_connection()
    elif how == "swallowed":
        with contextlib.suppress(Error):
            cut_connection()
    elif how == "wrapped":
        try:
            cut_connection()
        except Error as error:
            raise Glitch("wrapped") from error
    elif how == "idle":
        # MariaDB counts whole seconds.
        setting, seconds = IDLE_TIMEOUTS[connection.vendor]
        with connection.cursor() as cursor:
            cursor.execute(f"SET {setting}")
        time.sleep(seconds)
    else:
        cut_at_commit(commits=how == "answer lost")


def end_transaction(how: str) -> None:
    """End the open transaction from within, as a body must not."""
    from django.db import Error, connection, transaction

    if how == "swallowed":
        with contextlib.suppress(Error):
            end_transaction("closed and used")
    elif how == "wrapped":
        try:
            end_transaction("closed and used")
        except Error as error:
            raise Glitch("wrapped") from error
    elif how.startswith("closed"):
        connection.close()
    elif how.startswith("driver closed"):
        connection.connection.close()
    elif how == "driver rollback":
        connection.connection.rollback()
    elif how == "DDL":
        with connection.cursor() as cursor:
            cursor.execute("CREATE TABLE IF NOT EXISTS ended_by_ddl (id integer)")
            cursor.execute("DROP TABLE ended_by_ddl")
    elif how == "within a savepoint":
        with transaction.atomic():
            end_transaction("ROLLBACK")
    else:
        with connection.cursor() as cursor:
            cursor.execute(how.removesuffix(" and used"))
    if how.endswith("and used"):
        count()


@task(atomic=True, max_attempts=3, backoff=0)
def ends_its_transaction(how: str) -> None:
    """Have an effect, and end the transaction."""
    note("ends", how=how)
    count()
    end_transaction(how)


@task(takes_context=True, max_attempts=3, backoff=0)
def ends_its_block(context: TaskContext, how: str) -> None:
    """Do so in the block that completes the run."""
    note("ends", how=how)
    with context.complete_on_commit():
        count()
        end_transaction(how)


@task(atomic=True, takes_context=True, max_attempts=2, backoff=0, give_up_on=(Fatal,))
def is_cut(context: TaskContext, how: str, runs: Sequence[int], fails_in: int = 0) -> int:
    """Have an effect, and be cut in runs of these numbers, or fail in one; all within the transaction."""
    note("is_cut", id=context.task_result.id)
    count()
    run = len(context.record.errors) + 1
    if run in runs:
        cut_at(how)
    if run == fails_in:
        raise Glitch("of its own")
    return run


@task(takes_context=True)
def is_cut_in_block(context: TaskContext, how: str, runs: Sequence[int]) -> None:
    """Be cut in the block that completes the run."""
    note("is_cut", id=context.task_result.id)
    with context.complete_on_commit():
        count()
        if len(context.record.errors) + 1 in runs:
            cut_at(how)


@task(takes_context=True)
def is_cut_and_completes(context: TaskContext, how: str) -> None:
    """Be cut in a block, and complete the run in another."""
    from django.db import Error, connection

    # The close of a cursor lets errors of mysqlclient through as they are.
    with contextlib.suppress(Error, connection.Database.Error), context.complete_on_commit():
        count()
        cut_at(how)
    with context.complete_on_commit():
        count()


@task
def is_cut_outside(how: str) -> None:
    """Be cut without a transaction that completes the run."""
    count()
    cut_at(how)


@task(takes_context=True)
def completes_after_all(context: TaskContext) -> str:
    """End within a second block, after the first was rolled back by the task's own error."""
    try:
        with context.complete_on_commit():
            count()
            raise Glitch("in the block")
    except Glitch:
        with context.complete_on_commit("second"):
            count()
    return ""


@task(takes_context=True)
def completes_when_told(context: TaskContext, signal_file: str) -> None:
    """Wait for a file, then end within a block."""
    note("begin", id=context.task_result.id)
    wait_for(signal_file)
    with context.complete_on_commit():
        count()


@task(atomic=True)
def counts_and_waits(signal_file: str) -> None:
    """Have an effect, then wait for a file in the open transaction."""
    count()
    note("counted")
    wait_for(signal_file)


@task(atomic=True, timeout=0.3)
def counts_too_late() -> None:
    """Have an effect and end after the timeout."""
    count()
    time.sleep(0.5)


@task(takes_context=True)
async def completes_in_a_thread(context: TaskContext) -> str:
    """End an `async def` task within a block, in a thread."""
    from asgiref.sync import sync_to_async

    def end() -> None:
        with context.complete_on_commit("from a thread"):
            count()

    await sync_to_async(end)()
    return ""


@task
def enqueues_closely(queue: str, count: int) -> None:
    """Enqueue tasks one after the other."""
    for number in range(count):
        add.using(queue_name=queue).enqueue(number)


def wait_for(path: str) -> None:
    """Wait until a file is there."""
    deadline = time.monotonic() + 30
    while not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.01)


@task(takes_context=True, gate="{gate}", queue_limit=20, expected_seconds=1, max_attempts=2, backoff=0)
def gated_and_fails_once(context: TaskContext, gate: str, seconds: float = 0.01) -> None:
    """Hold a slot of a gate for a while; fail in the first attempt."""
    note("begin", id=context.task_result.id, attempt=context.attempt)
    time.sleep(seconds)
    note("end", id=context.task_result.id, attempt=context.attempt)
    if context.attempt == 1:
        raise Glitch("the first attempt")

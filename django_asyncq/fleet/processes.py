"""The worker processes of a supervisor: started, killed when a task ignores its timeout, replaced when dead."""

from __future__ import annotations

import atexit
import json
import logging
import math
import multiprocessing
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from django.conf import ENVIRONMENT_VARIABLE

from .. import conf, lifecycle
from ..conf import AUTO, FORKSERVER, SPAWN
from ..core.guard import LongLivedThread, get_logger
from ..core.logs import log_extra_of_ids
from ..core.masking import stderr_verbosity
from ..core.names import runs_alone, runs_isolated
from ..exceptions import DatabaseNotSetUp
from ..worker import entry_points
from ..worker.bootstrap import PRELOAD_VARIABLE, run_worker
from ..worker.child_process import (
    STACKS_SIGNAL,
    UNKNOWN_EXIT_CODE,
    ChildProcess,
    CrashStack,
    ForkedProcess,
    NeverStarted,
    reap_group,
    start_of_child,
)
from ..worker.options import CANCEL, DRAIN, EXITS, HURRY, NOT_SET_UP, OVER, READY, START, STOP, Alone, WorkerOptions
from ..worker.slot_table import SlotTable

# --- How worker processes are started: as fresh interpreters ("spawn"), or forked by a fork server ("forkserver").
#
# The fork server of multiprocessing is a fresh interpreter too. It sets Django up and imports the tasks once;
# processes that it forks are ready sooner, and share its memory until they write to it. What they must not share,
# such as connections, it does not have: see `worker.bootstrap.load_to_fork`.


@dataclass(slots=True, eq=False)
class Start:
    """One process that is to be started, and what became of it: either it `began`, or there was an `error`.

    arguments: of `run_worker`. pipe, other_end: of this process, and of the one that starts. at: monotonic seconds.
    failed_starts: see `Vacancy`. giver: see `Child`.
    """

    arguments: tuple[Any, ...]
    options: WorkerOptions
    slot_table: SlotTable
    pipe: Connection[Any, Any]
    other_end: Connection[Any, Any]
    crash_stack: CrashStack
    at: float
    failed_starts: int
    giver: Child | None = None
    began: ChildProcess | None = None
    error: BaseException | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.pipe.closed

    def abandon(self) -> None:
        """Release what was made for it."""
        self.pipe.close()
        self.crash_stack.close()


class SpawnStarter:
    """Starts each process at once, in the calling thread.

    on_done: called in the thread of a start that is over later than in `begin`.
    """

    def __init__(self, on_done: Callable[[], object]) -> None:
        self._on_done = on_done
        self._done: SimpleQueue[Start] = SimpleQueue()

    def begin(self, start: Start) -> None:
        """Have a process started; `done` returns it."""
        process = new_process(SPAWN, start)
        try:
            with start_of_child():
                process.start()
            start.began = ChildProcess(process)
        except OSError as error:  # the system allows no more of them
            start.error = error
        self._finish(start)

    def done(self) -> Iterator[Start]:
        """Yield what became of the starts, each once."""
        while True:
            try:
                yield self._done.get_nowait()
            except Empty:
                return

    def _finish(self, start: Start) -> None:
        start.other_end.close()
        self._done.put(start)


class ForkStarter(SpawnStarter):
    """Has each process forked by a fork server, in a thread; `done` returns it later.

    The first start takes as long as the project takes to load, and one at a server that hangs never returns. The
    supervisor must renew leases meanwhile.

    may_spawn: whether processes are spawned when the fork server has something that should not be forked: it says so
    in a file then, and exits. Otherwise it logs a warning.
    """

    def __init__(self, on_done: Callable[[], object], *, may_spawn: bool = False) -> None:
        super().__init__(on_done)
        multiprocessing.get_context(FORKSERVER).set_forkserver_preload(["django_asyncq.worker.preload"])
        self._obstacle_file = ""
        if may_spawn:
            descriptor, self._obstacle_file = tempfile.mkstemp(prefix="asyncq-fork-server-")
            os.close(descriptor)
            atexit.register(Path(self._obstacle_file).unlink, missing_ok=True)
        # For the fork server, and for each that replaces one that has died.
        wanted = {"path": sys.path, "verbosity": stderr_verbosity(), "obstacle_file": self._obstacle_file}
        os.environ[PRELOAD_VARIABLE] = json.dumps(wanted)
        self._is_refused = False
        self._wanted: SimpleQueue[Start] = SimpleQueue()
        self._thread = LongLivedThread("starts", self._run, is_endless=True)

    def begin(self, start: Start) -> None:
        """Have a process started; `done` returns it later."""
        if not self._thread.is_alive():
            self._thread.start()
        self._wanted.put(start)

    def _run(self) -> None:
        while True:
            start = self._wanted.get()
            if start.is_abandoned:
                start.other_end.close()
                continue
            if not self._is_refused:
                self._fork(start)
            if self._is_refused:
                SpawnStarter.begin(self, start)
            self._on_done()

    def _fork(self, start: Start) -> None:
        process = new_process(FORKSERVER, start)
        try:
            # The fork server inherits what is blocked here, and so does each process that it forks.
            with start_of_child(signal.SIGTERM):
                process.start()
            start.began = ForkedProcess(process)
        except BaseException as error:  # noqa: BLE001 - the supervisor logs it, and tries again
            # EOFError, for instance: the fork server has died.
            if reason := self._obstacle():
                self._is_refused = True
                logger.info(SPAWNED_INSTEAD, reason)
                return
            start.error = error
        self._finish(start)

    def _obstacle(self) -> str:
        """Return why the fork server has refused to fork, and reap it; "" if it has not."""
        pid, _, reason = (Path(self._obstacle_file).read_text() if self._obstacle_file else "").partition(" ")
        if reason:
            with suppress(ChildProcessError):
                os.waitpid(int(pid), 0)
        return reason


def new_process(method: str, start: Start) -> BaseProcess:
    """Return the process of multiprocessing that a start is to begin."""
    context: Any = multiprocessing.get_context(method)
    name = "asyncq-" + start.options.process_name.replace(" ", "-")
    process: BaseProcess = context.Process(target=run_worker, args=start.arguments, name=name)
    return process


SPAWNED_INSTEAD = "worker processes are spawned, not forked: %s"
MAY_DIFFER = "runworkers was called by a program, whose settings may not be those that are written"


def fork_obstacle() -> str:
    """Return why this process cannot use a fork server; "" if it can."""
    if ENVIRONMENT_VARIABLE not in os.environ:
        return f"the fork server finds the settings by {ENVIRONMENT_VARIABLE}, which is not set"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return "it needs Linux 5.3"
    return ""


STARTERS: dict[str, Callable[[Callable[[], object]], SpawnStarter]] = {
    SPAWN: SpawnStarter,
    FORKSERVER: ForkStarter,
    AUTO: partial(ForkStarter, may_spawn=True),
}


# --- When a worker process may be started for each one that is missing.
#
# A process that was ready is replaced at once, however often it is killed from outside. One that exits before it is
# ready has most likely failed an import, and would fail again at once; so pauses grow before its replacements.

# Between the start of a process and the start of its replacement. A start costs about 0.5 s of one core, so a task that
# kills its process each time takes no more than that core.
LEAST_SECONDS_BETWEEN_STARTS = 0.5
LONGEST_PAUSE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Vacancy:
    """A missing process. start_at: when one may be started, in monotonic seconds.

    failed_starts: how many processes in a row exited before they were ready, each the replacement of the one before.
    """

    start_at: float = 0.0
    failed_starts: int = 0

    @classmethod
    def after_death(cls, started_at: float, now: float) -> Vacancy:
        """Return the vacancy of a process that was ready before it died. started_at: when it was started."""
        return cls(max(now, started_at + LEAST_SECONDS_BETWEEN_STARTS))

    @classmethod
    def after_failed_start(cls, failed_starts: int, started_at: float, now: float) -> Vacancy:
        """Return the vacancy of a process that exited before it was ready: no pause, then 1 s, 2 s, 4 s, up to 30 s.

        failed_starts: its own included.
        """
        # The exponent is bounded too: 2.0 ** 1024 overflows.
        pause = min(LONGEST_PAUSE_SECONDS, 2.0 ** min(failed_starts - 2, 10)) if failed_starts > 1 else 0.0
        return cls(max(now + pause, started_at + LEAST_SECONDS_BETWEEN_STARTS), failed_starts)


logger = get_logger("django_asyncq.fleet")

# After the tasks' own grace period: time to write the last outcomes, and for what the project does at exit
# (`worker.process`, `worker.life`).
EXIT_MARGIN_SECONDS = 10.0
# A burst gives up when this many processes in a row exited before they were ready; a service never gives up.
FAILED_STARTS = 3
# An isolated task whose process takes longer to start waits for a busy host.
SLOW_START_SECONDS = 10.0
# For the stacks of a process that is about to be killed.
STACK_SECONDS = 0.2
# How many ids are sent at once: 40 bytes each, and a pipe that is writable takes 50 KB.
MOST_CANCELLED = 500


def load_average() -> str:
    """Return the load of this host over 1, 5 and 15 minutes, and its number of processors, in words."""
    try:
        loads = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    except OSError:
        loads = "unknown"
    return f"load average {loads}; processors: {os.cpu_count()}"


class WorkersCannotStart(RuntimeError):
    """Worker processes exit before they are ready; their own output says why."""


@dataclass(slots=True, eq=False)
class Child:
    """One worker process, and what is known about it after its death.

    overdue, cancelled: ids of the tasks for which it was killed: after their timeout or deadline, or although they were
    cancelled. was_killed: by its supervisor. was_asked: whether all were sent SIGTERM. was_ready: whether
    it began to fetch. is_stalled: whether it was asked to stop because it stood still.
    said_exit: the exit code that it has said as its last word; None when it did not stop in order.
    is_mute: whether it can say nothing more. exit_code, stack: of the dead process; stack: "" if it left none.
    failed_starts: how many processes before it, each replaced by the next, exited before they were ready.
    is_draining: whether it was asked to take no more tasks.
    alone: of a process that runs one task. giver: the process whose slot its task occupies.
    stop_at: when it is killed because its task was cancelled, in monotonic seconds. kill_at: when it is killed, once it
    was asked for its stacks.
    """

    process: ChildProcess
    slot_table: SlotTable
    pipe: Any
    worker_id: str
    started_at: float
    crash_stack: CrashStack
    exit_code: int | None = None
    stack: str = ""
    overdue: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)
    was_killed: bool = False
    was_asked: bool = False
    was_ready: bool = False
    failed_starts: int = 0
    is_stalled: bool = False
    is_draining: bool = False
    said_exit: int | None = None
    is_mute: bool = False
    alone: Alone | None = None
    giver: Child | None = None
    stop_at: float = math.inf
    kill_at: float = math.inf

    @property
    def is_quarantined(self) -> bool:
        """Whether it runs one suspect."""
        return runs_alone(self.worker_id)

    @property
    def is_isolated(self) -> bool:
        """Whether it runs one isolated task."""
        return runs_isolated(self.worker_id)

    @property
    def is_alone(self) -> bool:
        """Whether it runs one task, and no other one takes its place."""
        return self.is_quarantined or self.is_isolated

    @property
    def has_failed_to_start(self) -> bool:
        """Whether it is dead, and has done nothing."""
        return not (self.was_ready or self.was_asked) and self.exit_code != 0

    @property
    def died_as_planned(self) -> bool:
        """Whether it died of a signal that its supervisor has sent; SIGTERM kills a process that is starting."""
        if self.exit_code == -signal.SIGKILL:
            return self.was_killed
        return self.exit_code == -signal.SIGTERM and (self.was_asked or self.is_stalled)


class Processes:
    """The living worker processes, `count` and those that run one task, and when the next one may be started.

    on_death: called once for each process that has exited. start_method: see `STARTERS`.
    on_started: called by another thread when there is something for `take_started`.
    """

    def __init__(
        self,
        options: WorkerOptions,
        count: int,
        *,
        on_death: Callable[[Child], None],
        start_method: str = conf.SPAWN,
        on_started: Callable[[], object] = lambda: None,
    ) -> None:
        self.options = options
        self.count = count
        self.on_death = on_death
        self.children: list[Child] = []
        # Whether processes are expected to exit: their deaths are no errors, and nobody replaces them.
        self.is_stopping = False
        self._starter = STARTERS[start_method](on_started)
        self._starting: set[Start] = set()
        self._orphaned_groups: set[int] = set()
        # Of those that are over, the process that has not been told of it yet.
        self._over: list[tuple[Child, str]] = []
        self._vacancies = [Vacancy()] * count
        self._failed_starts = 0
        # Whether a slow start was logged, and none was quick since.
        self._starts_slowly = False
        # What a process said that had to exit because of the database.
        self.not_set_up: DatabaseNotSetUp | None = None

    @property
    def sentinels(self) -> list[int]:
        """What becomes readable when a process exits, or says something."""
        pipes = [child.pipe.fileno() for child in self.children if not child.is_mute]
        return [child.process.sentinel for child in self.children] + pipes

    @property
    def are_complete(self) -> bool:
        """Whether all processes run, those that run one task aside."""
        return sum(not child.is_alone for child in self.children) == self.count

    @property
    def are_ready(self) -> bool:
        """Whether all processes run, and have begun to fetch."""
        return self.are_complete and all(each.was_ready and not each.process.has_exited() for each in self.children)

    @property
    def quarantined(self) -> list[Child]:
        """The quarantine processes."""
        return [child for child in self.children if child.is_quarantined]

    def count_quarantined(self) -> int:
        """Return how many quarantine processes there are, those that are being started included."""
        starting = [start.options.alone for start in self._starting]
        return len(self.quarantined) + sum(alone is not None and runs_alone(alone.worker_id) for alone in starting)

    @property
    def cannot_start(self) -> bool:
        """Whether several processes in a row have exited before they were ready."""
        return self._failed_starts >= FAILED_STARTS

    # --- start

    def start_missing(self, now: float) -> None:
        """Start a process for each missing one, unless it is too early; nothing replaces one that runs one task."""
        for vacancy in [vacancy for vacancy in self._vacancies if vacancy.start_at <= now]:
            self._vacancies.remove(vacancy)
            self.start(self.options, now, vacancy.failed_starts)
        self.take_started(now)

    def start(self, options: WorkerOptions, now: float, failed_starts: int = 0, *, giver: Child | None = None) -> None:
        """Have one process started with options of its own. failed_starts, giver: see `Child`."""
        # Async tasks have slots of their own, after those of the threads.
        slot_table = SlotTable(2 * options.concurrency)
        ours, theirs = multiprocessing.Pipe()
        crash_stack = CrashStack()
        inherited = entry_points.pack()
        arguments = (inherited, stderr_verbosity(), options, slot_table, theirs, crash_stack.path)
        wanted = Start(arguments, options, slot_table, ours, theirs, crash_stack, now, failed_starts, giver)
        if self.is_stopping and options.alone is not None:
            theirs.close()
            wanted.abandon()
            self._note_never_started(wanted)
            return
        self._starting.add(wanted)
        self._starter.begin(wanted)

    def take_started(self, now: float) -> None:
        """Add the processes that have been started since the last call, and try again where that failed."""
        for start in self._starter.done():
            self._starting.discard(start)
            if start.is_abandoned:
                continue
            if start.began is not None:
                self.children.append(self._child_of(start, start.began))
                continue
            start.abandon()
            alone = start.options.alone
            # `Recovery` warns of an isolated task that waits for that.
            level = logging.INFO if alone is not None and runs_isolated(alone.worker_id) else logging.ERROR
            logger.log(level, "a worker process could not be started: %r", start.error)
            if alone is not None:
                self._note_never_started(start)
            else:
                # Not since it was asked for, which may be long ago: a fork server that dies is not gone at once.
                self._note_failed_start(start.failed_starts, now, now)

    def stop_starting(self, now: float) -> None:
        """Start no more. A process that begins after all finds its pipe closed, and exits."""
        self.is_stopping = True
        self.take_started(now)
        for start in self._starting:
            start.abandon()
            if start.options.alone is not None:
                self._note_never_started(start)
        self._starting.clear()

    def _note_never_started(self, start: Start) -> None:
        """Count a process as dead before it has begun: a task was claimed for it."""
        child = self._child_of(start, NeverStarted())
        child.was_asked = self.is_stopping
        self._note_death(child)

    @staticmethod
    def _child_of(start: Start, process: ChildProcess) -> Child:
        worker_id = start.options.worker_id_of(process.pid)
        place = (process, start.slot_table, start.pipe, worker_id, start.at, start.crash_stack)
        return Child(*place, failed_starts=start.failed_starts, alone=start.options.alone, giver=start.giver)

    # --- death

    def reap(self, now: float) -> None:
        """Notice dead processes: kill what they left, pass them on, and have them replaced."""
        self._orphaned_groups = {pid for pid in self._orphaned_groups if reap_group(pid)}
        for child in [child for child in self.children if child.process.has_exited()]:
            # Before its process id can be given to another process.
            child.process.kill_group()
            child.exit_code = child.process.exit_code
            if child.exit_code is None:
                continue  # whoever reaps it has not said it yet
            self._read_words(child, now)
            self.children.remove(child)
            self._orphaned_groups.add(child.process.pid)
            if child.exit_code == UNKNOWN_EXIT_CODE and child.said_exit is not None:
                child.exit_code = child.said_exit
            child.pipe.close()
            child.process.close()
            child.stack = child.crash_stack.take()
            self._note_death(child)
            if child.exit_code == 0 or self.is_stopping:
                if not child.is_alone:
                    self._vacancies.append(Vacancy())
                continue
            self._log_death(child)
            if not child.is_alone:
                self._add_vacancy(child, now)

    @staticmethod
    def _log_death(child: Child) -> None:
        how = lifecycle.describe_exit(child.exit_code)
        if child.died_as_planned:
            # Why it had to stop was said before.
            logger.info("worker %s has been stopped: %s", child.worker_id, how)
        elif not (child.is_isolated and child.has_failed_to_start):  # `Recovery` says that, with its task
            details = "\n".join(filter(None, [how, child.stack]))
            # That of a task alone in it is the task's failure, which is logged when it is final.
            level = logging.WARNING if child.is_alone else logging.ERROR
            logger.log(level, "worker %s exited unexpectedly: %s", child.worker_id, details)

    def _add_vacancy(self, child: Child, now: float) -> None:
        if child.was_ready:
            self._failed_starts = 0
            self._vacancies.append(Vacancy.after_death(child.started_at, now))
        else:
            self._note_failed_start(child.failed_starts, child.started_at, now)

    def _note_failed_start(self, failed_before: int, started_at: float, now: float) -> None:
        self._failed_starts += 1
        self._vacancies.append(Vacancy.after_failed_start(failed_before + 1, started_at, now))

    def _note_death(self, child: Child) -> None:
        self.on_death(child)
        if child.giver is not None:
            self._over.append((child.giver, child.worker_id))

    # --- what the processes say

    def listen(self, now: float) -> None:
        """Do what the processes have asked for, and tell them which processes of theirs are over."""
        for child in self.children.copy():
            self._read_words(child, now)
        self._over = [
            (giver, worker_id)
            for giver, worker_id in self._over
            if giver in self.children and not _send(giver, OVER, worker_id)
        ]

    def _read_words(self, child: Child, now: float) -> None:
        for word in [] if child.is_mute else _words_of(child):
            if word == READY:
                child.was_ready = True
                if child.is_isolated:
                    self._note_start(child, now - child.started_at)
            if not isinstance(word, tuple):
                continue
            if word[0] == NOT_SET_UP:
                self.not_set_up = DatabaseNotSetUp(*word[1:])
            elif word[0] == EXITS:
                child.said_exit = word[1]
            elif word[0] == START:
                self.start(self.options.for_one(word[1]), now, giver=child)

    def _note_start(self, child: Child, seconds: float) -> None:
        """Warn of a slow start of an isolated task; once, until one is quick again: on a busy host all are slow."""
        was_slow, self._starts_slowly = self._starts_slowly, seconds > SLOW_START_SECONDS
        if self._starts_slowly and not was_slow:
            logger.warning(
                "worker %s: the process of an isolated task took %.1f s to start; %s",
                child.worker_id,
                seconds,
                load_average(),
            )

    # --- signals

    def signal_all(self, number: int) -> None:
        """Send a signal to every worker process, not to what its tasks have started."""
        for child in self.children:
            if number == signal.SIGTERM:
                child.was_asked = True
                if child.is_alone:
                    # Its task is in the main thread, where the handler waits for a long call in C.
                    _send(child, STOP)
            child.process.signal(number)

    def signal_groups(self, number: int) -> None:
        """Send a signal to every worker process and to all that its tasks have started."""
        for child in self.children:
            child.process.signal_group(number)

    def hurry_all(self) -> None:
        """Ask every process that stops to requeue its tasks at once; one that does not read is killed in the end."""
        for child in self.children:
            _send(child, HURRY)

    def kill_overdue(self, now: float) -> None:
        """Kill processes in which a task ignores its timeout or its cancellation; the next round replaces them."""
        for child in self.children:
            if now >= child.kill_at and not child.was_killed:
                self.kill(child)
            must_stop = now >= child.stop_at
            running = child.slot_table.running()
            late = [each for each in running if must_stop or (each.deadline and each.deadline < now)]
            if not late or child.overdue or child.cancelled:
                continue
            child.cancelled = {each.id for each in late if each.is_cancelled or must_stop}
            child.overdue = {each.id for each in late} - child.cancelled
            for each in late:
                text = "worker %s is killed: task %s ran on after its timeout"
                if each.id in child.cancelled:
                    text = "worker %s is killed: task %s was cancelled and did not stop"
                # An ERROR of the task's own follows if it has failed finally.
                logger.warning(text, child.worker_id, each.id, extra=log_extra_of_ids([each.id]))
            child.process.signal(STACKS_SIGNAL)
            child.kill_at = now + STACK_SECONDS

    def cancel(self, worker_id: str, ids: Sequence[str]) -> None:
        """Send a process the ids of cancelled tasks, unless it does not read; the next beat sends them again."""
        for child in self.children:
            if child.worker_id == worker_id:
                _send(child, CANCEL, *ids[:MOST_CANCELLED])
                if child.is_alone:
                    # No thread of it can act while its task holds the interpreter.
                    stop_at = time.monotonic() + conf.current().timeout_grace_seconds
                    child.stop_at = min(child.stop_at, stop_at)

    def drain(self, child: Child, *, is_draining: bool) -> None:
        """Ask a process to take no more tasks, or to take tasks again; when it does not read, the next beat asks."""
        if child.is_draining != is_draining and _send(child, DRAIN, is_draining):
            child.is_draining = is_draining
            logger.info("worker %s %s", child.worker_id, "takes no more tasks" if is_draining else "takes tasks again")

    def kill_remaining(self) -> None:
        """Kill the processes that did not stop in time, and notice their death."""
        for child in self.children:
            logger.error("worker %s did not stop in time and is killed", child.worker_id)
            self.kill(child)
        self.reap(time.monotonic())

    def kill(self, child: Child) -> None:
        """Kill a process and all that its tasks have started; the next round replaces it."""
        child.was_killed = True
        child.process.kill_group()


def _send(child: Child, *message: object) -> bool:
    """Send a process a message, unless it does not read; return whether it was sent.

    A pipe that is writable takes MOST_CANCELLED ids at once, so a process that stands still keeps nobody waiting.
    """
    found = select.poll()
    found.register(child.pipe, select.POLLOUT)
    if not found.poll(0):
        return False
    try:
        child.pipe.send(message)
    except OSError:
        return False
    return True


def _words_of(child: Child) -> list[Any]:
    """Return what a process has said since the last call; note the end of its pipe."""
    words = []
    try:
        while child.pipe.poll():
            words.append(child.pipe.recv())
    except (EOFError, OSError):
        child.is_mute = True
    return words

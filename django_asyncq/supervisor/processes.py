"""The worker processes of a supervisor: started, killed when a task ignores its timeout, replaced when dead."""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .. import conf, failpoints, lifecycle
from ..definitions.names import runs_alone
from ..exceptions import DatabaseNotSetUp
from ..guard import get_logger
from ..logs import log_extra_of_ids
from ..registry import every_task
from ..stderr_log import stderr_verbosity
from ..worker import inherited_settings
from ..worker.bootstrap import run_worker
from ..worker.child_process import UNKNOWN_EXIT_CODE, ChildProcess, NeverStarted
from ..worker.crash_stack import CrashStack
from ..worker.options import CANCEL, DRAIN, EXITS, HURRY, NOT_SET_UP, READY, WorkerOptions
from ..worker.process_groups import reap_group
from ..worker.slot_table import SlotTable
from .starting import STARTERS, Start
from .vacancies import Vacancy

logger = get_logger("django_asyncq.supervisor")

# After the tasks' own grace period: time to write the last outcomes.
EXIT_MARGIN_SECONDS = 8.0
# A burst gives up when this many processes in a row exited before they were ready; a service never gives up.
FAILED_STARTS = 3
# How many ids are sent at once: 40 bytes each, and a pipe that is writable takes 50 KB.
MOST_CANCELLED = 500


class WorkersCannotStart(RuntimeError):
    """Worker processes exit before they are ready; their own output says why."""


@dataclass(slots=True, eq=False)
class Child:
    """One worker process, and what is known about it after its death.

    overdue, cancelled: ids of the tasks for which it was killed: after their timeout or deadline, or although they were
    cancelled. was_killed: by its supervisor. was_asked: whether all were sent SIGTERM. was_ready: whether
    it began to fetch; known after its death. is_stalled: whether it was asked to stop because it stood still.
    exit_code, stack: of the dead process; stack: "" if it left none.
    failed_starts: how many processes before it, each replaced by the next, exited before they were ready.
    is_draining: whether it was asked to take no more tasks.
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

    @property
    def is_starting(self) -> bool:
        """Whether it lives and has not begun to fetch. It sends nothing else than READY."""
        return not self.pipe.poll()

    @property
    def is_alone(self) -> bool:
        """Whether it is a quarantine process, which runs one task at a time."""
        return runs_alone(self.worker_id)

    @property
    def died_as_planned(self) -> bool:
        """Whether it died of a signal that its supervisor has sent; SIGTERM kills a process that is starting."""
        if self.exit_code == -signal.SIGKILL:
            return self.was_killed
        return self.exit_code == -signal.SIGTERM and (self.was_asked or self.is_stalled)


class Processes:
    """The living worker processes, `count` and those in quarantine, and when the next one may be started.

    on_death: called once for each process that has exited. start_method: see `starting`.
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
        self._vacancies = [Vacancy()] * count
        self._failed_starts = 0
        # What a process said that had to exit because of the database.
        self.not_set_up: DatabaseNotSetUp | None = None

    @property
    def sentinels(self) -> list[int]:
        """What becomes readable when a process exits."""
        return [child.process.sentinel for child in self.children]

    @property
    def are_complete(self) -> bool:
        """Whether all processes run, those in quarantine aside."""
        return len(self.children) - len(self.alone) == self.count

    @property
    def are_ready(self) -> bool:
        """Whether all processes run, and have begun to fetch."""
        return self.are_complete and not any(each.is_starting or each.process.has_exited() for each in self.children)

    @property
    def alone(self) -> list[Child]:
        """The quarantine processes."""
        return [child for child in self.children if child.is_alone]

    @property
    def cannot_start(self) -> bool:
        """Whether several processes in a row have exited before they were ready."""
        return self._failed_starts >= FAILED_STARTS

    # --- start

    def start_missing(self, now: float) -> None:
        """Start a process for each missing one, unless it is too early; nothing replaces one in quarantine."""
        for vacancy in [vacancy for vacancy in self._vacancies if vacancy.start_at <= now]:
            self._vacancies.remove(vacancy)
            self.start(self.options, now, vacancy.failed_starts)
        self.take_started(now)

    def start(self, options: WorkerOptions, now: float, failed_starts: int = 0) -> None:
        """Have one process started with options of its own. failed_starts: see `Child`."""
        # Async tasks have slots of their own, after those of the threads.
        slot_table = SlotTable(2 * options.concurrency, keeps_logs=_keeps_logs())
        context = self._starter.context
        ours, theirs = context.Pipe()
        crash_stack = CrashStack()
        inherited = inherited_settings.pack()
        arguments = (inherited, stderr_verbosity(), options, slot_table, theirs, crash_stack.path)
        process = context.Process(target=run_worker, args=arguments, name="asyncq-worker")
        wanted = Start(process, options, slot_table, ours, theirs, crash_stack, now, failed_starts)
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
            logger.error("a worker process could not be started: %r", start.error)
            if start.options.quarantine is not None:
                # It counts as dead before it has begun: a suspect was claimed for it.
                self.on_death(self._child_of(start, NeverStarted()))
            else:
                # Not since it was asked for, which may be long ago: a fork server that dies is not gone at once.
                self._note_failed_start(start.failed_starts, now, now)

    def stop_starting(self, now: float) -> None:
        """Start no more. A process that begins after all finds its pipe closed, and exits."""
        self.is_stopping = True
        self.take_started(now)
        for start in self._starting:
            start.abandon()
        self._starting.clear()

    @staticmethod
    def _child_of(start: Start, process: ChildProcess) -> Child:
        worker_id = start.options.worker_id_of(process.pid)
        place = (process, start.slot_table, start.pipe, worker_id, start.at, start.crash_stack)
        return Child(*place, failed_starts=start.failed_starts)

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
            self.children.remove(child)
            self._orphaned_groups.add(child.process.pid)
            self._read_words(child)
            child.pipe.close()
            child.process.close()
            child.stack = child.crash_stack.take()
            self.on_death(child)
            failpoints.reach("reap.death_noticed")
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
        else:
            details = "\n".join(filter(None, [how, child.stack]))
            logger.error("worker %s exited unexpectedly: %s", child.worker_id, details)

    def _add_vacancy(self, child: Child, now: float) -> None:
        if child.was_ready:
            self._failed_starts = 0
            self._vacancies.append(Vacancy.after_death(child.started_at, now))
        else:
            self._note_failed_start(child.failed_starts, child.started_at, now)

    def _note_failed_start(self, failed_before: int, started_at: float, now: float) -> None:
        self._failed_starts += 1
        self._vacancies.append(Vacancy.after_failed_start(failed_before + 1, started_at, now))

    def _read_words(self, child: Child) -> None:
        """Note whether a dead process began to fetch tasks, whether it found the database not set up, how it exited."""
        for word in words_of(child.pipe):
            child.was_ready = child.was_ready or word == READY
            if not isinstance(word, tuple):
                continue
            if word[0] == NOT_SET_UP:
                self.not_set_up = DatabaseNotSetUp(*word[1:])
            elif word[0] == EXITS and child.exit_code == UNKNOWN_EXIT_CODE:
                child.exit_code = word[1]

    # --- signals

    def signal_all(self, number: int) -> None:
        """Send a signal to every worker process, not to what its tasks have started."""
        for child in self.children:
            child.was_asked = child.was_asked or number == signal.SIGTERM
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
            late = [each for each in child.slot_table.running() if each.deadline and each.deadline < now]
            if not late or child.overdue or child.cancelled:
                continue
            child.cancelled = {each.id for each in late if each.is_cancelled}
            child.overdue = {each.id for each in late if not each.is_cancelled}
            for each in late:
                text = "worker %s is replaced: task %s ran on after its timeout"
                if each.is_cancelled:
                    text = "worker %s is replaced: task %s was cancelled and did not stop"
                logger.error(text, child.worker_id, each.id, extra=log_extra_of_ids([each.id]))
            self.kill(child)

    def cancel(self, worker_id: str, ids: Sequence[str]) -> None:
        """Send a process the ids of cancelled tasks, unless it does not read; the next beat sends them again."""
        for child in self.children:
            if child.worker_id == worker_id:
                _send(child, CANCEL, *ids[:MOST_CANCELLED])

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


def _keeps_logs() -> bool:
    """Whether a process needs memory for what its runs log. One call that asks for it (`using`) is not known here."""
    return conf.current().keep_logs > 0 or any(task.keep_logs for task in every_task())


def words_of(pipe: Any) -> list[Any]:
    """Return what the dead process at the other end of the pipe has said."""
    words = []
    with suppress(EOFError, OSError):
        while pipe.poll():
            words.append(pipe.recv())
    return words

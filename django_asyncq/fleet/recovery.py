"""The tasks of dead worker processes: each process's are recovered once, and again while a store is unreachable."""

from __future__ import annotations

import logging
import re
import signal
import time
from datetime import datetime
from pathlib import Path

from django.db import connections

from .. import conf, lifecycle
from ..broker import Broker
from ..broker.access import queues_with
from ..broker.task_entries import dequeue_suspect
from ..core.guard import EX_SOFTWARE, get_logger, is_a
from ..core.logs import log_extra_of_ids
from ..core.registry import registered
from ..exceptions import BrokerUnavailable, TaskCancelled, TaskNotRegistered, TaskTimeout
from ..results import Judgement, judge_failure
from ..storage import database_clock
from ..storage.errors import STORE_ERRORS, Faults, concerns_one_row, in_turn
from ..worker.child_process import crashed_thread
from ..worker.job import timeout_text
from ..worker.options import Alone, WorkerOptions
from .processes import FAILED_STARTS, Child, Processes, load_average

# --- How much memory worker processes have used, and whether the kernel may have killed one for want of memory.
#
# Linux only; elsewhere nothing is known. A dead process no longer has these figures, so they are read while it
# lives. Source: man 5 proc, and the kernel's admin-guide/cgroup-v1/memory and cgroup-v2.

# A task may use up the memory quickly. Reading those of 8 processes takes 0.2 ms.
SAMPLE_SECONDS = 0.2
# The kernel begins to kill at the limit, and a process may grow a little between a sample and its death.
NEAR_LIMIT = 0.9
PEAK = re.compile(r"^VmHWM:\s+(\d+) kB", re.MULTILINE)
OOM_KILLS = re.compile(r"^oom_kill (\d+)", re.MULTILINE)
# cgroup version → names of the files of its limit, its usage, and its count of processes killed.
FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control"),
    2: ("memory.max", "memory.current", "memory.events"),
}


class MemorySampler:
    """Samples the memory of the processes and of their cgroup. root: where the file systems are, for tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self.peaks_mb: dict[str, float] = {}
        self.was_near_limit = False
        self._sample_at = 0.0
        self._version, self._folder = self._find_cgroup()
        self._oom_kills = self._count_oom_kills()

    def sample(self, children: list[Child], now: float) -> None:
        """Read the figures of the living processes, at most each SAMPLE_SECONDS. now: monotonic seconds."""
        if now < self._sample_at:
            return
        self._sample_at = now + SAMPLE_SECONDS
        living = {child.worker_id: self._peak_mb(child.process.pid) for child in children}
        # One that has just died keeps its last figure until its tasks are recovered.
        self.peaks_mb |= {worker_id: peak for worker_id, peak in living.items() if peak}
        self.was_near_limit = self._is_near_limit()

    def describe(self, child: Child) -> list[str]:
        """Describe the memory of a dead process: its peak if known, and whether it may have been killed for it."""
        peak = self.peaks_mb.get(child.worker_id)
        found = [f"it had used up to {peak:.0f} MB of memory"] if peak else []
        if child.exit_code == -signal.SIGKILL and not child.was_killed and self._may_be_out_of_memory():
            found.append("the kernel may have killed it because memory was used up (OOM killer)")
        return found

    def forget(self, child: Child) -> None:
        """Forget a dead process whose tasks are recovered."""
        self.peaks_mb.pop(child.worker_id, None)
        self._oom_kills = self._count_oom_kills()

    def _may_be_out_of_memory(self) -> bool:
        return self.was_near_limit or self._count_oom_kills() > self._oom_kills

    def _peak_mb(self, pid: int) -> float:
        found = PEAK.search(_read(self.root / f"proc/{pid}/status"))
        return int(found[1]) / 1024 if found else 0.0

    def _find_cgroup(self) -> tuple[int, Path]:
        """Return the cgroup's version and its folder; in a container it is seen as the root."""
        for line in _read(self.root / "proc/self/cgroup").splitlines():
            number, controllers, path = line.split(":", 2)
            version = 2 if number == "0" else 1 if "memory" in controllers.split(",") else 0
            base = self.root / ("sys/fs/cgroup/memory" if version == 1 else "sys/fs/cgroup")
            for folder in (base / path.lstrip("/"), base) if version else ():
                if (folder / FILES[version][2]).exists():
                    return version, folder
        return 2, self.root / "sys/fs/cgroup"

    def _is_near_limit(self) -> bool:
        limit, used = (_read(self._folder / name).strip() for name in FILES[self._version][:2])
        return limit.isdigit() and used.isdigit() and int(used) > NEAR_LIMIT * int(limit)

    def _count_oom_kills(self) -> int:
        found = OOM_KILLS.search(_read(self._folder / FILES[self._version][2]))
        return int(found[1]) if found else 0


def _read(path: Path) -> str:
    """Return the text of a small file; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# --- What the death of a worker process counts against the tasks that it had begun. Uses no store.
#
# A loss counts against a task only when no other can have caused it. All that may have caused it go back, and
# become suspects when that happens twice in a row: they run alone next, so a task that takes processes down is soon
# the only one that it can take down.


def blame(child: Child) -> lifecycle.Blame:
    """Return whom to blame for the death of a process.

    Nobody when it stopped by itself or was killed by its supervisor: then it was no task that took it down.
    """
    running = child.slot_table.running()
    begun = frozenset(each.id for each in running)
    # A task that exits with code 0 leaves its process without a last word.
    has_stopped = child.exit_code == 0 and child.said_exit is not None
    if has_stopped or ((child.was_killed or child.died_as_planned) and not child.is_stalled):
        return lifecycle.Blame()
    if child.is_isolated:
        return lifecycle.Blame(named=begun)
    if child.is_stalled:
        # One of them may hold what the process waited for; alone, it keeps no other task waiting.
        return lifecycle.Blame(suspects=begun)
    thread = crashed_thread(child.stack)
    # Coroutines share a thread, so several may be named.
    named = frozenset(each.id for each in running if thread is not None and each.thread == thread)
    if named:
        return lifecycle.Blame(named=named) if len(named) == 1 else lifecycle.Blame(suspects=named)
    # EX_SOFTWARE: the process found itself unable to go on, and no task needs to be the cause.
    if len(begun) == 1 and (child.exit_code != EX_SOFTWARE or child.is_alone):
        return lifecycle.Blame(alone=begun)
    return lifecycle.Blame(suspects=begun)


def describe_death(child: Child, memory: MemorySampler) -> str:
    """Describe how a process died, for the errors of the tasks that it may have died of."""
    others = len(child.slot_table.running()) - 1
    company = "lost alone" if others < 1 else f"lost together with {others} other{'s' if others > 1 else ''}"
    return "; ".join(filter(None, [lifecycle.describe_exit(child.exit_code), company, *memory.describe(child)]))


logger = get_logger("django_asyncq.fleet")

RECOVER_AGAIN_SECONDS = 1.0
START_AGAIN_SECONDS = 5


class Recovery:
    """The dead processes whose tasks are not recovered yet."""

    def __init__(self, broker: Broker, options: WorkerOptions, memory: MemorySampler) -> None:
        self.broker = broker
        self.options = options
        self.memory = memory
        self.dead: list[Child] = []
        self._recover_at = 0.0
        # Of isolated tasks, in a row.
        self._failed_starts = 0
        self._faults = Faults(
            logger,
            "the tasks of dead workers cannot be recovered yet",
            over="the tasks of dead workers have been recovered",
        )

    def add(self, child: Child) -> None:
        """Have the tasks of a dead process recovered in the next round."""
        self.dead.append(child)
        self._recover_at = time.monotonic()

    def recover_dead(self, now: float) -> bool:
        """Recover the tasks of dead processes; retry later while a store is unreachable. Return whether it was done."""
        if not self.dead or now < self._recover_at:
            return False
        self._recover_at = now + RECOVER_AGAIN_SECONDS
        has_failed = False
        for child in self.dead.copy():
            try:
                self.recover(child)
            except Exception as error:  # noqa: BLE001 - it is logged, and the leases of the tasks expire at last
                connections.close_all()
                self._faults.note(error)
                has_failed = True
                if is_a(error, STORE_ERRORS) and not concerns_one_row(error):
                    return False
                continue
            self.dead.remove(child)
            self.memory.forget(child)
        if not has_failed:
            self._faults.clear()
        return not has_failed

    def recover(self, child: Child) -> None:
        """Recover the tasks of one dead process. Raises: BrokerUnavailable, django.db.Error."""
        reason, blamed = describe_death(child, self.memory), blame(child)
        # Read again: the known names may be 5 s old, and the worker may have claimed a task of a newer queue.

        def recover_queue(queue: str) -> None:
            leases = self.broker.held(queue, child.worker_id)
            if not leases:
                return
            if child.is_isolated and child.has_failed_to_start:
                self._log_failed_start(child, leases[0].id, queue, "\n".join(filter(None, [reason, child.stack])))
                self.broker.postpone(queue, child.worker_id, leases, START_AGAIN_SECONDS)
                return
            recovered = lifecycle.recover(
                self.broker,
                queue,
                child.worker_id,
                leases,
                reason=reason,
                blame=blamed,
                timed_out=_cancelled(child.cancelled) | _timed_out(child.overdue),
                stack=child.stack,
            )
            logger.info("worker %s: tasks recovered in queue %s: %d", child.worker_id, queue, recovered)

        if child.is_isolated and child.was_ready:
            self._failed_starts = 0
        queues = [child.alone.queue] if child.alone else self.options.queues or sorted(self.broker.queues())
        in_turn(queues, recover_queue)

    def _log_failed_start(self, child: Child, id: str, queue: str, reason: str) -> None:
        """Warn of the first failed start of an isolated task; log one ERROR when it seems that none will succeed."""
        self._failed_starts += 1
        logger.log(
            {1: logging.WARNING, FAILED_STARTS: logging.ERROR}.get(self._failed_starts, logging.INFO),
            "task %s: its process did not start in %.1f s, in a row: %d; "
            "it runs again in %d s, without using an attempt; %s: %s",
            id,
            time.monotonic() - child.started_at,
            self._failed_starts,
            START_AGAIN_SECONDS,
            load_average(),
            reason,
            extra=log_extra_of_ids([id], queue=queue),
        )


def _cancelled(ids: set[str]) -> dict[str, tuple[BaseException, datetime | None]]:
    """Return the error, by id, of cancelled tasks that did not stop. They are not retried."""
    text = "the task was cancelled and did not stop when asked; its process was killed"
    return {id: (TaskCancelled(text), None) for id in ids}


def _timed_out(overdue: set[str]) -> dict[str, tuple[BaseException, datetime | None]]:
    """Return the error and the time of the retry, by id, of tasks that overran their timeout."""
    decided: dict[str, tuple[BaseException, datetime | None]] = {}
    for id, record in lifecycle.load_rows(sorted(overdue)).items():
        now = database_clock.now()
        is_past_deadline = record.deadline is not None and record.deadline <= now
        passed = timeout_text(record, by_deadline=is_past_deadline)
        error = TaskTimeout(f"{passed} and did not stop when asked; its process was killed")
        try:
            judgement = judge_failure(registered(record.name), record, error, now)
        except TaskNotRegistered:
            judgement = Judgement(error, None)
        decided[id] = (judgement.exception, judgement.retry_at)
    return decided


# --- Suspects run in quarantine: in extra worker processes, beside the others, as an isolated task does.
#
# Nobody drains and nobody waits for them. A quarantine process takes one suspect of a queue after the other and exits
# when none is left, or when one of them takes it down; that task was then alone. It has an id that ends in `-alone`.

LOOK_SECONDS = 1.0
# A suspect that has waited this long beside the others gets a process of its own.
PATIENCE_SECONDS = 5.0


class Quarantine:
    """Starts as many processes as its supervisor has others, while suspects wait, and more when they wait for long.

    It claims the first suspect for each, so of several supervisors one starts it. There are never more quarantine
    processes than slots in all other processes together.
    """

    def __init__(self, broker: Broker, options: WorkerOptions, processes: Processes) -> None:
        self.broker = broker
        self.options = options
        self.processes = processes
        self._faults = Faults(logger, "suspects cannot be claimed", over="suspects are claimed again")
        self._number = 1
        self._look_at = 0.0
        self._not_before = 0.0
        self._starting_at = 0.0

    def look_soon(self) -> None:
        """Look for suspects in the next round: there may be new ones."""
        self._look_at = 0.0

    def note_death(self, child: Child) -> None:
        """Wait for a while when a quarantine process died before it could fetch: the next one would die too."""
        if child.is_quarantined and child.has_failed_to_start:
            self._not_before = time.monotonic() + PATIENCE_SECONDS

    def tick(self, now: float, *, is_draining: bool = False) -> None:
        """Start a quarantine process if a suspect waits for one. now: monotonic seconds.

        is_draining: whether this supervisor takes no more tasks.
        """
        if now < max(self._look_at, self._not_before) or self.processes.is_stopping or is_draining:
            return
        self._look_at = now + LOOK_SECONDS
        if any(not child.was_ready for child in self.processes.quarantined):
            # On a busy host a start takes long, and one more would make it longer.
            self._starting_at = now
        while self._start_one(now):
            pass

    def _start_one(self, now: float) -> bool:
        """Start a quarantine process if there may be one more and a suspect waits for it; return whether it did."""
        count = self.processes.count_quarantined()
        if count >= self.options.concurrency * self.processes.count:
            return False
        is_extra = count >= self.processes.count
        if is_extra and now - self._starting_at < PATIENCE_SECONDS:
            return False
        try:
            queue = self._claim(waited_seconds=PATIENCE_SECONDS if is_extra else 0.0)
        except Exception as error:  # noqa: BLE001 - it is logged there; whatever it is, the supervisor must live
            if not is_a(error, BrokerUnavailable):
                self._faults.note(error)
            # The number stays: the next call returns what a lost reply may have claimed for it.
            self._not_before = now + PATIENCE_SECONDS
            return False
        self._faults.clear()
        if queue is None:
            return False
        alone = Alone(self.options.alone_id(self._number), queue)
        self._number += 1
        self._starting_at = now
        self.processes.start(self.options.for_one(alone), now)
        return True

    def _claim(self, *, waited_seconds: float) -> str | None:
        """Claim a suspect for the next process; return its queue. Raises: BrokerUnavailable."""
        worker_id, seconds = self.options.alone_id(self._number), conf.current().lease_seconds
        queues = list(self.options.queues or self.broker.known_queues())
        # What it holds may be a suspect whose reply was lost.
        for queue in queues_with(self.broker, queues, "suspects", held_by=[worker_id]):
            lease = dequeue_suspect(self.broker, queue, worker_id, seconds, waited_seconds=waited_seconds)
            if lease is not None:
                text = "task %s of queue %s runs in quarantine: it was lost with its worker"
                logger.info(text, lease.id, queue, extra=log_extra_of_ids([lease.id], queue=queue))
                return queue
        return None

"""Named points between the two stores, at which a test can kill the process: `ASYNCQ_CRASH=<point>` or `<point>:<n>`.

The variable is read once, at import; without it `reach` does nothing. Imports nothing of the project. Nobody reads
here what a task is or does: a point only says how far the process has come.
Source: FreeBSD, fail(9).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

VARIABLE = "ASYNCQ_CRASH"
MARK_VARIABLE = "ASYNCQ_CRASH_MARK"

# What has just happened; then what has not.
POINTS: Mapping[str, str] = {
    # Into the queue.
    "build.gate_built": "a gate's members were made from the rows; those that ended meanwhile are not taken out yet",
    "enqueue.slot_taken": "the gate gave a provisional slot; the row is not inserted",
    "enqueue.row_inserted": "the row is inserted, or on its way; an open transaction is not committed",
    "enqueue.committed": "the transaction is committed; nothing is pushed, no slot confirmed",
    "dispatch.slots_confirmed": "slots are confirmed apart (for later, lost, in a cluster); nothing is pushed",
    "dispatch.queue_pushed": "the tasks of one queue are pushed; those of the next are not",
    "broker.batch_sent": "one call has told Redis of some hundred tasks; the others of the same group are not told",
    "batch.taken": "tasks that were enqueued one right after the other are taken to be pushed; none of them is",
    "enqueue.pushed": "all is pushed, or waits to be pushed with more; it is not announced",
    "park.row_written": "the row of a task that lost its slot says 3 with `retry_at`; Redis is not told",
    # Through a worker.
    "claim.leased": "Redis has leased the tasks; their rows are not read",
    "claim.rows_read": "the rows are read; no slot has the tasks",
    "begin.counted": "the board shows the run, the attempt is counted in memory; the function is not called",
    "mark.row_written": "the row says 1; it is not announced, the task goes on",
    "run.ended": "the function has returned; nobody was told",
    "report.row_written": "the outcome is in the row; Redis is not told",
    "acknowledge.queue_told": "Redis knows how the tasks of one queue ended; those of the next are not told",
    "report.acknowledged": "Redis is told; it is not announced, gate slots are not given back",
    "complete.row_written": "effects and success are written in one transaction; it is not committed",
    "complete.committed": "the effects and the success are committed; Redis is not told",
    "spill.outcome_left": "the outcomes of one queue are left in Redis; those of the next are not",
    "replay.row_written": "an outcome that was left in Redis is in the row; Redis is not told",
    "refuse.row_written": "the row of a task that nobody can run says 3; its entry is still there",
    "requeue.row_written": "the row of an unfinished task says 0 again; Redis is not told",
    # Back into the queue.
    "retry.slot_taken": "the gate gave a slot again; the row still says 3",
    "retry.committed": "the row says 0 again; nothing is pushed",
    "recover.row_written": "the row of a lost worker's task says how it goes on; Redis is not told",
    "recover.redis_told": "both stores know that it goes on; it is not announced",
    "abandon.row_written": "the row in 1 that nobody knew of is closed; it is not pushed",
    # Out for good.
    "delete.committed": "the row is deleted; its slot and its entry are still there",
    "prune.rows_deleted": "old rows are deleted; their entries in the archive are still there",
    # What looks after the rest.
    "forward.retry_found": "a retry is found due; its row is not changed",
    "reconcile.marked_alive": "Redis had lost its memory and is marked as alive; nothing is rebuilt",
    "reconcile.page_mended": "some hundred rows are mended; the next page is not",
    "reconcile.leases_mended": "lapsed leases are handed back; the other repairs are not done",
    "beat.lease_renewed": "the leases of one queue are renewed; those of the next are not",
    "reap.death_noticed": "the supervisor knows that a worker process is dead; nothing it held is handed back",
    "fire.occurrence_written": "a schedule's tick is written, not committed; its task is not queued",
    "fire.committed": "the tick and its task are committed; nobody looks for the next",
    "start_up.row_written": "a start-up task's run has a row; its process is not started",
}


class Failpoint:
    """Kills the process at the n-th time it reaches one point. Safe to call from any thread."""

    def __init__(self, point: str, nth: int, mark: str) -> None:
        self.point = point
        self.nth = nth
        self.mark = mark
        self._reached = 0
        self._lock = threading.Lock()

    def __call__(self, name: str) -> None:
        """Count one arrival at a point. Raises: ValueError for one that is not declared."""
        check_point(name)
        if name != self.point:
            return
        with self._lock:
            self._reached += 1
            is_due = self._reached == self.nth
        if is_due and self._is_first():
            os.write(2, f"failpoint {name}: process {os.getpid()} kills itself\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_first(self) -> bool:
        """Leave pid and point in the mark; no where another process has left its own."""
        if not self.mark:
            return True
        # Written apart and then named: who finds the mark finds all of it.
        draft = Path(f"{self.mark}.{os.getpid()}")
        draft.write_text(f"{os.getpid()} {self.point}\n")
        try:
            Path(self.mark).hardlink_to(draft)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True


def check_point(name: str) -> None:
    """Refuse a point that is not declared. Raises: ValueError, naming all that are."""
    if name not in POINTS:
        raise ValueError(f"{name!r} is no failpoint; there are {', '.join(sorted(POINTS))}")


def read(text: str, mark: str = "") -> Callable[[str], None]:
    """Return what `reach` is to be. text: `<point>`, `<point>:<n>` or "". Raises: ValueError."""
    if not text:
        return pass_by
    point, _, nth = text.partition(":")
    check_point(point)
    if nth and not (nth.isascii() and nth.isdigit() and int(nth) > 0):
        raise ValueError(f"{VARIABLE}={text!r}: write <point>:<n> with n from 1 on")
    return Failpoint(point, int(nth or 1), mark)


def pass_by(name: str) -> None:
    """Do nothing: no process is to die."""


reach = read(os.environ.get(VARIABLE, ""), os.environ.get(MARK_VARIABLE, ""))

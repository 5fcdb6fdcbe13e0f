"""Named points between a write to one store and the write to the other, at which a test can stop the process.

The code calls `reach` at each point. Nothing happens there until something calls `arm`, and only
`django_asyncq.testing` does: no setting and no environment variable can make a production process kill itself.
Must not know what a task is or does: a point only says how far the process has come.
Source: FreeBSD, fail(9).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

# What has just happened; then what has not.
POINTS: Mapping[str, str] = {
    # Into the queue.
    "build.gate_built": "a gate's members are built from the rows; tasks that finished meanwhile still have a slot",
    "enqueue.slot_acquired": "the gate granted a provisional slot; the row is not inserted",
    "enqueue.row_inserted": "the row is inserted, or on its way; an open transaction is not committed",
    "enqueue.committed": "the transaction is committed; nothing is pushed, no slot is confirmed",
    "dispatch.slots_confirmed": "slots are confirmed separately (delayed, lost, in a cluster); nothing is pushed",
    "dispatch.queue_pushed": "the tasks of one queue are pushed; those of the next queue are not",
    "broker.batch_sent": "one script call has written some hundred tasks to Redis; the next call is not sent",
    "push_batch.collected": "the batcher has collected tasks to push together; none of them is pushed",
    "enqueue.pushed": "all tasks are pushed, or wait in the batcher; nothing is announced",
    "park.row_written": "the row of a task that lost its slot is RETRYING; Redis does not know",
    "batch.taken": "Redis has taken the members of a ripe group; no row says so",
    "batch.rows_written": "the row of a batch is written, its members name it; Redis still has the members",
    "batch.dropped": "the entries of the members are dropped; the batch is not pushed",
    # Through a worker.
    "claim.leased": "Redis has leased the tasks; their rows are not read",
    "adopt.row_named": "a hash names the row of another program's task; the row is not inserted",
    "adopt.row_inserted": "the row of another program's task is inserted; nothing is announced, no worker slot has it",
    "claim.rows_read": "the rows are read; no worker slot has the tasks",
    "begin.counted": "the slot table shows the run, the attempt is counted in memory; the function is not called",
    "mark_running.row_written": "the row is RUNNING; nothing is announced, the task goes on",
    "run.function_returned": "the function has returned; nothing is recorded",
    "report.row_written": "the outcome is in the row; Redis does not know",
    "acknowledge.queue_acknowledged": "the outcomes of one queue are acknowledged; those of the next queue are not",
    "report.acknowledged": "Redis knows the outcome; nothing is announced, no gate slot is released",
    "complete.row_written": "effects and success are written in one transaction; it is not committed",
    "complete.committed": "the effects and the success are committed; Redis does not know",
    "spill.queue_spilled": "the outcomes of one queue are spilled to Redis; those of the next queue are not",
    "replay.row_written": "a spilled outcome is in the row; Redis does not know",
    "wait_for_key.row_written": "a task that waits for a host with the key has a QUEUED row; Redis does not know",
    "refuse.row_written": "the row of a task without code is FAILED; its entry is still in Redis",
    "requeue.row_written": "the row of an unfinished task is QUEUED again; Redis does not know",
    # Back into the queue.
    "retry.slot_acquired": "the gate granted a slot for a retry; the row is still FAILED",
    "retry.committed": "the row is QUEUED again; nothing is pushed",
    "replace.committed": "a task has newer arguments; its entry in Redis is the old one",
    "replace.taken_out": "the old entry is removed; the task is not pushed",
    "hurry.committed": "a delayed task has no time any more; its entry in Redis is still scheduled",
    "follow.committed": "a follower holds the key; it is not pushed",
    "recover.row_written": "the row of a lost worker's task is updated; Redis does not know",
    "recover.redis_updated": "both stores know that the task is recovered; nothing is announced",
    "abandon.row_written": "a RUNNING row without an entry in Redis is closed; nothing is pushed",
    "members.released": "a lost batch has left its members behind; they are not pushed",
    "evidence.rows_written": "the row shows what another program has done; its entry is not settled",
    # Stopped.
    "close.rows_written": "the rows of cancelled or expired tasks are FAILED, not committed; Redis does not know",
    "cancel.rows_written": "a cancel is written, not committed; Redis does not know, no worker is asked to stop",
    "close.committed": "a cancel or an expiry is committed; Redis does not know, no worker is asked to stop",
    "close.taken_out": "the entries of closed tasks are removed; nothing is announced, no gate slot is released",
    "close_claimed.rows_written": "a claimed task that must not begin is FAILED; its entry is still in Redis",
    # Deletion.
    "delete.committed": "the row is deleted; its gate slot and its entry are still there",
    "prune.rows_deleted": "old rows are deleted; their entries in the archive are still there",
    # Maintenance.
    "forward.retry_found": "a retry is found due; its row is not changed",
    "reconcile.marked_alive": "Redis had lost its memory and is marked as alive; nothing is rebuilt",
    "reconcile.page_repaired": "some hundred rows are repaired; the next page is not",
    "reconcile.leases_recovered": "tasks with expired leases are recovered; the other repairs are not done",
    "beat.leases_renewed": "the leases of one queue are renewed; those of the next queue are not",
    "reap.death_noticed": "the supervisor knows that a worker process died; its tasks are not recovered",
    "fire.occurrences_written": "occurrences of schedules and their tasks are written, not committed; no next one is",
    "fire.committed": "occurrences, their tasks and the next times are committed, perhaps pushed; nothing is logged",
    "inbox.taken": "documents are taken out of an inbox; no row is inserted",
    "inbox.committed": "the tasks of taken documents are committed, perhaps pushed; the documents are still taken",
    "bulk.page_changed": "a page of an action on many tasks is changed and counted, not committed",
    "bulk.page_committed": "the page and the position behind it are committed; the next page is not begun",
    "start_up.row_written": "the run of a start-up task has a row; its process is not started",
}

_armed: Callable[[str], None] | None = None


def reach(name: str) -> None:
    """Call what is armed with the name of the point; do nothing otherwise. name: one of POINTS."""
    armed = _armed
    if armed is not None:
        armed(name)


def arm(action: Callable[[str], None] | None) -> Callable[[str], None] | None:
    """Have `action` called with the name of each point that this process reaches, in any thread.

    action: None for nothing. Returns: what was armed before.
    """
    global _armed
    before, _armed = _armed, action
    return before


def disarm() -> None:
    """Have nothing happen at any point."""
    arm(None)

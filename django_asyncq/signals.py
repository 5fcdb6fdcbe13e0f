"""The signals of a task's state, a run, a failure, a worker process and the fleet. `tasks` also sends Django's three.

task_state_changing: sent before a task becomes QUEUED, new or again; nothing has been written yet. A receiver may raise
    to veto: the caller gets the error, and no task of the call is queued. When `partial` is true it may instead return
    the ids (a set of UUID) that it refuses; the other tasks are queued. `timed` is true for a retry whose time has
    come: no caller waits for the answer.
task_state_changed: sent after a change was committed. An error of a receiver is logged and changes nothing.

Both carry `sender` (TaskRecord), `records` (a list of TaskRecord, never empty), `old` (the TaskState before, None for
new tasks) and `new` (the TaskState after).

run_started: sent before the body of a task is called, for each attempt, in the thread or coroutine that calls it. A
    context variable that a receiver sets is seen by the body, and by no other run.
run_ended: sent in the same place when the body has returned or raised, and it is certain how the run has ended: a body
    that returned after its timeout, or whose result cannot be stored, has failed. Its outcome is not written yet.
run_lost: sent instead of `run_ended` when a run is given up whose process has died or was stopped, when that is
    written, by the process that does it: a supervisor, the leader, or that of a person's click. `record` is the row as
    it is now, QUEUED again or FAILED. It also carries `attempt`, `began_at` and `lost_at` of the run (by the clock of
    the database; equal if the run was too short for its row to say when it began).

All carry `sender` (TaskRecord) and `record`, the last two `exception` (None when the run has not failed; what became of
a lost run, such as WorkerLost). An error of a receiver is logged and changes nothing.

task_failed: sent with the ERROR line about a failure that is final, so for each task once: in the worker, in its
    process if it is isolated, in a supervisor, or in the leader. It carries `sender`, `record`, which holds the error
    and is about to be written or has just been, and `exception`, None where nothing was raised in this process. Not
    sent for a task that was cancelled or discarded, or did not run because another had failed. An error of a receiver
    is logged and changes nothing.

worker_started: sent in a worker process, in its main thread, before its first task: the place to load a model or to
    open a pool. No task of the process begins before the receivers have returned.
worker_stopping: sent in a worker process that ends in order, after its last task and before its exit functions
    (`atexit`), in a thread of its own. Both together have 5 seconds. A process that crashes or is killed sends nothing.

Both carry `worker_id`, `queues` (a tuple of names; empty for all queues) and `runs_one_task` (whether the process was
started for one task). Their `sender` is None. An error of a receiver is logged and changes nothing.

fleet_problem: sent once when something is wrong with the fleet, and once when it is over, by the process that looks:
    the leader, or `asyncq alerts check --send`. It carries `sender` (Alert), `problem` with `kind`, `backend`,
    `subject`, `title`, `text` and `command`, and `is_over`. The leader looks only if a receiver is connected when it
    starts, or ASYNCQ["ALERTS"] has an address. An error of a receiver is logged; it counts as not told.
"""

from __future__ import annotations

from django.dispatch import Signal

from .core.run_signals import RunSignal

# With caching the receivers are looked up once, not for each task.
task_state_changing = Signal(use_caching=True)
task_state_changed = Signal(use_caching=True)
run_started = RunSignal()
run_ended = RunSignal()
run_lost = RunSignal()
task_failed = RunSignal()
fleet_problem = Signal(use_caching=True)
worker_started = Signal()
worker_stopping = Signal()

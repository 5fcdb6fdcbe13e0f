"""The signals of a task's state, of a run, and of a failure. `tasks` also sends Django's own three.

task_state_changing: sent before a task becomes QUEUED, new or again; nothing has been written yet. A receiver may raise
    to veto: the caller gets the error, and no task of the call is queued. When `partial` is true it may instead return
    the ids (a set of UUID) that it refuses; the other tasks are queued. `timed` is true for a retry whose time has
    come: no caller waits for the answer.
task_state_changed: sent after a change was committed. An error of a receiver is logged and changes nothing.

Both carry `sender` (TaskRecord), `records` (a list of TaskRecord, never empty), `old` (the TaskState before, None for
new tasks) and `new` (the TaskState after).

run_started: sent before the body of a task is called, for each attempt, in the thread or coroutine that calls it. A
    context variable that a receiver sets is seen by the body, and by no other run.
run_ended: sent in the same place when the body has returned or raised, before its outcome is judged or written. The run
    of an isolated task whose process died ends in the worker, where it has not started.

Both carry `sender` (TaskRecord) and `record`, the second `exception` (None when the body has returned). An error of a
receiver is logged and changes nothing.

task_failed: sent with the ERROR line about a failure that is final, so for each task once: in the worker, in its
    process if it is isolated, in a supervisor, or in the leader. It carries `sender`, `record`, which holds the error
    and is about to be written or has just been, and `exception`, None where nothing was raised in this process. Not
    sent for a task that was cancelled. An error of a receiver is logged and changes nothing.
"""

from __future__ import annotations

from django.dispatch import Signal

# With caching the receivers are looked up once, not for each task.
task_state_changing = Signal(use_caching=True)
task_state_changed = Signal(use_caching=True)
run_started = Signal(use_caching=True)
run_ended = Signal(use_caching=True)
task_failed = Signal(use_caching=True)

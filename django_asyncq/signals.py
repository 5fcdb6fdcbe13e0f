"""The two signals of a task's state. Django's own three are sent as well, by `tasks`.

task_state_changing: sent before a task becomes queued, new or again; nothing has been written. A receiver that
    raises vetoes it: the error reaches whoever called, and no task of the call is queued. When `partial` is true it
    may instead return the ids (a set of UUID) it refuses, and the others go on. `timed` is true for a retry whose time
    has come: nobody waits for the answer.
task_state_changed: sent after a change is committed. A receiver that raises is logged and changes nothing.

Both carry `sender` (TaskRecord), `records` (a list of TaskRecord, never empty), `old` (the TaskState they had, None
for new ones) and `new` (TaskState).
"""

from __future__ import annotations

from django.dispatch import Signal

# Who listens is looked up once, not with each task.
task_state_changing = Signal(use_caching=True)
task_state_changed = Signal(use_caching=True)

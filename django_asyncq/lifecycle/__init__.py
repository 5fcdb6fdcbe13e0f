"""THE ONE DOOR for a task's state: check → row → Redis → announce.

RETRYING is FAILED with `retry_at`.

| change                                | verbs                                                | module                |
|---------------------------------------|------------------------------------------------------|-----------------------|
| new → QUEUED, of a batch              | `form_batches`, `make_batches`                       | `batching`            |
| any of a member of a batch            | as that of its batch, in one transaction             | `members`             |
| new → QUEUED                          | `enqueue`, `enqueue_unique`                          | `enqueueing`, `unique`|
| the same, behind other tasks          | `enqueue_together`, and both of these                | `parents`             |
| QUEUED behind tasks → QUEUED, FAILED  | by the end of one of these, in its transaction       | `children`            |
| FAILED behind tasks → QUEUED behind   | by `retry` of it, or of one of these                 | `reviving`            |
| QUEUED → RETRYING                     | `park`                                               | `dispatching`         |
| QUEUED at a gate → QUEUED with a slot | `let_in`                                             | `waiting`             |
| QUEUED → RUNNING                      | `claim` or `claim_suspect`, `begin`, `mark_running`  | `claiming`, `running` |
| RUNNING → SUCCEEDED, FAILED, RETRYING | `succeed`, `fail`, then `record_runs`, `acknowledge` | `running`             |
| RUNNING → SUCCEEDED with its effects  | `complete`                                           | `running`             |
| the same, recorded later              | `spill_outcomes`, then `replay_outcomes`             | `spill`               |
| RUNNING → QUEUED                      | `requeue`                                            | `running`             |
| the same, without a connection        | `postpone_run`, then `record_runs`, `acknowledge`    | `running`             |
| RUNNING → QUEUED or FAILED            | `count_cut`, then `record_runs`, `acknowledge`       | `running`             |
| QUEUED → FAILED                       | `refuse`                                             | `running`             |
| FAILED or RETRYING → QUEUED           | `retry`, `retry_due`, `retry_waiting`                | `retrying`    |
| RUNNING → QUEUED, FAILED or RETRYING  | `recover`, `abandon`                                 | `recovery`            |
| QUEUED or RETRYING → FAILED           | `cancel`                                             | `closing`             |
| the same, by itself                   | `close_cancelled`, `expire`                          | `closing`             |
| any but final → FAILED, in a copy     | `close_copied`                                       | `copies`              |
| any → deleted                         | `follow_deletion`                                    | `deletion`            |
| SUCCEEDED or FAILED → deleted         | `delete`                                             | `deletion`            |
| the same, when kept for long enough   | `prune`                                              | `deletion`            |

`dispatch` and `push` bring QUEUED rows to Redis, `hurry` delayed ones, `reschedule` one with another time.
`reassert` brings RUNNING ones back after Redis lost its memory. `record_checkpoint` writes RUNNING, as `mark_running`.
Every step between the two stores can be repeated, and each verb says who repairs a crash between them.
Only `interop`, for what other programs have done, writes `state` too; a test reads the code to make sure.
"""

from __future__ import annotations

from .base import Run, announce, load_rows, place_of, rows_of_entries, rules_of_groups, shown_here
from .batching import form_batches, make_batches
from .checkpoints import record_checkpoint
from .claiming import Claimed, Others, claim, claim_suspect, classify, with_members
from .closing import (
    Cancelled,
    ask_again,
    cancel,
    cancel_pages,
    cancel_rows,
    close_cancelled,
    expire,
    expired,
    how_stopped,
    is_expired,
    settle_lost,
)
from .copies import Waiting, close_copied, count_waiting
from .counting import counter
from .deletion import delete, follow_deletion, prune
from .dispatching import dispatch, flush_pushes, hurry, park, push, reassert
from .enqueueing import enqueue
from .following import move_up_waiting
from .members import release_orphans
from .messages import WireCall, named_rows, remote_message_of, wire_call_of
from .progress import newest_progress, note_progress, record_log_lines, record_progress
from .recovery import LEASE_EXPIRED, Blame, abandon, describe_exit, recover
from .replacing import reschedule
from .retrying import Retried, retry, retry_due, retry_waiting
from .running import (
    acknowledge,
    already_recorded,
    begin,
    complete,
    count_cut,
    fail,
    leave_to_others,
    mark_running,
    postpone,
    postpone_run,
    record_runs,
    record_unlocked,
    refuse,
    requeue,
    strip_result,
    succeed,
    upgrade,
)
from .spill import replay_outcomes, spill_outcomes
from .unique import Taken, enqueue_together, enqueue_unique
from .waiting import WAITS

__all__ = [
    "LEASE_EXPIRED",
    "WAITS",
    "Blame",
    "Cancelled",
    "Claimed",
    "Others",
    "Retried",
    "Run",
    "Taken",
    "Waiting",
    "WireCall",
    "abandon",
    "acknowledge",
    "already_recorded",
    "announce",
    "ask_again",
    "begin",
    "cancel",
    "cancel_pages",
    "cancel_rows",
    "claim",
    "claim_suspect",
    "classify",
    "close_cancelled",
    "close_copied",
    "complete",
    "count_cut",
    "count_waiting",
    "counter",
    "delete",
    "describe_exit",
    "dispatch",
    "enqueue",
    "enqueue_together",
    "enqueue_unique",
    "expire",
    "expired",
    "fail",
    "flush_pushes",
    "follow_deletion",
    "form_batches",
    "how_stopped",
    "hurry",
    "is_expired",
    "leave_to_others",
    "load_rows",
    "make_batches",
    "mark_running",
    "move_up_waiting",
    "named_rows",
    "newest_progress",
    "note_progress",
    "park",
    "place_of",
    "postpone",
    "postpone_run",
    "prune",
    "push",
    "reassert",
    "record_checkpoint",
    "record_log_lines",
    "record_progress",
    "record_runs",
    "record_unlocked",
    "recover",
    "refuse",
    "release_orphans",
    "remote_message_of",
    "replay_outcomes",
    "requeue",
    "reschedule",
    "retry",
    "retry_due",
    "retry_waiting",
    "rows_of_entries",
    "rules_of_groups",
    "settle_lost",
    "shown_here",
    "spill_outcomes",
    "strip_result",
    "succeed",
    "upgrade",
    "wire_call_of",
    "with_members",
]

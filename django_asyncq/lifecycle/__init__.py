"""THE ONE DOOR for a task's state: check → row → Redis → announce.

RETRYING is FAILED with `retry_at`.

| change                                | verbs                                                | module                |
|---------------------------------------|------------------------------------------------------|-----------------------|
| new → QUEUED, of a batch              | `form_batches`, `make_batches`                       | `batching`            |
| any of a member of a batch            | as that of its batch, in one transaction             | `members`             |
| new → QUEUED                          | `enqueue`, `enqueue_unique`                          | `enqueueing`, `unique`|
| the same, of another program          | `claim`                                              | `adopting`            |
| QUEUED → RETRYING                     | `park`                                               | `dispatching`         |
| QUEUED → RUNNING                      | `claim` or `claim_suspect`, `begin`, `mark_running`  | `claiming`, `running` |
| RUNNING → SUCCEEDED, FAILED, RETRYING | `succeed`, `fail`, then `record_runs`, `acknowledge` | `running`             |
| RUNNING → SUCCEEDED with its effects  | `complete`                                           | `running`             |
| the same, recorded later              | `spill_outcomes`, then `replay_outcomes`             | `outcome_spill`       |
| RUNNING → QUEUED                      | `requeue`                                            | `running`             |
| the same, without a connection        | `postpone_run`, then `record_runs`, `acknowledge`    | `cuts`, `running`     |
| RUNNING → QUEUED or FAILED            | `count_cut`, then `record_runs`, `acknowledge`       | `cuts`, `running`     |
| the same, of an isolated task         | `apply_changes`, or `count_own_crash`                | `run_changes`         |
| QUEUED → FAILED                       | `refuse`                                             | `running`             |
| FAILED or RETRYING → QUEUED           | `retry`, `retry_due`, `retry_waiting`, `retry_without_redis` | `retrying`    |
| RUNNING → QUEUED, FAILED or RETRYING  | `recover`, `recover_without_redis`, `abandon`        | `recovery`            |
| QUEUED or RETRYING → FAILED           | `cancel`                                             | `cancelling`          |
| the same, by itself                   | `close_cancelled`, `expire`                          | `closing`             |
| any but final → what Redis shows      | `settle_evidence`, `follow_remote`                   | `evidence`, `remote`  |
| any → deleted                         | `follow_deletion`                                    | `deletion`            |
| SUCCEEDED or FAILED → deleted         | `delete`                                             | `deletion`            |
| the same, when kept for long enough   | `prune`                                              | `deletion`            |

`dispatch` and `push` bring QUEUED rows to Redis, `hurry` delayed ones. `reassert` brings RUNNING ones back after Redis
lost its memory.
Every step between the two stores can be repeated, and each verb says who repairs a crash between them.
Nothing else in the project writes `state`; a test reads the code to make sure.
"""

from __future__ import annotations

from .batching import form_batches, make_batches
from .cancelling import Cancelled, cancel, cancel_rows
from .claimed_runs import Run
from .claiming import Claimed, claim, claim_suspect, classify, receive, with_members
from .closing import ask_again, close_cancelled, expire, expired, is_expired, settle_lost
from .cuts import count_cut, postpone_run
from .deletion import delete, follow_deletion, prune
from .dispatching import dispatch, park, push
from .enqueueing import enqueue
from .events import announce
from .evidence import settle_evidence
from .following import move_up_waiting
from .group_places import place_of, rules_of_groups
from .hurrying import hurry
from .log_lines import record_lines_of_dead, record_log_lines
from .members import release_orphans
from .messages import named_rows, remote_message_of
from .outcome_spill import replay_outcomes, spill_outcomes
from .ownership import load_rows, rows_of_entries
from .progress import newest_progress, note_progress, record_progress
from .push_batcher import flush_pushes
from .reassertion import reassert
from .recovery import LEASE_EXPIRED, Blame, abandon, describe_exit, recover, recover_without_redis
from .remote import follow_remote
from .retrying import Retried, retry, retry_due, retry_waiting, retry_without_redis
from .run_changes import apply_changes, changes_of, completed_run, count_own_crash, perhaps_completed
from .running import (
    acknowledge,
    already_recorded,
    begin,
    complete,
    fail,
    mark_running,
    postpone,
    record_runs,
    record_unlocked,
    refuse,
    requeue,
    strip_result,
    succeed,
)
from .runs_here import shown_here
from .unique import Taken, enqueue_unique
from .wire_calls import WireCall, wire_call_of

__all__ = [
    "LEASE_EXPIRED",
    "Blame",
    "Cancelled",
    "Claimed",
    "Retried",
    "Run",
    "Taken",
    "WireCall",
    "abandon",
    "acknowledge",
    "already_recorded",
    "announce",
    "apply_changes",
    "ask_again",
    "begin",
    "cancel",
    "cancel_rows",
    "changes_of",
    "claim",
    "claim_suspect",
    "classify",
    "close_cancelled",
    "complete",
    "completed_run",
    "count_cut",
    "count_own_crash",
    "delete",
    "describe_exit",
    "dispatch",
    "enqueue",
    "enqueue_unique",
    "expire",
    "expired",
    "fail",
    "flush_pushes",
    "follow_deletion",
    "follow_remote",
    "form_batches",
    "hurry",
    "is_expired",
    "load_rows",
    "make_batches",
    "mark_running",
    "move_up_waiting",
    "named_rows",
    "newest_progress",
    "note_progress",
    "park",
    "perhaps_completed",
    "place_of",
    "postpone",
    "postpone_run",
    "prune",
    "push",
    "reassert",
    "receive",
    "record_lines_of_dead",
    "record_log_lines",
    "record_progress",
    "record_runs",
    "record_unlocked",
    "recover",
    "recover_without_redis",
    "refuse",
    "release_orphans",
    "remote_message_of",
    "replay_outcomes",
    "requeue",
    "retry",
    "retry_due",
    "retry_waiting",
    "retry_without_redis",
    "rows_of_entries",
    "rules_of_groups",
    "settle_evidence",
    "settle_lost",
    "shown_here",
    "spill_outcomes",
    "strip_result",
    "succeed",
    "wire_call_of",
    "with_members",
]

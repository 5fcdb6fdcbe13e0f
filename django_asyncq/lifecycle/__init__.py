"""THE ONE DOOR for a task's state: check → row → Redis → announce.

RETRYING is FAILED with `retry_at`.

| change                                | verbs                                                | module                |
|---------------------------------------|------------------------------------------------------|-----------------------|
| new → QUEUED                          | `enqueue`                                            | `enqueueing`          |
| QUEUED → RETRYING                     | `park`                                               | `dispatching`         |
| QUEUED → RUNNING                      | `claim` or `claim_suspect`, `begin`, `mark_running`  | `claiming`, `running` |
| RUNNING → SUCCEEDED, FAILED, RETRYING | `succeed`, `fail`, then `record_runs`, `acknowledge` | `running`             |
| RUNNING → SUCCEEDED with its effects  | `complete`                                           | `running`             |
| the same, recorded later              | `spill_outcomes`, then `replay_outcomes`             | `outcome_spill`       |
| RUNNING → QUEUED                      | `requeue`                                            | `running`             |
| the same, without a connection        | `postpone_run`, then `record_runs`, `acknowledge`    | `cuts`, `running`     |
| RUNNING → QUEUED or FAILED            | `count_cut`, then `record_runs`, `acknowledge`       | `cuts`, `running`     |
| QUEUED → FAILED                       | `refuse`                                             | `running`             |
| FAILED or RETRYING → QUEUED           | `retry`, `retry_due`, `retry_waiting`, `retry_without_redis` | `retrying`    |
| RUNNING → QUEUED, FAILED or RETRYING  | `recover`, `recover_without_redis`, `abandon`        | `recovery`            |
| any → deleted                         | `follow_deletion`                                    | `deletion`            |
| SUCCEEDED or FAILED → deleted         | `prune`                                              | `deletion`            |

`dispatch` and `push` bring QUEUED rows to Redis; `reassert` brings RUNNING ones back after Redis lost its memory.
Every step between the two stores can be repeated, and each verb says who repairs a crash between them.
Nothing else in the project writes `state`; a test reads the code to make sure.
"""

from __future__ import annotations

from .claiming import Claimed, claim, claim_suspect, classify, receive
from .cuts import count_cut, postpone_run
from .deletion import follow_deletion, prune
from .dispatching import dispatch, park, push
from .enqueueing import enqueue
from .events import announce
from .outcome_spill import replay_outcomes, spill_outcomes
from .push_batcher import flush_pushes
from .reassertion import reassert
from .recovery import LEASE_EXPIRED, Blame, abandon, describe_exit, recover, recover_without_redis
from .retrying import Retried, retry, retry_due, retry_waiting, retry_without_redis
from .running import (
    Run,
    acknowledge,
    already_recorded,
    begin,
    complete,
    fail,
    load_rows,
    mark_running,
    postpone,
    record_runs,
    refuse,
    requeue,
    strip_result,
    succeed,
)

__all__ = [
    "LEASE_EXPIRED",
    "Blame",
    "Claimed",
    "Retried",
    "Run",
    "abandon",
    "acknowledge",
    "already_recorded",
    "announce",
    "begin",
    "claim",
    "claim_suspect",
    "classify",
    "complete",
    "count_cut",
    "describe_exit",
    "dispatch",
    "enqueue",
    "fail",
    "flush_pushes",
    "follow_deletion",
    "load_rows",
    "mark_running",
    "park",
    "postpone",
    "postpone_run",
    "prune",
    "push",
    "reassert",
    "receive",
    "record_runs",
    "recover",
    "recover_without_redis",
    "refuse",
    "replay_outcomes",
    "requeue",
    "retry",
    "retry_due",
    "retry_waiting",
    "retry_without_redis",
    "spill_outcomes",
    "strip_result",
    "succeed",
]

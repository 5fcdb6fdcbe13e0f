"""THE ONE DOOR for a task's state: check → row → Redis → announce.

| change            | verb                | module      |
|-------------------|---------------------|-------------|
| new → 0           | `enqueue`           | `entering`  |
| 0 → 3, retry_at   | `park`              | `pushing`   |
| 0 → 1             | `claim`, then `begin`, `mark_running` | `claiming`, `running` |
| 1 → 2 or 3        | `succeed`, `fail`, then `record_runs`, `acknowledge`, `announce` | `running`   |
| 1 → 0             | `requeue`         | `running`   |
| 1 → 2 with its effects | `complete`     | `running`   |
| 1 → 2 or 3, later | `spill_outcomes`, then `replay_outcomes` | `handing_over` |
| 0 → 3             | `refuse`            | `running`   |
| 3 → 0             | `retry`, `retry_due`| `returning` |
| 1 → 0 or 3        | `recover`, `abandon` | `returning` |
| any → gone        | `follow_deletion`            | `leaving`   |
| 2 or 3 → gone     | `prune`             | `leaving`   |

Every step between the two stores can be repeated; each verb says who repairs it when the process dies in between.
Nothing else in the project writes `state`, and a test reads the code to see to it.
"""

from __future__ import annotations

from .claiming import Claimed, claim, classify, receive
from .deletion import follow_deletion, prune
from .dispatching import dispatch, park, push
from .enqueueing import enqueue
from .events import announce
from .outcome_spill import replay_outcomes, spill_outcomes
from .push_batcher import flush_pushes
from .reassertion import reassert
from .recovery import Retried, abandon, describe_exit, recover, retry, retry_due
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
    "Claimed",
    "Retried",
    "Run",
    "abandon",
    "acknowledge",
    "already_recorded",
    "announce",
    "begin",
    "claim",
    "classify",
    "complete",
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
    "prune",
    "push",
    "reassert",
    "receive",
    "record_runs",
    "recover",
    "refuse",
    "replay_outcomes",
    "requeue",
    "retry",
    "retry_due",
    "spill_outcomes",
    "strip_result",
    "succeed",
]

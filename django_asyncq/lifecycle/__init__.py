"""THE ONE DOOR for a task's state: check → row → Redis → announce.

| change            | verb                | module      |
|-------------------|---------------------|-------------|
| new → 0           | `enqueue`           | `entering`  |
| 0 → 3, retry_at   | `park`              | `pushing`   |
| 0 → 1             | `claim`, then `begin`, `mark_running` | `claiming`, `running` |
| 1 → 2 or 3        | `succeed`, `fail`, then `record_runs`, `acknowledge`, `announce` | `running`   |
| 1 → 0             | `hand_back`         | `running`   |
| 1 → 2 with its effects | `complete`     | `running`   |
| 1 → 2 or 3, later | `hand_over`, then `take_up` | `handing_over` |
| 0 → 3             | `refuse`            | `running`   |
| 3 → 0             | `retry`, `retry_due`| `returning` |
| 1 → 0 or 3        | `recover`, `abandon` | `returning` |
| any → gone        | `forget`            | `leaving`   |
| 2 or 3 → gone     | `prune`             | `leaving`   |

Every step between the two stores can be repeated; each verb says who repairs it when the process dies in between.
Nothing else in the project writes `state`, and a test reads the code to see to it.
"""

from __future__ import annotations

from .announcing import announce
from .claiming import Claimed, claim, receive, sort_out
from .entering import enqueue
from .gathering import push_now
from .handing_over import hand_over, take_up
from .leaving import forget, prune
from .pushing import dispatch, park, push
from .reasserting import reassert
from .returning import Retried, abandon, describe_exit, recover, retry, retry_due
from .running import (
    Run,
    acknowledge,
    begin,
    complete,
    fail,
    hand_back,
    load,
    mark_running,
    put_off,
    record_runs,
    recorded,
    refuse,
    strip_result,
    succeed,
)

__all__ = [
    "Claimed",
    "Retried",
    "Run",
    "abandon",
    "acknowledge",
    "announce",
    "begin",
    "claim",
    "complete",
    "describe_exit",
    "dispatch",
    "enqueue",
    "fail",
    "forget",
    "hand_back",
    "hand_over",
    "load",
    "mark_running",
    "park",
    "prune",
    "push",
    "push_now",
    "put_off",
    "reassert",
    "receive",
    "record_runs",
    "recorded",
    "recover",
    "refuse",
    "retry",
    "retry_due",
    "sort_out",
    "strip_result",
    "succeed",
    "take_up",
]

"""THE ONE DOOR for a task's state: check → row → Redis → announce.

| change            | verb                | module      |
|-------------------|---------------------|-------------|
| new → 0           | `enqueue`           | `entering`  |
| 0 → 3, retry_at   | `park`              | `entering`  |
| 0 → 1             | `claim`, `begin`, `mark_running` | `running`   |
| 1 → 2 or 3        | `succeed`, `fail`, then `record_runs`, `acknowledge`, `announce` | `running`   |
| 1 → 0             | `hand_back`         | `running`   |
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
from .entering import dispatch, enqueue, park
from .leaving import forget, prune
from .returning import Retried, abandon, describe_exit, recover, retry, retry_due
from .running import (
    Claimed,
    Run,
    acknowledge,
    begin,
    claim,
    fail,
    hand_back,
    load,
    mark_running,
    put_off,
    reassert,
    record_runs,
    refuse,
    sort_out,
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
    "describe_exit",
    "dispatch",
    "enqueue",
    "fail",
    "forget",
    "hand_back",
    "load",
    "mark_running",
    "park",
    "prune",
    "put_off",
    "reassert",
    "record_runs",
    "recover",
    "refuse",
    "retry",
    "retry_due",
    "sort_out",
    "strip_result",
    "succeed",
]

"""Follow the tasks that only another program runs: their rows show what Redis says of their entries.

Nothing else writes these rows while they are not final, except a cancel. Their `fence` is no fence: no worker of ours
runs them. It holds the Unix second, of Redis, since which Redis is known to have the entry, and 0 before that. So a
missing entry that was deleted differs from one that was never pushed, and from one that Redis has lost with its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from ..broker import Broker
from ..broker.evidence import settle_entries
from ..exceptions import WorkerLost
from ..models import FailureReason, TaskRecord, TaskState
from ..storage.routing import rows_of
from ..storage.row_conditions import as_check
from .dispatching import by_queue, dispatch
from .events import announce
from .evidence import Seen, fail_rows, push_unhandled, see, write_outcomes
from .remote_seen import note_seen
from .verdicts import OUTCOMES, Verdict

FOLLOWED = OUTCOMES | {Verdict.QUEUED, Verdict.RUNNING}
# A cancel gives a row a fence, which is in microseconds.
SMALLEST_FENCE = 10**12
DELETED = "the entry was deleted by another program"
# asynq deletes the members of a group when their aggregate is enqueued, and leaves no trace of them.
LEFT_GROUP = (
    "the call has left its group: another program has aggregated it with others, or has deleted it; nothing in Redis "
    "says which, or what became of the aggregate"
)


def follow_remote(broker: Broker, rows: Sequence[TaskRecord], alive_since: int, pushed_before: datetime) -> int:
    """Have rows show what Redis says of their entries; return how many changed, or were pushed again.

    rows: remote ones that are not final. alive_since: Unix seconds since which Redis remembers everything,
    and was reached without an outage.
    pushed_before: the process that has enqueued a younger row may not have pushed it yet.

    | check    | the row is as it was read                                                       |
    | row      | → QUEUED, RUNNING, RETRYING, SUCCEEDED or FAILED, as Redis says                 |
    | Redis    | what has succeeded is removed; what is missing, and was not deleted, is pushed  |
    | announce | `task_state_changed`                                                            |

    If we die in between, the next pass does the same. Raises: BrokerUnavailable, django.db.Error.
    """
    changed = 0
    for of_alias, queue, group in by_queue(broker, rows):
        seen = see(of_alias, queue, group)
        note_seen([each.row for each in seen if each.found.state and _seen_since(each.row) < alive_since])
        final = [each for each in seen if each.verdict is Verdict.FINAL]
        settle_entries(of_alias, queue, [(each.found, 0) for each in final])
        changed += len(write_outcomes(of_alias, queue, [each for each in seen if each.verdict in FOLLOWED]))
        changed += len(push_unhandled(of_alias, queue, [each for each in seen if each.verdict is Verdict.UNHANDLED]))
        missing = [each for each in seen if each.verdict is Verdict.MISSING]
        deleted = [each for each in missing if alive_since <= _seen_since(each.row)]
        changed += len(fail_rows(of_alias, queue, [(each, _lost(each.row)) for each in deleted]))
        changed += _push_again(
            [each for each in missing if each not in deleted and each.row.enqueued_at < pushed_before]
        )
        changed += _push_retried([each.row for each in seen if _is_left(each)])
    return changed


def _lost(row: TaskRecord) -> WorkerLost:
    return WorkerLost(LEFT_GROUP if row.group else DELETED)


def _seen_since(row: TaskRecord) -> int:
    """Return the Unix second since which Redis is known to have the entry; 0: it is not known to have it."""
    return row.fence if row.fence < SMALLEST_FENCE else 0


def _push_again(missing: Sequence[Seen]) -> int:
    """Push tasks whose entries were never pushed, or that Redis has forgotten; return how many."""
    pushed = 0
    for old in (TaskState.QUEUED, TaskState.RUNNING, TaskState.FAILED):
        rows = [each.row for each in missing if each.row.state == old]
        if not rows:
            continue
        still = as_check(state=old, finished_at__isnull=True)
        unchanged = rows_of(TaskRecord).filter(still, id__in=[row.id for row in rows])
        unchanged.update(state=TaskState.QUEUED, reason=FailureReason.NONE, retry_at=None, fence=0)
        rows = _still_queued(rows)
        for row in rows:
            row.state, row.reason, row.retry_at, row.fence = TaskState.QUEUED, FailureReason.NONE, None, 0
        pushed += dispatch(rows)
        if old != TaskState.QUEUED:
            announce(rows, old, TaskState.QUEUED)
    return pushed


def _still_queued(rows: Sequence[TaskRecord]) -> list[TaskRecord]:
    """Return the rows that are QUEUED. Another program would run one that somebody has cancelled meanwhile."""
    queued = rows_of(TaskRecord).filter(as_check(state=TaskState.QUEUED), id__in=[row.id for row in rows])
    ids = set(queued.values_list("id", flat=True))
    return [row for row in rows if row.id in ids]


def _is_left(seen: Seen) -> bool:
    """Return whether a person has retried the task, and its entry is where its last failure was settled."""
    return seen.row.state == TaskState.QUEUED and seen.found.state == seen.found.settled == "archived"


def _push_retried(rows: Sequence[TaskRecord]) -> int:
    """Push tasks whose process died, or could not reach Redis, after it had written the retry; return how many."""
    return dispatch(_still_queued(rows), again=True) if rows else 0

"""What waits in each queue for a worker of ours, and for how long: the one answer that every surface gives.

A task waits that a worker could take now, if one is free and nothing is paused. Most are rows that are due. A message
of another program and a document of an inbox have a row only once a worker has taken them, so Redis counts those:

| what waits                              | is counted as                                                   |
|-----------------------------------------|-----------------------------------------------------------------|
| due rows, also while Redis is emptied   | rows                                                            |
| entries in pending, priority, suspects  | what is more than the due rows is without a row                 |
| members of groups                       | in the same way, beside the due rows that have a group          |
| documents of an inbox                   | documents                                                       |
| values of a list that a task reads      | documents of the inbox of its queue                             |
| tasks that only another program runs    | not: their entries are taken off                                |

A task that a worker has claimed and that has not begun is still a due row, so for an instant a message may hide behind
it; the number is never too high.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import NamedTuple

from django.db.models import Count, Min, Q
from django.db.models.functions import Coalesce, Greatest

from ..broker import Broker, redis_clock
from ..broker.foreign import reading_waiting
from ..broker.inspection import QueueContents, reading_contents
from ..broker.reading import Reader, read, side_by_side
from ..core.aliases import one_alias_per_prefix, prefix_of, uses_redis, written_aliases
from ..core.guard import attempt
from ..core.names import QUEUE_NAME
from ..core.registry import every_task, load_task_modules
from ..models import FailureReason, TaskRecord, TaskState
from ..models.tasks import IS_READY
from ..storage.routing import rows_of

# Alias and name.
QueueKey = tuple[str, str]

# `run_after` of a task that was retried, or run at once by a person, is when that was. One whose run was lost has been
# due since some time after its last attempt began.
DUE_SINCE = Greatest(Coalesce("run_after", "enqueued_at"), Coalesce("last_attempted_at", "enqueued_at"))


class LiveRows(NamedTuple):
    """The live rows of a queue. due: those that a worker of ours could take now. since: when the first of these was.

    grouped: those of these that wait in a group. remote, remote_grouped: the same of rows that only another program
    runs, which are not in the others.
    """

    queued: int = 0
    running: int = 0
    due: int = 0
    since: datetime | None = None
    grouped: int = 0
    remote: int = 0
    remote_grouped: int = 0


class Backlog(NamedTuple):
    """What waits in a queue. oldest_seconds: how long what has waited longest does; None when nothing waits.

    Where only documents wait, nothing says for how long, and it is None too.
    """

    waiting: int
    oldest_seconds: float | None


def is_due(now: datetime) -> Q:
    """Return the condition that the time of a QUEUED row has come."""
    return Q(run_after=None) | Q(run_after__lte=now)


def live_rows(
    now: datetime, *, backend: str | None = None, queue: str = "", without: Collection[str] = ()
) -> dict[QueueKey, LiveRows]:
    """Count the live rows by queue, with one query that reads no finished row.

    without: names of tasks that may wait, so `since` does not look at them. Raises: django.db.Error.
    """
    rows = rows_of(TaskRecord).filter(state__in=(TaskState.QUEUED, TaskState.RUNNING)).order_by()
    if backend is not None:
        rows = rows.filter(backend=backend)
    if queue:
        rows = rows.filter(queue_name=queue)
    queued = Q(state=TaskState.QUEUED)
    # What waits for a slot of its gate, or for other tasks, has no entry that a worker could take.
    ready = queued & Q(reason=FailureReason.NONE)
    due = ready & Q(IS_READY, after_id=None, batch_id=None, is_remote=False) & is_due(now)
    remote = ready & Q(IS_READY, is_remote=True) & is_due(now)
    in_group = ~Q(group="") & Q(batch_size=None)
    found = rows.values_list("backend", "queue_name").annotate(
        queued=Count("id", filter=queued),
        running=Count("id", filter=Q(state=TaskState.RUNNING)),
        due=Count("id", filter=due),
        since=Min(DUE_SINCE, filter=due & ~Q(name__in=without) if without else due),
        grouped=Count("id", filter=due & in_group),
        remote=Count("id", filter=remote),
        remote_grouped=Count("id", filter=remote & in_group),
    )
    return {(alias, name): LiveRows(*counts) for alias, name, *counts in found}


def contents_of(live: Collection[QueueKey], *, backend: str | None = None) -> dict[QueueKey, QueueContents]:
    """Return what `reading_contents_of` finds. Raises: BrokerUnavailable."""
    return read("worker", reading_contents_of(live, backend=backend))


def reading_contents_of(
    live: Collection[QueueKey], *, backend: str | None = None
) -> Reader[dict[QueueKey, QueueContents]]:
    """Read what Redis holds of the queues that `reading_known` finds."""
    queues = yield from reading_known(live, backend=backend)
    return (yield from reading_queues(queues))


def reading_known(live: Collection[QueueKey], *, backend: str | None = None) -> Reader[list[QueueKey]]:
    """Read which queues there are: these, and all that the project has named; sorted."""
    known = {(prefix_of(alias), queue) for alias, queue in live}
    aliases = one_alias_per_prefix() if backend is None else [backend]
    # The clock too, so that the next step is the last.
    named, *_ = yield from side_by_side(reading_names(aliases), *map(redis_clock.reading_seconds, aliases))
    # A queue in Redis says which prefix it has; where two aliases have one prefix, the rows say whose queue it is.
    listed = {
        (alias, queue)
        for alias in aliases
        for queue in {*named[alias], *_declared(alias)}
        if (prefix_of(alias), queue) not in known
    }
    return sorted({*live, *listed})


def reading_names(aliases: Sequence[str]) -> Reader[dict[str, set[str]]]:
    """Read the names of the queues that the project has used, by alias."""
    found = yield from side_by_side(*(Broker("worker", alias).reading_queues() for alias in aliases))
    return dict(zip(aliases, found, strict=True))


def reading_queues(queues: Sequence[QueueKey]) -> Reader[dict[QueueKey, QueueContents]]:
    """Read what Redis holds of queues, and for their tasks in lists of other programs."""
    lists, readers = _lists(), {}
    for alias, queue in queues:
        # Of two aliases with one prefix, the first that has the queue.
        if names := lists.pop((prefix_of(alias), queue), None):
            readers[alias, queue] = reading_waiting(names, alias)
    found: dict[QueueKey, QueueContents]
    found, counts = yield from side_by_side(reading_contents(queues), side_by_side(*readers.values()))
    for key, count in zip(readers, counts, strict=True):
        found[key] = found[key]._replace(inbox=found[key].inbox + count)
    return found


def _lists() -> dict[QueueKey, list[str]]:
    """Return the lists of other programs that tasks read, by prefix and queue, as far as tasks can be imported."""
    attempt(load_task_modules)
    found: dict[QueueKey, list[str]] = {}
    for task in every_task():
        if isinstance(task.inbox, str) and uses_redis(task.backend):
            found.setdefault((prefix_of(task.backend), task.queue_name), []).append(task.inbox)
    return found


def _declared(alias: str) -> list[str]:
    """Return the names in QUEUES of an alias: a queue that nobody has used yet is empty, and not unknown."""
    options = written_aliases().get(alias)
    names = options.get("QUEUES") if isinstance(options, dict) else None
    return [name for name in names or () if isinstance(name, str) and QUEUE_NAME.fullmatch(name)]


def backlog_of(rows: LiveRows, contents: QueueContents | None, now: datetime) -> Backlog:
    """Return what waits in a queue. contents: None while Redis is unreachable: then rows alone say it."""
    ages = [] if rows.since is None else [max((now - rows.since).total_seconds(), 0.0)]
    if contents is None:
        return Backlog(rows.due, max(ages, default=None))
    plain, entries = rows.due - rows.grouped, contents.pending - (rows.remote - rows.remote_grouped)
    if entries > plain and contents.pending_since is not None:
        # One of them has no row. With its row, an entry has not waited for longer than that.
        ages.append(max(redis_clock.seconds() - contents.pending_since, 0.0))
    members = max(rows.grouped, contents.group_members - rows.remote_grouped)
    return Backlog(max(plain, entries) + members + contents.inbox, max(ages, default=None))

"""The queues, for an `Inspector`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db.models import Count, Min, Q

from .. import lifecycle, pausing
from ..aliases import uses_redis
from ..broker import Broker, redis_clock
from ..broker.history import LONGEST, MINUTE, MOST_DAYS, History
from ..broker.queue_reading import STATES, QueueContents, QueueReading, StoredEntry, read_contents
from ..broker.rejected import MOST_KEPT, forget_rejected, read_rejected
from ..definitions.names import check_queue_name
from ..exceptions import InvalidOption
from ..models import Pause, PauseKind, TaskRecord, TaskState
from ..prefixes import DEFAULT_ALIAS, one_alias_per_prefix, prefix_of
from ..storage import database_clock
from ..storage.routing import rows_of
from .due import DUE_SINCE, is_due
from .selecting import MOST_PER_PAGE
from .values import DayInfo, EntryInfo, GroupInfo, MinuteInfo, QueueInfo, RejectedInfo

MOST_MINUTES = LONGEST // MINUTE
# The states whose score is a time in Unix seconds.
TIMED = ("scheduled", "retry", "archived", "completed")
# Where the year has four digits; a score may be any number.
LATEST = 253_370_764_800
LIVE = (TaskState.QUEUED, TaskState.RUNNING)


class Queues:
    """List and operate queues. A queue is that of an alias: where no alias is known, of the default one."""

    def __init__(self, backend: str | None) -> None:
        self._backend = backend

    def all(self) -> list[QueueInfo]:
        """Return every queue that the project has named or has live tasks in, by alias and name."""
        now, live = database_clock.now(), self._live()
        paused = {(row.backend, row.name): row for row in rows_of(Pause).filter(kind=PauseKind.QUEUE)}
        known = {(prefix_of(alias), queue) for alias, queue in live}
        aliases = one_alias_per_prefix() if self._backend is None else [self._backend]
        listed = {
            (alias, queue)
            for alias in aliases
            for queue in Broker("worker", alias).queues()
            if (prefix_of(alias), queue) not in known
        }
        contents = read_contents("worker", (each for each in {*live, *listed} if uses_redis(each[0])))
        return [_info(*each, live.get(each, {}), paused.get(each), contents[each], now) for each in sorted(contents)]

    def get(self, queue: str, *, backend: str | None = None) -> QueueInfo:
        """Return one queue; one that nobody has used is empty. Raises: InvalidOption for a name that none can have."""
        check_queue_name(queue)
        alias = self._alias(backend)
        live = self._live(queue).get((alias, queue), {})
        paused = rows_of(Pause).filter(kind=PauseKind.QUEUE, backend=alias, name=queue).first()
        (contents,) = QueueReading("worker", alias).contents([queue])
        return _info(alias, queue, live, paused, contents, database_clock.now())

    def pause(self, queue: str, *, by: str = "", note: str = "", backend: str | None = None) -> bool:
        """Let no worker take tasks from a queue; return whether it was running. by: who; note: why.

        Raises: InvalidOption.
        """
        return pausing.pause(PauseKind.QUEUE, queue, backend=self._alias(backend), by=by, note=note)

    def resume(self, queue: str, *, backend: str | None = None) -> bool:
        """Let workers take tasks from a queue again; return whether it was paused. Raises: InvalidOption."""
        return pausing.resume(PauseKind.QUEUE, queue, backend=self._alias(backend))

    def history(self, queue: str, *, days: int = 7, backend: str | None = None) -> list[DayInfo]:
        """Return asynq's counters of the latest UTC days, the newest first. They are lost with Redis.

        days: at most 90. Raises: InvalidOption.
        """
        check_queue_name(queue)
        if not 1 <= days <= MOST_DAYS:
            raise InvalidOption(f"a history has 1 to {MOST_DAYS} days, not {days}")
        found = History("worker", self._alias(backend)).days(queue, days)
        return [DayInfo(each.day.isoformat(), each.processed, each.failed) for each in reversed(found)]

    def minutes(self, queue: str, *, minutes: int = 60, backend: str | None = None) -> list[MinuteInfo]:
        """Return what was processed in each of the latest minutes, the newest first; that one is not over yet.

        minutes: at most 11,520, which are 8 days. Raises: InvalidOption.
        """
        check_queue_name(queue)
        if not 1 <= minutes <= MOST_MINUTES:
            raise InvalidOption(f"a history has 1 to {MOST_MINUTES:,} minutes, not {minutes}")
        since = datetime.fromtimestamp(redis_clock.seconds(), UTC) - timedelta(minutes=minutes - 1)
        found = History("worker", self._alias(backend)).minutes(queue, since)
        return [MinuteInfo(*each) for each in reversed(found)][:minutes]

    def entries(
        self, queue: str, *, states: Sequence[str] = (), most: int = 50, backend: str | None = None
    ) -> list[EntryInfo]:
        """Return what Redis holds of a queue one by one: also what has no row, such as messages of other programs.

        states: "pending", "priority", "suspects", "active", "scheduled", "retry", "archived", "completed"; () for all.
        most: of each state, those that come first; at most 1,000. Raises: InvalidOption.
        """
        check_queue_name(queue)
        if unknown := sorted(set(states) - STATES.keys()):
            raise InvalidOption(f"no state of an entry is called {unknown[0]!r}: use {', '.join(STATES)}")
        if not 1 <= most <= MOST_PER_PAGE:
            raise InvalidOption(f"most is 1 to {MOST_PER_PAGE:,} entries of each state, not {most}")
        alias = self._alias(backend)
        reading = QueueReading("worker", alias)
        found = [
            entry for state in STATES if not states or state in states for entry in reading.entries(queue, state, most)
        ]
        rows = lifecycle.rows_of_entries(Broker("worker", alias), queue, [entry.id for entry in found])
        return [_entry(each, rows.get(each.id)) for each in found]

    def rejected(self, queue: str, *, most: int = MOST_KEPT, backend: str | None = None) -> list[RejectedInfo]:
        """Return the messages and documents that can be no task, the newest first. Raises: InvalidOption."""
        check_queue_name(queue)
        found = read_rejected(Broker("worker", self._alias(backend)), queue, most)
        return [
            RejectedInfo(datetime.fromtimestamp(each.at, UTC), each.source, each.id, each.reason, each.data)
            for each in found
        ]

    def forget_rejected(self, queue: str, *, backend: str | None = None) -> int:
        """Remove what was rejected; return how many there were. Raises: InvalidOption."""
        check_queue_name(queue)
        return forget_rejected(Broker("worker", self._alias(backend)), queue)

    def groups(self) -> list[GroupInfo]:
        """Return the groups that wait to be aggregated, of all queues that the project has named."""
        return [
            GroupInfo(each.backend, each.queue, group, size)
            for each in self.all()
            if each.groups
            for group, size in QueueReading("worker", each.backend).groups(each.queue).items()
        ]

    def _alias(self, backend: str | None) -> str:
        return backend or self._backend or DEFAULT_ALIAS

    def _live(self, queue: str = "") -> dict[tuple[str, str], dict[str, Any]]:
        """Count the live rows by alias and queue. No finished row is read."""
        now = database_clock.now()
        due = Q(state=TaskState.QUEUED, after_id=None) & is_due(now)
        rows = rows_of(TaskRecord).filter(state__in=LIVE).order_by()
        if self._backend is not None:
            rows = rows.filter(backend=self._backend)
        counted = (
            (rows.filter(queue_name=queue) if queue else rows)
            .values("backend", "queue_name")
            .annotate(
                queued=Count("id", filter=Q(state=TaskState.QUEUED)),
                running=Count("id", filter=Q(state=TaskState.RUNNING)),
                oldest=Min(DUE_SINCE, filter=due),
            )
        )
        return {(row["backend"], row["queue_name"]): dict(row) for row in counted}


def _entry(each: StoredEntry, row: TaskRecord | None) -> EntryInfo:
    message = each.message
    return EntryInfo(
        id=each.id,
        state=each.state,
        type=message.type if message else None,
        row=row.id if row else None,
        at=_moment(each.score) if each.state in TIMED else None,
        retried=message.retried if message else 0,
        error=message.error_msg if message else "",
        payload=message.payload if message else b"",
    )


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None or not 0 <= seconds <= LATEST else datetime.fromtimestamp(seconds, UTC)


def _info(
    alias: str, queue: str, live: dict[str, Any], paused: Pause | None, contents: QueueContents, now: datetime
) -> QueueInfo:
    numbers = contents._asdict()
    since = numbers.pop("paused_since")
    oldest = live.get("oldest")
    return QueueInfo(
        backend=alias,
        queue=queue,
        queued=live.get("queued", 0),
        running=live.get("running", 0),
        **numbers,
        oldest_waiting_seconds=None if oldest is None else max((now - oldest).total_seconds(), 0.0),
        is_paused=since is not None,
        paused_at=paused.paused_at if paused else None,
        paused_by=paused.paused_by if paused else "",
    )

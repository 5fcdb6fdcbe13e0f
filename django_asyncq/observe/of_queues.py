"""The queues, for an `Inspector`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime, timedelta

from django.core.exceptions import ValidationError

from .. import control, gates, lifecycle
from ..broker import Broker, redis_clock, servers
from ..broker.foreign import MOST_KEPT, forget_rejected, reading_rejected
from ..broker.inspection import LONGEST, MINUTE, MOST_DAYS, STATES, History, QueueContents, QueueReading
from ..broker.reading import Reader, read, side_by_side
from ..core.aliases import DEFAULT_ALIAS, one_alias_per_prefix
from ..core.names import check_gate_name, check_queue_name
from ..core.time import moment_of
from ..exceptions import InvalidOption, StillRunning
from ..models import Gate, Pause, PauseKind
from ..storage import database_clock
from ..storage.routing import rows_of, transaction_of, writing_database
from . import still_running
from .backlog import LiveRows, QueueKey, backlog_of, live_rows, reading_contents_of, reading_queues
from .counts import GateStats, gate_stats
from .of_entries import LATEST, entry_info
from .of_tasks import MOST_PER_PAGE
from .values import (
    DayInfo,
    EntryInfo,
    GateDetails,
    GateDrift,
    GateInfo,
    GroupInfo,
    MinuteInfo,
    QueueInfo,
    RejectedInfo,
    RunningTask,
    WorkerInfo,
)

MOST_MINUTES = LONGEST // MINUTE
NO_ROWS = LiveRows()
# What is shown of a queue as Redis says it.
SHOWN = {field.name for field in fields(QueueInfo)}


class Queues:
    """List and operate queues. A queue is that of an alias: where no alias is known, of the default one."""

    def __init__(self, backend: str | None) -> None:
        self._backend = backend

    def all(self) -> list[QueueInfo]:
        """Return every queue that the project has named or has live tasks in, by alias and name."""
        return read("worker", reading_queue_infos(self._backend))

    def get(self, queue: str, *, backend: str | None = None) -> QueueInfo:
        """Return one queue; one that nobody has used is empty. Raises: InvalidOption for a name that none can have."""
        check_queue_name(queue)
        alias, now = self._alias(backend), database_clock.now()
        live = live_rows(now, backend=alias, queue=queue).get((alias, queue), NO_ROWS)
        paused = rows_of(Pause).filter(kind=PauseKind.QUEUE, backend=alias, name=queue).first()
        contents = read("worker", reading_queues([(alias, queue)]))[alias, queue]
        return _queue_info(alias, queue, live, paused, contents, now)

    def pause(
        self, queue: str, *, by: str = "", note: str = "", backend: str | None = None, wait: float | None = None
    ) -> bool:
        """Let no worker take tasks from a queue; return whether it was running. by: who; note: why.

        wait: return only when no task of it runs and none begins, within so many seconds; not in a transaction.
        Raises: InvalidOption, StillRunning: the queue is paused, and workers still have tasks of it.
        """
        return still_running.pause(PauseKind.QUEUE, queue, self._alias(backend), by=by, note=note, wait=wait)

    def resume(self, queue: str, *, backend: str | None = None) -> bool:
        """Let workers take tasks from a queue again; return whether it was paused. Raises: InvalidOption."""
        return control.resume(PauseKind.QUEUE, queue, backend=self._alias(backend))

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
        return [entry_info(each, rows.get(each.id)) for each in found]

    def rejected(self, queue: str, *, most: int = MOST_KEPT, backend: str | None = None) -> list[RejectedInfo]:
        """Return the messages and documents that can be no task, the newest first. Raises: InvalidOption."""
        return read("worker", reading_rejected_infos(queue, self._alias(backend), most))

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


def reading_rejected_infos(queue: str, alias: str, most: int) -> Reader[list[RejectedInfo]]:
    """Read what `Queues.rejected` returns. Raises: InvalidOption."""
    check_queue_name(queue)
    return [
        RejectedInfo(datetime.fromtimestamp(each.at, UTC), each.source, each.id, each.reason, each.data)
        for each in (yield from reading_rejected(queue, alias, most))
    ]


def reading_queue_infos(backend: str | None = None) -> Reader[list[QueueInfo]]:
    """Read every queue of an alias, by alias and name; None: of all. Raises: django.db.Error."""
    now = database_clock.now()
    live = live_rows(now, backend=backend)
    return queue_infos(live, (yield from reading_contents_of(live, backend=backend)), now)


def queue_infos(
    live: Mapping[QueueKey, LiveRows], contents: Mapping[QueueKey, QueueContents], now: datetime
) -> list[QueueInfo]:
    """Return queues as both stores have them, in the order of `contents`. Raises: django.db.Error."""
    paused = {(row.backend, row.name): row for row in rows_of(Pause).filter(kind=PauseKind.QUEUE)}
    return [_queue_info(*each, live.get(each, NO_ROWS), paused.get(each), contents[each], now) for each in contents]


def _queue_info(
    alias: str, queue: str, live: LiveRows, paused: Pause | None, contents: QueueContents, now: datetime
) -> QueueInfo:
    numbers = {name: value for name, value in contents._asdict().items() if name in SHOWN}
    backlog = backlog_of(live, contents, now)
    since = contents.paused_since
    return QueueInfo(
        backend=alias,
        queue=queue,
        waiting=backlog.waiting,
        queued=live.queued,
        running=live.running,
        **numbers,
        oldest_waiting_seconds=backlog.oldest_seconds,
        is_paused=since is not None,
        paused_at=paused.paused_at if paused else None,
        paused_by=paused.paused_by if paused else "",
    )


# --- The gates, for an `Inspector`.


class Gates:
    """List, repair and set gates."""

    def all(self) -> list[GateInfo]:
        """Return every gate with a row, an unfinished task or a task that waits, by name."""
        expected, paused = _expected_seconds(), _paused()
        return [_gate_info(each, expected.get(each.gate), is_paused=each.gate in paused) for each in gate_stats()]

    def get(self, name: str) -> GateDetails | None:
        """Return a gate with who holds its slots; None when nothing is known of it."""
        found = [each for each in self.all() if each.gate == name]
        if not found:
            return None
        info = {each.name: getattr(found[0], each.name) for each in fields(GateInfo)}
        slots = [(slot.id, datetime.fromtimestamp(min(slot.expires_at, LATEST), UTC)) for slot in gates.slots(name)]
        return GateDetails(**info, slots=slots, waiters=gates.waiters(name))

    def audit(self, name: str, *, dry_run: bool = False) -> GateDrift:
        """Make the slots of a gate agree with the rows, which decide who holds one. dry_run: only count."""
        check_gate_name(name)
        return GateDrift(*gates.audit(name, dry_run=dry_run))

    def set(self, name: str, *, limit: int | None = None, expected_seconds: float | None = None) -> GateInfo:
        """Set the limit of a gate, or how long its tasks take; make its row when it has none. Takes effect at once.

        limit: 0 or less means no limit; required for a gate without a row. expected_seconds: of a new row by default
        what the tasks of the gate say. Raises: InvalidOption.
        """
        check_gate_name(name)
        with transaction_of(Gate):
            row = rows_of(Gate).select_for_update().filter(name=name).first()
            if row is None:
                if limit is None:
                    raise InvalidOption(f"gate {name} has no row yet: give a limit for it")
                row = Gate(name=name)
                if expected_seconds is None:
                    row.expected_seconds = gates.expected_seconds_of(name)
            row.limit = row.limit if limit is None else limit
            row.expected_seconds = row.expected_seconds if expected_seconds is None else expected_seconds
            try:
                row.clean_fields()
            except ValidationError as error:
                raise InvalidOption(f"gate {name} cannot be set: {'; '.join(error.messages)}") from error
            row.save(using=writing_database(Gate))
        (info,) = [each for each in self.all() if each.gate == name]
        return info

    def pause(self, name: str, *, by: str = "", note: str = "", wait: float | None = None) -> bool:
        """Let a gate admit nothing new; return whether it admitted. by: who; note: why.

        wait: return only when no task holds a slot of it, so none begins, within so many seconds; not in a transaction.
        Raises: InvalidOption, StillRunning: the gate is paused, and tasks still hold slots of it.
        """
        return still_running.pause(PauseKind.GATE, name, by=by, note=note, wait=wait)

    def resume(self, name: str) -> bool:
        """Let a gate admit again; return whether it was paused. Raises: InvalidOption."""
        return control.resume(PauseKind.GATE, name)


def _gate_info(each: GateStats, expected_seconds: float | None, *, is_paused: bool) -> GateInfo:
    return GateInfo(each.gate, each.limit, expected_seconds, each.occupancy, each.live, each.waiting, is_paused)


def _expected_seconds() -> dict[str, float]:
    return dict(rows_of(Gate).values_list("name", "expected_seconds"))


def _paused() -> set[str]:
    return set(rows_of(Pause).filter(kind=PauseKind.GATE).values_list("name", flat=True))


# --- The worker processes, for an `Inspector`.


class Workers:
    """List worker processes, also those of other programs, and drain those of ours."""

    def __init__(self, backend: str | None) -> None:
        self._backend = backend

    def all(self) -> list[WorkerInfo]:
        """Return the living processes, by alias, host and process id; some seconds old at most."""
        return read("worker", reading_worker_infos(self._aliases()))

    def serving(self, queue: str) -> list[WorkerInfo]:
        """Return the processes that take tasks from a queue, without those that are drained.

        Aliases that share a prefix share its queues.
        """
        return [each for each in self.all() if queue in each.queues and not each.is_draining]

    def drain(self, name: str, *, wait: float | None = None) -> list[WorkerInfo]:
        """Ask processes to take no more tasks and to finish what they run, until they are resumed; return which.

        name: a worker's id, or a host, which means all of it, also processes that start later. The request holds for a
        day at most. Other programs have no such request.
        wait: return only when they have noticed it and have no task, so none begins there, within so many seconds.
        Raises: StillRunning: the request is made.
        """
        drained = [_worker_info(each, alias) for alias in self._aliases() for each in servers.drain(name, alias)]
        end = time.monotonic() + (wait or 0.0)
        while wait is not None:
            found = [each for each in self.all() if each.is_ours and name in (each.id, each.host)]
            # First whether they have noticed it: what they took before is held then.
            are_noticed = all(each.is_draining for each in found)
            held = still_running.held_by({(each.backend, each.id) for each in [*drained, *found]})
            if are_noticed and not held:
                break
            if time.monotonic() >= end:
                raise StillRunning(f"{name} is asked to take no more tasks", wait, held)
            time.sleep(still_running.POLL_SECONDS)
        return drained

    def resume(self, name: str) -> bool:
        """Let processes take tasks again; return whether a request to drain had this name."""
        found = [servers.resume(name, alias) for alias in self._aliases()]
        return any(found)

    def drained_by(self, name: str) -> list[str]:
        """Return the names of the requests to drain that hold for a process, or for any of a host."""
        now, found = redis_clock.seconds("producer"), set[str]()
        for alias in self._aliases():
            requests = servers.read_requests(alias)
            for each in servers.workers(alias):
                if each.details is not None and each.is_named(name):
                    names = (each.details.worker_id, each.id, each.host)
                    found |= {other for other in names if requests.get(other, 0) > now}
        return sorted(found)

    def _aliases(self) -> list[str]:
        return one_alias_per_prefix() if self._backend is None else [self._backend]


def reading_worker_infos(aliases: Sequence[str]) -> Reader[list[WorkerInfo]]:
    """Read the living processes of some aliases, as `Workers.all` returns them."""
    found = yield from side_by_side(*(servers.reading_workers(alias) for alias in aliases))
    return [_worker_info(each, alias) for alias, of_alias in zip(aliases, found, strict=True) for each in of_alias]


def _worker_info(each: servers.WorkerInfo, alias: str) -> WorkerInfo:
    details = each.details
    return WorkerInfo(
        id=details.worker_id if details else each.id,
        backend=details.alias if details else alias,
        host=each.host,
        pid=each.pid,
        queues=dict(each.queues),
        status=each.status,
        slots=each.concurrency,
        busy=each.busy,
        started_at=each.started_at,
        running=[RunningTask(task.id, task.type, task.queue, task.started_at) for task in each.running],
        is_ours=details is not None,
        version=details.version if details else "",
        finished=details.finished if details else 0,
        rss_bytes=details.rss_bytes if details else 0,
        beat_at=moment_of(details.beat_at) if details else None,
        is_draining=bool(details and details.is_draining),
        is_leader=bool(details and details.is_leader),
        is_quarantined=bool(details and details.is_quarantined),
        tasks=list(details.tasks) if details else [],
        versions=dict(details.versions) if details else {},
        app_version=details.app_version if details else "",
        queue_slots=dict(details.queue_slots) if details else {},
    )

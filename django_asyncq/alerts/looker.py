"""Look what is wrong now, by the limits of ASYNCQ["ALERTS"]. No query here reads finished rows, and nothing is changed.

A part that cannot be looked at, because its store is unreachable, says nothing: what an earlier look has found there is
then neither found again nor over.
"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta

from django.conf import settings as django_settings
from django.db import Error as DatabaseError
from django.db import connections
from django.db.models import Min

from ..aliases import is_redis_used, uses_redis
from ..broker import Broker, prefix_owner, redis_clock
from ..broker.prefix_owner import Supervisor
from ..clock_difference import clock_difference_seconds
from ..definitions.alert_settings import AlertSettings
from ..definitions.printable import visible_line
from ..exceptions import BrokerUnavailable
from ..faults import Faults, Outages
from ..guard import get_logger
from ..inspector import Inspector
from ..inspector.due import DUE_SINCE, due_rows
from ..inspector.soundness import mismatches, read_silence
from ..models import Alert, AlertKind, PauseKind, Schedule
from ..pausing.rows import pauses
from ..prefixes import DEFAULT_ALIAS, one_alias_per_prefix
from ..storage import database_clock
from ..storage.routing import rows_of
from .findings import DATABASE, REDIS, Finding, Findings, Key, key_of
from .wording import percent, span

logger = get_logger("django_asyncq.alerts")

RATIO_MINUTES = 15
LEAST_ATTEMPTS = 20
# An alert begins at its limit, and is over below this part of it: one that lies between does not come and go.
OVER_BELOW = 0.75
# Of each kind; the worst ones. Of the others nothing is found and nothing is over.
MOST_FINDINGS = 1_000

Part = Callable[[], Iterable[Finding]]


class Looker:
    """Looks at both stores, again and again; the log says once in each outage that it cannot. Used by one thread.

    outages: of loops of this process that say so too.
    """

    def __init__(self, settings: AlertSettings, outages: Outages | None = None) -> None:
        self._settings = settings
        self._faults = Faults(
            logger,
            "a look for alerts found a store unreachable",
            over="a look for alerts reached both stores again",
            outages=outages,
        )

    def look(self) -> Findings:
        """Return what is wrong. Raises nothing for a store that is unreachable: that is a finding."""
        look = _Look(self._settings, self._faults)
        look.at(AlertKind.STORE, look.ask_database, DATABASE)
        look.at(AlertKind.OLDEST_WAITING, look.waiting_queues, DATABASE)
        look.at(AlertKind.OVERDUE_SCHEDULES, look.overdue_schedules, DATABASE)
        if is_redis_used():
            look.at(AlertKind.STORE, look.ask_redis, REDIS)
            look.at(AlertKind.FAILURE_RATIO, look.failing_queues, REDIS)
            look.at(AlertKind.SILENT_WORKERS, look.silent_workers, REDIS)
            look.at(AlertKind.MISMATCH, look.mismatches, DATABASE, REDIS)
        if not look.unreachable:
            self._faults.clear()
        return look.findings()


class _Look:
    """One look. unreachable: the stores that have not answered."""

    def __init__(self, settings: AlertSettings, faults: Faults) -> None:
        self.limits = settings
        self.unreachable: set[str] = set()
        self._faults = faults
        self._found: dict[Key, Finding] = {}
        self._kinds: set[str] = {AlertKind.STORE}
        self._living_hosts: frozenset[str] = frozenset()

    def at(self, kind: AlertKind, part: Part, *stores: str) -> None:
        """Look at one part, unless it has no limit, or a store that it needs is unreachable."""
        if getattr(self.limits, kind.value, True) is None or self.unreachable.intersection(stores):
            return
        try:
            found = self._faults.attempt(f"the look for alerts, {kind.value}", lambda: list(part()), None)
        except BrokerUnavailable as error:
            self._faults.note(error)
            self.unreachable.add(REDIS)
        except DatabaseError as error:
            self._faults.note(error)
            self.unreachable.add(DATABASE)
            connections.close_all()
        else:
            if found is not None:
                self._found.update({each.key: each for each in found[:MOST_FINDINGS]})
                if len(found) <= MOST_FINDINGS:
                    self._kinds.add(kind)

    def findings(self) -> Findings:
        """Return what was found."""
        stores = {each.key: each for each in map(_unreachable, self.unreachable)}
        return Findings({**self._found, **stores}, frozenset(self._kinds), self._living_hosts)

    # --- the parts; each yields the worst first

    def ask_database(self) -> list[Finding]:
        """Find nothing, if the database answers."""
        rows_of(Alert).exists()
        return []

    def ask_redis(self) -> list[Finding]:
        """Find nothing, if Redis answers."""
        redis_clock.measure()
        return []

    def waiting_queues(self) -> Iterator[Finding]:
        """Find queues in which a task has been due for too long. What is paused may wait."""
        limit, now = self.limits.oldest_waiting or 0, database_clock.now()
        rows, paused = due_rows(now), pauses()
        # As values, not as a subquery: of half a million tasks it would double the time.
        if names := [each.name for each in paused if each.kind == PauseKind.TASK]:
            rows = rows.exclude(name__in=names)
        queues = {(each.backend, each.name) for each in paused if each.kind == PauseKind.QUEUE}
        by_queue = rows.values_list("backend", "queue_name").annotate(since=Min(DUE_SINCE))
        late = by_queue.filter(since__lte=now - timedelta(seconds=limit * OVER_BELOW)).order_by("since")
        for alias, queue, since in late:
            if (alias, queue) in queues or not uses_redis(alias):
                continue
            seconds, name = (now - since).total_seconds(), _queue(alias, queue)
            yield Finding(
                key_of(AlertKind.OLDEST_WAITING, queue, alias),
                f"{name}: tasks wait",
                f"{name}: the oldest task has waited for {span(seconds)} (limit {span(limit)})",
                f"manage.py asyncq queues show {_argument(queue)}{_backend(alias)}",
                value=seconds,
                limit=limit,
                since=since,
                is_beyond=seconds >= limit,
            )

    def overdue_schedules(self) -> Iterator[Finding]:
        """Find schedules that should have fired. Without time zones none fires; a check reports that."""
        limit, now = self.limits.overdue_schedules or 0, database_clock.now()
        late = rows_of(Schedule).firing().filter(next_occurrence_at__lte=now - timedelta(seconds=limit * OVER_BELOW))
        rows = late.order_by("next_occurrence_at").values_list("name", "next_occurrence_at")
        for name, since in rows[: MOST_FINDINGS + 1] if django_settings.USE_TZ else ():
            seconds, shown = (now - (since or now)).total_seconds(), visible_line(name)
            yield Finding(
                key_of(AlertKind.OVERDUE_SCHEDULES, name),
                f"schedule {shown} is overdue",
                f"schedule {shown} is overdue by {span(seconds)} (limit {span(limit)})",
                f"manage.py asyncq schedules history {_argument(name)}",
                value=seconds,
                limit=limit,
                since=since,
                is_beyond=seconds >= limit,
            )

    def failing_queues(self) -> Iterator[Finding]:
        """Find queues of whose latest attempts too many have failed."""
        limit = self.limits.failure_ratio or 0
        counted = [
            (failed / processed, processed, alias, queue)
            for alias in one_alias_per_prefix()
            for queue in Broker("worker", alias).queues()
            for processed, failed in [_attempts(alias, queue)]
            if processed and failed / processed >= limit * OVER_BELOW
        ]
        for ratio, processed, alias, queue in sorted(counted, key=lambda each: (-each[0], each[2:])):
            name = _queue(alias, queue)
            yield Finding(
                key_of(AlertKind.FAILURE_RATIO, queue, alias),
                f"{name}: attempts fail",
                f"{name}: {percent(ratio)} of {processed:,} attempts of the last {RATIO_MINUTES} minutes failed "
                f"(limit {percent(limit)})",
                f"manage.py asyncq tasks failures --queue {shlex.quote(visible_line(queue))}{_backend(alias)}",
                value=round(ratio, 4),
                limit=limit,
                is_beyond=ratio >= limit and processed >= LEAST_ATTEMPTS,
            )

    def silent_workers(self) -> Iterator[Finding]:
        """Find that nobody runs tasks, and supervisors that have vanished without being stopped."""
        limit = self.limits.silent_workers or 0
        known, now = prefix_owner.supervisors(), redis_clock.seconds()
        self._living_hosts = frozenset(visible_line(each.host) for each in known if each.is_alive)
        alive, silence = read_silence()
        if silence is None:
            yield self._nobody(f"no worker is known (limit {span(limit)})")
        elif silence >= limit:
            since = datetime.fromtimestamp(now - silence, UTC)
            text = f"no worker has reported for {span(silence)} (limit {span(limit)})"
            yield self._nobody(text, value=silence, since=since, hold_seconds=0.0)
        elif alive and not any(each.is_ours for each in Inspector().workers.all()):
            yield self._nobody(f"runworkers runs, but none of its worker processes does (limit {span(limit)})")
        lost = {(each.host, each.pid): each for each in sorted(known, key=lambda each: each.reported_at)}
        for each in lost.values():
            is_lost = not each.is_alive and not any(map(each.is_replaced_by, known))
            if is_lost and now - each.reported_at >= limit:
                yield self._vanished(each, now - each.reported_at)

    def mismatches(self) -> Iterator[Finding]:
        """Find what is always a problem."""
        for each in mismatches(clock_difference_seconds()):
            yield Finding(key_of(AlertKind.MISMATCH, each.subject), each.title, each.text, "manage.py asyncq health")

    def _nobody(
        self, text: str, *, value: float | None = None, since: datetime | None = None, hold_seconds: float | None = None
    ) -> Finding:
        limit = self.limits.silent_workers or 0
        # Of workers that were stopped nothing shows since when there are none: only the looks know.
        hold = limit if hold_seconds is None else hold_seconds
        key, command = key_of(AlertKind.SILENT_WORKERS, ""), "manage.py asyncq workers list"
        return Finding(key, "no worker runs", text, command, value, limit, since, hold_seconds=hold)

    def _vanished(self, lost: Supervisor, silence: float) -> Finding:
        limit, host = self.limits.silent_workers or 0, visible_line(lost.host)
        return Finding(
            key_of(AlertKind.SILENT_WORKERS, f"{host}:{lost.pid}"),
            f"host {host}: runworkers has vanished",
            f"host {host}: runworkers (process {lost.pid}) has not reported for {span(silence)} (limit {span(limit)}), "
            "and was not stopped",
            "manage.py asyncq workers list",
            value=silence,
            limit=limit,
            since=datetime.fromtimestamp(lost.reported_at, UTC),
        )


def _unreachable(store: str) -> Finding:
    name = "the database" if store == DATABASE else store
    text = f"{name} is unreachable from {socket.gethostname()}"
    return Finding(key_of(AlertKind.STORE, store), f"{name} is unreachable", text, "manage.py asyncq health")


def _attempts(alias: str, queue: str) -> tuple[int, int]:
    """Return how many attempts of a queue have finished lately, and how many of them have failed."""
    minutes = Inspector(alias).queues.minutes(queue, minutes=RATIO_MINUTES)
    return sum(each.processed or 0 for each in minutes), sum(each.failed or 0 for each in minutes)


def _queue(alias: str, queue: str) -> str:
    of_alias = "" if alias == DEFAULT_ALIAS else f" of {visible_line(alias)}"
    return f"queue {visible_line(queue)}{of_alias}"


def _backend(alias: str) -> str:
    return "" if alias == DEFAULT_ALIAS else f" --backend {shlex.quote(visible_line(alias))}"


def _argument(name: str) -> str:
    """Return a name for a shell; one that begins like an option is none."""
    quoted = shlex.quote(visible_line(name))
    return f"-- {quoted}" if name.startswith("-") else quoted

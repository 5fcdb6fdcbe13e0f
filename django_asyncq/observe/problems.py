"""Look what is wrong with the fleet now. No query here reads finished rows, and nothing is changed.

Where a store is unreachable, its parts say nothing: what is wrong there is neither found nor over.
"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import NamedTuple

from django.conf import settings as django_settings
from django.db import Error as DatabaseError
from django.db import connections

from .. import conf
from ..broker import Broker, redis_clock
from ..broker.reading import read
from ..broker.unknown_tasks import label_of, reading_unknown
from ..control import pauses
from ..core.aliases import DEFAULT_ALIAS, is_redis_used, one_alias_per_prefix, uses_redis
from ..core.guard import get_logger
from ..core.names import visible_line
from ..core.policies import AlertSettings
from ..exceptions import BrokerUnavailable
from ..models import Alert, AlertKind, PauseKind, Schedule
from ..storage import database_clock
from ..storage.errors import Faults, Outages
from ..storage.routing import rows_of
from .backlog import LiveRows, backlog_of, contents_of, live_rows
from .inspector import Inspector
from .of_rates import names_that_wait
from .soundness import clock_difference_seconds, mismatches, read_silence, vanished_supervisors

logger = get_logger("django_asyncq.alerts")

RATIO_MINUTES = 15
LEAST_ATTEMPTS = 20
# A supervisor reports every five seconds.
MOST_SILENCE_SECONDS = 120
MOST_OVERDUE_SECONDS = 300
DATABASE, REDIS = "database", "Redis"

Key = tuple[str, str, str]
Part = Callable[[], Iterable["Problem"]]


class Problem(NamedTuple):
    """Something wrong. kind: of `AlertKind`. backend, subject: what it is about; with the kind, there is one row of it.

    title: in a few words, without numbers. text: a sentence with the numbers. command: shows more.
    """

    kind: str
    backend: str
    subject: str
    title: str
    text: str
    command: str

    @property
    def key(self) -> Key:
        """By which it is known again."""
        return self.kind, self.backend, self.subject


class Look(NamedTuple):
    """What a look has found, the most important first. kinds: those of which it has found all there is.

    rows: of problems that were sent, as they were before the look. database: its problem, when it is
    unreachable.
    """

    problems: dict[Key, Problem]
    kinds: set[str]
    rows: list[Alert]
    database: Problem | None


class Looker:
    """Looks, again and again; the log says once in each outage that a store is unreachable. Used by one thread.

    outages: of loops of this process that say so too.
    """

    def __init__(self, limits: AlertSettings, outages: Outages | None = None) -> None:
        self._limits = limits
        self._faults = Faults(
            logger,
            "a look for alerts found a store unreachable",
            over="a look for alerts reached both stores again",
            outages=outages,
        )
        self._rows: list[Alert] = []

    def look(self) -> Look:
        """Return what is wrong. Raises nothing for a store that is unreachable: that is a problem."""
        parts: list[tuple[AlertKind, Part, set[str]]] = [(AlertKind.STORE, self._read_rows, {DATABASE})]
        if is_redis_used():
            parts += [
                (AlertKind.STORE, self._ask_redis, {REDIS}),
                (AlertKind.SILENT_WORKERS, self._silent_workers, {REDIS}),
                (AlertKind.MISMATCH, self._mismatches, {DATABASE, REDIS}),
            ]
        parts += [
            (AlertKind.OLDEST_WAITING, self._waiting_queues, {DATABASE}),
            (AlertKind.OVERDUE_SCHEDULES, self._overdue_schedules, {DATABASE}),
        ]
        if is_redis_used():
            parts.append((AlertKind.UNKNOWN_TASKS, self._unknown_tasks, {REDIS}))
            parts.append((AlertKind.FAILURE_RATIO, self._failing_queues, {REDIS}))
        found: list[Problem] = []
        kinds: set[str] = {AlertKind.STORE.value}
        unreachable: dict[str, Problem] = {}
        for kind, part, stores in parts:
            if stores.isdisjoint(unreachable):
                problems, lost = self._attempt(kind, part)
                if lost:
                    unreachable[lost] = _unreachable(lost)
                elif problems is not None:
                    found += problems
                    kinds.add(kind.value)
        if not unreachable:
            self._faults.clear()
        problems_by_key = {each.key: each for each in (*unreachable.values(), *found)}
        return Look(problems_by_key, kinds, self._rows, unreachable.get(DATABASE))

    def _attempt(self, kind: AlertKind, part: Part) -> tuple[list[Problem] | None, str]:
        """Return what a part finds, None after an error of its own; and the store that it did not reach."""
        try:
            return self._faults.attempt(f"the look for alerts, {kind.value}", lambda: list(part()), None), ""
        except BrokerUnavailable as error:
            self._faults.note(error)
            return None, REDIS
        except DatabaseError as error:
            self._faults.note(error)
            connections.close_all()
            return None, DATABASE

    # --- the parts; each yields the worst first

    def _read_rows(self) -> list[Problem]:
        self._rows = list(rows_of(Alert))
        return []

    def _ask_redis(self) -> list[Problem]:
        redis_clock.measure()
        return []

    def _silent_workers(self) -> Iterator[Problem]:
        """Find that all supervisors have vanished, or some. One that was stopped is missed when tasks wait."""
        now, (_, silence) = redis_clock.seconds(), read_silence()
        if silence is not None and silence >= MOST_SILENCE_SECONDS:
            text = f"no worker has reported for {silence:.0f} s, longer than {MOST_SILENCE_SECONDS} s"
            yield _problem(AlertKind.SILENT_WORKERS, "", "no worker runs", text, "workers list")
        for each in sorted(vanished_supervisors(), key=lambda each: each.reported_at):
            ago, host = now - each.reported_at, visible_line(each.host)
            if ago >= MOST_SILENCE_SECONDS:
                title = f"host {host}: runworkers has vanished"
                text = f"{title}: process {each.pid} has not reported for {ago:.0f} s, and was not stopped"
                yield _problem(AlertKind.SILENT_WORKERS, f"{host}:{each.pid}", title, text, "workers list")

    def _mismatches(self) -> Iterator[Problem]:
        for each in mismatches(clock_difference_seconds()):
            yield _problem(AlertKind.MISMATCH, each.subject, each.title, each.text, "health")

    def _waiting_queues(self) -> Iterator[Problem]:
        """Find queues in which a task has been due for too long. What is paused, or waits for a rate, may wait."""
        limit, now = self._limits.oldest_waiting, database_clock.now()
        if limit is None:
            return
        paused = pauses()
        names = [each.name for each in paused if each.kind == PauseKind.TASK] + names_that_wait()
        queues = {(each.backend, each.name) for each in paused if each.kind == PauseKind.QUEUE}
        live = live_rows(now, without=names)
        try:
            contents = contents_of(live) if is_redis_used() else {}
        except BrokerUnavailable:
            contents = {}  # another part says so; the rows alone are worth a look
        late = [
            (backlog.oldest_seconds, alias, queue)
            for alias, queue in {*live, *contents}
            if (backlog := backlog_of(live.get((alias, queue), LiveRows()), contents.get((alias, queue)), now))
            and backlog.oldest_seconds is not None
            and backlog.oldest_seconds >= limit
        ]
        for seconds, alias, queue in sorted(late, reverse=True):
            if (alias, queue) not in queues and uses_redis(alias):
                name = _queue(alias, queue)
                text = f"{name}: the oldest task has been waiting for {seconds:.0f} s, longer than {limit:g} s"
                command = f"queues show {_argument(queue)}{_backend(alias)}"
                yield _problem(AlertKind.OLDEST_WAITING, queue, f"{name}: tasks wait", text, command, alias)

    def _overdue_schedules(self) -> Iterator[Problem]:
        """Find schedules that should have fired. Without time zones none fires; a check reports that."""
        now = database_clock.now()
        late = rows_of(Schedule).firing().filter(next_occurrence_at__lte=now - timedelta(seconds=MOST_OVERDUE_SECONDS))
        rows = late.order_by("next_occurrence_at").values_list("name", "next_occurrence_at")
        for name, since in rows if django_settings.USE_TZ else ():
            title, seconds = f"schedule {visible_line(name)} is overdue", (now - (since or now)).total_seconds()
            text = f"{title} by {seconds:.0f} s, more than {MOST_OVERDUE_SECONDS} s"
            yield _problem(AlertKind.OVERDUE_SCHEDULES, name, title, text, f"schedules history {_argument(name)}")

    def _unknown_tasks(self) -> Iterator[Problem]:
        """Find tasks that have waited for longer than UNREGISTERED_PATIENCE_SECONDS for code that has them."""
        patience = conf.current().unregistered_patience_seconds
        for alias in one_alias_per_prefix():
            broker = Broker("worker", alias)
            for each in read("worker", reading_unknown(alias, broker.queues())):
                waited = redis_clock.seconds() - each.since
                if each.since and waited >= patience:
                    name, queue = visible_line(label_of(each.name, each.version)), _queue(alias, each.queue)
                    title = f"no worker has the code of {name}"
                    text = f"{queue}: {each.total:,} tasks wait, because {title}; the first one for {waited:.0f} s"
                    command = f"tasks list --task {_argument(each.name)} --state queued{_backend(alias)}"
                    yield _problem(AlertKind.UNKNOWN_TASKS, f"{each.queue} {name}", title, text, command, alias)

    def _failing_queues(self) -> Iterator[Problem]:
        """Find queues of whose latest attempts too many have failed."""
        limit = self._limits.failure_ratio
        for alias in one_alias_per_prefix() if limit is not None else ():
            for queue in Broker("worker", alias).queues():
                minutes = Inspector(alias).queues.minutes(queue, minutes=RATIO_MINUTES)
                processed = sum(each.processed or 0 for each in minutes)
                failed = sum(each.failed or 0 for each in minutes)
                if processed >= LEAST_ATTEMPTS and failed / processed >= (limit or 0):
                    name = _queue(alias, queue)
                    text = f"{name}: {failed:,} of {processed:,} attempts of the last {RATIO_MINUTES} minutes failed"
                    command = f"tasks failures --queue {shlex.quote(visible_line(queue))}{_backend(alias)}"
                    yield _problem(AlertKind.FAILURE_RATIO, queue, f"{name}: attempts fail", text, command, alias)


def _problem(kind: AlertKind, subject: str, title: str, text: str, command: str, backend: str = "") -> Problem:
    """Return a problem whose key each database can hold, whatever the names are."""
    backend, subject = visible_line(backend)[:64], visible_line(subject)[:200]
    return Problem(kind.value, backend, subject, title, text, f"manage.py asyncq {command}")


def _unreachable(store: str) -> Problem:
    title = f"{'the database' if store == DATABASE else store} is unreachable"
    return _problem(AlertKind.STORE, store, title, f"{title} from {socket.gethostname()}", "health")


def _queue(alias: str, queue: str) -> str:
    return f"queue {visible_line(queue)}" + ("" if alias == DEFAULT_ALIAS else f" of {visible_line(alias)}")


def _backend(alias: str) -> str:
    return "" if alias == DEFAULT_ALIAS else f" --backend {shlex.quote(visible_line(alias))}"


def _argument(name: str) -> str:
    """Return a name for a shell; one that begins like an option is none."""
    quoted = shlex.quote(visible_line(name))
    return f"-- {quoted}" if name.startswith("-") else quoted

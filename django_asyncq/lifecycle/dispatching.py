"""Dispatch committed rows to Redis, and park those whose gate slot was lost in the meantime."""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from uuid import UUID

from django.conf import settings
from django.core.signals import setting_changed
from django.db import Error as DatabaseError
from django.db import connections
from django.template.defaultfilters import pluralize

from .. import conf, gates
from ..broker import Broker, Entry, Lease, clients, keys, ownership, redis_clock
from ..broker.groups import Groups
from ..broker.inspection import Inspection
from ..core.aliases import client_factory_of, prefix_of
from ..core.guard import LongLivedThread, attempt, get_logger, is_a
from ..core.logs import log_extra
from ..exceptions import BrokerMisconfigured, BrokerUnavailable, GateUnavailable, PrefixTaken
from ..models import FailureReason, TaskRecord, TaskState
from ..models.tasks import IS_READY
from ..storage import database_clock, identity
from ..storage.errors import one_line
from ..storage.routing import as_check, rows_of, transaction_of, writing_database
from .base import NO_GROUP, CommitHook, GroupPlace, announce, by_group, load_rows, update_waiting
from .messages import entry_of, later_fence

# --- Refuse to enqueue under a Redis prefix that belongs to another database, whose workers would find no row.
#
# Redis and the database are asked once per process and prefix, at the first `enqueue`. They are asked again after a
# push that failed, and when Redis no longer knows a queue, which a process notices within a minute. While the
# answer is not known (Redis is unreachable, or no supervisor has taken the prefix yet) tasks are enqueued, and the
# next `enqueue` after ASK_AGAIN_SECONDS asks again. So is a refusal, after REFUSED_SECONDS: a person may have run
# `asyncq adopt`.

logger = get_logger("django_asyncq.lifecycle")

ASK_AGAIN_SECONDS = 60.0
REFUSED_SECONDS = 1.0

# Prefix → monotonic seconds before which nothing is asked.
_ask_from: dict[str, float] = {}
# Prefix → the identities of its owner and of this database, which differ.
_refused: dict[str, tuple[UUID, UUID]] = {}
# Prefix → monotonic seconds until which nothing is asked or refused for it, nor for KEY_PREFIX.
settled_until: dict[str, float] = {}


def require_own_prefix(aliases: Iterable[str], *, may_ask: bool) -> None:
    """Check that no other database owns the prefix of one of these aliases, or KEY_PREFIX.

    may_ask: whether Redis may be asked now.
    Raises: PrefixTaken; BrokerUnavailable when that is not known, so the task can be enqueued.
    """
    now = time.monotonic()
    unreachable: BrokerUnavailable | None = None
    prefixes = list(map(prefix_of, aliases))
    for prefix in dict.fromkeys([keys.prefix(), *prefixes]):
        if may_ask and unreachable is None and now >= _ask_from.get(prefix, 0.0):
            # First, so that no other thread asks too, or waits for the answer.
            _ask_from[prefix] = now + ASK_AGAIN_SECONDS
            try:
                _ask(prefix, now)
            except BrokerUnavailable as error:
                unreachable = error
        if prefix in _refused:
            owner, database = _refused[prefix]
            raise PrefixTaken(prefix=prefix, owner=owner, database=database)
    if unreachable is not None:
        raise unreachable
    of_all = _ask_from.get(keys.prefix(), 0.0)
    settled_until.update({prefix: min(of_all, _ask_from.get(prefix, 0.0)) for prefix in prefixes})


def forget() -> None:
    """Ask again at the next `enqueue`: the owner may be another one now."""
    _ask_from.clear()
    settled_until.clear()


def _forget_after_change(*, setting: str, **kwargs: object) -> None:
    """Check the settings again that a test has changed."""
    if setting in (conf.NAME, "CACHES", "TASKS"):
        forget()


setting_changed.connect(_forget_after_change, dispatch_uid="django_asyncq.lifecycle.dispatching")


def adopts_by_itself() -> bool:
    """Return whether a supervisor adopts a prefix that no other supervisor uses: while a project is developed.

    `rm db.sqlite3` and `migrate` make another database.
    """
    return bool(settings.DEBUG)


def _ask(prefix: str, now: float) -> None:
    """Ask both stores. What is refused stays refused until they say otherwise. Raises: BrokerUnavailable."""
    owner = ownership.read_owner(prefix)
    try:
        database = _read_identity() if owner is not None else None
    except DatabaseError as error:
        # If it is more than a table that is missing, the INSERT reports it; so it does in a broken transaction.
        logger.debug("the identity of the database cannot be read: %s", one_line(error))
        return
    if owner is not None and database is not None and owner != database and not _will_adopt(prefix, database):
        _refused[prefix] = owner, database
        _ask_from[prefix] = now + REFUSED_SECONDS
        return
    _refused.pop(prefix, None)
    if owner is not None and owner == database:
        _ask_from[prefix] = math.inf


def _read_identity() -> UUID | None:
    """Read the identity of the database; an error does not break the caller's transaction. Raises: django.db.Error."""
    connection = connections[writing_database(TaskRecord)]
    with transaction_of(TaskRecord) if connection.in_atomic_block else nullcontext():
        return identity.read()


def _will_adopt(prefix: str, database: UUID) -> bool:
    """Return whether the next supervisor of this database will adopt a prefix. Raises: BrokerUnavailable."""
    return adopts_by_itself() and not ownership.note_supervisor(database, prefix=prefix).supervisors


# --- Note that Redis has the entries of tasks that only another program runs.


def note_seen(rows: Sequence[TaskRecord]) -> None:
    """Write into remote rows of one alias, as their fence, since when Redis has their entries."""
    if not rows:
        return
    since = redis_clock.now(rows[0].backend)
    unseen = rows_of(TaskRecord).filter(as_check(finished_at__isnull=True), id__in=[row.id for row in rows])
    unseen.update(fence=since)
    for row in rows:
        row.fence = since


def _note_pushed(rows: Sequence[TaskRecord]) -> None:
    """Note that Redis has the entries of remote rows.

    Another program may run them, or aggregate them in a group, and leave no trace before the leader looks. Without the
    note they would seem never to have been pushed, and would run again and again. A note that cannot be written is
    written by the leader, if it still finds the entry.
    """
    try:
        note_seen(rows)
    except DatabaseError as error:
        text = "Redis has %d task%s of another program, which their rows do not say yet: %s"
        logger.warning(text, len(rows), pluralize(len(rows)), one_line(error), extra=log_extra(*rows))


# After a failed push, pushes are skipped for this time: a request pays for one timeout, not for each of its pushes.
BREAKER_SECONDS = 2.0
# A task that waits at a gate is retried when a slot is released; after this time it is retried in any case, since Redis
# may have forgotten that it waits, or no leader looks at the waiters. The next leader needs LOCK_TTL_SECONDS.
GATE_RETRY_SECONDS = 30
# How long the same failure of pushes is not logged again: it may last for hours, and a busy site pushes all the time.
LOG_AGAIN_SECONDS = 60.0

_breaker_closes_at = 0.0
# The texts of the failures that were logged lately, and when.
_logged: dict[str, float] = {}


def dispatch(records: Sequence[TaskRecord], *, again: bool = False) -> int:
    """Confirm the gate slots of committed QUEUED rows and push them to Redis; return how many were pushed.

    again: Redis may have had the rows before; their fences then start above all that were handed out.
    Never raises for Redis: the reconciler pushes what could not be.
    """
    if not records or is_paused():
        return 0
    try:
        return push(Broker("producer", records[0].backend), records, again=again)
    except (BrokerUnavailable, GateUnavailable) as error:
        note_failed_push(error, records)
        return 0


def is_paused() -> bool:
    """Return whether pushes are skipped now, because one has just failed."""
    return time.monotonic() < _breaker_closes_at


def note_failed_push(error: Exception, records: Sequence[TaskRecord]) -> None:
    """Skip pushes for BREAKER_SECONDS, and log that the push of these tasks failed."""
    global _breaker_closes_at
    _breaker_closes_at = time.monotonic() + BREAKER_SECONDS
    # Redis may be another one, or empty, when it answers again.
    forget()
    log_failed_push(error, records, time.monotonic())


def log_failed_push(error: Exception, records: Sequence[TaskRecord], now: float) -> None:
    """Log a failed push, unless one with the same cause was logged within LOG_AGAIN_SECONDS. now: monotonic seconds."""
    text = str(error)
    for each, logged_at in list(_logged.items()):
        if now >= logged_at + LOG_AGAIN_SECONDS:
            _logged.pop(each, None)
    if text in _logged:
        return
    _logged[text] = now
    is_wrong = any(is_a(each, BrokerMisconfigured) for each in (error, error.__cause__))
    level = logging.ERROR if is_wrong else logging.WARNING
    count, text = len(records), "push of %d task%s failed; the reconciler will retry: %s"
    logger.log(level, text, count, pluralize(count), error, extra=log_extra(*records))


def push(broker: Broker, records: Sequence[TaskRecord], *, again: bool = False) -> int:
    """Do what `dispatch` does, but raise BrokerUnavailable or GateUnavailable when that is impossible.

    The script that makes a task pending also confirms its slot, where one script can reach both keys. Only a task that
    is delayed, or has lost its slot, costs a second call.
    """
    # A task that follows another one, or waits for some, waits as a row alone. A member of a batch waits in the batch.
    records = [
        record for record in records if record.after_id is None and not record.waits_for and not record.is_in_batch
    ]
    if waiting := [record for record in records if record.reason]:
        _bring_to_wait(broker, waiting, again=again)
        records = [record for record in records if not record.reason]
    if not records:
        return 0
    confirmed = not broker.reaches_all
    if confirmed:
        records = _confirmed(records)
    pushed = 0
    for of_alias, queue, group in by_queue(broker, records):
        if of_alias.register_queue(queue):
            # Redis did not know it: it may have lost its memory, and be another database's now.
            forget()
        due, delayed = _by_time(group)
        due, grouped = by_group(due)
        if due:
            pushed += _make_pending(of_alias, queue, due, again=again, confirmed=confirmed)
        for place, of_group in grouped.items():
            pushed += _add_to_group(of_alias, queue, place, of_group, again=again, confirmed=confirmed)
        if delayed := delayed if confirmed else _confirmed(delayed):
            pushed += _schedule(of_alias, queue, delayed, again=again)
    return pushed


def _bring_to_wait(broker: Broker, records: Sequence[TaskRecord], *, again: bool) -> None:
    """Let QUEUED tasks without a slot wait at their gates; delayed ones wait in the retry set until they ask."""
    for of_alias, queue, group in by_queue(broker, records):
        of_alias.register_queue(queue)
        delayed = [record for record in group if record.retry_at is not None]
        if delayed:
            of_alias.park(queue, [_entry(record, again=again) for record in delayed])
        gates.wait_again([record for record in group if record.retry_at is None])


def _by_time(records: list[TaskRecord]) -> tuple[list[TaskRecord], list[TaskRecord]]:
    """Return the tasks that are due, and those that are delayed."""
    timed = [record for record in records if record.run_after is not None]
    if not timed:
        return records, []
    now = database_clock.now()
    due: list[TaskRecord] = []
    delayed: list[TaskRecord] = []
    for record in records:
        (due if record.run_after is None or record.run_after <= now else delayed).append(record)
    return due, delayed


def _schedule(broker: Broker, queue: str, records: list[TaskRecord], *, again: bool) -> int:
    """Schedule delayed tasks of one queue; return how many. One with a group joins it when it is due."""
    plain, grouped = by_group(records)
    pushed = 0
    for place, of_group in [(NO_GROUP, plain), *grouped.items()]:
        if of_group:
            entries = [_entry(record, again=again) for record in of_group]
            words = broker.schedule(queue, entries, group=place.name, rules=place.rules)
            # Those whose lock another program has go without it.
            if "duplicate" in words:
                entries = _without_locks(entries, words)
                words += broker.schedule(queue, entries, group=place.name, rules=place.rules)
            pushed += words.count("scheduled")
            if remote := [record for record in of_group if record.is_remote]:
                _note_pushed(remote)
    return pushed


def _add_to_group(
    broker: Broker, queue: str, place: GroupPlace, records: list[TaskRecord], *, again: bool, confirmed: bool
) -> int:
    """Add tasks of one queue to their group; return how many."""
    if not confirmed:
        records = _confirmed(records)
    if not records:
        return 0
    entries = [_entry(record, again=again) for record in records]
    groups = Groups(broker.role, broker.alias)
    words = groups.add(queue, place.name, entries, rules=place.rules, again=again)
    if "duplicate" in words:
        words += groups.add(queue, place.name, _without_locks(entries, words), rules=place.rules, again=again)
    if remote := [record for record in records if record.is_remote]:
        _note_pushed(remote)
    return words.count("grouped")


def _make_pending(broker: Broker, queue: str, records: list[TaskRecord], *, again: bool, confirmed: bool) -> int:
    """Make tasks of one queue pending; return how many. confirmed: their slots are confirmed already."""
    if not confirmed and (several := [record for record in records if record.other_gates]):
        lost = set(several).difference(_confirmed(several))
        records = [record for record in records if record not in lost]
        if not records:
            return 0
    entries = [_entry(record, again=again, confirmed=confirmed) for record in records]
    words = broker.enqueue(queue, entries, again=again)
    if "duplicate" in words:
        # Another program has taken the lock meanwhile. The row is committed, so it runs, without the lock.
        words += broker.enqueue(queue, _without_locks(entries, words), again=again)
    pushed = words.count("queued")
    refused = {entry.id for entry, word in zip(entries, words, strict=False) if word == "no_slot"}
    if remote := [record for record in records if record.is_remote and record.redis_id not in refused]:
        _note_pushed(remote)
    if refused:
        kept = _confirmed([record for record in records if record.redis_id in refused])
        pushed += _make_pending(broker, queue, kept, again=again, confirmed=True) if kept else 0
    return pushed


def _without_locks(entries: Sequence[Entry], words: Sequence[str]) -> list[Entry]:
    """Return the entries whose lock another program holds, without it."""
    return [entry._replace(unique_key="") for entry, word in zip(entries, words, strict=True) if word == "duplicate"]


def _confirmed(records: list[TaskRecord]) -> list[TaskRecord]:
    """Confirm the slots of tasks; park the tasks whose slot is lost at a full gate, and return the others."""
    if not records:
        return records
    lost = gates.confirm(records)
    if not lost:
        return records
    park([record for record in records if record.id in lost], timedelta(seconds=GATE_RETRY_SECONDS))
    return [record for record in records if record.id not in lost]


def park_lost(records: Sequence[TaskRecord]) -> None:
    """Make the provisional slots of QUEUED tasks last; park those whose slot was lost meanwhile at a full gate.

    Raises: GateUnavailable, BrokerUnavailable.
    """
    _confirmed(list(records))


def _entry(record: TaskRecord, *, again: bool, confirmed: bool = True) -> Entry:
    # The script confirms one slot. Those of several gates are confirmed before.
    of_gate = gates.keys_for(record) if record.gate and not record.other_gates and not confirmed else None
    return entry_of(record, fence=later_fence(record) if again else record.fence, gate=of_gate)


def by_queue(broker: Broker, records: Sequence[TaskRecord]) -> Iterator[tuple[Broker, str, list[TaskRecord]]]:
    """Group tasks by alias and queue: one script call each. broker: of any alias; yields that of the group's alias."""
    groups: dict[tuple[str, str], list[TaskRecord]] = {}
    for record in records:
        groups.setdefault((record.backend, record.queue_name), []).append(record)
    for (alias, queue), group in groups.items():
        yield broker.of_alias(alias), queue, group


def park(records: Sequence[TaskRecord], delay: timedelta) -> None:
    """Put queued tasks that lost their gate slot aside; they are retried when it has a free slot, or after `delay`.

    | check    | only rows that are still QUEUED                                                          |
    | row      | QUEUED → RETRYING (FAILED with `retry_at`), reason GATE_FULL; one that may wait anyway   |
    |          | stays QUEUED                                                                             |
    | Redis    | asynq's retry set; `gates.confirm` has let them wait. Not for those that stay QUEUED     |
    | announce | `task_state_changed`, if it changes                                                      |

    If we die in between, the reconciler puts the row's entry into the retry set.
    """
    if not records:
        return
    waiting = [record for record in records if record.max_waiting is not None]
    if waiting:
        queued = rows_of(TaskRecord).filter(as_check(state=TaskState.QUEUED), id__in=[record.id for record in waiting])
        update_waiting(queued, waiting, reason=FailureReason.GATE_FULL)
        for record in waiting:
            record.reason = FailureReason.GATE_FULL
        records = [record for record in records if record.max_waiting is None]
        if not records:
            return
    retry_at = database_clock.now() + delay
    changed = rows_of(TaskRecord).filter(as_check(state=TaskState.QUEUED), id__in=[record.id for record in records])
    update_waiting(changed, records, state=TaskState.FAILED, reason=FailureReason.GATE_FULL, retry_at=retry_at)
    for record in records:
        record.state, record.reason, record.retry_at = TaskState.FAILED, FailureReason.GATE_FULL, retry_at
    for broker, queue, group in by_queue(Broker("producer", records[0].backend), records):
        broker.park(queue, [entry_of(record) for record in group])
    announce(records, TaskState.QUEUED, TaskState.FAILED)


# --- Push tasks that are enqueued shortly after each other from a thread, and those of a dense stream in batches.
#
# A lone task is pushed at once by its caller. A task committed within PUSH_BATCH_SECONDS of another one is pushed
# by the thread, so its caller need not wait for Redis. A push costs one round trip, for one task as for ten. So
# when DENSE commits fall within PUSH_BATCH_SECONDS, the thread waits for the rest of that time and pushes all of
# them with one script call per queue. The thread finishes when nothing more comes. All rows are committed: if the
# process dies before the push, the reconciler pushes them. Source: RFC 896 (Nagle), with time in place of the
# acknowledgement.

# Commits within PUSH_BATCH_SECONDS that make a dense stream. With fewer, waiting costs each task more than it saves.
DENSE = 4
# With this many waiting, callers push their tasks themselves, so that producers cannot outrun Redis for long.
MOST_WAITING = 10_000
# Longer than a push takes when Redis does not answer.
FINISH_SECONDS = 2.0


class PushBatcher:
    """The tasks that this process has committed and not pushed yet. Safe to use from any thread."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start empty, in the child of a fork: the parent has the thread and pushes what waits."""
        # `add` takes the lock directly, which is in C; entering the condition is in Python. Reentrant, because the
        # handler of an operating system's signal may enqueue while the lock is held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: list[TaskRecord] = []
        # Monotonic times: of the last few commits, and of the last time that the thread took what waited.
        self._came_at: deque[float] = deque(maxlen=DENSE)
        self._taken_at = 0.0
        self._is_pushing = False
        self._thread: threading.Thread | None = None

    def add(self, records: Sequence[TaskRecord]) -> bool:
        """Have committed tasks pushed by the thread; False when the caller must push them now.

        Nothing is batched for an alias whose clients need no round trip. Raises: as `clients.client`.
        """
        seconds = conf.current().push_batch_seconds
        if seconds <= 0 or client_factory_of(records[0].backend) is not None:
            return False
        with self._lock:
            now = time.monotonic()
            is_lone = not self._came_at or now - self._came_at[-1] >= seconds
            self._came_at.append(now)
            if is_lone and not (self._waiting or self._is_pushing):
                return False
            if len(self._waiting) >= MOST_WAITING or not (self._thread or self._start()):
                return False
            self._waiting.extend(records)
            # In a dense stream the thread wakes by itself when the time of the batch is over.
            if not self._is_stream(now, seconds):
                self._changed.notify_all()
            return True

    def _is_stream(self, now: float, seconds: float) -> bool:
        """Whether the last commits are dense enough for the next push to wait for more."""
        return len(self._came_at) == DENSE and now - self._came_at[0] < seconds

    def flush_pushes(self) -> None:
        """Push what waits now, and wait until a push that is under way has finished."""
        with self._changed:
            records, self._waiting = self._waiting, []
            # The thread may be waiting for what this call pushes.
            self._changed.notify_all()
        if records:
            self._push(records)
        with self._changed:
            self._changed.wait_for(lambda: not self._is_pushing, FINISH_SECONDS)

    def _start(self) -> bool:
        """Start the thread; False when none can be started, as in an exit handler, or no node of a cluster answers."""
        # Not a daemon: an interpreter that exits waits for the last push.
        thread = LongLivedThread("asyncq-push-batcher", self._push_until_idle, daemon=False)
        try:
            # An error of the settings is for the caller: the thread could only log it.
            clients.client("producer")
            thread.start()
        except (BrokerUnavailable, RuntimeError):
            return False
        self._thread = thread
        return True

    def _push_until_idle(self) -> None:
        try:
            while records := self._take_when_due():
                self._push(records)
                # A push that parks a task writes its row. Until the next push the database may close the connection.
                for connection in connections.all(initialized_only=True):
                    connection.close()
                self._finish_push()
        finally:
            with self._changed:
                # Only after a BaseException. Otherwise the thread has removed itself, and a new one may be running.
                if self._thread is threading.current_thread():
                    self._thread, self._is_pushing = None, False

    def _take_when_due(self) -> list[TaskRecord]:
        """Wait until a push is due and return what waits; nothing when the thread is to finish."""
        with self._changed:
            while (pause := self._pause_seconds(time.monotonic())) > 0:
                self._changed.wait(pause)
            records, self._waiting = self._waiting, []
            self._taken_at = time.monotonic()
            self._is_pushing = bool(records)
            if not records:
                self._thread = None
        return records

    def _pause_seconds(self, now: float) -> float:
        """Return how long the thread must wait for more of a stream, or for anything at all."""
        seconds = conf.current().push_batch_seconds
        if self._is_stream(now, seconds):
            return self._taken_at + seconds - now
        return 0.0 if self._waiting else self._came_at[-1] + seconds - now

    def _finish_push(self) -> None:
        with self._changed:
            self._is_pushing = False
            self._changed.notify_all()

    def _push(self, records: list[TaskRecord]) -> None:
        count = len(records)
        # An unexpected error must stop neither the thread nor the caller of `flush_pushes`.
        if error := attempt(dispatch, records).error:
            text = "push of %d task%s failed; the reconciler will retry"
            logger.error(text, count, pluralize(count), exc_info=error, extra=log_extra(*records))


_batcher = PushBatcher()
add = _batcher.add
flush_pushes = _batcher.flush_pushes
# For tasks that exit handlers enqueue, when no thread can start: handlers registered after this one run before it.
atexit.register(flush_pushes)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_batcher.reset)


# --- Run delayed tasks now, because a person asks for it.


class Hurry(CommitHook):
    """Makes the delayed tasks pending whose time a transaction has removed."""

    def follow_up(self) -> None:
        dispatch(self.records, again=True)


def hurry(ids: Collection[UUID]) -> list[UUID]:
    """Let delayed tasks run now; return the ids of those that were delayed.

    | check    | QUEUED with a `run_after` that has not come, and no task to wait for; the rows are locked   |
    | row      | `run_after` is now; the state stays                                                         |
    | Redis    | after the commit: out of scheduled, into pending                                            |
    | announce | nothing: the state is the same                                                              |

    If we die after the commit, the entry becomes due at its former time, as if nothing had been asked for.
    """
    with transaction_of(TaskRecord):
        now = database_clock.now()
        rows = rows_of(TaskRecord).filter(as_check(IS_READY, state=TaskState.QUEUED, run_after__gt=now), id__in=ids)
        records = list(rows.select_for_update().order_by("id"))
        if not records:
            return []
        # A time to ask its gate is one of a task that waits.
        rows_of(TaskRecord).filter(id__in=[record.id for record in records]).update(run_after=now, retry_at=None)
        for record in records:
            record.run_after, record.retry_at = now, None
        connection = connections[writing_database(TaskRecord)]
        hook = Hurry.of_transaction(connection)
        hook.records.extend(records)
        hook.register(connection)
    return [record.id for record in records]


# --- Give running tasks their entry and lease again after Redis lost its memory.


def reassert(broker: Broker, worker_id: str, ids: Collection[str]) -> int:
    """Give running tasks their entry and lease again after Redis lost its memory; return how many had lost them.

    ids: the tasks that the worker believes to run. No state changes.

    | check    | the row, after Redis: RUNNING, and this worker is the last in `worker_ids`          |
    | row      | read only                                                                           |
    | Redis    | the entry and its lease, with the fence of the row                                  |
    | check    | the row again: a task that finished in the meantime loses its new entry             |
    | announce | nothing                                                                             |

    The order matters. A run may finish, or be recovered from a frozen worker, at any time; the row is always written
    before the entry is removed. So when Redis lacks an entry *and the row is still RUNNING afterwards*, the entry was
    lost and not removed. The second check is needed because the worker is alive: it would renew a stale lease for ever.

    If we die in between, the lease expires and the reconciler finds the row final. Raises: BrokerUnavailable,
    django.db.Error; a stale entry may then stay until the worker checks what it holds, or exits.
    """
    reasserted = 0
    for of_alias, queue, rows in by_queue(broker, _run_by(worker_id, ids)):
        entry_states = Inspection(of_alias.role, of_alias.alias).entry_states(queue, [row.redis_id for row in rows])
        gone = {task.id for task in entry_states if not task.state}
        lost = _run_by(worker_id, [str(row.id) for row in rows if row.redis_id in gone])
        if not lost:
            continue
        of_alias.forget_registered()
        of_alias.register_queue(queue)
        entries = [entry_of(row, fence=row.fence) for row in lost]
        words = of_alias.reassert(queue, worker_id, entries, conf.current().lease_seconds)
        given_rows = [row for row, word in zip(lost, words, strict=True) if word == "reasserted"]
        given = [Lease(row.redis_id, row.fence) for row in given_rows]
        kept = {(row.redis_id, row.fence) for row in _run_by(worker_id, [str(row.id) for row in given_rows])}
        if finished := [lease for lease in given if (lease.id, lease.fence) not in kept]:
            of_alias.done(queue, worker_id, finished)
        reasserted += len(given) - len(finished)
    return reasserted


def _run_by(worker_id: str, ids: Iterable[str]) -> list[TaskRecord]:
    """Return the rows that are RUNNING in this worker; a frozen worker may name tasks that another worker runs."""
    rows = load_rows(ids).values()
    return [row for row in rows if row.state == TaskState.RUNNING and row.worker_ids[-1:] == [worker_id]]

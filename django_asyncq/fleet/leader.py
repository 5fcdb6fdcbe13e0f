"""The supervisor's maintenance threads: due tasks, schedules, repairs, pruning, start-up tasks and alerts.

They are apart from the supervisor's main thread, which renews the leases and must never wait for them. They are apart
from each other so that a schedule never waits for a sweep, and no repair for a mail server. Each loop sleeps until it
has work or is woken. Schedules, repairs, pruning, alerts and actions on many tasks run only in the leader, which is the
process that holds the maintenance lock.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from functools import partial

from django.conf import settings
from django.db import connections
from django.db.models import Q

from .. import conf, interop, lifecycle
from ..broker import Broker, ownership, redis_clock
from ..broker.access import queues_with
from ..broker.ownership import MESSAGE, PURPOSE, read_key_check, write_key_check
from ..broker.waits import SupervisorListener
from ..control import PauseKeeper, is_paused
from ..core import batches
from ..core.aliases import DEFAULT_ALIAS, one_alias_per_prefix, owned_prefixes
from ..core.guard import LongLivedThread, get_logger
from ..exceptions import BrokerUnavailable, DatabaseNotSetUp, LockLost, PrefixTaken
from ..interop.asynq_display import BEAT_SECONDS, SchedulerEntries
from ..interop.inbox import InboxService
from ..leadership.coordinator import StartupTaskCoordinator
from ..lifecycle import spill
from ..lifecycle.dispatching import adopts_by_itself
from ..models import TaskRecord, TaskState
from ..models.tasks import IS_READY
from ..observe.alerts import Alerter
from ..observe.soundness import clock_difference_seconds
from ..scheduling.scheduler import FireResult, Scheduler
from ..storage import database_clock, identity
from ..storage.connections import OwnConnections, SharedConnections, close_dead_connections
from ..storage.errors import STORE_ERRORS, Faults, Outages, in_turn, one_line
from ..storage.routing import return_connections, rows_of
from . import unknown_tasks
from .bulk import BulkRunner
from .changes import LOOK_SECONDS, ChangeLook
from .forwarder import WaiterService, forward_due
from .pruner import Pruner
from .rates import RateLook
from .reconciler import Reconciler
from .startup_tasks import StartupRunner

# --- Compare the clocks of the two stores: rows say by the database's when a task is due, and Redis finds by its own
# whether that time has come.

logger = get_logger("django_asyncq.fleet.leader")

# Above the first they count as apart, below the second as together again, so that one that lies between says nothing.
APART_SECONDS = 1.0
TOGETHER_SECONDS = 0.5


# Quartzes drift apart by milliseconds in that time; a clock that somebody sets wrong is found soon enough.
COMPARE_SECONDS = 60.0


class ClockCheck:
    """Compare once a minute; warn once when the clocks come apart, and say once when they agree again."""

    def __init__(self) -> None:
        self._due_at = 0.0
        self._is_apart = False

    def tick(self, now: float) -> None:
        """Compare, if that is due. now: monotonic seconds. Raises: BrokerUnavailable, django.db.Error."""
        if now < self._due_at:
            return
        self._due_at = now + COMPARE_SECONDS
        difference = clock_difference_seconds()
        if not self._is_apart and abs(difference) > APART_SECONDS:
            self._is_apart, word = True, "later" if difference > 0 else "earlier"
            logger.warning(
                "the clock of the database shows a time %.1f s %s than that of Redis: delayed tasks and retries start "
                "that much %s; synchronize the clocks of both servers",
                abs(difference),
                word,
                word,
            )
        elif self._is_apart and abs(difference) < TOGETHER_SECONDS:
            self._is_apart = False
            logger.info("the clocks of the database and of Redis agree again")


# --- Notice early that two hosts have different SECRET_KEYs, before an outcome that one signed is lost on the other.
#
# The leader writes a signed constant to Redis. Every supervisor reads it when it starts, and now and then
# afterwards.

KEY_CHECK_SECONDS = 60.0
CHECK_AGAIN_SECONDS = 5.0


class KeyCheck:
    """Check whether this process can verify what the leader signs; warn once for each key that it cannot."""

    def __init__(self) -> None:
        self._warned_about = b""

    def tick(self, *, is_leader: bool) -> float:
        """Read the leader's signature, or write it as the leader; return the seconds until the next call.

        Silent while Redis is unreachable: the other loops report that.
        """
        try:
            self._check()
            if is_leader and conf.has_secret_key():
                write_key_check(spill.sign(PURPOSE, MESSAGE))
        except BrokerUnavailable:
            return CHECK_AGAIN_SECONDS
        return KEY_CHECK_SECONDS

    def _check(self) -> None:
        found = read_key_check(spill.SIGNATURE_BYTES)
        if not found or found == self._warned_about or spill.is_signed(PURPOSE, MESSAGE, found):
            return
        self._warned_about = found
        logger.warning(
            "this host cannot verify what the leader has signed: its SECRET_KEY is neither the SECRET_KEY nor in the "
            "SECRET_KEY_FALLBACKS of this host; a finished task whose outcome lies in Redis may run again"
        )


# --- One maintenance thread: a step that is repeated, through outages and errors, until it is stopped.

# How often a loop that is disabled in this process asks whether it is enabled now.
DISABLED_POLL_SECONDS = 5.0
ERROR_PAUSE_SECONDS = 1.0


class Loop(LongLivedThread):
    """Repeat a step until stopped.

    step: returns the seconds until its next call; None ends the loop. is_enabled: whether this process may do the step
    now; while it may not, the loop uses neither store and says nothing about them. outages: those of all its loops.
    shared: the database connections that it uses in turn with others; None: it seldom uses any, and has its own.
    A step may raise anything, SystemExit of the project's code included: nothing is kept from one step to the next, so
    it is called again.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], float | None],
        is_enabled: Callable[[], bool] = lambda: True,
        *,
        outages: Outages | None = None,
        shared: SharedConnections | None = None,
    ) -> None:
        super().__init__(name, self.repeat)
        self._step = step
        self._connections = OwnConnections() if shared is None else shared
        self._is_enabled = is_enabled
        self._wakeup = threading.Event()
        self._is_stopping = False
        self._faults = Faults(
            logger,
            "the %s loop cannot reach a store and tries again",
            name,
            over="the %s loop can reach both stores again",
            failed="the %s loop failed and tries again",
            outages=outages,
        )
        # Why this process cannot go on, if it cannot.
        self.not_set_up: DatabaseNotSetUp | None = None

    def repeat(self) -> None:
        """Step and sleep in turn until stopped."""
        try:
            while not self._is_stopping:
                with self._connections.round():
                    pause = self.tick()
                if pause is None:
                    return
                self._wakeup.wait(pause)
                self._wakeup.clear()
        finally:
            connections.close_all()

    def wake(self) -> None:
        """Cut the current or the next sleep short."""
        self._wakeup.set()

    def stop(self) -> None:
        """Begin no further step."""
        self._is_stopping = True
        self._wakeup.set()

    def tick(self) -> float | None:
        """Do one step if it is enabled; log an outage once when it begins and once when it is over."""
        try:
            if not self._is_enabled():
                return DISABLED_POLL_SECONDS
            close_dead_connections()
            pause = self._step()
        except LockLost as error:
            logger.info("%s: %s", self.name, error)
            return ERROR_PAUSE_SECONDS
        except Exception as error:  # noqa: BLE001 - it is logged there
            connections.close_all()
            pause = self._faults.note(error)
            self.not_set_up = self._faults.not_set_up
            return pause
        except BaseException:
            logger.exception("the %s loop failed and tries again", self.name)
            return ERROR_PAUSE_SECONDS
        finally:
            return_connections()
        self._faults.clear()
        return pause


class LoopWaker:
    """Stand in for the event that a `Listener` sets: wake loops instead."""

    def __init__(self, *loops: Loop) -> None:
        self._loops = loops

    def set(self) -> None:
        """Wake every loop."""
        for loop in self._loops:
            loop.wake()


# --- Keep two databases from sharing a Redis prefix: each would disable the other's schedules and park its tasks.
#
# The identity of the database that owns a prefix is in Redis: of KEY_PREFIX, and of the prefix of each alias in
# TASKS. Each supervisor compares all of them with that of its own database, because it may lead and then serves
# every alias. It does so when it starts and then every CHECK_SECONDS; one that finds another database there stops
# with the remedies.
#
# The leader takes a prefix without an owner, after it has compared all rows with Redis. So a supervisor whose
# database is unreachable takes none, and an emptied Redis gets its owner back with its tasks. Of two databases that
# meet at such a prefix, the first takes it and the supervisors of the other stop. A burst takes none, because it
# may be that of a test.

OWNERSHIP_SECONDS = 5.0
# A restored backup, and a Redis that was emptied, have newer rows than this while a project is in use.
COPY_SECONDS = 60.0


def in_words(waiting: lifecycle.Waiting) -> str:
    """Return how much waits in a copy, for people."""
    wait = "1 task waits" if waiting.total == 1 else f"{waiting.total:,} tasks wait"
    return f"{wait} in this copy, {waiting.due:,} {'is' if waiting.due == 1 else 'are'} due"


def notice_of_copy() -> str:
    """Return what to say before the first workers of what may be a copy of a database; "" for nothing.

    It may be one when no database owns the prefixes in Redis, though tasks of this one have begun, and the newest was
    enqueued a while ago. A project that has not started yet, and one whose Redis was just emptied, look otherwise.
    Raises: BrokerUnavailable, django.db.Error.
    """
    if any(ownership.read_owner(prefix) is not None for prefix in owned_prefixes()):
        return ""
    if not rows_of(TaskRecord).exclude(state=TaskState.QUEUED).exists():
        return ""
    waiting = lifecycle.count_waiting()
    if not waiting.total or waiting.newest_at is None:
        return ""
    if (database_clock.now() - waiting.newest_at).total_seconds() < COPY_SECONDS:
        return ""
    return (
        f"This Redis has had no workers of this database, whose newest task is of {waiting.newest_at:%Y-%m-%d %H:%M} "
        f"UTC. If the database is a copy: {in_words(waiting)}, and these workers run them. To cancel them and pause "
        "all schedules, stop the workers and run: manage.py asyncq adopt --new-identity. To run them here too: "
        "manage.py asyncq adopt --new-identity --keep-waiting. If it is no copy, nothing has to be done."
    )


class PrefixOwnership:
    """Compare the owners of all prefixes with this supervisor's database.

    may_take: whether it takes a prefix without owner. host: the name by which alerts know this supervisor's host.
    """

    def __init__(self, *, may_take: bool = True, host: str = "") -> None:
        self._may_take = may_take
        self._host = host or socket.gethostname()
        # Made when Redis can be asked for the time.
        self._token = ""
        # Prefixes that this database owned at some check.
        self._owned = set[str]()
        # Whether the last check has found this database at every prefix.
        self.is_owner = False
        # Why this process must stop, if it must.
        self.lost: PrefixTaken | None = None

    def tick(self, *, has_read_rows: bool = False, may_differ: bool = True) -> float:
        """Check, and return the seconds until the next call. has_read_rows: all rows were compared with Redis.

        may_differ: whether the database may have another identity than at the last call. If not, it is asked only when
        a prefix does not belong to it.
        Silent while a store is unreachable: the other loops report that. What is not known is checked at the next call.
        """
        found = identity.known()
        if self.is_owner and not may_differ and found is not None:
            with suppress(BrokerUnavailable):
                if all(self._check(prefix, found, may_take=False) == found for prefix in owned_prefixes()):
                    return OWNERSHIP_SECONDS
        try:
            database = identity.ensure()
        except STORE_ERRORS as error:
            logger.debug("the identity of the database cannot be read: %s", one_line(error))
            connections.close_all()
            found = identity.known()
            if found is None:
                return OWNERSHIP_SECONDS
            database = found
        may_take = self._may_take and has_read_rows
        with suppress(BrokerUnavailable):
            owners = {prefix: self._check(prefix, database, may_take=may_take) for prefix in owned_prefixes()}
            self.is_owner = set(owners.values()) == {database}
            taken = [
                PrefixTaken(prefix=prefix, owner=owner, database=database)
                for prefix, owner in owners.items()
                if owner not in (None, database)
            ]
            if taken or self.is_owner:
                self.lost = taken[0] if taken else None
        return OWNERSHIP_SECONDS

    def _check(self, prefix: str, database: uuid.UUID, *, may_take: bool) -> uuid.UUID | None:
        """Check one prefix; return its owner. Raises: BrokerUnavailable."""
        self._token = self._token or ownership.token_of(self._host, os.getpid(), redis_clock.seconds())
        found = ownership.note_supervisor(
            database,
            self._token,
            prefix=prefix,
            alive_ms=ownership.ALIVE_MS,
            may_take=may_take,
            # Only at the start: one that ran before lost the prefix to a person's command.
            replaces="unused" if adopts_by_itself() and prefix not in self._owned else "never",
        )
        if found.owner == database:
            if found.former not in (None, database):
                logger.warning(
                    "the Redis prefix %s belonged to another database (%s), none of whose workers is running; because "
                    "DEBUG is on, this database has adopted it. Tasks of the other one that are left in Redis are "
                    "archived there",
                    prefix,
                    found.former,
                )
            elif found.former is None:
                logger.info("the Redis prefix %s now belongs to this database (%s)", prefix, database)
            self._owned.add(prefix)
        return found.owner

    def release(self) -> None:
        """Note that this supervisor has stopped."""
        if not self._token:
            return
        with suppress(BrokerUnavailable):
            for prefix in owned_prefixes():
                ownership.forget_supervisor(self._token, prefix)


# Times in Redis are whole seconds, so a task that is due this soon counts as due.
DUE_WITHIN_SECONDS = 2
# The leader renews its lock, and every other process tries to acquire it, this many times within the lock's TTL.
LEADER_CHECKS_PER_TTL = 10
# The longest pause of the leader between two rounds of repairs and pruning.
REPAIR_SECONDS = 1.0
# The longest time between two looks for tasks that have become due. Ours wake the forwarder when they are due; this is
# for those that other programs schedule, without a word.
FORWARD_SECONDS = 5.0
# How soon a worker is woken for tasks that came without a token.
WAKE_SECONDS = 1.0
# How often the scheduler, and what does actions on many tasks, look at rows of which no look for changes has told them.
UNASKED_SECONDS = 60.0
# How soon declared schedules that could not be written are written again.
SYNC_SECONDS = 5.0
STOP_SECONDS = 10.0
# Between SIGTERM and SIGKILL of a start-up task at shutdown; the tasks have had their own grace period before.
STARTUP_GRACE_SECONDS = 2.0
# How often a process without tasks that run together looks for groups of such tasks.
BATCHES_ELSEWHERE_SECONDS = 60.0


class MaintenanceService:
    """Run everything that a supervisor does besides its worker processes.

    queues: those of the alias to forward while another process leads; empty for all. The leader serves all aliases.
    may_take_prefix: whether it takes a Redis prefix that has no owner. host: of this supervisor, as alerts name it.
    """

    def __init__(
        self,
        queues: Sequence[str],
        *,
        alias: str = DEFAULT_ALIAS,
        single_instance: bool | None,
        may_take_prefix: bool = True,
        host: str = "",
    ) -> None:
        self.queues = list(queues)
        self._look_faults = Faults(
            logger, "it is not known whether work is left", over="it is known again whether work is left"
        )
        self.broker = Broker("worker", alias)
        self.connections = SharedConnections()
        # Projects that share a Redis under prefixes of their own each have a leader of their own.
        self.lock_name = f"{conf.current().key_prefix}.maintenance"
        self.coordinator = StartupTaskCoordinator(single_instance=single_instance)
        self.reconciler = Reconciler(self.broker)
        self.pruner = Pruner(self.broker, fenced=self._fenced)
        self.bulk_runner = BulkRunner(self._fenced)
        self.waiters = WaiterService(self.broker)
        self.inbox = InboxService(self.broker, self._fenced)
        self.scheduler = Scheduler(self._fenced)
        self.scheduler_entries = SchedulerEntries()
        self.startup_runner = StartupRunner(single_instance=single_instance)
        self.key_check = KeyCheck()
        self.ownership = PrefixOwnership(may_take=may_take_prefix, host=host)
        self.clock_check = ClockCheck()
        self.pause_keeper = PauseKeeper()
        self.change_look = ChangeLook()
        self._looked_term = 0
        # Set by the look for changes; cleared before the rows are read.
        self._identity_may_differ = threading.Event()
        self._schedules_may_differ = threading.Event()
        self._schedules_due_at = 0.0
        self._synced_term = 0
        # Of the leader that was logged last; and which process leads, for people; "" while it is not known.
        self._leader_token = self.leader = ""
        self._entries_due_at = 0.0
        self._batches_due_at = 0.0
        self._make_loops()

    def _make_loops(self) -> None:
        """Make the threads, of which one says for all of them that a store is unreachable."""
        outages = Outages()
        self.alerter = Alerter(outages)
        loop = partial(Loop, outages=outages)
        # What asks the database without having work.
        asking = partial(loop, shared=self.connections)
        self._leadership_loop = loop("leadership", self.seek_leadership)
        self._forwarder_loop = loop("forwarder", self.forward, self._may_use_prefix)
        self._batch_loop = loop("batches", self.form_batches, self._may_use_prefix)
        self._inbox_loop = loop("inbox", self.read_inboxes, self._is_leader)
        self._unknown_loop = loop("unknown tasks", unknown_tasks.look, self._is_leader)
        self._rate_loop = asking("rates", RateLook().tick, self._is_leader)
        self._waker_loop = loop("waker", self.wake_workers, self._is_leader)
        self._waiter_loop = loop("waiters", self.admit_waiters, self._is_leader)
        self._scheduler_loop = asking("scheduler", self.fire_schedules, self._may_fire_schedules)
        self._change_loop = asking("changes", self.look_for_changes, self._is_leader)
        self._pause_loop = asking("pauses", self.keep_pauses, self._is_leader)
        self._repair_loop = asking("repairs", self.repair_and_prune, self._is_leader)
        self._bulk_loop = asking("bulk actions", self.run_bulk_actions, self._is_leader)
        self._startup_loop = loop("startup", self.run_startup_tasks)
        self._key_check_loop = loop("key check", self.check_key)
        self._ownership_loop = asking("ownership", self.check_ownership)
        if self.alerter.has_listeners:
            self._alert_loop = asking("alerts", self.alerter.tick, self._may_alert)
        self._loops = [each for each in vars(self).values() if isinstance(each, Loop)]
        waker = LoopWaker(self._forwarder_loop, self._change_loop, self._batch_loop)
        self._listener = SupervisorListener(waker, free_slot=LoopWaker(self._waiter_loop))

    # --- start and stop

    def start(self) -> None:
        """Start the threads."""
        for loop in self._loops:
            loop.start()
        self._listener.start()

    def stop(self) -> None:
        """Stop the threads and release the locks."""
        for loop in self._loops:
            loop.stop()
        self._listener.stop()
        deadline = time.monotonic() + STOP_SECONDS
        for loop in self._loops:
            if loop.is_alive():
                loop.join(max(deadline - time.monotonic(), 0.1))
        self.startup_runner.stop(STARTUP_GRACE_SECONDS)
        if self._is_leader():
            with suppress(BrokerUnavailable):
                self.scheduler_entries.clear()
        self.coordinator.release(self.lock_name)
        self.ownership.release()
        self.connections.close()

    def is_alive(self) -> bool:
        """Return whether a thread still runs."""
        return any(loop.is_alive() for loop in self._loops)

    @property
    def dead_threads(self) -> list[str]:
        """The names of threads that have died, without which this process does not do its work."""
        threads = [(loop.name, loop.has_died) for loop in self._loops]
        return [name for name, has_died in [*threads, ("listener", self._listener.has_died)] if has_died]

    def has_no_work(self, backend: str) -> bool:
        """Return whether the rows show no task of this alias as running, or as one that workers can begin soon.

        What is paused, what this code does not have and what only other programs run may stay queued for ever. False
        when in doubt.
        """
        if not self.startup_runner.is_finished:
            return False
        soon = database_clock.now() + timedelta(seconds=DUE_WITHIN_SECONDS)
        # One that follows another, or waits for some, waits for those, which count, or for the end of a throttle.
        queued = Q(IS_READY, state=TaskState.QUEUED, after_id=None, is_remote=False)
        queued &= unknown_tasks.is_known() & ~is_paused()
        # One question for each: of all together, old statistics would make each a walk over all that is queued.
        looks = (
            Q(state=TaskState.RUNNING, is_remote=False),
            Q(state=TaskState.FAILED, retry_at__lte=soon),
            queued & (Q(run_after=None) | Q(run_after__lte=soon)),
        )
        rows = rows_of(TaskRecord).filter(backend=backend)
        if self.queues:
            rows = rows.filter(queue_name__in=self.queues)
        try:
            found = any(rows.filter(look).exists() for look in looks)
        except STORE_ERRORS as error:
            connections.close_all()
            self._look_faults.note(error)
            return False
        finally:
            return_connections()
        self._look_faults.clear()
        return not found

    @property
    def not_set_up(self) -> DatabaseNotSetUp | None:
        """The error to end with, when the database cannot be used until a person has acted."""
        found = [loop.not_set_up for loop in self._loops]
        return next(filter(None, [*found, self._look_faults.not_set_up]), None)

    # --- leadership

    @property
    def is_leader(self) -> bool:
        """Whether this process leads the fleet."""
        return self._is_leader()

    def _is_leader(self) -> bool:
        return self._may_use_prefix() and self.coordinator.is_held(self.lock_name)

    def _may_use_prefix(self) -> bool:
        return self.ownership.lost is None

    def _fenced(self) -> AbstractContextManager[int]:
        """Return a transaction that commits only while this process is the leader."""
        return self.coordinator.fenced(self.lock_name)

    def _may_fire_schedules(self) -> bool:
        # Without time zones a time of day is no moment; a check reports it.
        return self._is_leader() and settings.USE_TZ

    def _may_alert(self) -> bool:
        # While Redis is unreachable nobody leads; the process that led last says so.
        return self._may_use_prefix() and self._leader_token == self.coordinator.owner.token

    # --- one step of each loop

    def seek_leadership(self) -> float:
        """Renew the locks, and become the leader when no process is."""
        if not self._may_use_prefix():
            # This process stops, but its running tasks may take a while.
            self.coordinator.release(self.lock_name)
            return DISABLED_POLL_SECONDS
        self.coordinator.tick()
        if self._is_leader():
            return conf.current().lock_ttl_seconds / LEADER_CHECKS_PER_TTL
        if self.coordinator.acquire(self.lock_name, conf.current().lock_ttl_seconds):
            self._leader_token = self.coordinator.owner.token
            self.leader = "this process"
            logger.info("leadership acquired: this process leads, and runs schedules, repairs and pruning")
            for loop in self._loops:
                loop.wake()
        else:
            self._log_other_leader()
        return conf.current().lock_ttl_seconds / LEADER_CHECKS_PER_TTL

    def _log_other_leader(self) -> None:
        """Log which process leads, once, and again when another one does."""
        leader = self.coordinator.holder(self.lock_name)
        if leader is None or leader.token == self._leader_token:
            return
        self._leader_token = leader.token
        self.leader = str(leader)
        since = "" if leader.since is None else f" since {leader.since:%Y-%m-%d %H:%M:%S} UTC"
        logger.info("leadership: led by %s%s; this process leads when that one stops", leader, since)

    def forward(self) -> float:
        """Forward tasks that are due: those of this process's queues and, as the leader, those of every alias."""
        found: list[float] = []

        def forward_of(broker: Broker) -> None:
            seconds = forward_due(broker, self._queues_of(broker)).next_seconds
            found.extend([] if seconds is None else [max(seconds, 0.0)])

        in_turn(self._brokers(), forward_of)
        return min([FORWARD_SECONDS, *found])

    def form_batches(self) -> float:
        """Make batches of groups that are ripe, in the queues in which `forward` forwards tasks.

        A process without such tasks looks every BATCHES_ELSEWHERE_SECONDS, and when a group that it has seen is ripe:
        what is left are groups of code that has just been replaced.
        """
        if not batches.are_declared() and (seconds := self._batches_due_at - time.monotonic()) > 0:
            return seconds
        found: list[float] = []

        def form_of(each: tuple[Broker, str]) -> None:
            _, seconds = interop.form_batches(*each)
            found.extend([] if seconds is None else [max(seconds, 0.0)])

        names = ("groups", "group_due", "group_rules", "aggregation_sets")
        found_in = [(each, queues_with(each, self._queues_of(each), *names)) for each in self._brokers()]
        in_turn([(broker, queue) for broker, queues in found_in for queue in queues], form_of)
        self._batches_due_at = time.monotonic() + min([BATCHES_ELSEWHERE_SECONDS, *found])
        return min([FORWARD_SECONDS, *found])

    def _brokers(self) -> list[Broker]:
        """Return the brokers of the prefixes that this process serves: as the leader, all of them."""
        others = one_alias_per_prefix() if self._is_leader() else []
        return [self.broker, *(self.broker.of_alias(each) for each in others if not self.broker.holds(each))]

    def _queues_of(self, broker: Broker) -> list[str]:
        """Return the queues that this process serves: as the leader, all of them."""
        queues = set(self.queues) if broker is self.broker else set()
        if self._is_leader() or not queues:
            queues.update(broker.known_queues())
        return sorted(queues)

    def admit_waiters(self) -> float:
        """Retry tasks that wait at a gate with a free slot."""
        return self.waiters.tick(self._listener.take_gates(), time.monotonic())

    def wake_workers(self) -> float:
        """Wake workers for tasks that came without a token, as those of other programs do, or whose token was lost."""
        in_turn(self._brokers(), lambda broker: broker.wake(self._queues_of(broker)))
        return WAKE_SECONDS

    def read_inboxes(self) -> float:
        """Enqueue what other programs have pushed to inboxes."""
        return self.inbox.tick(time.monotonic())

    def look_for_changes(self) -> float:
        """Wake the loops whose rows may have changed; at the start of a term all of them."""
        term = self.coordinator.term(self.lock_name)
        if term != self._looked_term:
            self.change_look.forget()
        changes = self.change_look.tick()
        self._looked_term = term
        if changes.identity:
            self._identity_may_differ.set()
            self._ownership_loop.wake()
        if changes.schedules:
            self._schedules_may_differ.set()
            self._scheduler_loop.wake()
        if changes.pauses:
            self.pause_keeper.forget()
            self._pause_loop.wake()
        if changes.actions:
            self._bulk_loop.wake()
        return LOOK_SECONDS

    def fire_schedules(self) -> float:
        """Fire the schedules that are due; at the start of a term, read those declared in code first."""
        is_synced = self.coordinator.term(self.lock_name) == self._synced_term
        seconds = self._schedules_due_at - time.monotonic()
        if is_synced and not self._schedules_may_differ.is_set() and seconds > 0:
            self._show_schedules()
            return min(seconds, BEAT_SECONDS)
        self._schedules_may_differ.clear()
        # Until all of it is done.
        self._schedules_due_at = 0.0
        try:
            self._sync_schedules()
        finally:
            # Whatever keeps the declarations from being read keeps no schedule from firing.
            result = self.scheduler.fire_due()
        self._show_schedules(result)
        waits = [UNASKED_SECONDS if self.scheduler.is_synced else SYNC_SECONDS]
        waits += [] if result.next_seconds is None else [max(result.next_seconds, 0.0)]
        self._schedules_due_at = time.monotonic() + min(waits)
        return min(*waits, BEAT_SECONDS)

    def _sync_schedules(self) -> None:
        term = self.coordinator.term(self.lock_name)
        if term != self._synced_term:
            self.scheduler.sync()
            if self.scheduler.is_synced:
                self._synced_term = term

    def _show_schedules(self, result: FireResult | None = None) -> None:
        """Let asynq's tools see the schedules. result: of a round in which their rows were read."""
        if result is not None:
            self.scheduler_entries.add_events(result.fired)
            self.scheduler_entries.forget()
        if time.monotonic() >= self._entries_due_at:
            self.scheduler_entries.beat()
            self._entries_due_at = time.monotonic() + BEAT_SECONDS

    def repair_and_prune(self) -> float:
        """Compare the clocks, do the repairs that are due, then prune a little."""
        try:
            self.clock_check.tick(time.monotonic())
            self.reconciler.tick(time.monotonic())
        finally:
            # Whatever keeps the repairs from being made does not keep old rows for ever.
            self.pruner.tick(time.monotonic())
        if self.reconciler.has_checked_all and not self.ownership.is_owner:
            self._ownership_loop.wake()
        return 0.0 if self.reconciler.is_urgent else min(REPAIR_SECONDS, conf.RECONCILE_SECONDS)

    def keep_pauses(self) -> float:
        """Make Redis say what is paused as the rows do, and rows what another program has paused."""
        return self.pause_keeper.tick()

    def run_bulk_actions(self) -> float:
        """Change the next tasks of the actions on many tasks."""
        seconds = self.bulk_runner.tick(time.monotonic())
        return seconds if self.bulk_runner.has_actions else UNASKED_SECONDS

    def check_key(self) -> float:
        """Check that this process has the leader's SECRET_KEY; as the leader, let the others check theirs."""
        return self.key_check.tick(is_leader=self._is_leader())

    def check_ownership(self) -> float:
        """Check that the Redis prefix belongs to this database; as the leader, take one that belongs to none."""
        # Nobody looks for changes in a process that does not lead.
        may_differ = not self._is_leader() or self._identity_may_differ.is_set()
        self._identity_may_differ.clear()
        has_read_rows = self._is_leader() and self.reconciler.has_checked_all
        return self.ownership.tick(has_read_rows=has_read_rows, may_differ=may_differ)

    def run_startup_tasks(self) -> float | None:
        """Advance the start-up tasks; None when all are finished."""
        return None if self.startup_runner.is_finished else self.startup_runner.tick()

"""The supervisor's maintenance threads: due tasks, schedules, repairs, pruning, start-up tasks and alerts.

They are apart from the supervisor's main thread, which renews the leases and must never wait for them. They are apart
from each other so that a schedule never waits for a sweep, and no repair for a mail server. Each loop sleeps until it
has work or is woken. Schedules, repairs, pruning, alerts and actions on many tasks run only in the leader, which is the
process that holds the maintenance lock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from functools import partial

from django.conf import settings
from django.db import connections
from django.db.models import Q

from .. import conf, lifecycle
from ..alerts.alerter import Alerter
from ..broker import Broker
from ..broker.many_queues import queues_with
from ..broker.notifications import SupervisorListener
from ..definitions import batches
from ..exceptions import BrokerUnavailable, DatabaseNotSetUp
from ..faults import STORE_ERRORS, Faults, Outages, in_turn
from ..guard import get_logger
from ..leadership.coordinator import StartupTaskCoordinator
from ..models import TaskRecord, TaskState
from ..pausing.keeper import PauseKeeper
from ..pausing.rows import is_paused
from ..prefixes import DEFAULT_ALIAS, one_alias_per_prefix
from ..scheduling.asynq_entries import BEAT_SECONDS, SchedulerEntries
from ..scheduling.firing import Fired
from ..scheduling.scheduler import Scheduler
from ..storage import database_clock
from ..storage.pooling import return_connections
from ..storage.routing import rows_of
from .bulk import BulkRunner
from .clock_check import ClockCheck
from .forwarder import forward_due
from .inbox import InboxService
from .key_check import KeyCheck
from .loop import DISABLED_POLL_SECONDS, Loop, LoopWaker
from .ownership import PrefixOwnership
from .pruner import Pruner
from .reconciler import Reconciler
from .startup_tasks import StartupRunner
from .waiters import WaiterService
from .waker import WakerService

logger = get_logger("django_asyncq.maintenance.service")

# Times in Redis are whole seconds, so a task that is due this soon counts as due.
DUE_WITHIN_SECONDS = 2
# The leader renews its lock, and every other process tries to acquire it, this many times within the lock's TTL.
LEADER_CHECKS_PER_TTL = 10
# The longest pause of the leader between two rounds of repairs and pruning.
REPAIR_SECONDS = 1.0
# The longest time until the scheduler notices a schedule that was changed without a signal (`QuerySet.update`).
SCHEDULE_POLL_SECONDS = 5.0
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
        # Projects that share a Redis under prefixes of their own each have a leader of their own.
        self.lock_name = f"{conf.current().key_prefix}.maintenance"
        self.coordinator = StartupTaskCoordinator(single_instance=single_instance)
        self.reconciler = Reconciler(self.broker)
        self.pruner = Pruner(self.broker, fenced=self._fenced)
        self.bulk_runner = BulkRunner(self._fenced)
        self.waiters = WaiterService(self.broker)
        self.waker = WakerService(self.broker)
        self.inbox = InboxService(self.broker, self._fenced)
        self.scheduler = Scheduler(self._fenced)
        self.scheduler_entries = SchedulerEntries()
        self.startup_runner = StartupRunner(single_instance=single_instance)
        self.key_check = KeyCheck()
        self.ownership = PrefixOwnership(may_take=may_take_prefix, host=host)
        self.clock_check = ClockCheck()
        self.pause_keeper = PauseKeeper()
        self._synced_term = 0
        # Of the leader that was logged last; and which process leads, for people; "" while it is not known.
        self._leader_token = self.leader = ""
        self._entries_due_at = 0.0
        self._batches_due_at = 0.0
        self._make_loops()

    def _make_loops(self) -> None:
        """Make the threads, of which one says for all of them that a store is unreachable."""
        outages = Outages()
        self.alerter = Alerter(outages=outages)
        loop = partial(Loop, outages=outages)
        self._leadership_loop = loop("leadership", self.seek_leadership)
        self._forwarder_loop = loop("forwarder", self.forward, self._may_use_prefix)
        self._batch_loop = loop("batches", self.form_batches, self._may_use_prefix)
        self._inbox_loop = loop("inbox", self.read_inboxes, self._is_leader)
        self._waker_loop = loop("waker", self.wake_workers, self._may_use_prefix)
        self._waiter_loop = loop("waiters", self.admit_waiters, self._is_leader)
        self._scheduler_loop = loop("scheduler", self.fire_schedules, self._may_fire_schedules)
        self._pause_loop = loop("pauses", self.keep_pauses, self._is_leader)
        self._repair_loop = loop("repairs", self.repair_and_prune, self._is_leader)
        self._bulk_loop = loop("bulk actions", self.run_bulk_actions, self._is_leader)
        self._startup_loop = loop("startup", self.run_startup_tasks)
        self._key_check_loop = loop("key check", self.check_key)
        self._ownership_loop = loop("ownership", self.check_ownership)
        if self.alerter.channels:
            self._alert_loop = loop("alerts", self.alerter.tick, self._may_alert)
        self._loops = [each for each in vars(self).values() if isinstance(each, Loop)]
        waker = LoopWaker(self._forwarder_loop, self._scheduler_loop, self._batch_loop)
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
        self.alerter.stop()
        self.waker.stop()
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

        What is paused, and what only other programs run, may stay queued for ever. False when in doubt.
        """
        if not self.startup_runner.is_finished:
            return False
        soon = database_clock.now() + timedelta(seconds=DUE_WITHIN_SECONDS)
        # One that follows another waits for that one, which counts, or for the end of a throttle.
        queued = Q(state=TaskState.QUEUED, after_id=None, is_remote=False) & ~is_paused()
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
        return min([conf.current().forward_seconds, *found])

    def form_batches(self) -> float:
        """Make batches of groups that are ripe, in the queues in which `forward` forwards tasks.

        A process without such tasks looks every BATCHES_ELSEWHERE_SECONDS, and when a group that it has seen is ripe:
        what is left are groups of code that has just been replaced.
        """
        if not batches.are_declared() and (seconds := self._batches_due_at - time.monotonic()) > 0:
            return seconds
        found: list[float] = []

        def form_of(each: tuple[Broker, str]) -> None:
            _, seconds = lifecycle.form_batches(*each)
            found.extend([] if seconds is None else [max(seconds, 0.0)])

        names = ("groups", "group_due", "group_rules", "aggregation_sets")
        found_in = [(each, queues_with(each, self._queues_of(each), *names)) for each in self._brokers()]
        in_turn([(broker, queue) for broker, queues in found_in for queue in queues], form_of)
        self._batches_due_at = time.monotonic() + min([BATCHES_ELSEWHERE_SECONDS, *found])
        return min([conf.current().forward_seconds, *found])

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
        """As the leader, wait for pushes to queues that have a wake list, and wake workers."""
        if not self._is_leader():
            self.waker.close()
            return DISABLED_POLL_SECONDS
        self.waker.tick()
        return 0.0

    def read_inboxes(self) -> float:
        """Enqueue what other programs have pushed to inboxes."""
        return self.inbox.tick(time.monotonic())

    def fire_schedules(self) -> float:
        """Fire the schedules that are due; at the start of a term, read those declared in code first."""
        try:
            self._sync_schedules()
        finally:
            # Whatever keeps the declarations from being read keeps no schedule from firing.
            result = self.scheduler.fire_due()
        self._update_scheduler_entries(result.fired)
        if result.next_seconds is None:
            return SCHEDULE_POLL_SECONDS
        return min(max(result.next_seconds, 0.0), SCHEDULE_POLL_SECONDS)

    def _sync_schedules(self) -> None:
        term = self.coordinator.term(self.lock_name)
        if term != self._synced_term:
            self.scheduler.sync()
            if self.scheduler.is_synced:
                self._synced_term = term

    def _update_scheduler_entries(self, fired: Sequence[Fired]) -> None:
        self.scheduler_entries.add_events(fired)
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
        return 0.0 if self.reconciler.is_urgent else min(REPAIR_SECONDS, conf.current().reconcile_seconds)

    def keep_pauses(self) -> float:
        """Make Redis say what is paused as the rows do, and rows what another program has paused."""
        return self.pause_keeper.tick()

    def run_bulk_actions(self) -> float:
        """Change the next tasks of the actions on many tasks."""
        return self.bulk_runner.tick(time.monotonic())

    def check_key(self) -> float:
        """Check that this process has the leader's SECRET_KEY; as the leader, let the others check theirs."""
        return self.key_check.tick(is_leader=self._is_leader())

    def check_ownership(self) -> float:
        """Check that the Redis prefix belongs to this database; as the leader, take one that belongs to none."""
        return self.ownership.tick(has_read_rows=self._is_leader() and self.reconciler.has_checked_all)

    def run_startup_tasks(self) -> float | None:
        """Advance the start-up tasks; None when all are finished."""
        return None if self.startup_runner.is_finished else self.startup_runner.tick()

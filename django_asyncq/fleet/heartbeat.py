"""Show the worker processes of a supervisor to people and tools, with each beat, and obey requests to drain.

It costs one call of Redis a beat for all processes; what they run is in the replies to the renewal of their leases. All
of it is a copy: when Redis is unreachable it expires, and nothing else depends on it.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from pathlib import Path

from django.db import connections

from .. import __version__, conf, lifecycle
from ..broker import Broker, redis_clock, servers
from ..broker.access import queues_with
from ..broker.entries import HeldMessage
from ..broker.message import RunningInfo, ServerInfo, TaskMessage, UndecodableMessage, decode_message, decode_type
from ..broker.servers import Details, ShownWorker
from ..core.guard import get_logger
from ..core.registry import known_versions
from ..core.time import moment_of
from ..storage.errors import Faults, in_turn
from ..worker.memory import PAGE_BYTES
from ..worker.options import WorkerOptions
from ..worker.slot_table import Running
from .processes import Child, Processes
from .unknown_tasks import bring_back, waiting_in

logger = get_logger("django_asyncq.fleet")

# A task is known by its id and by when this run of it began.
RunKey = tuple[str, float]


class HeartbeatWriter:
    """Writes the heartbeats of the processes. is_leader: says whether this supervisor leads the fleet."""

    def __init__(
        self, broker: Broker, options: WorkerOptions, processes: Processes, *, is_leader: Callable[[], bool]
    ) -> None:
        self.broker = broker
        self.options = options
        self.processes = processes
        self.is_leader = is_leader
        # Whether all processes of this supervisor are asked to take no more.
        self.is_draining = False
        self._faults = Faults(logger, "workers cannot be shown", over="workers are shown again")
        self._messages: dict[RunKey, tuple[str, TaskMessage]] = {}
        self._known: dict[str, int] | None = None
        # The processes that were shown with the last beat and take tasks.
        self._shown_ids: frozenset[str] = frozenset()

    def unknown(self, running: Iterable[Running]) -> list[str]:
        """Return the row ids of the runs whose messages are not known yet."""
        return [run.id for run in running if _key(run) not in self._messages]

    def note(self, queue: str, messages: Iterable[HeldMessage], running: Collection[Running]) -> None:
        """Note the messages of runs of one queue."""
        keys = {run.id: _key(run) for run in running}
        for row_id, id, data in messages:
            try:
                message = decode_message(data)
            except UndecodableMessage:
                # Also that of a long one, of which there is only the beginning.
                message = TaskMessage(type=decode_type(data))
            if len(message.payload) > servers.LARGEST_PAYLOAD_BYTES:
                message = message._replace(payload=b"")
            if row_id in keys:
                self._messages[keys[row_id]] = id, message._replace(queue=queue)

    def beat(self) -> None:
        """Show the processes; log it once while that fails, and raise nothing: the leases do not depend on it."""
        try:
            # Redis keeps whole seconds, so one second could be over at once.
            seconds = max(2, math.ceil(2 * conf.current().beat_seconds))
            shown = self._shown()
            self._obey(servers.show(self.broker.alias, shown, seconds))
            self._bring_back(shown)
        except Exception as error:  # noqa: BLE001 - it is logged there; whatever it is, the supervisor must live
            self._faults.note(error)
        else:
            self._faults.clear()

    def clear(self, children: Iterable[Child]) -> None:
        """Show processes that have stopped no longer. While Redis is unreachable, their entries expire."""
        if self._faults.is_failing:
            return  # each of many processes that stop would wait for the time-out
        try:
            servers.clear(self.broker.alias, [self._name(child) for child in children])
        except Exception as error:  # noqa: BLE001 - as in `beat`
            self._faults.note(error)

    # --- requests to drain

    def obey_known(self) -> None:
        """Ask processes that have just been started to take no tasks, while all of this supervisor are to drain."""
        if self.is_draining:
            for child in self.processes.children:
                self.processes.drain(child, is_draining=True)

    def _obey(self, requests: dict[str, float]) -> None:
        """Ask processes to take no more tasks, or to take tasks again."""
        self.is_draining = servers.are_drained(requests, [self.options.name])
        for child in self.processes.children:
            names = (self.options.name, child.worker_id, servers.server_id_of(child.worker_id))
            self.processes.drain(child, is_draining=servers.are_drained(requests, names))

    # --- what is shown

    def _shown(self) -> list[ShownWorker]:
        children = self.processes.children
        of_child = {child.worker_id: child.slot_table.running() for child in children}
        alive = {_key(run) for running in of_child.values() for run in running}
        self._messages = {key: message for key, message in self._messages.items() if key in alive}
        now, clock = redis_clock.seconds(), time.monotonic()

        def moment(monotonic: float) -> datetime:
            return datetime.fromtimestamp(now - (clock - monotonic), UTC)

        return [self._shown_worker(child, of_child[child.worker_id], moment) for child in children]

    def _shown_worker(
        self, child: Child, running: Collection[Running], moment: Callable[[float], datetime]
    ) -> ShownWorker:
        server_id = servers.server_id_of(child.worker_id)
        takes_no_more = child.is_draining or self.processes.is_stopping
        info = ServerInfo(
            host=self.options.name,
            pid=child.process.pid,
            server_id=server_id,
            concurrency=1 if child.is_alone else self.options.concurrency,
            queues=self.options.queues or dict.fromkeys(self.broker.known_queues(), 1),
            is_strict=self.options.strict,
            status=servers.STOPPED if takes_no_more else servers.ACTIVE,
            started_at=moment(child.started_at),
            active=len(running),
        )
        known = [(run, *self._messages[_key(run)]) for run in running if _key(run) in self._messages]
        shown = [_running_info(info, id, message, moment(run.began_at)) for run, id, message in known]
        return ShownWorker(info, self._details(child), shown)

    def _details(self, child: Child) -> Details:
        known = self._versions()
        return Details(
            worker_id=child.worker_id,
            version=__version__,
            app_version=conf.current().app_version,
            alias=self.options.backend,
            processes=self.processes.count,
            supervisor_pid=os.getpid(),
            finished=child.slot_table.pulse.finished,
            rss_bytes=resident_bytes(child.process.pid),
            beat_at=redis_clock.seconds(),
            tasks=tuple(sorted(known)),
            versions={name: version for name, version in known.items() if version != 1},
            queue_slots={} if child.is_alone else self.options.queue_slots,
            is_draining=child.is_draining and child.slot_table.pulse.takes_none,
            is_leader=self.is_leader(),
            is_quarantined=child.is_quarantined,
        )

    def _versions(self) -> dict[str, int]:
        if self._known is None:
            self._known = known_versions()
        return self._known

    def _bring_back(self, shown: Iterable[ShownWorker]) -> None:
        """Make due what waited for this code, when new processes have it. Raises: BrokerUnavailable."""
        ids = {
            each.details.worker_id: each.info.queues
            for each in shown
            if each.info.status == servers.ACTIVE and not each.details.is_quarantined
        }
        if new := ids.keys() - self._shown_ids:
            known = self._versions()
            queues = {queue for id in new for queue in ids[id]}
            waiting = waiting_in(self.broker, queues)
            bring_back(self.broker, [each for each in waiting if known.get(each.name, 0) >= each.version])
        self._shown_ids = frozenset(ids)

    def _name(self, child: Child) -> str:
        return f"{self.options.name}:{child.process.pid}:{servers.server_id_of(child.worker_id)}"


def _key(run: Running) -> RunKey:
    return run.id, run.began_at


def _running_info(server: ServerInfo, id: str, message: TaskMessage, started_at: datetime) -> RunningInfo:
    ends = [message.deadline] if message.deadline else []
    if message.timeout:
        ends.append(int(started_at.timestamp()) + message.timeout)
    return RunningInfo(
        host=server.host,
        pid=server.pid,
        server_id=server.server_id,
        id=id,
        type=message.type,
        payload=message.payload,
        queue=message.queue,
        started_at=started_at,
        deadline=moment_of(min(ends)) if ends else None,
    )


def resident_bytes(pid: int) -> int:
    """Return the memory that a process uses now; 0 where that cannot be read, as without /proc."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


# --- The leases of the tasks that a supervisor's processes hold: renewed with each beat, reasserted if Redis lost them.
#
# A beat also learns which of them were cancelled, so a process that missed the message learns of it a beat later.


class LeaseKeeper:
    """Renews the leases of the tasks that the processes hold.

    heartbeat: is given what the renewal says of the tasks.
    """

    def __init__(
        self, broker: Broker, options: WorkerOptions, processes: Processes, heartbeat: HeartbeatWriter
    ) -> None:
        self.broker = broker
        self.options = options
        self.processes = processes
        self.heartbeat = heartbeat
        self._beat_at = 0.0
        self._alive_since: int | None = None
        self._faults = Faults(logger, "leases cannot be renewed", over="leases are renewed again")

    @property
    def is_failing(self) -> bool:
        """Whether the last renewal failed."""
        return self._faults.is_failing

    def beat(self) -> bool:
        """Renew the leases when due; return whether it was. While a store is unreachable, retry soon; log it once."""
        now = time.monotonic()
        if now < self._beat_at:
            return False
        try:
            self.renew()
        except Exception as error:  # noqa: BLE001 - it is logged there; whatever it is, the supervisor must live
            connections.close_all()
            self._beat_at = now + conf.current().beat_retry_seconds
            self._faults.note(error)
        else:
            self._beat_at = now + conf.current().beat_seconds
            self._faults.clear()
        return True

    def renew(self) -> None:
        """Renew the leases of all tasks that the processes hold, and reassert tasks that Redis has forgotten."""
        settings = conf.current()
        alive_since = self.broker.reachability(settings.outage_seconds).alive_since
        # Read first: a task that begins from now on has a fresh lease, and must not count as missing.
        children = self.processes.children
        runs = {child.worker_id: child.slot_table.running() for child in children}
        running = {worker_id: {run.id for run in found} for worker_id, found in runs.items()}
        workers = list(running)
        wanted = [id for found in runs.values() for id in self.heartbeat.unknown(found)]
        kept = dict.fromkeys(workers, 0)

        def extend(queue: str) -> None:
            extensions = self.broker.extend(queue, workers, settings.lease_seconds, wanted)
            for worker_id, extended in zip(workers, extensions, strict=True):
                kept[worker_id] += extended.kept
                self.heartbeat.note(queue, extended.messages, runs[worker_id])
                if extended.cancelled:
                    self.processes.cancel(worker_id, extended.cancelled)

        queues = list(self.options.queues or self.broker.known_queues()) if workers else []
        in_turn(queues_with(self.broker, queues, held_by=workers), extend)
        # The first mark is not a loss: Redis still has what began before it.
        has_lost_memory = self._alive_since is not None and alive_since != self._alive_since
        forgotten = [id for id, ids in running.items() if ids and (has_lost_memory or kept[id] < len(ids))]
        in_turn(forgotten, lambda id: lifecycle.reassert(self.broker, id, running[id]))
        # Kept while there is no mark, so that every beat reasserts until the new mark is seen.
        self._alive_since = alive_since or self._alive_since


# --- The liveness file, whose age shows a probe that all worker processes are up.


class LivenessFile:
    """A file that is touched while all is well. A full disk or a folder that vanished must not stop the workers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_failing = False

    def check(self) -> None:
        """Make sure that the file can be touched, and leave it as it is. Raises: OSError."""
        try:
            os.close(os.open(self.path, os.O_WRONLY))
        except FileNotFoundError:
            # Only `touch` says that processes are up, so another file shows that the folder takes one.
            with tempfile.TemporaryFile(dir=self.path.parent):
                pass

    def touch(self) -> None:
        """Touch the file; log once when that begins to fail, and once when it works again."""
        try:
            self.path.touch()
        except OSError as error:
            if not self._is_failing:
                logger.warning("the liveness file cannot be touched: %s", error)
            self._is_failing = True
        else:
            if self._is_failing:
                logger.info("the liveness file %s is touched again", self.path)
            self._is_failing = False

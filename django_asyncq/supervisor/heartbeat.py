"""Show the worker processes of a supervisor to people and tools, with each beat, and obey requests to drain.

It costs one call of Redis a beat for all processes; what they run is in the replies to the renewal of their leases. All
of it is a copy: when Redis is unreachable it expires, and nothing else depends on it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from .. import __version__, conf
from ..broker import Broker, redis_clock, servers
from ..broker.decoding import UndecodableMessage, decode_message, decode_type
from ..broker.entries import HeldMessage
from ..broker.message import RunningInfo, ServerInfo, TaskMessage
from ..broker.servers import Details, ShownWorker
from ..faults import Faults
from ..guard import get_logger
from ..registry import every_task
from ..worker.memory import PAGE_BYTES
from ..worker.options import WorkerOptions
from ..worker.slot_table import Running
from .processes import Child, Processes

logger = get_logger("django_asyncq.supervisor")

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
        self._tasks: tuple[str, ...] | None = None

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
            self._obey(servers.show(self.broker.alias, self._shown(), seconds))
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
        if self._tasks is None:
            self._tasks = tuple(sorted(task.module_path for task in every_task()))
        return Details(
            worker_id=child.worker_id,
            version=__version__,
            alias=self.options.backend,
            processes=self.processes.count,
            supervisor_pid=os.getpid(),
            rss_bytes=resident_bytes(child.process.pid),
            beat_at=redis_clock.seconds(),
            tasks=self._tasks,
            is_draining=child.is_draining,
            is_leader=self.is_leader(),
            is_quarantined=child.is_alone,
        )

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
        deadline=_moment(min(ends)) if ends else None,
    )


def _moment(unix_seconds: int) -> datetime | None:
    """Return an aware time; None when no datetime can hold it: another program may have written any number."""
    try:
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=unix_seconds)
    except OverflowError:
        return None


def resident_bytes(pid: int) -> int:
    """Return the memory that a process uses now; 0 where that cannot be read, as without /proc."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0

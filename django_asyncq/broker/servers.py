"""Show worker processes in asynq's format, and read what is shown: also asynq's own servers.

For asynq's tools each worker process is a server of its own, so that what they count and cancel is right. What asynq
has no word for is in a string beside it. All of it is a copy that expires two beats after it was written: nothing is
decided by it. Anything may be there, so what cannot be read is skipped.

Source: `ServerInfo` and `WorkerInfo` in asynq's `asynq.proto`.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, NamedTuple
from uuid import NAMESPACE_URL, uuid5

from ..core.aliases import DEFAULT_ALIAS, one_alias_per_prefix, prefix_of
from . import clients, entries, redis_clock, scripts
from .clients import broker_errors
from .keys import (
    drain_key,
    running_key,
    scheduler_history_key,
    scheduler_key,
    schedulers_key,
    server_key,
    server_running_key,
    servers_key,
    worker_info_key,
)
from .message import (
    RunningInfo,
    SchedulerEntry,
    ServerInfo,
    UndecodableMessage,
    decode_running,
    decode_scheduler_entry,
    decode_server,
)
from .reading import WITH_SCORES, Command, Reader, asking, read, side_by_side

# asynq's words: a server that takes tasks, and one that takes no more.
ACTIVE, STOPPED = "active", "stopped"
# What asynq's field for the arguments of a running task gets: of longer ones nothing.
LARGEST_PAYLOAD_BYTES = 4096
# How long a request to drain holds unless it is cancelled.
DRAIN_SECONDS = 86_400
# What a process may say of itself; more than that was not written here.
LARGEST_DETAILS_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """What a worker process of ours says of itself beyond asynq's words.

    worker_id: as in `TaskRecord.worker_ids`. version: of this package. app_version: of the project (`APP_VERSION`).
    alias: in TASKS. processes: how many its supervisor keeps, those in quarantine aside. finished: how many runs have
    finished there. rss_bytes: its memory; 0 when not known. beat_at: when this was written, by Redis's time in Unix
    seconds. tasks: names by which its code knows tasks, former ones too. versions: of the arguments of those where that
    is not 1. queue_slots: how many of its slots may run tasks of a queue, for those with a limit. is_leader: whether
    its supervisor leads the fleet. is_quarantined: whether it runs suspects only.
    """

    worker_id: str = ""
    version: str = ""
    app_version: str = ""
    alias: str = ""
    processes: int = 0
    supervisor_pid: int = 0
    finished: int = 0
    rss_bytes: int = 0
    beat_at: float = 0.0
    tasks: tuple[str, ...] = ()
    versions: Mapping[str, int] = field(default_factory=dict)
    queue_slots: Mapping[str, int] = field(default_factory=dict)
    is_draining: bool = False
    is_leader: bool = False
    is_quarantined: bool = False


class ShownWorker(NamedTuple):
    """One worker process as it is to be shown."""

    info: ServerInfo
    details: Details
    running: Sequence[RunningInfo]

    @property
    def name(self) -> str:
        """The name by which its keys are found."""
        return f"{self.info.host}:{self.info.pid}:{self.info.server_id}"


class WorkerInfo(NamedTuple):
    """One process that runs tasks, ours or a server of asynq.

    id: asynq's server id. concurrency: its slots. status: "active", or "stopped" when it takes no more tasks. running:
    what it runs, the longest first. details: None for asynq's servers, which do not have any.
    """

    id: str
    host: str
    pid: int
    queues: Mapping[str, int]
    is_strict: bool
    concurrency: int
    status: str
    started_at: datetime
    running: list[RunningInfo]
    details: Details | None

    @property
    def busy(self) -> int:
        """How many tasks it ran at its last heartbeat."""
        return len(self.running)

    def knows(self, alias: str, queue: str, name: str, version: int = 1) -> bool:
        """Whether it takes tasks of this alias and queue, and its code has this name and version of arguments."""
        details = self.details
        if details is None or not self.takes_tasks or details.alias != alias:
            return False
        return queue in self.queues and name in details.tasks and version <= details.versions.get(name, 1)

    @property
    def takes_tasks(self) -> bool:
        """Whether it is a process of ours that is not drained and runs more than suspects."""
        return self.details is not None and self.status == ACTIVE and not self.details.is_quarantined

    def is_named(self, name: str) -> bool:
        """Whether a request to drain of this name is meant for it; never for a server of asynq."""
        return self.details is not None and name in (self.details.worker_id, self.id, self.host)


def server_id_of(worker_id: str) -> str:
    """Return asynq's id of the server that a worker process is: always the same UUID."""
    return str(uuid5(NAMESPACE_URL, f"asyncq:worker:{worker_id}"))


# --- written by supervisors


def show(alias: str, workers: Sequence[ShownWorker], seconds: int) -> dict[str, float]:
    """Show worker processes of an alias for some seconds; return the requests to drain: name → until when.

    One call of Redis; in a cluster three for each process and one more. Raises: BrokerUnavailable.
    """
    client = clients.client("worker")
    if not clients.is_cluster(client):
        keys = [servers_key(alias), running_key(alias), drain_key(alias), *_keys_of(alias, workers)]
        found = scripts.run("server_beat", client, keys, [seconds, "all", *_arguments_of(workers)])
        return _requests(dict(zip(found[::2], found[1::2], strict=False)))
    expires_at = int(redis_clock.seconds()) + seconds
    for worker in workers:
        keys = _keys_of(alias, [worker])
        scripts.run("server_beat", client, keys, [seconds, "", *_arguments_of([worker])])
        scripts.send(client, "zadd", servers_key(alias), {keys[0]: expires_at})
        scripts.send(client, "zadd", running_key(alias), {keys[1]: expires_at})
    return read_requests(alias, "worker")


def clear(alias: str, names: Iterable[str]) -> None:
    """Remove what was shown of worker processes that have stopped. names: `ShownWorker.name`.

    Raises: BrokerUnavailable; what is left then expires.
    """
    client = clients.client("worker")
    of_each = [[key(name, alias) for key in (server_key, server_running_key, worker_info_key)] for name in names]
    if not clients.is_cluster(client):
        keys = [servers_key(alias), running_key(alias), *(key for keys in of_each for key in keys)]
        scripts.run("server_clear", client, keys, ["all"])
        return
    for keys in of_each:
        scripts.run("server_clear", client, keys, [""])
        scripts.send(client, "zrem", servers_key(alias), keys[0])
        scripts.send(client, "zrem", running_key(alias), keys[1])


def _keys_of(alias: str, workers: Iterable[ShownWorker]) -> list[str]:
    keys = (server_key, server_running_key, worker_info_key)
    return [key(worker.name, alias) for worker in workers for key in keys]


def _arguments_of(workers: Iterable[ShownWorker]) -> list[Any]:
    found: list[Any] = []
    for info, details, running in workers:
        found += [info.encode(), json.dumps(asdict(details)), len(running)]
        found += [part for each in running for part in (each.id, each.encode())]
    return found


# --- read by people


def workers(alias: str = DEFAULT_ALIAS, role: clients.Role = "producer") -> list[WorkerInfo]:
    """Return what `reading_workers` finds. Raises: BrokerUnavailable."""
    return read(role, reading_workers(alias))


def reading_workers(alias: str = DEFAULT_ALIAS) -> Reader[list[WorkerInfo]]:
    """Read the living processes that serve queues under the prefix of an alias, by host and process id.

    What they run is as old as their last heartbeat, at most some seconds.
    """
    prefix, every = f"{prefix_of(alias)}:servers:{{", Command("zrange", [servers_key(alias)], (0, -1), WITH_SCORES)
    now, (listed,) = yield from side_by_side(redis_clock.reading_seconds(), asking(every))
    found = entries.texts(key for key, until in listed if until >= int(now))
    names = [key.removeprefix(prefix).removesuffix("}") for key in found if key.startswith(prefix) and key[-1] == "}"]
    replies = yield from asking(*(command for name in names for command in _commands_of(name, alias)))
    shown = [_worker(*replies[start : start + 3]) for start in range(0, len(replies), 3)]
    return sorted((each for each in shown if each is not None), key=lambda each: (each.host, each.pid, each.id))


def _commands_of(name: str, alias: str) -> list[Command]:
    return [
        Command("get", [server_key(name, alias)]),
        Command("hgetall", [server_running_key(name, alias)]),
        Command("get", [worker_info_key(name, alias)]),
    ]


def _worker(shown: bytes | None, runs: Mapping[bytes, bytes], details: Any) -> WorkerInfo | None:
    """Return one process; None when it has just stopped, or cannot be read."""
    try:
        info = decode_server(shown or b"-")
    except UndecodableMessage:
        return None
    running: list[RunningInfo] = []
    for value in runs.values():
        try:
            running.append(decode_running(value))
        except UndecodableMessage:
            continue
    return WorkerInfo(
        id=info.server_id,
        host=info.host,
        pid=info.pid,
        queues=info.queues,
        is_strict=info.is_strict,
        concurrency=info.concurrency,
        status=info.status,
        started_at=info.started_at,
        running=sorted(running, key=lambda each: (each.started_at, each.id)),
        details=_details(details),
    )


def _details(written: Any) -> Details | None:
    """Read what a process of ours says of itself; what has another type than expected is as if it were not there."""
    if not isinstance(written, bytes) or len(written) > LARGEST_DETAILS_BYTES:
        return None
    try:
        found = json.loads(written)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    default = asdict(Details())
    kept: dict[str, Any] = {name: value for name, value in found.items() if type(value) is type(default.get(name))}
    tasks = found.get("tasks")
    kept["tasks"] = tuple(map(str, tasks)) if isinstance(tasks, list) else ()
    for name in ("versions", "queue_slots"):
        kept[name] = {key: number for key, number in kept.get(name, {}).items() if type(number) is int}
    return Details(**kept)


# --- requests to drain


def drain(name: str, alias: str = DEFAULT_ALIAS, seconds: int = DRAIN_SECONDS) -> list[WorkerInfo]:
    """Ask worker processes to take no more tasks: one by its worker id, or all of a host.

    They finish what they run, and notice the request within a beat. It holds until it is cancelled, for `seconds` at
    most; one for a host also holds for processes that start later. Returns the processes that it is meant for now; when
    there are none, nothing is written. Raises: BrokerUnavailable.
    """
    meant = [worker for worker in workers(alias) if worker.is_named(name)]
    if meant:
        scripts.run("drain", clients.client("producer"), [drain_key(alias)], [max(seconds, 1), name])
    return meant


def resume(name: str, alias: str = DEFAULT_ALIAS) -> bool:
    """Cancel a request to drain, by the name that it had; return whether there was one. Raises: BrokerUnavailable."""
    return bool(scripts.run("drain", clients.client("producer"), [drain_key(alias)], [0, name]))


def read_requests(alias: str = DEFAULT_ALIAS, role: clients.Role = "producer") -> dict[str, float]:
    """Return the requests to drain of an alias: name → until when, in Unix seconds. Raises: BrokerUnavailable."""
    return _requests(scripts.send(clients.client(role), "hgetall", drain_key(alias)))


def are_drained(requests: Mapping[str, float], names: Collection[str]) -> bool:
    """Return whether a request that still holds has one of these names. Raises: BrokerUnavailable."""
    wanted = [requests[name] for name in names if name in requests]
    return bool(wanted) and max(wanted) > redis_clock.seconds()


def _requests(found: Mapping[Any, Any]) -> dict[str, float]:
    read = ((entries.text(name), entries.whole(until, 0)) for name, until in found.items())
    return {name: float(until) for name, until in read if until is not None}


# --- Write schedules for asynq's tools: entries that expire unless they are renewed, and their latest events. Read
# those of other programs.
#
# Nothing is decided by what is read: the rows decide. Source: `SchedulerEntry` in asynq's `asynq.proto`.

EVENTS_KEPT = 1000
MOST_SCHEDULERS = 100
MOST_ENTRIES = 1_000


class SchedulerEntryList:
    """Keep the entries of one scheduler process. Every method raises BrokerUnavailable when Redis is unreachable."""

    def __init__(self) -> None:
        self.id = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4()}"
        # Aliases in TASKS under whose prefixes there are entries.
        self._aliases: set[str] = set()

    def beat(self, alias: str, entries: Sequence[bytes], seconds: int) -> None:
        """List these entries under the prefix of an alias in TASKS for `seconds`."""
        client, key = clients.client("worker"), scheduler_key(self.id, alias)
        self._aliases.add(alias)
        scripts.send(client, "zadd", schedulers_key(alias), {key: int(redis_clock.seconds()) + seconds})
        scripts.run("scheduler_beat", client, [key], [seconds, *entries])

    def note(self, alias: str, entry_id: str, event: bytes, at: int) -> None:
        """Add one firing to the history of an entry of an alias. at: Unix seconds."""
        client = clients.client("worker")
        scripts.run("scheduler_event", client, [scheduler_history_key(entry_id, alias)], [at, event, EVENTS_KEPT])

    def clear(self) -> None:
        """Remove all entries at a clean stop. Events stay: the entry may belong to another scheduler by now."""
        client = clients.client("worker")
        for alias in self._aliases:
            key = scheduler_key(self.id, alias)
            scripts.send(client, "zrem", schedulers_key(alias), key)
            with broker_errors(client):
                client.delete(key)


class ListedSchedule(NamedTuple):
    """A schedule as its scheduler lists it. scheduler: `<host>:<pid>:<UUID>`. entry: None when it cannot be read."""

    scheduler: str
    entry: SchedulerEntry | None


def schedules(alias: str) -> list[ListedSchedule]:
    """Return what the living schedulers under the prefix of an alias list, ours and those of other programs.

    Of at most MOST_SCHEDULERS, MOST_ENTRIES each. Raises: BrokerUnavailable.
    """
    client, prefix = clients.client("producer"), f"{prefix_of(alias)}:schedulers:{{"
    now = int(redis_clock.seconds("producer"))
    alive = {"byscore": True, "offset": 0, "num": MOST_SCHEDULERS}
    names = entries.texts(scripts.send(client, "zrange", schedulers_key(alias), now, "+inf", **alive))
    found = []
    for name in names:
        # The set may name any key; only that of a scheduler is read.
        if name.startswith(prefix) and name.endswith("}"):
            id = name[len(prefix) : -1]
            listed = scripts.send(client, "lrange", scheduler_key(id, alias), 0, MOST_ENTRIES - 1)
            found += [ListedSchedule(id, _scheduler_entry(each)) for each in listed]
    return found


def _scheduler_entry(data: bytes) -> SchedulerEntry | None:
    try:
        return decode_scheduler_entry(data)
    except UndecodableMessage:
        return None


def forget_events(entry_id: str) -> None:
    """Remove the history of a deleted entry. Raises: BrokerUnavailable."""
    client = clients.client("producer")
    for alias in one_alias_per_prefix():
        with broker_errors(client):
            client.delete(scheduler_history_key(entry_id, alias))

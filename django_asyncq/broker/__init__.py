"""Redis on asynq's layout: every operation of a queue as one script call per batch.

Knows keys, messages as bytes, leases and fences; knows nothing of rows. Each call may be repeated after a lost reply.
Raises BrokerUnavailable throughout when Redis is away or refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Literal, TypeVar

from . import clients, scripts
from .entries import Dequeued, Entry, Expired, Extended, Forwarded, Lease
from .keys import QueueKeys, alive_key, queues_key

T = TypeVar("T")

# Each id costs some µs of a server that does nothing else meanwhile; Lua's unpack fails beyond 8,000 values.
IDS_PER_CALL = 200
KEEP_COUNTERS_SECONDS = 90 * 86_400
LARGEST_COUNTER = 2**63 - 1
ARCHIVE_SECONDS = 90 * 86_400
# asynq's archive holds 10,000, in effect 9,999.
ARCHIVE_TASKS = 9_999

_registered: set[str] = set()


class Broker:
    """The queues in one Redis, seen by a producer or a worker."""

    def __init__(self, role: clients.Role = "worker") -> None:
        self.role: clients.Role = role

    @property
    def client(self) -> clients.Client:
        """The Redis client of this role."""
        return clients.client(self.role)

    # --- what is there

    def register_queue(self, queue: str) -> None:
        """Tell asynq's tools that the queue exists; once per process."""
        key = f"{queues_key()}/{queue}"
        if key not in _registered:
            with clients.broker_errors():
                self.client.sadd(queues_key(), queue)
            _registered.add(key)

    def queues(self) -> set[str]:
        """Return the names of all queues."""
        with clients.broker_errors():
            return {name.decode() for name in self.client.smembers(queues_key())}

    def is_alive(self) -> int | None:
        """Return since when Redis has its memory (Unix seconds), or None when it has lost it."""
        with clients.broker_errors():
            since = self.client.get(alive_key())
        return int(since) if since is not None else None

    def mark_alive(self) -> None:
        """Mark that what is enqueued from now on is in Redis; also makes known queues be registered again."""
        _registered.clear()
        with clients.broker_errors():
            self.client.set(alive_key(), int(self.client.time()[0]), nx=True)

    def eviction_policy(self) -> str:
        """Return Redis's maxmemory-policy, or "" where it may not be asked."""
        try:
            with clients.broker_errors():
                found: dict[Any, Any] = self.client.config_get("maxmemory-policy")
        except clients.redis.ResponseError:
            return ""
        return str(next((_text(value) for value in found.values()), ""))

    # --- a task comes in

    def enqueue(self, queue: str, entries: Sequence[Entry], *, again: bool = False) -> list[str]:
        """Make tasks pending; answer "queued", "exists" or "duplicate" for each.

        again: a task that waits in retry, archived, completed or scheduled becomes pending as well.
        """
        keys = QueueKeys(queue)
        names = [keys.pending, keys.priority, keys.scheduled, keys.retry, keys.archived, keys.completed]
        head = [keys.task_prefix, keys.wake, "again" if again else ""]
        rows = [[e.id, e.message, e.fence, e.priority, e.unique_key, e.unique_seconds] for e in entries]
        return self._words("enqueue", names, head, rows)

    def schedule(self, queue: str, entries: Sequence[Entry]) -> list[str]:
        """Let new tasks wait for their `due_at`; answer "scheduled", "exists" or "duplicate" for each."""
        keys = QueueKeys(queue)
        rows = [[e.id, e.message, e.fence, e.priority, e.unique_key, e.unique_seconds, e.due_at] for e in entries]
        return self._words("schedule", [keys.scheduled], [keys.task_prefix], rows)

    def add_to_group(self, queue: str, group: str, entries: Sequence[Entry]) -> list[str]:
        """Let new tasks wait in a group; answer "grouped", "exists" or "duplicate" for each."""
        keys = QueueKeys(queue)
        rows = [[e.id, e.message, e.unique_key, e.unique_seconds] for e in entries]
        return self._words("add_to_group", [keys.group(group), keys.groups], [keys.task_prefix, group], rows)

    def park(self, queue: str, entries: Sequence[Entry]) -> list[str]:
        """Put tasks into the retry set until `due_at`; answer "parked", or "exists" for what is pending or active."""
        keys = QueueKeys(queue)
        rows = [[e.id, e.message, e.fence, e.priority, e.due_at] for e in entries]
        return self._words("park", [keys.retry, keys.scheduled, keys.archived], [keys.task_prefix], rows)

    # --- a task is taken

    def dequeue(self, queue: str, worker_id: str, count: int, lease_seconds: int) -> Dequeued:
        """Lease up to `count` tasks (at most 200 a call): high priorities, pending, low priorities."""
        keys = QueueKeys(queue)
        reply = scripts.run(
            "dequeue",
            self.client,
            [keys.pending, keys.priority, keys.active, keys.lease, keys.paused, keys.held(worker_id)],
            [keys.task_prefix, min(count, IDS_PER_CALL), lease_seconds, worker_id],
        )
        return Dequeued(_leases(reply[1:]), reply[0] == b"paused")

    def held(self, queue: str, worker_id: str) -> list[Lease]:
        """Return what a worker process has leased."""
        with clients.broker_errors():
            found = self.client.hgetall(QueueKeys(queue).held(worker_id))
        return [Lease(_text(id), int(fence)) for id, fence in found.items()]

    def extend(self, queue: str, worker_id: str, lease_seconds: int) -> Extended:
        """Renew the leases of all that a worker process holds."""
        keys = QueueKeys(queue)
        reply = scripts.run(
            "extend", self.client, [keys.lease, keys.held(worker_id)], [keys.task_prefix, lease_seconds]
        )
        return Extended(int(reply[0]), [_text(id) for id in reply[1:]])

    def reassert(
        self, queue: str, worker_id: str, items: Sequence[tuple[Lease, bytes]], lease_seconds: int
    ) -> list[str]:
        """Give running tasks their entry back; answer "reasserted", "exists" or "stale" for each."""
        keys = QueueKeys(queue)
        rows = [[lease.id, lease.fence, message, 0] for lease, message in items]
        names = [keys.active, keys.lease, keys.held(worker_id)]
        return self._words("reassert", names, [keys.task_prefix, lease_seconds, worker_id], rows)

    # --- a task leaves its worker

    def done(self, queue: str, worker_id: str, leases: Sequence[Lease]) -> list[str]:
        """End tasks; answer "done", "stale" or "gone" for each."""
        keys = QueueKeys(queue)
        day, expires_at = _today()
        names = [keys.active, keys.lease, keys.held(worker_id), keys.processed_on(day), keys.processed]
        return self._words("done", names, [keys.task_prefix, expires_at, LARGEST_COUNTER], [list(x) for x in leases])

    def retry(
        self, queue: str, worker_id: str, items: Sequence[tuple[Lease, bytes, int]], *, counted: bool = True
    ) -> list[str]:
        """Put failed tasks into the retry set; answer "retried", "stale" or "gone" for each.

        items: lease, message, due time in Unix seconds. counted: whether asynq's counters tell of a failure.
        """
        keys = QueueKeys(queue)
        rows = [[lease.id, lease.fence, message, due_at] for lease, message, due_at in items]
        names, head = self._failing(keys, worker_id, keys.retry)
        return self._words("retry", names, [*head, int(counted)], rows)

    def archive(self, queue: str, worker_id: str, items: Sequence[tuple[Lease, bytes]]) -> list[str]:
        """Put tasks that failed for good into the archive; answer "archived", "stale" or "gone" for each.

        items: lease and message; an empty message leaves the one that is there.
        """
        keys = QueueKeys(queue)
        rows = [[lease.id, lease.fence, message] for lease, message in items]
        names, head = self._failing(keys, worker_id, keys.archived)
        oldest = int(datetime.now(UTC).timestamp()) - ARCHIVE_SECONDS
        return self._words("archive", names, [*head, oldest, ARCHIVE_TASKS], rows)

    def requeue(self, queue: str, worker_id: str, leases: Sequence[Lease], *, raise_fence: bool = False) -> list[str]:
        """Give tasks back to the head of the queue; answer "requeued", "stale" or "gone" for each.

        raise_fence: taken from a worker that may still be alive; what it says afterwards is refused.
        """
        keys = QueueKeys(queue)
        names = [keys.active, keys.lease, keys.held(worker_id), keys.pending, keys.priority]
        head = [keys.task_prefix, keys.wake, int(raise_fence)]
        # RPUSH one by one turns the order around: the first of the batch shall be the next to run.
        return self._words("requeue", names, head, [list(x) for x in reversed(leases)])[::-1]

    def postpone(self, queue: str, worker_id: str, leases: Sequence[Lease], delay_seconds: int) -> list[int]:
        """Put tasks aside; answer for each how many seconds ago it first was, -1 when it is not held any more."""
        keys = QueueKeys(queue)
        names = [keys.active, keys.lease, keys.held(worker_id), keys.scheduled]
        return [
            int(age)
            for age in self._replies("postpone", names, [keys.task_prefix, delay_seconds], [list(x) for x in leases])
        ]

    # --- upkeep

    def forward(self, queue: str, source: Literal["scheduled", "retry"], limit: int = 100) -> Forwarded:
        """Move up to `limit` due tasks to pending; those of ours in retry are only told."""
        keys = QueueKeys(queue)
        reply = scripts.run(
            "forward",
            self.client,
            [getattr(keys, source), keys.pending, keys.priority, keys.groups],
            [keys.task_prefix, keys.group(""), keys.wake, limit, int(source == "retry")],
        )
        next_due = _text(reply[1])
        return Forwarded(int(reply[0]), [_text(id) for id in reply[2:]], int(float(next_due)) if next_due else None)

    def expired(self, queue: str, limit: int = 100) -> list[Expired]:
        """Return tasks of ours whose lease has run out."""
        keys = QueueKeys(queue)
        reply = scripts.run("expired", self.client, [keys.lease], [keys.task_prefix, limit])
        return [Expired(_text(i), int(f), _text(w)) for i, f, w in zip(*[iter(reply)] * 3, strict=True)]

    def missing(self, queue: str, ids: Sequence[str]) -> list[str]:
        """Return the ids that Redis does not know."""
        keys = QueueKeys(queue)
        # The key is only there to find the queue's node in a cluster.
        rows = [[id] for id in ids]
        return [_text(id) for id in self._replies("missing", [keys.pending], [keys.task_prefix], rows)]

    def remove(self, queue: str, ids: Sequence[str]) -> int:
        """Remove tasks from wherever they are; return how many were there."""
        keys = QueueKeys(queue)
        names = [keys.pending, keys.priority, keys.scheduled, keys.retry, keys.archived, keys.completed]
        removed = 0
        for some in _chunks(list(ids)):
            arguments = [keys.task_prefix, keys.held(""), *some]
            removed += int(scripts.run("remove", self.client, [*names, keys.active, keys.lease], arguments))
        return removed

    # --- calling scripts

    def _failing(self, keys: QueueKeys, worker_id: str, target: str) -> tuple[list[str], list[Any]]:
        """Return the keys and first arguments that retry and archive share."""
        day, expires_at = _today()
        counters = [keys.processed_on(day), keys.failed_on(day), keys.processed, keys.failed]
        names = [keys.active, keys.lease, keys.held(worker_id), target, *counters]
        return names, [keys.task_prefix, expires_at, LARGEST_COUNTER]

    def _replies(self, name: str, keys: list[str], head: list[Any], rows: Sequence[list[Any]]) -> list[Any]:
        """Run a script over rows of arguments, in chunks; return its answers in order."""
        replies: list[Any] = []
        for some in _chunks(rows):
            replies += scripts.run(name, self.client, keys, [*head, *chain.from_iterable(some)])
        return replies

    def _words(self, name: str, keys: list[str], head: list[Any], rows: Sequence[list[Any]]) -> list[str]:
        return [_text(word) for word in self._replies(name, keys, head, rows)]


def _chunks(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(rows), IDS_PER_CALL):
        yield rows[start : start + IDS_PER_CALL]


def _leases(flat: Sequence[Any]) -> list[Lease]:
    return [Lease(_text(id), int(fence)) for id, fence in zip(flat[::2], flat[1::2], strict=True)]


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _today() -> tuple[str, int]:
    """Return the UTC day asynq counts under, and when its counters expire."""
    now = datetime.now(UTC)
    return now.strftime("%Y-%m-%d"), int(now.timestamp()) + KEEP_COUNTERS_SECONDS


__all__ = ["Broker", "Dequeued", "Entry", "Expired", "Extended", "Forwarded", "Lease"]

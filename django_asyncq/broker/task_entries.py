"""Hold tasks, take them out of a queue, and ask the workers of running ones to stop.

A request to stop is asynq's own: the id of a task on its channel of cancellations. For a worker of ours the fence of
the row may follow, after a space: it then means the runs that have read the row with a lower one, since the request
may come when the task has begun anew; each change of a row raises its fence. The field `cancel` in the hash of the task
outlives a lost message; a new run of the task begins without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from . import entries, scripts
from .access import Access
from .entries import Lease, id_bytes
from .keys import cancel_channel
from .scripts import send

# Removing an id from a pending list of 100,000 ids takes about 1 ms: 50 of them, 50 ms.
TAKEN_OUT_PER_CALL = 50
ASKED_PER_CALL = 200
# How the name of a holder begins; it stands where that of a worker does.
HOLDER = "canceller:"
# How long a process that holds tasks may be dead until the leader finds them.
HOLD_SECONDS = 10


def hold(
    broker: Access, queue: str, ids: Sequence[str], holder: str, rows: Mapping[str, str] | None = None
) -> list[str]:
    """Take the leases of tasks that wait, so that no worker claims them, whatever pushes them.

    holder: its name, which begins with HOLDER. rows: as of `Broker.remove`.
    Returns, for each: the fence of its lease; "claimed": a worker has it, or another program has finished it; or
    "missing": Redis does not know it.
    Raises: BrokerUnavailable; the call may be repeated.
    """
    keys = broker.keys(queue)
    places = [keys.pending, keys.priority, keys.scheduled, keys.retry, keys.archived, keys.active]
    places += [keys.lease, keys.groups, keys.due, keys.suspects]
    head = [keys.task_prefix, keys.group_prefix, holder, HOLDER, HOLD_SECONDS]
    items = [[id, (rows or {}).get(id, "")] for id in ids]
    return entries.texts(scripts.run_in_parts("hold", broker.client, places, head, items, TAKEN_OUT_PER_CALL))


def take_out(
    broker: Access,
    queue: str,
    tasks: Sequence[tuple[str, int | None]],
    rows: Mapping[str, str] | None = None,
    *,
    holder: str = "",
    overtaken: bool = False,
) -> list[str]:
    """Remove tasks that wait, wherever they do, or that the caller holds; ask the workers of running ones to stop.

    tasks: id, and the fence that the row had when it was closed or replaced; None: only if it is held.
    rows: as of `Broker.remove`. holder: as of `hold`.
    overtaken: remove also what waits with a later fence: it was pushed as the row was before, or is pushed again.
    Returns, for each: "removed"; "active": a worker has claimed it, or somebody else holds it, so its entry and its
    lease stay; "missing"; or "overtaken": its fence is later, because it was retried since, say, and it stays.
    Raises: BrokerUnavailable; the call may be repeated.
    """
    keys = broker.keys(queue)
    places = [keys.pending, keys.priority, keys.scheduled, keys.retry, keys.archived, keys.completed]
    places += [keys.lease, keys.groups, keys.due, keys.suspects, keys.active, keys.fair]
    head = [keys.task_prefix, keys.group_prefix, cancel_channel(broker.alias), holder, "1" if overtaken else ""]
    items = [[id, "" if fence is None else fence, (rows or {}).get(id, "")] for id, fence in tasks]
    return entries.texts(scripts.run_in_parts("take_out", broker.client, places, head, items, TAKEN_OUT_PER_CALL))


def ask_to_stop(broker: Access, queue: str, ids: Sequence[str]) -> list[str]:
    """Ask the workers that run these tasks to stop. Returns, for each: "asked", or "missing" (Redis does not know it).

    Raises: BrokerUnavailable; the call may be repeated.
    """
    keys = broker.keys(queue)
    head = [keys.task_prefix, cancel_channel(broker.alias)]
    items = [[id] for id in ids]
    return entries.texts(scripts.run_in_parts("ask_to_stop", broker.client, [keys.lease], head, items, ASKED_PER_CALL))


def make_pending(broker: Access, queue: str, id: str, states: Iterable[str]) -> str:
    """Make an entry without a row pending, if it is in one of these states of scheduled, retry and archived.

    Returns "moved", or why nothing was changed: the state that it has, "" for none, or "row".
    Raises: BrokerUnavailable.
    """
    keys = broker.keys(queue)
    places = [keys.pending, keys.scheduled, keys.retry, keys.archived, keys.due, keys.wake]
    return entries.text(scripts.run("make_pending", broker.client, places, [keys.task(id), id, *states]))


# --- The tasks of a queue that must run alone, because one of them may have taken its worker process down.
#
# They wait in a key of their own, which the dequeue of ordinary workers never reads.


def dequeue_suspect(
    broker: Access, queue: str, worker_id: str, lease_seconds: int, *, waited_seconds: float = 0.0
) -> Lease | None:
    """Dequeue the task that has waited longest; None when there is none, or when the queue is paused.

    A worker that holds a task already gets that one: the reply to an earlier call was lost.
    waited_seconds: how long the task must have waited. Raises: BrokerUnavailable.
    """
    keys = broker.keys(queue)
    places = [keys.suspects, keys.active, keys.lease, keys.paused, keys.held(worker_id)]
    arguments = [keys.task_prefix, lease_seconds, worker_id, round(waited_seconds * 1000)]
    found = entries.leases(scripts.run("dequeue_suspect", broker.client, places, arguments))
    return found[0] if found else None


def isolate(broker: Access, queue: str, lease: Lease, worker_id: str, to: str, lease_seconds: int) -> bool:
    """Give a task that a worker holds to another one; return False if it no longer holds it.

    to: id of the other worker. Raises: BrokerUnavailable; the call may be repeated.
    """
    keys = broker.keys(queue)
    places = [keys.lease, keys.held(worker_id), keys.held(to)]
    arguments = [keys.task_prefix, id_bytes(lease.id), lease.fence, lease_seconds, to]
    return bool(scripts.run("isolate", broker.client, places, arguments))


# --- Outcomes that workers spilled to Redis: bytes in the hash of their task. Only `lifecycle` knows what they hold.

# An outcome may have a megabyte. Reading them is not limited like this: hardly any task has one.
WRITTEN_PER_CALL = 20
IDS_PER_CALL = 200


class SpilledOutcome(NamedTuple):
    """What the hash of a task holds. waited_fence: the run whose outcome the task has waited for; 0 for none."""

    outcome: bytes
    waited_fence: int


class SpilledOutcomes(Access):
    """Read and write spilled outcomes. Every method raises BrokerUnavailable when Redis is unreachable."""

    def write(self, queue: str, worker_id: str, items: Sequence[tuple[Lease, bytes]]) -> list[str]:
        """Store the outcomes of runs with their tasks, for another process to record, and expire their leases.

        items: (lease, outcome). Returns, for each: "spilled", "stale" or "missing".
        """
        keys = self.keys(queue)
        places, head = [keys.lease, keys.held(worker_id)], [keys.task_prefix]
        rows = [[lease.id, lease.fence, outcome] for lease, outcome in items]
        return entries.texts(scripts.run_in_parts("spill_outcomes", self.client, places, head, rows, WRITTEN_PER_CALL))

    def read(self, queue: str, ids: Sequence[str], *, largest_bytes: int) -> dict[str, SpilledOutcome]:
        """Return the outcomes that are stored with these tasks, by id; skip those above `largest_bytes`."""
        keys = self.keys(queue)
        head, items = [keys.task_prefix, largest_bytes], [[id] for id in ids]
        flat = scripts.run_in_parts("spilled_outcomes", self.client, [keys.pending], head, items, IDS_PER_CALL)
        answers = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        return {
            entries.text(id): SpilledOutcome(outcome, entries.whole(waited, 0) or 0) for id, outcome, waited in answers
        }

    def mark_waited(self, queue: str, fences: dict[str, int]) -> None:
        """Note that tasks have waited for a process that can verify their outcome. fences: of the outcomes, by id."""
        keys = self.keys(queue)
        arguments: list[Any] = [keys.task_prefix]
        for id, fence in fences.items():
            arguments += [id_bytes(id), fence]
        scripts.run("mark_outcomes_waited", self.client, [keys.pending], arguments)


# --- The newest progress of running tasks: JSON in the hash of the task, behind the fence of the run that reported it.

RUNS_PER_CALL = 100


class ProgressNotes(Access):
    """Write and read progress. Every method raises BrokerUnavailable when Redis is unreachable."""

    def write(self, queue: str, items: Sequence[tuple[Lease, bytes]]) -> int:
        """Note the progress of runs; return how many were noted: those that still hold their task."""
        keys = self.keys(queue)
        noted = 0
        for start in range(0, len(items), RUNS_PER_CALL):
            arguments: list[Any] = [keys.task_prefix]
            for lease, progress in items[start : start + RUNS_PER_CALL]:
                arguments += [id_bytes(lease.id), lease.fence, progress]
            noted += int(scripts.run("progress", self.client, [keys.pending], arguments))
        return noted

    def read(self, queue: str, id: str, fence: int, *, largest_bytes: int) -> bytes | None:
        """Return what the run with this fence has noted last; None when it has noted nothing, or too much."""
        found = send(self.client, "hget", self.keys(queue).task(id), "progress")
        written_by, _, progress = found.partition(b" ") if isinstance(found, bytes) else (b"", b"", b"")
        return progress if written_by == str(fence).encode() and len(progress) <= largest_bytes else None

"""The Redis half of the model: one method per script, plain Python."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from .values import QUEUES, WAITING, Entry, Outcome, Row


@dataclass
class Entries:
    """Redis, and the rows that its calls are made from. members: id → whether its slot is provisional.

    pending: from left to right; an id may be there twice, and may stay when it waits no more. dropped: ids that
    a refused script has popped from pending, by queue. retaken: id → fence of the last run that may no longer
    release the slot. waiters: in order. alive: "" after Redis was emptied, "just", "long". calls: how many calls have
    made tasks pending; tasks of one call have the same age.
    """

    rows: dict[str, Row] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    pending: dict[str, list[str]] = field(default_factory=lambda: {queue: [] for queue in QUEUES})
    held: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)
    dropped: dict[str, list[str]] = field(default_factory=dict)
    members: dict[str, bool] = field(default_factory=dict)
    retaken: dict[str, int] = field(default_factory=dict)
    waiters: list[str] = field(default_factory=list)
    counters: dict[str, list[int]] = field(default_factory=lambda: {queue: [0, 0] for queue in QUEUES})
    paused: set[str] = field(default_factory=set)
    built: bool = False
    alive: str = "long"
    calls: int = 0

    def enqueue(self, name: str, *, fence: int = 0, again: bool = False) -> None:
        entry, row = self.entries.get(name), self.rows[name]
        if entry and not (again and entry.place in WAITING):
            return
        fence = max(fence, entry.fence if entry else 0)
        place = "priority" if row.priority else "pending"
        self.entries[name] = Entry(row.queue, place, fence, priority=row.priority, since=self.calls)
        if place == "pending":
            self.pending[row.queue].insert(0, name)

    def schedule(self, name: str, *, fence: int = 0) -> None:
        row = self.rows[name]
        self.entries.setdefault(name, Entry(row.queue, "scheduled", fence, priority=row.priority, due=row.due))

    def park_entry(self, name: str, *, fence: int = 0) -> bool:
        entry, row = self.entries.get(name), self.rows[name]
        if entry and entry.place not in WAITING:
            return False
        fence = max(fence, entry.fence if entry else 0)
        worker, outcome = (entry.worker, entry.outcome) if entry else ("", None)
        self.entries[name] = Entry(row.queue, "retry", fence, worker, row.priority, row.due, outcome=outcome)
        return True

    def dequeue(self, queue: str, worker: str, count: int) -> list[tuple[str, int]]:
        if queue in self.paused:
            return []
        by_priority = [(-e.priority, n) for n, e in self.entries.items() if (e.queue, e.place) == (queue, "priority")]
        ids = [name for score, name in sorted(by_priority) if score < 0][:count]
        while len(ids) < count and self.pending[queue]:
            ids.append(self.pending[queue].pop())
        ids += [name for score, name in sorted(by_priority) if score > 0][: count - len(ids)]
        leases = []
        for name in ids:
            entry = self.entries.get(name)
            if entry and entry.place in ("pending", "priority"):
                leases.append((name, self._activate(name, worker)))
        return leases

    def dequeue_suspect(self, name: str, worker: str) -> tuple[str, int]:
        """The one that has waited longest; of those of one millisecond Redis chooses one."""
        assert self.entries[name].place == "suspects"
        return name, self._activate(name, worker)

    def _activate(self, name: str, worker: str) -> int:
        entry = self.entries[name]
        entry.place, entry.worker, entry.expired, entry.due, entry.since = "active", worker, False, "", 0
        entry.fence += 1
        self.held.setdefault((entry.queue, worker), {})[name] = entry.fence
        return entry.fence

    def _leave(self, name: str) -> None:
        """Its oldest place in the list is free; another one stays until a worker finds that it waits no more."""
        pending = self.pending[self.entries[name].queue]
        if self.entries[name].place == "pending" and name in pending:
            del pending[len(pending) - 1 - pending[::-1].index(name)]

    # --- ids in no list

    def is_dropped(self, name: str) -> bool:
        """Whether it was dropped, and is in no list."""
        entry = self.entries[name]
        return entry.place == "pending" and name not in self.pending[entry.queue]

    def drop(self, queue: str) -> None:
        self.dropped.setdefault(queue, []).insert(0, self.pending[queue].pop())

    def put_back(self, queue: str) -> None:
        self.pending[queue] += reversed(self.dropped.pop(queue, []))

    def repair_orphans(self, queue: str) -> int:
        """An id that was dropped goes back before all others, if it has a row and is late."""
        dropped = sorted(n for n, e in self.entries.items() if e.queue == queue and self.is_dropped(n))
        found = [name for name in dropped if name in self.rows and self._is_late(name)]
        self.pending[queue] += found
        return len(found)

    def _is_late(self, name: str) -> bool:
        """Whether Redis sees that it has waited for longer than the next that is left."""
        entry, oldest = self.entries[name], 0
        for id in self.pending[entry.queue][-10:]:
            oldest = (self.entries[id].since if id in self.entries else 0) or oldest
        return not self.pending[entry.queue] or entry.since == 0 or entry.since < oldest

    def remove_dangling(self, queue: str) -> int:
        dangling = {name for name in self.pending[queue] if name not in self.entries}
        self.pending[queue] = [name for name in self.pending[queue] if name in self.entries]
        return len(dangling)

    # --- what is held

    def holds(self, name: str, fence: int) -> bool:
        """The guard of every script that finishes a run."""
        entry = self.entries.get(name)
        return entry is not None and entry.place == "active" and entry.fence == fence

    def listed(self, queue: str, worker: str) -> dict[str, int]:
        """What a worker holds, except what another run has or is about to have."""
        mine = self.held.get((queue, worker), {}).items()
        return {n: f for n, f in mine if n not in self.entries or self._is_of(n, f, worker)}

    def _is_of(self, name: str, fence: int, worker: str) -> bool:
        return self.holds(name, fence) and self.entries[name].worker == worker

    def release(self, queue: str, name: str, worker: str, fence: int) -> Entry | None:
        """Remove a run from active, lease and held; None when it is stale or missing."""
        if self.holds(name, fence) or name not in self.entries:
            self.held.get((queue, worker), {}).pop(name, None)
        if not self.holds(name, fence):
            return None
        entry = self.entries[name]
        entry.worker, entry.expired = "", False
        return entry

    def count(self, queue: str, *, failed: bool) -> None:
        self.counters[queue][0] += 1
        self.counters[queue][1] += failed

    def done(self, queue: str, name: str, worker: str, fence: int) -> None:
        if self.release(queue, name, worker, fence):
            del self.entries[name]
            self.count(queue, failed=False)

    def retry_entry(self, queue: str, name: str, worker: str, fence: int, due: str, *, counted: bool) -> None:
        if entry := self.release(queue, name, worker, fence):
            entry.place, entry.due, entry.outcome = "retry", due, None
            if counted:
                self.count(queue, failed=True)

    def archive(self, queue: str, name: str, worker: str, fence: int) -> None:
        if entry := self.release(queue, name, worker, fence):
            entry.place, entry.outcome = "archived", None
            self.count(queue, failed=True)

    def restore(self, queue: str, name: str, worker: str, fence: int, due: str) -> bool:
        """What has no row goes back for other programs, and forgets its fence; return whether it was held."""
        entry = self.release(queue, name, worker, fence)
        if entry:
            entry.place, entry.due, entry.outcome, entry.fence = "scheduled", due, None, 0
        return entry is not None

    def requeue(
        self,
        queue: str,
        names: Sequence[tuple[str, int]],
        worker: str,
        *,
        raised: bool = False,
        suspects: Collection[str] = (),
    ) -> int:
        """The first one given is the next to run; suspects wait elsewhere."""
        words = 0
        for name, fence in reversed(names):
            if entry := self.release(queue, name, worker, fence):
                if name in suspects:
                    entry.place, entry.due = "suspects", ""
                else:
                    self._to_pending(name, entry, head=True)
                entry.fence += raised
                words += 1
        return words

    def _to_pending(self, name: str, entry: Entry, *, head: bool) -> None:
        entry.place, entry.due = ("priority" if entry.priority else "pending"), ""
        if entry.place == "pending":
            self.pending[entry.queue].insert(len(self.pending[entry.queue]) if head else 0, name)

    def postpone(self, queue: str, name: str, worker: str, fence: int) -> bool:
        entry = self.release(queue, name, worker, fence)
        if entry:
            entry.place, entry.due = "scheduled", "future"
        return entry is not None

    def spill_outcomes(self, queue: str, name: str, worker: str, fence: int, outcome: Outcome) -> bool:
        """The entry stays active with its fence; its lease has expired, and no worker renews it."""
        if not self.holds(name, fence):
            return False
        self.held.get((queue, worker), {}).pop(name, None)
        self.entries[name].outcome, self.entries[name].expired = outcome, True
        return True

    def extend(self, queue: str, worker: str) -> tuple[int, list[str]]:
        mine = self.held.get((queue, worker), {})
        lost = [name for name, fence in mine.items() if not self.holds(name, fence)]
        for name in lost:
            del mine[name]
        for name in mine:
            self.entries[name].expired = False
        return len(mine), lost

    def remove(self, name: str) -> None:
        if entry := self.entries.get(name):
            self._leave(name)
            self.held.get((entry.queue, entry.worker), {}).pop(name, None)
            del self.entries[name]

    def reassert(self, worker: str, names: Iterable[str]) -> int:
        found = [name for name in names if name not in self.entries]
        for name in found:
            row = self.rows[name]
            self.entries[name] = Entry(row.queue, "active", row.fence, worker)
            self.held.setdefault((row.queue, worker), {})[name] = row.fence
        return len(found)

    def foreign_recoverer(self, name: str) -> None:
        """asynq's own recoverer and forwarder: back to pending; neither the row nor `held` changes."""
        entry = self.entries[name]
        entry.expired = False
        self._to_pending(name, entry, head=False)

    def flush(self) -> None:
        self.entries, self.held, self.members, self.retaken, self.paused = {}, {}, {}, {}, set()
        self.pending = {queue: [] for queue in QUEUES}
        self.dropped = {}
        self.counters = {queue: [0, 0] for queue in QUEUES}
        self.built, self.waiters, self.alive = False, [], ""

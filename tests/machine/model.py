"""What the two stores must hold after each call: plain Python, no Redis, no database.

A row and its entry in Redis are told apart on purpose, as they are in the design: each has its own guard, and a crash
may change the one without the other. Times are "future" or "past"; to let time pass is to say "past".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

QUEUED, RUNNING, SUCCEEDED, FAILED = range(4)
QUEUES = ("one", "two")
WORKERS = ("A", "B")
GATE = "g"
MOST_CRASHES = 3
WAITING = ("scheduled", "retry", "archived")


@dataclass
class Row:
    """One record. retry_at, run_after: "", "future" or "past"."""

    queue: str
    gate: str = ""
    priority: int = 0
    run_after: str = ""
    state: int = QUEUED
    fence: int = 0
    attempt: int = 0
    crashes: int = 0
    retry_at: str = ""

    @property
    def is_final(self) -> bool:
        return self.state == SUCCEEDED or (self.state == FAILED and not self.retry_at)

    @property
    def due(self) -> str:
        return self.retry_at or self.run_after


@dataclass
class Entry:
    """What Redis knows of a task. place: pending, priority, scheduled, retry, archived or active."""

    queue: str
    place: str
    fence: int = 0
    worker: str = ""
    priority: int = 0
    due: str = ""
    lapsed: bool = False


@dataclass
class Held:
    """One claim in a worker's hands; the values are those of its record in memory."""

    name: str
    worker: str
    fence: int
    row: Row
    begun: bool = False
    written: bool = False
    counted: bool = True


@dataclass
class Model:
    """Both stores. members: id → is its slot provisional. strangers: slots without a row that the last audit saw.

    later: the least fence of what is pushed again in this step. alive: "" after Redis was emptied, "just", "long".
    """

    rows: dict[str, Row] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    pending: dict[str, list[str]] = field(default_factory=lambda: {queue: [] for queue in QUEUES})
    held: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)
    members: dict[str, bool] = field(default_factory=dict)
    counters: dict[str, list[int]] = field(default_factory=lambda: {queue: [0, 0] for queue in QUEUES})
    paused: set[str] = field(default_factory=set)
    strangers: set[str] = field(default_factory=set)
    limit: int = 2
    built: bool = False
    alive: str = "long"
    later: int = 10_000

    # --- Redis: one method per script

    def enqueue(self, name: str, *, fence: int = 0, again: bool = False) -> None:
        entry, row = self.entries.get(name), self.rows[name]
        if entry and not (again and entry.place in WAITING):
            return
        fence = max(fence, entry.fence if entry else 0)
        place = "priority" if row.priority else "pending"
        self.entries[name] = Entry(row.queue, place, fence, priority=row.priority)
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
        worker = entry.worker if entry else ""
        self.entries[name] = Entry(row.queue, "retry", fence, worker, priority=row.priority, due=row.due)
        return True

    def dequeue(self, queue: str, worker: str, count: int) -> list[tuple[str, int]]:
        if queue in self.paused:
            return []
        by_priority = [(-e.priority, n) for n, e in self.entries.items() if (e.queue, e.place) == (queue, "priority")]
        order = [name for score, name in sorted(by_priority) if score < 0]
        order += self.pending[queue][::-1]
        order += [name for score, name in sorted(by_priority) if score > 0]
        return [(name, self._activate(name, worker)) for name in order[:count]]

    def _activate(self, name: str, worker: str) -> int:
        entry = self.entries[name]
        self._leave(name)
        entry.place, entry.worker, entry.lapsed, entry.due = "active", worker, False, ""
        entry.fence += 1
        self.held.setdefault((entry.queue, worker), {})[name] = entry.fence
        return entry.fence

    def _leave(self, name: str) -> None:
        entry = self.entries[name]
        if entry.place == "pending":
            self.pending[entry.queue].remove(name)

    def holds(self, name: str, fence: int) -> bool:
        """The guard of every script that ends a run."""
        entry = self.entries.get(name)
        return entry is not None and entry.place == "active" and entry.fence == fence

    def release(self, queue: str, name: str, worker: str, fence: int) -> Entry | None:
        """Take a run out of active, lease and held; None when it is stale or gone."""
        if self.holds(name, fence) or name not in self.entries:
            self.held.get((queue, worker), {}).pop(name, None)
        if not self.holds(name, fence):
            return None
        entry = self.entries[name]
        entry.worker, entry.lapsed = "", False
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
            entry.place, entry.due = "retry", due
            if counted:
                self.count(queue, failed=True)

    def archive(self, queue: str, name: str, worker: str, fence: int) -> None:
        if entry := self.release(queue, name, worker, fence):
            entry.place = "archived"
            self.count(queue, failed=True)

    def requeue(self, queue: str, names: Sequence[tuple[str, int]], worker: str, *, raised: bool = False) -> int:
        """The first given is the next to be taken."""
        words = 0
        for name, fence in reversed(names):
            if entry := self.release(queue, name, worker, fence):
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

    def extend(self, queue: str, worker: str) -> tuple[int, list[str]]:
        mine = self.held.get((queue, worker), {})
        lost = [name for name, fence in mine.items() if not self.holds(name, fence)]
        for name in lost:
            del mine[name]
        for name in mine:
            self.entries[name].lapsed = False
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
        """asynq's own recoverer and forwarder: back to pending; neither the row nor `held` learns of it."""
        entry = self.entries[name]
        entry.lapsed = False
        self._to_pending(name, entry, head=False)

    def flush(self) -> None:
        self.entries, self.held, self.members, self.paused = {}, {}, {}, set()
        self.pending = {queue: [] for queue in QUEUES}
        self.counters = {queue: [0, 0] for queue in QUEUES}
        self.built, self.alive = False, ""

    # --- the gate

    def holders(self) -> list[str]:
        return sorted(name for name, row in self.rows.items() if row.gate and row.state in (QUEUED, RUNNING))

    def admit(self, names: Sequence[str], *, provisional: bool, partial: bool) -> list[str] | None:
        """Return those refused, or None when all are, for they do not all fit."""
        if not self.built:
            self.members |= dict.fromkeys(self.holders(), False)
            self.built = True
        if self.limit <= 0:
            return []
        fresh = [name for name in names if name not in self.members]
        free = max(self.limit - len(self.members), 0)
        if not partial and len(fresh) > free:
            return None
        for name in names:
            if name in self.members:
                self.members[name] = self.members[name] and provisional
        self.members |= dict.fromkeys(fresh[:free], provisional)
        return fresh[free:]

    def free_slots(self, names: Iterable[str]) -> None:
        for name in names:
            self.members.pop(name, None)

    def audit(self) -> dict[str, int]:
        """A slot without a live row goes when it is seen for the second time."""
        holders = self.holders() if self.limit > 0 else []
        added = len(set(holders) - set(self.members))
        strangers = {n for n, provisional in self.members.items() if not provisional} - set(self.holders())
        removed = strangers & self.strangers
        self.strangers = strangers - removed
        self.free_slots(removed)
        self.members |= dict.fromkeys(holders, False)
        return {"slots_added": added, "slots_removed": len(removed)}

    # --- rows

    def write(self, name: str, held_fence: int, new: Row) -> bool:
        """The guard of every write of a run; what it had already written counts as written."""
        row = self.rows.get(name)
        if row is None:
            return False
        if (row.state == RUNNING and row.fence == held_fence) or (row.state == QUEUED and row.fence < held_fence):
            self.rows[name] = replace(new, run_after=row.run_after)
            return True
        return (row.fence, row.state) == (new.fence, new.state)

    @staticmethod
    def count_crash(row: Row) -> None:
        row.crashes += 1
        row.attempt = max(row.attempt - 1, 0)
        row.state = FAILED if row.crashes >= MOST_CRASHES else QUEUED

    def later_fence(self, name: str) -> int:
        return max(self.later, self.rows[name].fence + 1)

    # --- lifecycle: one method per verb

    def dispatch(self, names: Sequence[str], *, again: bool = False) -> int:
        gated = [name for name in names if self.rows[name].gate]
        lost = (self.admit(gated, provisional=False, partial=True) or []) if gated else []
        for name in lost:
            row = self.rows[name]
            row.state, row.retry_at = FAILED, "future"
            self.park_entry(name)
        for name in (name for name in names if name not in lost):
            fence = self.later_fence(name) if again else 0
            if self.rows[name].run_after == "future":
                self.schedule(name, fence=fence)
            else:
                self.enqueue(name, fence=fence, again=again)
        return len(names) - len(lost)

    def sort_out(self, queue: str, worker: str, leases: Sequence[tuple[str, int]]) -> list[Held]:
        """Return what is to be run; see to the rest."""
        runs = []
        for name, fence in leases:
            row = self.rows.get(name)
            if row is None:
                self.archive(queue, name, worker, fence)
            elif row.is_final:
                self.done(queue, name, worker, fence)
            elif row.state == FAILED:
                self.retry_entry(queue, name, worker, fence, row.due, counted=False)
            elif row.state == QUEUED:
                runs.append(Held(name, worker, fence, replace(row)))
        running = [lease for lease in leases if lease[0] in self.rows and self.rows[lease[0]].state == RUNNING]
        return runs + [run for name, fence in running if (run := self._take_over(queue, worker, name, fence))]

    def _take_over(self, queue: str, worker: str, name: str, fence: int) -> Held | None:
        row = self.rows[name]
        self.count_crash(row)
        if row.state == QUEUED:
            return Held(name, worker, fence, replace(row))
        self.archive(queue, name, worker, fence)
        self.free_slots([name])
        return None

    def acknowledge(self, run: Held, *, lost: bool) -> None:
        queue, name, worker, fence, row = run.row.queue, run.name, run.worker, run.fence, run.row
        if lost or row.state == SUCCEEDED:
            self.done(queue, name, worker, fence)
        elif row.retry_at:
            self.retry_entry(queue, name, worker, fence, row.retry_at, counted=run.counted)
        else:
            self.archive(queue, name, worker, fence)

    def retry(self, names: Sequence[str], *, by_person: bool) -> list[str]:
        """3 → 0 in the rows; return those whose gate is full. `dispatch` what was retried afterwards."""
        names = [name for name in names if name in self.rows and self.rows[name].state == FAILED]
        gated = [name for name in names if self.rows[name].gate]
        full = (self.admit(gated, provisional=True, partial=True) or []) if gated else []
        for name in names:
            if name not in full:
                row = self.rows[name]
                row.state, row.retry_at, row.run_after = QUEUED, "", ""
                row.crashes = 0 if by_person else row.crashes
        return full

    def forward(self) -> tuple[int, int]:
        moved = retried = 0
        for queue in QUEUES:
            due = sorted(n for n, e in self.entries.items() if e.queue == queue and e.due == "past")
            for name in [name for name in due if self.entries[name].place == "scheduled"]:
                self._to_pending(name, self.entries[name], head=False)
                moved += 1
            retried += self._retry_due([name for name in due if self.entries[name].place == "retry"])
        return moved, retried

    def _retry_due(self, names: Sequence[str]) -> int:
        waiting = []
        for name in names:
            row = self.rows.get(name)
            if row is None or row.is_final:
                self.remove(name)
            elif row.state == FAILED:
                waiting.append(name)
        waiting.reverse()  # rows come in Meta.ordering: the newest first
        full = self.retry(waiting, by_person=False)
        self.dispatch([name for name in waiting if name not in full], again=True)
        for name in full:
            self.rows[name].retry_at = "future"
            self.park_entry(name)
        return len(waiting) - len(full)

    def recover(
        self,
        queue: str,
        worker: str,
        leases: Sequence[tuple[str, int]],
        *,
        crashed: bool = True,
        started: Iterable[str] = (),
        cut: bool = False,
    ) -> int:
        """cut: it dies between the rows and Redis."""
        live, over = [], []
        for name, fence in leases:
            row = self.rows.get(name)
            if row and row.is_final:
                self.done(queue, name, worker, fence)
                continue
            live.append((name, fence))
            if row and row.state != FAILED:
                new = replace(row, fence=fence + 1)
                if new.state == QUEUED and name in started:
                    new.state, new.attempt = RUNNING, new.attempt + 1
                if new.state == RUNNING and crashed:
                    self.count_crash(new)
                elif new.state == RUNNING:
                    new.state, new.attempt = QUEUED, max(new.attempt - 1, 0)
                if self.write(name, fence, new) and new.state == FAILED:
                    over.append((name, fence))
        if cut:
            return 0
        recovered = self.requeue(queue, [lease for lease in live if lease not in over], worker, raised=True)
        for name, fence in over:
            self.archive(queue, name, worker, fence)
        self.free_slots(name for name, _ in over)
        return recovered

    def lapsed(self, queue: str) -> dict[str, list[tuple[str, int]]]:
        """Leases that ran out, by worker, in the order in which Redis lists them."""
        found: dict[str, list[tuple[str, int]]] = {}
        for name, entry in sorted(self.entries.items()):
            if entry.queue == queue and entry.lapsed:
                found.setdefault(entry.worker, []).append((name, entry.fence))
        return found

    # --- the reconciler

    def recover_expired(self, *, cut: bool = False) -> int:
        recovered = 0
        for queue in QUEUES:
            for worker, leases in self.lapsed(queue).items():
                recovered += self.recover(queue, worker, leases, cut=cut)
                if cut:
                    return recovered
        return recovered

    def missing(self, wanted: Callable[[Row], bool], places: Iterable[str] = ()) -> list[str]:
        """Rows that Redis does not know, or has in one of these places."""
        found = [name for name, row in self.rows.items() if wanted(row)]
        return sorted(n for n in found if n not in self.entries or self.entries[n].place in places)

    def quick(self) -> dict[str, int]:
        slots = self.audit() if self.strangers else {}
        return {**slots, "recovered": self.recover_expired(), "pushed": self.push_missing()}

    def push_missing(self) -> int:
        return self.dispatch(self.missing(lambda row: row.state == QUEUED), again=True)

    def sweep(self) -> dict[str, int]:
        repairs = {**self.audit(), "recovered": self.recover_expired()}
        waiting = [name for name, entry in self.entries.items() if entry.place not in ("active", "archived")]
        ended = [name for name in waiting if name in self.rows and self.rows[name].is_final]
        for name in ended:
            self._leave(name)
            del self.entries[name]
        repairs |= {"ended": len(ended), "held": self.prune_held(), "pushed": self.push_missing()}
        waits = self.missing(lambda row: row.state == FAILED and bool(row.retry_at))
        repairs["parked"] = sum(self.park_entry(name, fence=self.later_fence(name)) for name in waits)
        return repairs | {"unleased": self.recover_unleased()}

    def prune_held(self) -> int:
        pruned = 0
        for (_, worker), mine in self.held.items():
            for name, fence in list(mine.items()):
                if not self.holds(name, fence) or self.entries[name].worker != worker:
                    del mine[name]
                    pruned += 1
        return pruned

    def recover_unleased(self) -> int:
        found = self.missing(lambda row: row.state == RUNNING, WAITING) if self.alive == "long" else []
        for name in found:
            self.count_crash(self.rows[name])
            self.rows[name].fence = self.later_fence(name)
            if self.rows[name].is_final:
                self.free_slots([name])
            else:
                self.dispatch([name], again=True)
        return len(found)

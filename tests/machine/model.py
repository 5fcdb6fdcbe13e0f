"""What both stores must hold after each call: plain Python, without Redis or a database."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from .entries import Entries
from .values import ALONE, FAILED, MOST_CRASHES, QUEUED, QUEUES, RUNNING, SUCCEEDED, WAITING, Held, Row


@dataclass
class Model(Entries):
    """Both stores. strangers, dead_waiters: slots and waiters without a row that the last audit saw.

    later: the lowest fence of tasks that are pushed again in this step. stranded: QUEUED rows whose entry waits in
    retry or archived, as the last sweep saw. effects: of committed runs.
    """

    strangers: set[str] = field(default_factory=set)
    dead_waiters: set[str] = field(default_factory=set)
    stranded: set[str] = field(default_factory=set)
    limit: int = 2
    later: int = 10_000
    effects: int = 0

    # --- the gate

    def holders(self) -> list[str]:
        return sorted(name for name, row in self.rows.items() if row.gate and row.is_live)

    def admit(
        self, names: Sequence[str], *, provisional: bool, partial: bool, again: bool = False, wait: bool = False
    ) -> list[str] | None:
        """Return the names that are refused; None when all are, because not all fit. wait: those refused wait.

        A free slot is for the waiter that is next; who does not wait yet is behind all waiters.
        """
        if not self.built:
            self.build()
        if self.limit <= 0:
            # Whoever waited for a slot needs none now.
            self.stop_waiting(names if wait else ())
            return []
        newcomers = [name for name in names if name not in self.members and name not in self.waiters]
        order = [*self.waiters, *newcomers]
        free = order[: max(self.limit - len(self.members), 0)]
        inside = [name for name in names if name in self.members or name in free]
        refused = [name for name in names if name not in inside]
        if not partial and refused:
            return None
        self.members |= {name: self.members.get(name, True) and provisional for name in inside}
        self.stop_waiting(inside)
        if again:
            self.retaken |= {name: self.rows[name].fence for name in inside}
        if wait:
            self.wait(refused)
        return refused

    def wait(self, names: Iterable[str]) -> None:
        self.waiters += sorted(set(names) - set(self.waiters))

    def stop_waiting(self, names: Collection[str]) -> None:
        self.waiters = [name for name in self.waiters if name not in names]

    def waiting_rows(self) -> list[str]:
        return sorted(name for name, row in self.rows.items() if row.state == FAILED and row.retry_at and row.waits)

    def look(self) -> None:
        """The leader retries the waiters for which there are free slots, and forgets those that wait no longer."""
        if self.waiters and not self.built:
            self.build()
        free = max(self.limit - len(self.members), 0) if self.limit > 0 else len(self.waiters)
        found = self.waiters[:free]
        rows = [name for name in sorted(found) if name in self.rows and self.rows[name].state == FAILED]
        rows = [name for name in rows if self.rows[name].waits or self.rows[name].retry_at == "past"]
        full = self._retry_rows(self.close_waiting(rows))
        self.stop_waiting([name for name in found if name not in full])

    def build(self) -> None:
        self.wait(self.waiting_rows())
        for name in self.holders():
            row = self.rows[name]
            self.members[name] = False
            if over := row.fence if row.state == QUEUED else row.fence - 1:
                self.retaken[name] = over
        self.built = True

    def free_slots(self, names: Iterable[str]) -> None:
        for name in names:
            self.members.pop(name, None)
            self.retaken.pop(name, None)

    def announce(self, name: str, fence: int) -> None:
        """Release the slot of this run, but not that of a retry: the task has been queued again since."""
        if fence <= self.retaken.get(name, -1):
            return
        row = self.rows.get(name)
        # An open gate counts no task; when it has a limit again, it is built again.
        is_counted = self.limit > 0 and name in self.members
        assert row is None or not row.is_live or not is_counted, f"{name} is live, and its slot is released"
        self.free_slots([name])

    def audit(self) -> dict[str, int]:
        """A slot without a live row is released when it is seen for the second time, unless a worker has the task."""
        dead = set(self.waiters) - set(self.waiting_rows())
        gone = dead & self.dead_waiters
        self.dead_waiters = dead - gone
        self.wait(self.waiting_rows())
        self.stop_waiting(gone)
        holders = self.holders() if self.limit > 0 else []
        added = len(set(holders) - set(self.members))
        strangers = {n for n, provisional in self.members.items() if not provisional} - set(self.holders())
        entries = self.entries.items()
        claimed = {name for name, entry in entries if entry.place == "active" and name in self.rows}
        removed = (strangers & self.strangers) - claimed
        self.strangers = strangers - removed
        self.free_slots(removed)
        self.members |= dict.fromkeys(holders, False)
        return {"slots_added": added, "slots_removed": len(removed)}

    # --- rows

    def write(self, name: str, held_fence: int, read_fence: int, new: Row) -> bool:
        """The guard of every write of a run; a repeated write counts as written."""
        row = self.rows.get(name)
        if row is None:
            return False
        if self.is_open_to(name, held_fence, read_fence):
            self.rows[name] = replace(new, run_after=row.run_after, asked=row.asked, late=row.late)
            return True
        return (row.fence, row.state) == (new.fence, new.state)

    def is_open_to(self, name: str, held_fence: int, read_fence: int) -> bool:
        """Whether a run may write its row for the first time, or after RUNNING."""
        row = self.rows.get(name)
        if row is None:
            return False
        return (row.state, row.fence) in ((RUNNING, held_fence), (QUEUED, read_fence))

    @staticmethod
    def count_crash(row: Row) -> None:
        row.attempt, row.suspicion, row.crashes = max(row.attempt - 1, 0), 2, row.crashes + 1
        row.state = FAILED if row.crashes >= MOST_CRASHES else QUEUED

    @staticmethod
    def lose(row: Row, *, alone: bool) -> None:
        """The first loss in a row is nobody's fault."""
        if row.suspicion and alone:
            Model.count_crash(row)
        else:
            row.attempt, row.state, row.suspicion = max(row.attempt - 1, 0), QUEUED, 2 if row.suspicion else 1

    def lose_unseen(self, row: Row) -> None:
        """Nobody saw its worker die."""
        self.lose(row, alone=row.workers[-1:] == (ALONE,))

    def later_fence(self, *names: str) -> int:
        return max(self.later, *(self.rows[name].fence + 1 for name in names))

    # --- tasks that may not begin any more

    def cancel(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Change the rows; return those that are closed, and those that were asked. `follow_close` the former then.

        A QUEUED row is closed only where Redis knows that no worker has it.
        """
        open_names = [name for name in names if not self.rows[name].is_final]
        for name in open_names:
            self.rows[name].asked = True
        closed = [name for name in open_names if self.rows[name].state == FAILED or name in self.held_by(open_names)]
        self.close(closed, "cancelled")
        return closed, [name for name in open_names if name not in closed]

    def held_by(self, names: Sequence[str]) -> list[str]:
        """The tasks among these that a canceller holds: QUEUED, and with no worker."""
        queued = [name for name in names if self.rows[name].state == QUEUED and name in self.entries]
        return [name for name in queued if self.entries[name].place != "active"]

    def give_back(self, names: Sequence[str]) -> None:
        """Push tasks anew that a canceller has held in vain."""
        for name in names:
            self._leave(name)
            del self.entries[name]
        self.dispatch(names, again=True)

    def close(self, names: Sequence[str], why: str) -> None:
        """QUEUED or RETRYING → FAILED, with a fence above all that were handed out."""
        held = [self.entries[name].fence + 1 for name in self.held_by(names)]
        fence = max(self.later_fence(*names), *held, 0) if names else 0
        for name in names:
            self.close_row(self.rows[name], why)
            self.rows[name].fence = fence

    @staticmethod
    def close_row(row: Row, why: str) -> None:
        row.state, row.retry_at, row.waits, row.closed = FAILED, "", False, why

    def follow_close(self, names: Sequence[str]) -> None:
        """Take them out of Redis. What a worker has claimed keeps its entry, its lease and its slot."""
        self.waiters = [name for name in self.waiters if name not in names]
        for name in names:
            if name in self.entries and self.entries[name].place == "active":
                continue
            if name in self.entries:
                self._leave(name)
                del self.entries[name]
            self.announce(name, self.rows[name].fence)

    def why_closed(self, row: Row) -> str:
        """Why no run of it may begin; "" where one may."""
        return "cancelled" if row.asked else "expired" if row.late else ""

    def close_waiting(self, names: Iterable[str], *, are_claimed_left: bool = False) -> list[str]:
        """Close those of these that may not begin; return the others.

        are_claimed_left: what a worker has claimed is not closed here: it may have begun.
        """
        names = list(names)
        for why in ("cancelled", "expired"):
            found = [name for name in names if self.rows[name].is_waiting and self.why_closed(self.rows[name]) == why]
            if are_claimed_left:
                in_hand = {name for name, entry in self.entries.items() if entry.place == "active"}
                found = [name for name in found if self.rows[name].state == FAILED or name not in in_hand]
            self.close(found, why)
            self.follow_close(found)
        return [name for name in names if not self.rows[name].closed]

    def close_if_asked(self, row: Row) -> None:
        if row.asked and not row.is_final:
            self.close_row(row, "cancelled")

    def close_claimed(self, queue: str, worker: str, runs: list[Held]) -> list[Held]:
        """Close the tasks that a worker has just claimed and that must not begin; return the others."""
        over = [run for run in runs if self.why_closed(run.row)]
        for run in over:
            self.close_row(run.row, self.why_closed(run.row))
            run.row.fence = run.fence
        closed = [run for run in over if self.write(run.name, run.fence, run.read, run.row)]
        for run in over:
            self.done(queue, run.name, worker, run.fence)
        for run in closed:
            self.announce(run.name, run.fence)
        for run in over:
            if run not in closed:
                self.settle_lost(run)
        return [run for run in runs if run not in over]

    def settle_lost(self, run: Held) -> None:
        """Follow up a run whose outcome the row has refused."""
        row = self.rows.get(run.name)
        if row is None or row.fence == run.read:
            return
        if run.begun and row.is_final and row.closed and row.workers == run.row.workers[:-1]:
            # It notes what the run knows.
            row.attempt, row.workers = run.row.attempt, run.row.workers
        self.announce_void(run.name, run.fence)
        if row.state == QUEUED:
            self.dispatch([run.name], again=True)

    def announce_void(self, name: str, fence: int) -> None:
        """Announce a task that was closed while a worker had claimed it."""
        row = self.rows.get(name)
        if row and row.closed and row.fence != fence:
            self.announce(name, row.fence)

    # --- lifecycle: one method per verb

    def dispatch(self, names: Sequence[str], *, again: bool = False) -> int:
        """Queue by queue: first what the script may push by itself, then what needs a slot, then what is delayed."""
        pushed = 0
        for queue in dict.fromkeys(self.rows[name].queue for name in names):
            mine = [name for name in names if self.rows[name].queue == queue]
            delayed = [name for name in mine if self.rows[name].run_after == "future"]
            unconfirmed = [name for name in mine if name not in delayed and not self.needs_no_slot(name)]
            at_once = [name for name in mine if name not in delayed and name not in unconfirmed]
            if self.limit > 0:
                self.members |= dict.fromkeys((name for name in at_once if name in self.members), False)
            pushed += self._push(at_once, again=again)
            pushed += self._push(self._confirmed(unconfirmed), again=again)
            pushed += self._push(self._confirmed(delayed), again=again)
        return pushed

    def needs_no_slot(self, name: str) -> bool:
        """Whether the script may push it without a confirmation."""
        return not self.rows[name].gate or (self.built and (self.limit <= 0 or name in self.members))

    def _confirmed(self, names: Sequence[str]) -> list[str]:
        """The names whose slots are confirmed; a task whose slot another has by now is parked."""
        gated = [name for name in names if self.rows[name].gate]
        lost = (self.admit(gated, provisional=False, partial=True, wait=True) or []) if gated else []
        for name in lost:
            row = self.rows[name]
            row.state, row.retry_at, row.waits = FAILED, "future", True
            self.park_entry(name)
        return [name for name in names if name not in lost]

    def _push(self, names: Sequence[str], *, again: bool) -> int:
        self.calls += 1
        for name in names:
            fence = self.later_fence(name) if again else 0
            if self.rows[name].run_after == "future":
                self.schedule(name, fence=fence)
            else:
                self.enqueue(name, fence=fence, again=again)
        return len(names)

    def classify(self, queue: str, worker: str, leases: Sequence[tuple[str, int]]) -> list[Held]:
        """Return what is to be run; handle the rest."""
        replayed, runs, behind = self.replay_outcomes(queue, worker, leases), [], []
        leases = [lease for lease in leases if lease[0] not in replayed]
        for name, fence in leases:
            row = self.rows.get(name)
            if row is None:
                self.restore(queue, name, worker, fence, "future")
            elif row.is_final:
                self.done(queue, name, worker, fence)
                self.announce_void(name, fence)
            elif row.state == FAILED:
                self.retry_entry(queue, name, worker, fence, row.due, counted=False)
            elif row.state == RUNNING and row.fence > fence:
                self.postpone(queue, name, worker, fence)
            elif row.state == QUEUED and row.fence >= fence:
                behind.append(name)
            elif row.state == QUEUED:
                runs.append(Held(name, worker, fence, replace(row)))
        for name in behind:
            self.remove(name)
        self.dispatch(behind, again=True)
        running = [
            (name, fence)
            for name, fence in leases
            if name in self.rows and self.rows[name].state == RUNNING and self.rows[name].fence <= fence
        ]
        runs += [run for name, fence in running if (run := self._recover_run(queue, worker, name, fence))]
        runs = self.close_claimed(queue, worker, runs)
        aside = [run for run in runs if run.row.suspect and worker != ALONE]
        self.requeue(queue, [(run.name, run.fence) for run in aside], worker, suspects=[run.name for run in aside])
        return [run for run in runs if run not in aside]

    def replay_outcomes(
        self, queue: str, worker: str, leases: Sequence[tuple[str, int]], *, cut: bool = False
    ) -> set[str]:
        """Write spilled outcomes into rows that still belong to that run. cut: it dies between rows and Redis."""
        found = []
        for name, fence in leases:
            row, entry = self.rows.get(name), self.entries.get(name)
            if row is None or entry is None or entry.outcome is None:
                continue
            spilled = entry.outcome.row
            if row.is_final or spilled.fence > fence:
                continue  # the row shows it already, or is closed; or the lease is of an earlier run
            if row.state == QUEUED and row.fence not in (entry.outcome.read, spilled.fence - 1):
                continue
            starts_anew = spilled.retry_at and entry.outcome.counted
            new = replace(spilled, crashes=0 if starts_anew else row.crashes)
            if self.write(name, spilled.fence, row.fence, new):
                found.append(Held(name, worker, fence, new, counted=entry.outcome.counted))
        if not cut:
            for run in found:
                self.acknowledge(run, lost=False)
                self.announce(run.name, run.row.fence)
        return {run.name for run in found}

    def _recover_run(self, queue: str, worker: str, name: str, fence: int) -> Held | None:
        row = self.rows[name]
        self.lose_unseen(row)
        self.close_if_asked(row)
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
        """FAILED becomes QUEUED in the rows; return those whose gate is full. `dispatch` the others afterwards."""
        names = [name for name in names if name in self.rows and self.rows[name].state == FAILED]
        gated = [name for name in names if self.rows[name].gate]
        wait = not by_person
        full = (self.admit(gated, provisional=False, partial=True, again=True, wait=wait) or []) if gated else []
        self.free_slots(full)
        for name in names:
            if name not in full:
                row = self.rows[name]
                row.state, row.retry_at, row.run_after, row.waits = QUEUED, "", "past", False
                row.closed = ""
                if by_person:
                    row.crashes, row.asked, row.late = 0, False, False
        return full

    def forward(self) -> tuple[int, int]:
        moved = retried = 0
        for queue in QUEUES:
            self.calls += 1
            due = sorted(n for n, e in self.entries.items() if e.queue == queue and e.due == "past")
            for name in [name for name in due if self.entries[name].place == "scheduled"]:
                self._to_pending(name, self.entries[name], head=False)
                self.entries[name].since = self.calls
                moved += 1
            retried += self._retry_due([name for name in due if self.entries[name].place == "retry"])
        return moved, retried

    def _retry_due(self, names: Sequence[str]) -> int:
        waiting = []
        # The push after their retry was lost.
        queued = [name for name in names if name in self.rows and self.rows[name].state == QUEUED]
        for name in names:
            row = self.rows.get(name)
            if row is None:
                entry = self.entries[name]
                entry.place, entry.outcome, entry.fence = "scheduled", None, 0
            elif row.is_final:
                self.remove(name)
            elif row.state == FAILED:
                waiting.append(name)
        self.dispatch(queued, again=True)
        waiting = self.close_waiting(waiting)
        return len(waiting) - len(self._retry_rows(waiting))

    def _retry_rows(self, names: Sequence[str]) -> list[str]:
        """Retry rows in the order of their names; return those whose gate is full."""
        full = self.retry(names, by_person=False)
        self.dispatch([name for name in names if name not in full], again=True)
        for name in full:
            self.rows[name].retry_at, self.rows[name].waits = "future", True
            self.park_entry(name)
        return full

    def recover(
        self,
        queue: str,
        worker: str,
        leases: Sequence[tuple[str, int]],
        *,
        blame: tuple[Collection[str], Collection[str], Collection[str]] | None = None,
        cut: bool = False,
    ) -> int:
        """blame: as of `lifecycle.Blame`; None: nobody saw the worker die. cut: it dies between the rows and Redis."""
        final = [lease for lease in leases if lease[0] in self.rows and self.rows[lease[0]].is_final]
        for name, fence in final:
            self.done(queue, name, worker, fence)
            self.announce_void(name, fence)
        rest = [lease for lease in leases if lease not in final]
        replayed = self.replay_outcomes(queue, worker, rest, cut=cut)
        if cut and replayed:
            return 0
        live, over, aside = [lease for lease in rest if lease[0] not in replayed], [], []
        every = [name for name, _ in live]
        named, alone, suspects = blame or ([], every if worker == ALONE else [], every)
        begun = [*named, *alone, *suspects]
        for name, fence in live:
            row = self.rows.get(name)
            is_of_later = row is not None and row.state == QUEUED and row.fence >= fence
            if row and row.state != FAILED and not is_of_later:
                new = replace(row, fence=fence + 1)
                if new.state == QUEUED and name in begun:
                    new.begin(worker)
                if name in named:
                    self.count_crash(new)
                elif name in begun:
                    self.lose(new, alone=name in alone)
                elif new.state == RUNNING:
                    new.state = QUEUED
                    new.undo_attempt()
                self.close_if_asked(new)
                if new.suspect:
                    aside.append(name)
                if self.write(name, fence, row.fence, new) and new.state == FAILED:
                    over.append((name, fence))
        if cut:
            return 0
        again = [lease for lease in live if lease not in over and lease[0] in self.rows]
        restored = [self.restore(queue, *lease_of, "past") for lease_of in self._rowless(worker, live)]
        recovered = sum(restored) + self.requeue(queue, again, worker, raised=True, suspects=aside)
        for name, fence in over:
            self.archive(queue, name, worker, fence)
        self.free_slots(name for name, _ in over)
        return len(replayed) + recovered

    def expired_leases(self, queue: str) -> dict[str, list[tuple[str, int]]]:
        """Expired leases by worker, in the order in which Redis lists them."""
        found: dict[str, list[tuple[str, int]]] = {}
        for name, entry in sorted(self.entries.items()):
            if entry.queue == queue and entry.expired:
                found.setdefault(entry.worker, []).append((name, entry.fence))
        return found

    # --- the reconciler

    def _rowless(self, worker: str, leases: Sequence[tuple[str, int]]) -> list[tuple[str, str, int]]:
        return [(name, worker, fence) for name, fence in leases if name not in self.rows]

    def recover_expired(self, *, cut: bool = False) -> int:
        recovered = 0
        for queue in QUEUES:
            for worker, leases in self.expired_leases(queue).items():
                recovered += self.recover(queue, worker, leases, cut=cut)
                if cut:
                    return recovered
        return recovered

    def missing(self, wanted: Callable[[Row], bool], places: Iterable[str] = ()) -> list[str]:
        """Rows without an entry in Redis, or with one in these places."""
        found = [name for name, row in self.rows.items() if wanted(row)]
        return sorted(n for n in found if n not in self.entries or self.entries[n].place in places)

    def quick(self) -> dict[str, int]:
        slots = self.audit() if self.strangers else {}
        repairs = {**slots, "recovered": self.recover_expired(), "pushed": self.push_missing()}
        waiting = [name for name, row in self.rows.items() if row.is_waiting]
        return repairs | {"closed": len(waiting) - len(self.close_waiting(waiting, are_claimed_left=True))}

    def push_missing(self) -> int:
        return self.dispatch(self.missing(lambda row: row.state == QUEUED), again=True)

    def push_stranded(self) -> int:
        """Also rows whose entry waits in retry or archived, when they are seen so for the second time."""
        found = self.missing(lambda row: row.state == QUEUED, ("retry", "archived"))
        stranded = {name for name in found if name in self.entries} - self.stranded
        self.stranded = stranded
        return self.dispatch([name for name in found if name not in stranded], again=True)

    def sweep(self) -> dict[str, int]:
        repairs = {"recovered": self.recover_expired()}
        repairs["strays"] = sum(self.remove_dangling(queue) for queue in QUEUES)
        waiting = [name for name, entry in self.entries.items() if entry.place not in ("active", "archived")]
        # An id that was dropped is in no list: it is requeued first, and found by the next sweep.
        standing = [name for name in waiting if not self.is_dropped(name)]
        ended = [name for name in standing if name in self.rows and self.rows[name].is_final]
        for name in ended:
            self._leave(name)
            del self.entries[name]
        repairs |= {"discarded": len(ended), "released": self.prune_held()}
        repairs |= {"orphans": sum(self.repair_orphans(queue) for queue in QUEUES), "pushed": self.push_stranded()}
        waits = self.missing(lambda row: row.state == FAILED and bool(row.retry_at))
        repairs["parked"] = sum(self.park_entry(name, fence=self.later_fence(name)) for name in waits)
        return repairs | {"requeued": self.recover_unleased()} | self.audit()

    def prune_held(self) -> int:
        pruned = 0
        for (_, worker), mine in self.held.items():
            for name, fence in list(mine.items()):
                if not self._is_of(name, fence, worker):
                    del mine[name]
                    pruned += 1
        return pruned

    def recover_unleased(self) -> int:
        found = self.missing(lambda row: row.state == RUNNING, WAITING) if self.alive == "long" else []
        for name in found:
            self.lose_unseen(self.rows[name])
            self.close_if_asked(self.rows[name])
            self.rows[name].fence = self.later_fence(name)
            if self.rows[name].is_final:
                self.free_slots([name])
            else:
                self.dispatch([name], again=True)
        return len(found)

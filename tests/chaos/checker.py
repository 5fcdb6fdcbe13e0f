"""Check what a run proved or broke, from three witnesses that the package cannot influence.

- the history: a file of lines that task bodies, producers and the rig append, outside both stores;
- the transitions: every change of a row's state, fence and gate that a database trigger saw, in order;
- what is left in Redis when all tasks are finished.

Pure functions; `test_checker.py` feeds them made-up histories in which each violation is found.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

LIVE = (0, 1)
QUEUED, RUNNING, SUCCEEDED, FAILED = 0, 1, 2, 3
# An outcome is written within this time after the task's body, unless the store is unreachable.
UNWRITTEN_SECONDS = 0.5

Line = Mapping[str, Any]


class Transition(NamedTuple):
    """One change of one row. old_state None: an INSERT; new_state None: a DELETE; waits: the old row had `retry_at`."""

    id: str
    old_state: int | None
    new_state: int | None
    old_fence: int
    new_fence: int
    gate: str = ""
    waits: bool = False


class Execution(NamedTuple):
    """One run of a task's body. ended_at None: it was cut off. attempt: a run of another attempt is no repetition."""

    id: str
    pid: int
    began_at: float
    ended_at: float | None
    attempt: int = 1


def executions(history: Iterable[Line]) -> list[Execution]:
    """Pair each begin with the end that the same process wrote for the same id."""
    open_runs: dict[tuple[str, int], Execution] = {}
    found = []
    for line in history:
        key = (line.get("id", ""), line["pid"]) if line["event"] in ("begin", "end") else ("", 0)
        if line["event"] == "begin":
            if key in open_runs:
                found.append(open_runs[key])
            open_runs[key] = Execution(key[0], key[1], line["at"], None, line.get("attempt", 1))
        elif line["event"] == "end" and (run := open_runs.pop(key, None)) is not None:
            found.append(run._replace(ended_at=line["at"]))
    found += open_runs.values()
    return sorted(found, key=lambda each: each.began_at)


def committed(history: Iterable[Line]) -> set[str]:
    """Return the ids whose commit a producer wrote down."""
    return {id for line in history if line["event"] == "committed" for id in line["ids"]}


def lost(committed_ids: Collection[str], states: Mapping[str, int], waiting: Collection[str] = ()) -> set[str]:
    """I1: return the committed ids that are not in a final state. waiting: ids that are RETRYING."""
    ended = {id for id, state in states.items() if state in (SUCCEEDED, FAILED)} - set(waiting)
    return set(committed_ids) - ended


def ghosts(history: Sequence[Line], committed_ids: Collection[str]) -> set[str]:
    """I2: return the ids that ran without having been committed."""
    return {run.id for run in executions(history)} - set(committed_ids)


def lies(history: Iterable[Line], succeeded: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the ids that have succeeded with other arguments than those that a run got which came to its end.

    succeeded: by id, the arguments in the row by the names of the parameters.
    """
    got: dict[tuple[str, int], Any] = {}
    ran: dict[str, list[Any]] = defaultdict(list)
    for line in history:
        if line["event"] == "begin" and "got" in line:
            got[line["id"], line["pid"]] = line["got"]
        elif line["event"] == "end" and (line["id"], line["pid"]) in got:
            ran[line["id"]].append(got.pop((line["id"], line["pid"])))
    return [id for id, arguments in succeeded.items() if ran[id] and arguments not in ran[id]]


def extra_executions(history: Sequence[Line]) -> int:
    """I3: return how many runs there were beyond one for each attempt."""
    runs = executions(history)
    return len(runs) - len({(run.id, run.attempt) for run in runs})


def by_attempt(history: Iterable[Line]) -> dict[tuple[str, int], list[Execution]]:
    """Group the runs by what should have run once, in order."""
    found: dict[tuple[str, int], list[Execution]] = defaultdict(list)
    for run in executions(history):
        found[run.id, run.attempt].append(run)
    return found


def unexcused(history: Sequence[Line]) -> list[Execution]:
    """I3: return the runs that were followed by another of the same attempt although no fault hit their process."""
    hit: dict[int, list[float]] = defaultdict(list)
    for line in history:
        if line["event"] == "fault":
            for pid in line["pids"]:
                hit[pid].append(line["at"])
    repeated = [run for runs in by_attempt(history).values() for run in runs[:-1]]
    return [run for run in repeated if not any(at >= run.began_at for at in hit[run.pid])]


def most_executions(history: Sequence[Line]) -> dict[str, int]:
    """Return, for each kind of fault, the most runs of one attempt among those of processes that such a fault hit."""
    faults = [line for line in history if line["event"] == "fault"]
    # The first that hit a process is what it died of.
    kinds: dict[int, str] = {pid: line["kind"] for line in reversed(faults) for pid in line["pids"]}
    most: dict[str, int] = defaultdict(int)
    for runs in by_attempt(history).values():
        for run in runs:
            if kind := kinds.get(run.pid):
                most[kind] = max(most[kind], len(runs))
    return dict(most)


def in_flight(history: Sequence[Line]) -> int:
    """Return how many runs were going on, or had just finished, when a fault hit their process."""
    runs_by_pid: dict[int, list[Execution]] = defaultdict(list)
    for run in executions(history):
        runs_by_pid[run.pid].append(run)
    return sum(
        run.began_at <= line["at"] and (run.ended_at is None or run.ended_at > line["at"] - UNWRITTEN_SECONDS)
        for line in history
        if line["event"] == "fault"
        for pid in line["pids"]
        for run in runs_by_pid[pid]
    )


def recovery_seconds(history: Sequence[Line]) -> list[float]:
    """I8: for each run that a fault made repeat, return how long after the fault the task began again."""
    faults = [line for line in history if line["event"] == "fault"]
    found = []
    for runs in by_attempt(history).values():
        for run, again in pairwise(runs):
            hits = [line["at"] for line in faults if run.pid in line["pids"] and line["at"] >= run.began_at]
            found += [again.began_at - at for at in hits[:1] if at < again.began_at]
    return found


def double_ends(transitions: Iterable[Transition]) -> list[Transition]:
    """I4: return the changes of rows that were already final."""
    return [each for each in transitions if _is_ended(each) and each.new_state is not None]


def _is_ended(each: Transition) -> bool:
    return each.old_state == SUCCEEDED or (each.old_state == FAILED and not each.waits)


def resurrected(transitions: Iterable[Transition]) -> set[str]:
    """I4: return the ids whose row came back after its deletion."""
    deleted: set[str] = set()
    found = set()
    for each in transitions:
        if each.new_state is None:
            deleted.add(each.id)
        elif each.id in deleted:
            found.add(each.id)
    return found


def falling_terms(history: Iterable[Line]) -> list[tuple[str, int, int]]:
    """I10: return (lock, term, higher term before it) of a former leader's writes that were accepted.

    history: "fenced" lines, written while the row of the term is locked, so in the order of the commits.
    """
    highest: dict[str, int] = {}
    found = []
    for line in history:
        if line["event"] == "fenced":
            before = highest.get(line["lock"], 0)
            if line["term"] < before:
                found.append((line["lock"], line["term"], before))
            highest[line["lock"]] = max(before, line["term"])
    return found


def unreached(history: Iterable[Line]) -> set[str]:
    """Return what a mutant replaced and nothing called; a run with such a mutant proves nothing."""
    found: dict[str, set[str]] = {"replaced": set(), "reached": set()}
    for line in history:
        if line["event"] in found:
            found[line["event"]].add(line["what"])
    return (found["replaced"] or {"anything"}) - found["reached"]


def plain(id: str) -> str:
    """Write an id in the form that is the same for all witnesses."""
    return id.replace("-", "")


def stale_rows(transitions: Iterable[Transition]) -> list[Transition]:
    """I5: return the writes that the database accepted from a run that no longer held the row."""
    return [each for each in transitions if _is_stale(each)]


def _is_stale(each: Transition) -> bool:
    if each.old_state is None or each.new_state is None:
        return False
    if each.new_fence < each.old_fence:
        return True
    if each.new_state != SUCCEEDED:
        return False
    if each.old_state == RUNNING:
        return each.new_fence != each.old_fence
    return each.new_fence <= each.old_fence


def stale_answers(history: Sequence[Line]) -> list[tuple[str, int, int]]:
    """I5: return (id, fence, newer fence) of outcomes that Redis accepted although it had issued a newer fence.

    A process may stand still between a reply and its line here. So a fence counts as newer if its line was written
    before the outcome was sent, and not by the order of the lines. Redis has forgotten it after a FLUSHALL, and when
    the task had succeeded with it and its entry was removed: a push that had stood still may then put the task there
    with an older fence. Then only the row can refuse (`stale_rows`).
    """
    taken: dict[str, list[tuple[float, int]]] = defaultdict(list)
    flushes = [line["at"] for line in history if line["event"] == "fault" and line["kind"] == "FLUSHALL"]
    removed: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for line in history:
        for id, fence, word in line["runs"] if line["event"] == "answered" else ():
            if word == "done":
                removed[id].append((line.get("asked", line["at"]), fence))
    found = []
    for line in history:
        if line["event"] == "taken":
            for id, fence in line["runs"]:
                taken[id].append((line["at"], fence))
        elif line["event"] == "answered":
            asked = line.get("asked", line["at"])
            for id, fence, word in line["runs"]:
                known = [
                    each
                    for at, each in taken[id]
                    if at < asked
                    and not any(at < flush < line["at"] for flush in flushes)
                    and not any(at < gone_at < asked and of >= each for gone_at, of in removed[id])
                ]
                newest = max(known, default=0)
                if word in ("done", "retried", "archived") and fence < newest:
                    found.append((id, fence, newest))
    return found


def refused_answers(history: Iterable[Line]) -> int:
    """Return how many outcomes Redis refused as stale: without any, a test of the fence has tested nothing."""
    return sum(word == "stale" for line in history if line["event"] == "answered" for _, _, word in line["runs"])


def most_live(transitions: Iterable[Transition]) -> dict[str, int]:
    """I6: return, for each gate, the most rows that were QUEUED or RUNNING at one instant.

    A row is inserted after its slot is acquired and final before it is released, so this never counts too many.
    """
    live: dict[str, set[str]] = defaultdict(set)
    most: dict[str, int] = defaultdict(int)
    for each in transitions:
        if not each.gate:
            continue
        members = live[each.gate]
        if each.new_state in LIVE:
            members.add(each.id)
        else:
            members.discard(each.id)
        most[each.gate] = max(most[each.gate], len(members))
    return dict(most)


def waits_at_gates(transitions: Iterable[Transition]) -> int:
    """Return how often a retry was postponed because its gate was full: only then a RETRYING row stays RETRYING."""
    return sum(bool(each.gate) and each.waits and each.old_state == each.new_state == FAILED for each in transitions)


def over_limit(history: Iterable[Line], grace_seconds: float = 0.5) -> list[tuple[float, str, int, int]]:
    """I6: return (instant, gate, holders, limit) of each entry into a gate that was already full.

    history: "in" after a slot was acquired, "out" before it is released, "limit" when one changed, "fault" with the
    pids of holders that died. An entry may go by any limit that was in force since it `asked` (without that: within
    the last `grace_seconds`). A limit of 0 or less is none.
    """
    return [
        (entry.at, entry.gate, entry.holders, entry.limit)
        for entry in entries(history, grace_seconds)
        if entry.limit > 0 and entry.holders > entry.limit
    ]


class Entry(NamedTuple):
    """An acquired slot. holders: with this one; limit: the largest that it may have gone by, 0 for none."""

    at: float
    gate: str
    holders: int
    limit: int


def entries(history: Iterable[Line], grace_seconds: float = 0.5) -> Iterator[Entry]:
    """Yield each entry into a gate, in order."""
    holders: dict[str, dict[str, int]] = defaultdict(dict)
    limits: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for line in sorted(history, key=lambda each: each["at"]):
        if line["event"] == "limit":
            limits[line["gate"]].append((line["at"], line["limit"]))
        elif line["event"] == "in":
            inside = holders[line["gate"]]
            inside[line["id"]] = line["pid"]
            since = line.get("asked", line["at"] - grace_seconds)
            limit = _largest_limit(limits[line["gate"]], since, line["at"])
            yield Entry(line["at"], line["gate"], len(inside), limit)
        elif line["event"] == "out":
            holders[line["gate"]].pop(line["id"], None)
        elif line["event"] == "fault":
            for inside in holders.values():
                for id in [id for id, pid in inside.items() if pid in line["pids"]]:
                    del inside[id]


def _largest_limit(changes: Sequence[tuple[float, int]], since: float, until: float) -> int:
    """Return the largest limit that was in force within the span; 0 when there was none for some time."""
    current = [limit for at, limit in changes if at <= since][-1:]
    recent = [limit for at, limit in changes if since < at <= until]
    return 0 if min(found := [*current, *recent]) <= 0 else max(found)


def wake_ups(history: Sequence[Line]) -> list[float]:
    """Return, for each raised limit, the delay of the first entry that the old limit would have refused.

    `inf` where there was none before the next change.
    """
    found = []
    all_entries = list(entries(history))
    by_gate: dict[str, list[Line]] = defaultdict(list)
    for line in history:
        if line["event"] == "limit":
            by_gate[line["gate"]].append(line)
    for gate, changes in by_gate.items():
        for before, change, after in zip(changes, changes[1:], changes[2:], strict=False):
            if before["limit"] > 0 and (change["limit"] <= 0 or change["limit"] > before["limit"]):
                until = after["at"]
                got_in = [
                    entry.at - change["at"]
                    for entry in all_entries
                    if entry.gate == gate and change["at"] <= entry.at < until and entry.holders > before["limit"]
                ]
                found.append(min(got_in, default=float("inf")))
    return found


class Allowance:
    """How many starts a rate has allowed until a moment, beside its burst.

    history: "rate" when one changed; before a raise and after a reduction, so that it never counts too few. burst: what
    each change and each FLUSHALL may cost, because the starts before it may be forgotten.
    """

    def __init__(self, history: Iterable[Line], burst: int) -> None:
        self._since: list[float] = []
        self._until_then: list[float] = []
        self._per_second: list[float] = []
        allowed, at, per_second = 0.0, 0.0, 0.0
        for line in history:
            is_change = line["event"] == "rate"
            if is_change or (line["event"] == "fault" and line["kind"] == "FLUSHALL"):
                allowed += (line["at"] - at) * per_second + (burst if self._since else 0)
                at, per_second = line["at"], line["per_second"] if is_change else per_second
                self._since.append(at)
                self._until_then.append(allowed)
                self._per_second.append(per_second)

    def at(self, moment: float) -> float:
        """Return how many until a moment; the first rate counts for what was before it too."""
        place = max(bisect_right(self._since, moment) - 1, 0)
        return self._until_then[place] + (moment - self._since[place]) * self._per_second[place]


def starts(history: Iterable[Line]) -> list[float]:
    """Return when bodies began, in order."""
    return sorted(line["at"] for line in history if line["event"] == "begin")


def over_rate(history: Sequence[Line], burst: int, late_seconds: float) -> float:
    """Return by how many starts the worst window has more than its rate and burst allow; 0 or less is right.

    late_seconds: a body may begin so long after its start was taken.
    """
    allowance, worst, before = Allowance(history, burst), float("-inf"), float("-inf")
    for place, moment in enumerate(starts(history)):
        # The window that begins with an earlier start, or with this one, of which most would be over.
        before = max(before, allowance.at(moment - late_seconds) - place)
        worst = max(worst, place + 1 - allowance.at(moment) + before - burst)
    return worst


def share_of_rate(history: Sequence[Line]) -> float:
    """Return which part of the starts that the rate has allowed there were, from the first to the last change."""
    last = max(line["at"] for line in history if line["event"] == "rate")
    found, allowance = [moment for moment in starts(history) if moment <= last], Allowance(history, 0)
    return len(found) / (allowance.at(last) - allowance.at(found[0])) if found else 0.0


def leaked_slots(slots: Mapping[str, Collection[str]], states: Mapping[str, int]) -> set[str]:
    """I7: return the members of gates whose task is neither QUEUED nor RUNNING, or does not exist."""
    return {id for members in slots.values() for id in members if states.get(id) not in LIVE}


def disagreements(places: Mapping[str, Collection[str]], states: Mapping[str, int]) -> set[str]:
    """I9: return ids that Redis would still run although their row is final or deleted.

    places: for "pending", "suspects", "active", "lease", "scheduled" and "held", the ids there.
    """
    return {id for ids in places.values() for id in ids if states.get(id) not in LIVE}

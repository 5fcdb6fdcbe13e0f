"""What a run proved or broke, computed from three witnesses that the package cannot talk to.

- the history: a file of lines that task bodies, producers and the rig append, outside both stores;
- the transitions: what a trigger in the database saw of every row's state, fence and gate, in the order it happened;
- what is left in Redis when all is quiet.

Pure functions; `test_checker.py` feeds them made-up histories in which each violation is found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

LIVE = (0, 1)
QUEUED, RUNNING, SUCCEEDED, FAILED = 0, 1, 2, 3
# An outcome is written within this time of a task's end, or the store is away.
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
    """One run of a task's body. ended_at None: it was cut off."""

    id: str
    pid: int
    began_at: float
    ended_at: float | None


def executions(history: Iterable[Line]) -> list[Execution]:
    """Pair each begin with the end that the same process wrote for the same id."""
    open_runs: dict[tuple[str, int], float] = {}
    found = []
    for line in history:
        if line["event"] == "begin":
            key = (line["id"], line["pid"])
            if key in open_runs:
                found.append(Execution(*key, open_runs[key], None))
            open_runs[key] = line["at"]
        elif line["event"] == "end" and (began := open_runs.pop((line["id"], line["pid"]), None)) is not None:
            found.append(Execution(line["id"], line["pid"], began, line["at"]))
    found += [Execution(id, pid, began, None) for (id, pid), began in open_runs.items()]
    return sorted(found, key=lambda each: each.began_at)


def committed(history: Iterable[Line]) -> set[str]:
    """Return the ids whose commit a producer wrote down."""
    return {id for line in history if line["event"] == "committed" for id in line["ids"]}


def lost(committed_ids: Collection[str], states: Mapping[str, int], waiting: Collection[str] = ()) -> set[str]:
    """I1: return the committed ids that are not in a final state. waiting: ids in 3 that will be tried again."""
    ended = {id for id, state in states.items() if state in (SUCCEEDED, FAILED)} - set(waiting)
    return set(committed_ids) - ended


def ghosts(history: Sequence[Line], committed_ids: Collection[str]) -> set[str]:
    """I2: return the ids that ran although they were never committed."""
    return {run.id for run in executions(history)} - set(committed_ids)


def extra_executions(history: Sequence[Line]) -> int:
    """I3: return how many runs there were beyond one for each id."""
    runs = executions(history)
    return len(runs) - len({run.id for run in runs})


def unexcused(history: Sequence[Line]) -> list[Execution]:
    """I3: return the runs that were followed by another of the same id although no fault hit their process."""
    hit: dict[int, list[float]] = defaultdict(list)
    for line in history:
        if line["event"] == "fault":
            for pid in line["pids"]:
                hit[pid].append(line["at"])
    by_id: dict[str, list[Execution]] = defaultdict(list)
    for run in executions(history):
        by_id[run.id].append(run)
    repeated = [run for runs in by_id.values() for run in runs[:-1]]
    return [run for run in repeated if not any(at >= run.began_at for at in hit[run.pid])]


def in_flight(history: Sequence[Line]) -> int:
    """Return how many runs were going on, or ended a moment before, when a fault hit their process."""
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
    by_id: dict[str, list[Execution]] = defaultdict(list)
    for run in executions(history):
        by_id[run.id].append(run)
    found = []
    for runs in by_id.values():
        for run, again in pairwise(runs):
            hits = [line["at"] for line in faults if run.pid in line["pids"] and line["at"] >= run.began_at]
            found += [again.began_at - at for at in hits[:1] if at < again.began_at]
    return found


def double_ends(transitions: Iterable[Transition]) -> list[Transition]:
    """I4: return the changes of rows that had already ended."""
    return [each for each in transitions if _is_ended(each) and each.new_state is not None]


def _is_ended(each: Transition) -> bool:
    return each.old_state == SUCCEEDED or (each.old_state == FAILED and not each.waits)


def stale_rows(transitions: Iterable[Transition]) -> list[Transition]:
    """I5: return the writes that the database took from a run that did not hold the row any more."""
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


def stale_answers(history: Iterable[Line]) -> list[tuple[str, int, int]]:
    """I5: return (id, fence, newer fence) of endings that Redis took although it had handed out a newer fence."""
    newest: dict[str, int] = {}
    found = []
    for line in history:
        if line["event"] == "taken":
            for id, fence in line["runs"]:
                newest[id] = max(fence, newest.get(id, 0))
        elif line["event"] == "answered":
            for id, fence, word in line["runs"]:
                if word in ("done", "retried", "archived") and fence < newest.get(id, 0):
                    found.append((id, fence, newest[id]))
    return found


def refused_answers(history: Iterable[Line]) -> int:
    """Return how many endings Redis refused as stale: without any, a test of the fence has tested nothing."""
    return sum(word == "stale" for line in history if line["event"] == "answered" for _, _, word in line["runs"])


def most_live(transitions: Iterable[Transition]) -> dict[str, int]:
    """I6: return, for each gate, the most rows that were in 0 or 1 at one instant.

    A row enters after its slot was taken and leaves before it is given back, so this never counts too many.
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


def over_limit(history: Iterable[Line], grace_seconds: float = 0.5) -> list[tuple[float, str, int, int]]:
    """I6: return (instant, gate, holders, limit) of each entry that found the gate full already.

    history: "in" after a slot was taken, "out" before it is given back, "limit" when one changed, "fault" with the
    pids of holders that died. A lowered limit counts from `grace_seconds` after it was written, a raised one at once.
    """
    holders: dict[str, dict[str, int]] = defaultdict(dict)
    limits: dict[str, list[tuple[float, int]]] = defaultdict(list)
    found = []
    for line in sorted(history, key=lambda each: each["at"]):
        if line["event"] == "limit":
            limits[line["gate"]].append((line["at"], line["limit"]))
        elif line["event"] == "in":
            inside = holders[line["gate"]]
            inside[line["id"]] = line["pid"]
            limit = _limit_at(limits[line["gate"]], line["at"], grace_seconds)
            if len(inside) > limit:
                found.append((line["at"], line["gate"], len(inside), limit))
        elif line["event"] == "out":
            holders[line["gate"]].pop(line["id"], None)
        elif line["event"] == "fault":
            for inside in holders.values():
                for id in [id for id, pid in inside.items() if pid in line["pids"]]:
                    del inside[id]
    return found


def _limit_at(changes: Sequence[tuple[float, int]], at: float, grace_seconds: float) -> int:
    """Return the largest limit that was in force within the last `grace_seconds`."""
    current = [limit for since, limit in changes if since <= at - grace_seconds][-1:]
    recent = [limit for since, limit in changes if at - grace_seconds < since <= at]
    return max([*current, *recent])


def leaked_slots(slots: Mapping[str, Collection[str]], states: Mapping[str, int]) -> set[str]:
    """I7: return the members of gates whose task is neither queued nor running, or does not exist."""
    return {id for members in slots.values() for id in members if states.get(id) not in LIVE}


def disagreements(places: Mapping[str, Collection[str]], states: Mapping[str, int]) -> set[str]:
    """I9: return ids that Redis would still run although their row has ended or is gone.

    places: for "pending", "active", "lease", "scheduled" and "held", the ids there.
    """
    return {id for ids in places.values() for id in ids if states.get(id) not in LIVE}

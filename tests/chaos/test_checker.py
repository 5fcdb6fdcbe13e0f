"""The checker itself: each violation, made up, is found, and what is allowed is not."""

from __future__ import annotations

from typing import Any

from . import checker
from .checker import Transition


def line(at: float, event: str, **more: Any) -> dict[str, Any]:
    """A line of a history."""
    return {"at": at, "event": event, **more}


def run(id: str, pid: int, began: float, ended: float | None) -> list[dict[str, Any]]:
    """The lines of one run."""
    begin = [line(began, "begin", id=id, pid=pid)]
    return begin if ended is None else [*begin, line(ended, "end", id=id, pid=pid)]


def test_lost_are_committed_and_not_ended() -> None:
    """Queued, running, waiting for a retry and vanished: all lost; failed for good is not."""
    states = {"done": 2, "failed": 3, "queued": 0, "running": 1, "waiting": 3}
    found = checker.lost([*states, "vanished"], states, waiting=["waiting"])
    assert found == {"queued", "running", "waiting", "vanished"}


def test_ghosts_ran_without_a_commit() -> None:
    """A begin of an id that no producer wrote down."""
    history = [line(0, "committed", ids=["a"]), *run("a", 1, 1, 2), *run("b", 1, 1, 2)]
    assert checker.ghosts(history, checker.committed(history)) == {"b"}


def test_extra_executions_are_excused_by_a_fault_of_their_process_only() -> None:
    """The killed process's run may be repeated; the living one's may not."""
    history = [*run("a", 1, 0, None), line(1, "fault", pids=[1]), *run("a", 2, 2, 3)]
    assert (checker.extra_executions(history), checker.unexcused(history)) == (1, [])
    history = [*run("a", 1, 0, 1), line(1.5, "fault", pids=[9]), *run("a", 2, 2, 3)]
    assert [each.pid for each in checker.unexcused(history)] == [1]


def test_a_fault_before_the_run_excuses_nothing() -> None:
    """A pid that was hit earlier, and went on, must not run a task that is run again."""
    history = [line(0, "fault", pids=[1]), *run("a", 1, 1, 2), *run("a", 2, 3, 4)]
    assert len(checker.unexcused(history)) == 1


def test_in_flight_counts_what_runs_or_has_just_ended() -> None:
    """Not what ended long before, nor what another process runs."""
    history = [
        *run("long ago", 1, 0, 1),
        *run("just ended", 1, 9, 9.9),
        *run("running", 1, 9, None),
        *run("elsewhere", 2, 9, None),
        line(10, "fault", pids=[1]),
    ]
    assert checker.in_flight(history) == 2


def test_recovery_is_from_the_fault_to_the_next_begin() -> None:
    """For each run that was repeated, whether it was cut off or only its outcome was lost."""
    faults = [line(1, "fault", pids=[1]), line(9, "fault", pids=[1])]
    history = [*run("a", 1, 0, None), *run("b", 1, 0, 0.9), *faults, *run("a", 2, 3.5, 4), *run("b", 2, 2, 3)]
    assert sorted(checker.recovery_seconds(history)) == [1.0, 2.5]


def test_double_ends_are_changes_of_an_ended_row() -> None:
    """2 → anything and 3 → anything without `retry_at`; a retry and a DELETE are allowed."""
    bad = [Transition("a", 2, 2, 1, 2), Transition("b", 3, 2, 1, 2), Transition("c", 2, 0, 1, 1)]
    fine = [Transition("d", 1, 2, 1, 1), Transition("e", 3, 0, 1, 1, waits=True), Transition("f", 2, None, 1, 1)]
    assert checker.double_ends([*bad, *fine]) == bad


def test_stale_rows_are_writes_of_an_older_run() -> None:
    """A falling fence, an end by another run than the row tells of, an end by no newer run than the last."""
    bad = [Transition("a", 1, 1, 5, 4), Transition("b", 1, 2, 5, 6), Transition("c", 0, 2, 5, 5)]
    fine = [Transition("d", 1, 2, 5, 5), Transition("e", 0, 2, 4, 5), Transition("f", 1, 0, 5, 6)]
    assert checker.stale_rows([*bad, *fine]) == bad


def test_stale_answers_were_taken_after_a_newer_fence() -> None:
    """An older run's ending must be refused; a newer one's, or a refused one's, is fine."""
    history = [
        line(0, "taken", runs=[["a", 1], ["b", 1]]),
        line(1, "taken", runs=[["a", 3]]),
        line(2, "answered", runs=[["a", 1, "done"], ["b", 1, "done"]]),
        line(3, "answered", runs=[["a", 1, "stale"], ["a", 3, "done"]]),
    ]
    assert checker.stale_answers(history) == [("a", 1, 3)]
    assert checker.refused_answers(history) == 1


def test_most_live_counts_rows_in_0_and_1_by_gate() -> None:
    """Entering, running, leaving by success, parking and DELETE, and coming back."""
    transitions = [
        Transition("a", None, 0, 0, 0, "g"),
        Transition("b", None, 0, 0, 0, "g"),
        Transition("a", 0, 1, 0, 1, "g"),
        Transition("a", 1, 2, 1, 1, "g"),
        Transition("b", 0, 3, 0, 0, "g"),
        Transition("c", None, 0, 0, 0, "g"),
        Transition("c", 0, None, 0, 0, "g"),
        Transition("b", 3, 0, 0, 0, "g", waits=True),
        Transition("x", None, 0, 0, 0, "other"),
        Transition("y", None, 0, 0, 0, ""),
    ]
    assert checker.most_live(transitions) == {"g": 2, "other": 1}


def test_over_limit_is_found_by_overlap() -> None:
    """Three inside a gate of two; a holder that died does not count."""
    inside = [line(at, "in", gate="g", id=str(at), pid=at) for at in (1, 2, 3)]
    start = [line(0, "limit", gate="g", limit=2)]
    assert checker.over_limit([*start, *inside]) == [(3, "g", 3, 2)]
    assert checker.over_limit([*start, *inside, line(2.5, "out", gate="g", id="1", pid=1)]) == []
    assert checker.over_limit([*start, *inside, line(2.5, "fault", pids=[1])]) == []


def test_a_lowered_limit_counts_after_the_grace_and_not_for_those_inside() -> None:
    """Who is inside stays; who enters afterwards is over."""
    history = [
        line(0, "limit", gate="g", limit=2),
        line(1, "in", gate="g", id="a", pid=1),
        line(2, "in", gate="g", id="b", pid=1),
        line(3, "limit", gate="g", limit=1),
        line(3.1, "out", gate="g", id="b", pid=1),
    ]
    assert checker.over_limit([*history, line(3.2, "in", gate="g", id="c", pid=1)]) == []
    assert checker.over_limit([*history, line(4, "in", gate="g", id="c", pid=1)]) == [(4, "g", 2, 1)]


def test_leaked_slots_and_disagreements_are_of_ended_or_unknown_tasks() -> None:
    """A member, or an entry, without a row in 0 or 1."""
    states = {"queued": 0, "running": 1, "done": 2, "failed": 3}
    everything = [*states, "unknown"]
    assert checker.leaked_slots({"g": everything}, states) == {"done", "failed", "unknown"}
    assert checker.disagreements({"pending": everything, "lease": []}, states) == {"done", "failed", "unknown"}


def test_a_retry_is_no_repetition() -> None:
    """Another attempt may run; the same one again needs a fault."""
    first = [line(0, "begin", id="a", pid=1, attempt=1), line(1, "end", id="a", pid=1)]
    second = [line(2, "begin", id="a", pid=2, attempt=2), line(3, "end", id="a", pid=2)]
    assert (checker.extra_executions([*first, *second]), checker.unexcused([*first, *second])) == (0, [])
    again = [*first, line(2, "begin", id="a", pid=2, attempt=1)]
    assert (checker.extra_executions(again), len(checker.unexcused(again))) == (1, 1)


def test_most_executions_are_counted_by_the_fault_that_hit_the_process() -> None:
    """Three runs of one attempt, of which two were hit."""
    history = [*run("a", 1, 0, None), line(1, "fault", kind="x", pids=[1]), *run("a", 2, 2, None)]
    history += [line(3, "fault", kind="y", pids=[9, 2]), *run("a", 3, 4, 5), *run("b", 1, 0, 0.5)]
    assert checker.most_executions(history) == {"x": 3, "y": 3}


def test_resurrected_are_rows_that_come_back() -> None:
    """Inserted after they were deleted."""
    gone = Transition("a", 1, None, 1, 1)
    assert checker.resurrected([Transition("a", None, 0, 0, 0), gone]) == set()
    assert checker.resurrected([gone, Transition("a", None, 2, 0, 1)]) == {"a"}


def test_falling_terms_are_found_for_each_lock() -> None:
    """An older leader's write after a newer one's."""
    written = [(1, "x"), (2, "x"), (1, "y"), (2, "x"), (1, "x")]
    history = [line(at, "fenced", lock=lock, term=term) for at, (term, lock) in enumerate(written)]
    assert checker.falling_terms(history) == [("x", 1, 2)]
    assert checker.falling_terms(history[:-1]) == []


def test_an_entry_may_go_by_any_limit_since_it_asked() -> None:
    """Without a grace: who asked before the change may have the old one, who asked after it may not."""
    history = [
        line(0, "limit", gate="g", limit=2),
        line(1, "in", gate="g", id="a", pid=1, asked=0.9),
        line(3, "limit", gate="g", limit=1),
    ]
    late = line(3.1, "in", gate="g", id="b", pid=1, asked=3.05)
    assert checker.over_limit([*history, {**late, "asked": 2.9}]) == []
    assert checker.over_limit([*history, late]) == [(3.1, "g", 2, 1)]
    assert checker.over_limit([*history, line(3.01, "limit", gate="g", limit=0), late]) == []


def test_a_raise_wakes_up_whom_the_limit_before_kept_out() -> None:
    """After how long; never, when nobody came in before the next change."""
    inside = [line(at, "in", gate="g", id=str(at), pid=1) for at in (1, 2.5)]
    changes = [line(0, "limit", gate="g", limit=1), line(2, "limit", gate="g", limit=2)]
    end = line(9, "limit", gate="g", limit=1)
    assert checker.wake_ups([*changes, *inside, end]) == [0.5]
    assert checker.wake_ups([*changes, inside[0], end]) == [float("inf")]
    assert checker.wake_ups([*changes, *inside]) == []


def test_a_mutant_that_replaced_nothing_or_was_not_called_is_unreached() -> None:
    """One call in any process is enough; a run in which nothing was replaced has no mutant."""
    replaced = [line(at, "replaced", what=what) for at, what in enumerate(("a", "b", "a"))]
    assert checker.unreached([*replaced, line(3, "reached", what="a")]) == {"b"}
    assert checker.unreached([*replaced, *(line(3, "reached", what=what) for what in "ab")]) == set()
    assert checker.unreached([]) == {"anything"}

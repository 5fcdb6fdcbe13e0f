"""The checker itself: it finds each violation in made-up histories, and accepts what is allowed."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import django_asyncq

from . import checker, log_lines
from .checker import Transition

PACKAGE = Path(django_asyncq.__file__).parent


def line(at: float, event: str, **more: Any) -> dict[str, Any]:
    """A line of a history."""
    return {"at": at, "event": event, **more}


def run(id: str, pid: int, began: float, ended: float | None) -> list[dict[str, Any]]:
    """The lines of one run."""
    begin = [line(began, "begin", id=id, pid=pid)]
    return begin if ended is None else [*begin, line(ended, "end", id=id, pid=pid)]


def test_lost_are_committed_and_not_ended() -> None:
    """A task that is QUEUED, RUNNING, RETRYING or without a row is lost; a FAILED one is not."""
    states = {"done": 2, "failed": 3, "queued": 0, "running": 1, "waiting": 3}
    found = checker.lost([*states, "vanished"], states, waiting=["waiting"])
    assert found == {"queued", "running", "waiting", "vanished"}


def begun(*moments: float) -> list[dict[str, Any]]:
    """The lines of bodies that began."""
    return [line(at, "begin", id=str(number), pid=1) for number, at in enumerate(moments)]


def test_starts_above_a_rate_are_counted_in_every_window() -> None:
    """Of ten a second with a burst of two: twelve in a second are right, a thirteenth is one too many."""
    rate = [line(0, "rate", per_second=10)]
    right = [100.0, 100.0, *(100 + n / 10 for n in range(1, 11))]
    assert checker.over_rate([*rate, *begun(*right)], 2, 0.0) == pytest.approx(0)
    assert checker.over_rate([*rate, *begun(*right, 100.55)], 2, 0.0) == pytest.approx(1)
    assert checker.over_rate([*rate, *begun(*right, 100.55)], 2, 0.1) <= 0.001
    assert checker.over_rate([*rate, *begun(5.0, 5.0, 5.0, 5.0)], 2, 0.0) == pytest.approx(2)


def test_a_changed_rate_and_an_emptied_redis_cost_a_burst() -> None:
    """Within the windows in which they are; before and after, the rate of that time counts."""
    lines = [line(0, "rate", per_second=10), line(10, "rate", per_second=100)]
    fast = [10 + n / 100 for n in range(100)]
    assert checker.over_rate([*lines, *begun(*fast)], 1, 0.0) <= 0.001
    assert checker.over_rate([*lines, *begun(*(at - 5 for at in fast))], 1, 0.0) > 80
    flushed = [line(0, "rate", per_second=1), line(5, "fault", kind="FLUSHALL", pids=[])]
    assert checker.over_rate([*flushed, *begun(4.9, 4.9, 5.1, 5.1)], 2, 0.0) == pytest.approx(0)
    assert checker.over_rate([*flushed, *begun(4.9, 4.9, 4.9)], 2, 0.0) == pytest.approx(1)
    assert checker.over_rate([*flushed, *begun(5.1, 5.1, 5.1)], 2, 0.0) == pytest.approx(1)


def test_the_share_of_a_rate_counts_from_the_first_start_to_the_last_change() -> None:
    """What starts afterwards does not count."""
    lines = [line(0, "rate", per_second=10), line(20, "rate", per_second=1000)]
    assert checker.share_of_rate([*lines, *begun(*range(10, 20), 25, 26)]) == pytest.approx(0.1)
    assert checker.share_of_rate(lines) == 0


def test_ghosts_ran_without_a_commit() -> None:
    """A run of an id that no producer wrote down is a ghost."""
    history = [line(0, "committed", ids=["a"]), *run("a", 1, 1, 2), *run("b", 1, 1, 2)]
    assert checker.ghosts(history, checker.committed(history)) == {"b"}


def test_a_row_lies_that_succeeded_with_what_no_run_got() -> None:
    """A run counts that came to its end; one of several is enough; a task that says nothing of its arguments may."""
    history = [
        line(0, "begin", id="a", pid=1, got={"n": 1}),
        line(1, "end", id="a", pid=1),
        line(2, "begin", id="a", pid=1, got={"n": 2}),
        line(3, "end", id="a", pid=1),
        line(4, "begin", id="a", pid=2, got={"n": 3}),
        *run("silent", 1, 0, 1),
    ]
    rows = {"silent": {"n": 7}, "never begun": {"n": 7}}
    assert [checker.lies(history, {**rows, "a": {"n": n}}) for n in (1, 2, 3)] == [[], [], ["a"]]


def test_extra_executions_are_excused_by_a_fault_of_their_process_only() -> None:
    """The run of a killed process may be repeated; the run of a living one may not."""
    history = [*run("a", 1, 0, None), line(1, "fault", pids=[1]), *run("a", 2, 2, 3)]
    assert (checker.extra_executions(history), checker.unexcused(history)) == (1, [])
    history = [*run("a", 1, 0, 1), line(1.5, "fault", pids=[9]), *run("a", 2, 2, 3)]
    assert [each.pid for each in checker.unexcused(history)] == [1]


def test_a_fault_before_the_run_excuses_nothing() -> None:
    """A process that was hit before the run began, and lived on, does not excuse a repetition."""
    history = [line(0, "fault", pids=[1]), *run("a", 1, 1, 2), *run("a", 2, 3, 4)]
    assert len(checker.unexcused(history)) == 1


def test_in_flight_counts_runs_that_go_on_or_have_just_finished() -> None:
    """A run that finished long before, or of another process, does not count."""
    history = [
        *run("long ago", 1, 0, 1),
        *run("just ended", 1, 9, 9.9),
        *run("running", 1, 9, None),
        *run("elsewhere", 2, 9, None),
        line(10, "fault", pids=[1]),
    ]
    assert checker.in_flight(history) == 2


def test_recovery_is_from_the_fault_to_the_next_begin() -> None:
    """It is counted for each repeated run, whether the run was cut off or only its outcome was lost."""
    faults = [line(1, "fault", pids=[1]), line(9, "fault", pids=[1])]
    history = [*run("a", 1, 0, None), *run("b", 1, 0, 0.9), *faults, *run("a", 2, 3.5, 4), *run("b", 2, 2, 3)]
    assert sorted(checker.recovery_seconds(history)) == [1.0, 2.5]


def test_double_ends_are_changes_of_a_final_row() -> None:
    """SUCCEEDED, and FAILED without `retry_at`, must not change; a retry and a DELETE are allowed."""
    bad = [Transition("a", 2, 2, 1, 2), Transition("b", 3, 2, 1, 2), Transition("c", 2, 0, 1, 1)]
    fine = [Transition("d", 1, 2, 1, 1), Transition("e", 3, 0, 1, 1, waits=True), Transition("f", 2, None, 1, 1)]
    assert checker.double_ends([*bad, *fine]) == bad


def test_stale_rows_are_writes_of_an_older_run() -> None:
    """A falling fence, an outcome of another run than the row's, and one of no newer run than the last are stale."""
    bad = [Transition("a", 1, 1, 5, 4), Transition("b", 1, 2, 5, 6), Transition("c", 0, 2, 5, 5)]
    fine = [Transition("d", 1, 2, 5, 5), Transition("e", 0, 2, 4, 5), Transition("f", 1, 0, 5, 6)]
    assert checker.stale_rows([*bad, *fine]) == bad


def test_stale_answers_were_taken_after_a_newer_fence() -> None:
    """The outcome of an older run must be refused; that of a newer run, or a refused one, is fine."""
    history = [
        line(0, "taken", runs=[["a", 1], ["b", 1]]),
        line(1, "taken", runs=[["a", 3]]),
        line(2, "answered", runs=[["a", 1, "done"], ["b", 1, "done"]]),
        line(3, "answered", runs=[["a", 1, "stale"], ["a", 3, "done"]]),
    ]
    assert checker.stale_answers(history) == [("a", 1, 3)]
    # Its reply came before the newer run was taken, and its line was written later.
    assert checker.stale_answers([*history[:2], line(2, "answered", runs=[["a", 1, "done"]], asked=0.5)]) == []
    flushed = [*history[:2], line(1.5, "fault", kind="FLUSHALL", pids=[]), *history[2:]]
    assert checker.stale_answers(flushed) == []
    assert checker.stale_answers([line(0, "fault", kind="FLUSHALL", pids=[]), *history]) == [("a", 1, 3)]
    # The newer run had ended, and its entry was removed, before a late push put the task there again.
    late = [*history[:2], line(2, "answered", runs=[["a", 3, "done"]]), line(3, "answered", runs=[["a", 1, "done"]])]
    assert checker.stale_answers(late) == []
    assert checker.stale_answers(
        [*late[:3], line(3, "taken", runs=[["a", 5]]), line(4, "answered", runs=late[3]["runs"])]
    )
    assert checker.refused_answers(history) == 1


def test_a_retry_that_is_postponed_at_a_gate_has_waited() -> None:
    """One without a gate was vetoed; one that was not RETRYING before has failed just now."""
    off = checker.Transition("a", checker.FAILED, checker.FAILED, 1, 1, "g", waits=True)
    others = [off._replace(gate=""), off._replace(old_state=2, waits=False), off._replace(new_state=1)]
    assert checker.waits_at_gates([off, *others]) == 1


def test_most_live_counts_queued_and_running_rows_by_gate() -> None:
    """A row counts from its INSERT until success, parking or DELETE, and again after a retry."""
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
    """Three holders of a gate of two are one too many; a holder that died does not count."""
    inside = [line(at, "in", gate="g", id=str(at), pid=at) for at in (1, 2, 3)]
    start = [line(0, "limit", gate="g", limit=2)]
    assert checker.over_limit([*start, *inside]) == [(3, "g", 3, 2)]
    assert checker.over_limit([*start, *inside, line(2.5, "out", gate="g", id="1", pid=1)]) == []
    assert checker.over_limit([*start, *inside, line(2.5, "fault", pids=[1])]) == []


def test_a_lowered_limit_counts_after_the_grace_and_not_for_those_inside() -> None:
    """A task that holds a slot keeps it; one that enters afterwards is over the limit."""
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
    """A slot or an entry without a QUEUED or RUNNING row is left over."""
    states = {"queued": 0, "running": 1, "done": 2, "failed": 3}
    everything = [*states, "unknown"]
    assert checker.leaked_slots({"g": everything}, states) == {"done", "failed", "unknown"}
    assert checker.disagreements({"pending": everything, "lease": []}, states) == {"done", "failed", "unknown"}


def test_a_retry_is_no_repetition() -> None:
    """The next attempt may run; the same attempt runs again only after a fault."""
    first = [line(0, "begin", id="a", pid=1, attempt=1), line(1, "end", id="a", pid=1)]
    second = [line(2, "begin", id="a", pid=2, attempt=2), line(3, "end", id="a", pid=2)]
    assert (checker.extra_executions([*first, *second]), checker.unexcused([*first, *second])) == (0, [])
    again = [*first, line(2, "begin", id="a", pid=2, attempt=1)]
    assert (checker.extra_executions(again), len(checker.unexcused(again))) == (1, 1)


def test_most_executions_are_counted_by_the_fault_that_hit_the_process() -> None:
    """Three runs of one attempt, of which faults hit two, count for both faults."""
    history = [*run("a", 1, 0, None), line(1, "fault", kind="x", pids=[1]), *run("a", 2, 2, None)]
    history += [line(3, "fault", kind="y", pids=[9, 2]), *run("a", 3, 4, 5), *run("b", 1, 0, 0.5)]
    assert checker.most_executions(history) == {"x": 3, "y": 3}


def test_resurrected_are_rows_that_come_back() -> None:
    """A row that is inserted after its deletion is resurrected."""
    gone = Transition("a", 1, None, 1, 1)
    assert checker.resurrected([Transition("a", None, 0, 0, 0), gone]) == set()
    assert checker.resurrected([gone, Transition("a", None, 2, 0, 1)]) == {"a"}


def test_falling_terms_are_found_for_each_lock() -> None:
    """A write of an older leader after one of a newer leader is found, for each lock."""
    written = [(1, "x"), (2, "x"), (1, "y"), (2, "x"), (1, "x")]
    history = [line(at, "fenced", lock=lock, term=term) for at, (term, lock) in enumerate(written)]
    assert checker.falling_terms(history) == [("x", 1, 2)]
    assert checker.falling_terms(history[:-1]) == []


def test_an_entry_may_go_by_any_limit_since_it_asked() -> None:
    """A task that asked before the change may go by the old limit; one that asked after it may not."""
    history = [
        line(0, "limit", gate="g", limit=2),
        line(1, "in", gate="g", id="a", pid=1, asked=0.9),
        line(3, "limit", gate="g", limit=1),
    ]
    late = line(3.1, "in", gate="g", id="b", pid=1, asked=3.05)
    assert checker.over_limit([*history, {**late, "asked": 2.9}]) == []
    assert checker.over_limit([*history, late]) == [(3.1, "g", 2, 1)]
    assert checker.over_limit([*history, line(3.01, "limit", gate="g", limit=0), late]) == []


def test_a_raised_limit_admits_those_that_the_old_limit_kept_out() -> None:
    """The delay is measured; it is infinite when none was admitted before the next change."""
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


def logged() -> set[str]:
    """The texts of the package's log calls, and those that `Faults` logs."""
    calls = (node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    return {
        text.value
        for node in calls
        if isinstance(node, ast.Call)
        for text in node.args[ast.unparse(node.func) in ("Faults", "logger.log") :][:1]
        if isinstance(text, ast.Constant)
        and isinstance(text.value, str)
        and (ast.unparse(node.func) == "Faults" or ast.unparse(node.func).startswith("logger."))
    }


@pytest.mark.parametrize("text", log_lines.ALL)
def test_log_lines_that_the_chaos_suite_looks_for_are_logged(text: str) -> None:
    """The package still logs the text; otherwise a check that counts it would pass whatever happens."""
    assert any(text in line for line in logged()), f"log_lines.py: nothing logs {text!r}"

"""The arithmetic and the declarations of the benchmarks; nothing here is timed, and no server is started."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import pytest

if not sys.platform.startswith("linux"):
    pytest.skip("the benchmarks read /proc, which only Linux has", allow_module_level=True)

from tests.benchmarks import beside, compare, environments, measures, processes, table
from tests.benchmarks.costs import Reading, between, foreign_share
from tests.benchmarks.figures import longest_idle_wait_ms, percentile, ratio_between, ratios, spread
from tests.benchmarks.inside import layout
from tests.benchmarks.peers import ALL, MEASURES, OURS, Peer
from tests.benchmarks.probing import Probe, Times
from tests.benchmarks.table import Row

INSIDE = Path(compare.__file__).parent / "inside"
PEERS = pytest.mark.parametrize("peer", ALL.values(), ids=lambda peer: peer.name)


def test_percentiles_are_measured_values() -> None:
    """The nearest rank counts: p50 of 1 to 100 is 50, p99 is 99, and one value is every percentile of itself."""
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0, 0.5, 0.95, 0.99, 1)] == [1, 50, 95, 99, 100]
    assert percentile([7.0], 0.99) == 7
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_median_of_an_even_count_is_between_the_two_middle_values() -> None:
    """The median of 1, 2, 3 and 4 is 2.5."""
    found = spread([4.0, 1.0, 3.0, 2.0])
    assert (found.least, found.middle, found.most) == (1, 2.5, 4)
    with pytest.raises(ValueError, match="no values"):
        spread([])


def test_ratios_are_taken_within_a_round() -> None:
    """A round in which one of both was not measured, or measured as zero, has no ratio."""
    assert ratios({0: 10.0, 1: 30.0, 2: 5.0, 3: 1.0}, {0: 5.0, 1: 10.0, 3: 0.0}) == [2.0, 3.0]


def test_a_ratio_over_turns_has_an_interval() -> None:
    """A ratio that is the same in each turn has no width; one that holds only for the medians has a wide interval."""
    theirs = [float(turn % 7 + 1) for turn in range(100)]
    assert ratio_between([value / 2 for value in theirs], theirs) == (0.5, 0.5, 0.5)
    middle, low, high = ratio_between(theirs[::-1], theirs)
    assert middle == 1
    assert low < 1 < high


def test_only_waits_while_a_slot_is_free_count() -> None:
    """A task waits 20 ms while the only slot is busy, then 10 ms while it is free; of two slots one is always free."""
    ms = 1_000_000
    busy, waiting = Times(0, 0, 20 * ms), Times(0, 30 * ms, 31 * ms)
    assert longest_idle_wait_ms([waiting], [busy, waiting], 1) == 10
    assert longest_idle_wait_ms([waiting], [busy, waiting], 2) == 30
    assert longest_idle_wait_ms([], [busy], 1) == 0


def reading(**more: float) -> Reading:
    """Counters that are 0, except these."""
    return Reading(**{**dict.fromkeys(Reading.__slots__, 0), **more})  # type: ignore[arg-type]


def test_costs_are_per_task() -> None:
    """Commands that redis-py did not send ran inside scripts; CPU is in microseconds."""
    after = reading(at=2, worker_cpu=1, redis_commands=1200, sent_commands=200, round_trips=100, machine_cpu=1.5)
    found = between(reading(), after, 1000)
    assert found["worker_cpu_us"] == 1000
    assert found["redis_in_scripts"] == 1
    assert found["redis_sent"] == 0.2
    assert found["round_trips"] == 0.1
    assert foreign_share(reading(), after, processors=2) == 0.125


def test_cpu_is_read_from_a_line_of_proc() -> None:
    """The name of the process may hold spaces and brackets."""
    ticks = processes.TICKS_PER_SECOND
    line = f"42 (a) b (c) S 7 42 9 0 -1 0 0 0 0 0 {2 * ticks} {ticks} {5 * ticks} {ticks} 20 0"
    assert processes.parse_stat(line) == processes.Stat(7, 9, 3.0, 6.0)
    own = processes.read_stat(os.getpid())
    assert own is not None
    assert own.parent == os.getppid()


def test_probe_reads_what_bodies_write(tmp_path: Path) -> None:
    """The slots of two threads are summed up, and a task's times are read."""
    probe = Probe(tmp_path / "probe")
    words = probe._words
    words[0] = 2
    for slot, values in enumerate(((3, 50, 90, 10, 4), (2, 40, 80, 1, 1))):
        for field, value in enumerate(values):
            words[layout.SLOTS_AT + slot * layout.SLOT_WORDS + field] = value
    for field, value in enumerate((5, 6, 7)):
        words[layout.TIMES_AT + 9 * layout.TIMES_WORDS + field] = value
    assert (probe.count, probe.first_ns, probe.last_ns) == (5, 40, 90)
    assert (probe.redis_commands, probe.round_trips) == (11, 5)
    assert probe.times(9) == Times(5, 6, 7)
    probe.clear()
    assert (probe.count, probe.first_ns) == (0, 0)
    probe.close()


def test_report_has_spreads_and_ratios_and_names_what_is_missing() -> None:
    """Ratios stand beside the peer; a peer that is not installed and a failed measure are named with the reason."""
    rows = [Row(number, OURS, "enqueue", {"per_second": rate}) for number, rate in enumerate((200.0, 100.0, 300.0))]
    rows += [Row(number, "huey", "enqueue", {"per_second": rate}) for number, rate in enumerate((100.0, 100.0))]
    rows += [Row(2, "huey", "enqueue", error="MeasureFailed: it hung")]
    text = table.report(rows, [OURS, "huey", "taskiq"], ["enqueue", "bulk"], {}, {"taskiq": "no wheel"})
    assert "| 100 | **200** | 300 |" in text
    assert "| huey | 100 | **100** | 100 | 1.00 | **1.50** | 2.00 |" in text
    assert "taskiq: not installed: no wheel" in text
    assert "huey, enqueue, round 3: MeasureFailed: it hung" in text
    assert "not measured: bulk: has no bulk call" in text


def test_every_measure_is_known_everywhere() -> None:
    """The command line, the table and the modules know the same measures."""
    assert set(MEASURES) == set(measures.ALL) == set(table.SHOWN)
    assert set(beside.MEASURES) == set(beside.TAKEN) <= set(MEASURES)


def test_goals_are_ratios_within_a_round_to_the_best_of_the_peers() -> None:
    """A round that lacks one of the peers does not count; a goal without figures is not named."""
    rows = [Row(number, OURS, "drain 1,000", {"per_second": rate}) for number, rate in enumerate((130.0, 300.0, 999.0))]
    rows += [Row(number, "huey", "drain 1,000", {"per_second": 100.0}) for number in range(3)]
    rows += [Row(number, "dramatiq", "drain 1,000", {"per_second": 50.0 + 50 * number}) for number in range(2)]
    rows += [Row(0, OURS, "latency 50/s", {"p50_ms": 3.2}), Row(0, "celery", "latency 50/s", {"p50_ms": 2.0})]
    found = table.goals(rows)[2:]
    assert found == [
        "| drain 1,000 | per_second | dramatiq or huey | 1.30 | **2.15** | 3.00 | at least 1.3 | reached |",
        "| latency 50/s | p50_ms | celery | 1.60 | **1.60** | 1.60 | at most 1.5 | **missed** |",
    ]


def test_every_goal_is_measured_of_its_peers() -> None:
    """A goal names a known value of a measure that each of its peers takes."""
    for goal in table.GOALS:
        assert goal.name in {name for name, _, _ in table.SHOWN[goal.label]}
        assert all(ALL[peer].measures(goal.label) for peer in (OURS, *goal.peers))


def test_queues_are_compared_with_the_first_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each queue has a line, the others with the ratio of the first to theirs; impossible options are refused."""
    lines = beside.table("pick-up, ms", {"a": [2.0, 2.0, 4.0], "b": [1.0, 1.0, 2.0]}).splitlines()
    assert lines[2] == "| a | 2.000 | 2.000 | 2.667 | 4.000 | 4.000 |  |"
    assert lines[3] == "| b | 1.000 | 1.000 | 1.333 | 2.000 | 2.000 | 2.00 (2.00–2.00) |"
    for wrong in (["--turns", "99999"], ["--trees", str(tmp_path)]):
        with pytest.raises(SystemExit):
            beside.main(wrong)
        assert wrong[0] in capsys.readouterr().err


@PEERS
def test_every_peer_declares_what_it_needs(peer: Peer) -> None:
    """Its requirements are pinned; each setting and each measure that is not taken has a reason."""
    requirements = environments.requirements_of(peer.requirements)
    assert requirements.strip()
    assert not environments.unpinned(requirements)
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in requirements.splitlines()}
    assert {name.lower() for name in peer.packages} <= pinned
    assert peer.record
    assert peer.settings
    assert all(peer.settings.values())
    assert set(peer.unmeasured) <= set(MEASURES)
    assert all(peer.unmeasured.values())
    assert peer.uses_postgres or peer.uses_redis
    assert not peer.uses_postgres or peer.migrations()
    for measure in filter(peer.measures, MEASURES):
        assert peer.workers(measure) or measure in ("enqueue", "transaction"), "no worker would run its tasks"


def test_backlogs_that_are_not_drained_are_named() -> None:
    """A reader must not take an empty cell for a failure."""
    slow = next(peer for peer in ALL.values() if peer.drain_limit < Peer.drain_limit)
    said = "\n".join(table.notes([OURS, slow.name], ["drain"]))
    assert said.count("not measured: drains of more than") == 1
    assert f"more than {slow.drain_limit:,}" in said
    assert "drains of more" not in "\n".join(table.notes([slow.name], ["enqueue"]))


@PEERS
def test_every_application_defines_what_the_producer_calls(peer: Peer) -> None:
    """The source is read, not imported, because importing needs the peer's environment."""
    module = INSIDE / f"{peer.application}.py"
    source = (module if module.exists() else INSIDE / peer.application / "__init__.py").read_text()
    tree = ast.parse(source)
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert "enqueue" in defined
    assert not peer.measures("bulk") or "enqueue_many" in defined
    assert not peer.measures("transaction") or "atomic as transaction" in source or "transaction" in defined


def test_different_requirements_have_different_environments() -> None:
    """A changed version gets another folder."""
    assert environments.digest("a==1\n") != environments.digest("a==2\n")
    assert environments.unpinned("a==1\nb>=2\n\n") == ["b>=2"]


def test_raw_figures_replace_the_old_file_atomically(tmp_path: Path) -> None:
    """The new file has all figures, and no draft is left."""
    path = tmp_path / "raw.json"
    compare.write(path, [Row(0, OURS, "bulk", {"per_second": 1.5})], {}, {})
    assert '"per_second": 1.5' in path.read_text()
    assert list(tmp_path.iterdir()) == [path]

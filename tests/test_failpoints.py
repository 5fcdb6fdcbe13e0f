"""Failpoints: each is declared, reached and documented; unarmed they do nothing, armed they kill the process."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from django_asyncq import failpoints
from django_asyncq.testing import crash_at
from django_asyncq.testing.crashes import CRASH_VARIABLE, KillAt

from .test_imports import MODULES, PACKAGE
from .workers import ROOT

ARM = "from django_asyncq.testing import arm_from_environment; arm_from_environment(); "
REACH = (
    "from django_asyncq import failpoints; [failpoints.reach('enqueue.committed') for _ in range({})]; print('alive')"
)


@pytest.fixture
def _disarmed() -> Iterator[None]:
    """Nothing is armed after the test."""
    yield
    failpoints.disarm()


def reached() -> Iterator[str]:
    """Every name that the code gives to `reach`."""
    for tree in MODULES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "failpoints.reach":
                (argument,) = node.args
                assert isinstance(argument, ast.Constant), "the name of a point is a literal"
                yield argument.value


def run(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_every_declared_point_is_reached_in_one_place_and_no_other_is() -> None:
    """The table and the code agree."""
    assert Counter(reached()) == Counter(dict.fromkeys(failpoints.POINTS, 1))


def test_every_point_is_documented() -> None:
    """The page lists the same points with the same words."""
    page = (ROOT / "docs" / "reference" / "failpoints.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \| ([^|]+) \|", page, re.MULTILINE))
    assert rows == dict(failpoints.POINTS)


def test_names_are_a_verb_and_what_has_happened() -> None:
    """`<verb>.<what has just happened>`."""
    for name, happened in failpoints.POINTS.items():
        assert re.fullmatch(r"[a-z_]+\.[a-z_]+", name)
        assert "|" not in happened


def test_the_variable_alone_kills_nothing() -> None:
    """A process lives through its point when it does not call `arm_from_environment`: production never does."""
    done = run(REACH.format(1), crash_at("enqueue.committed"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")


def test_only_the_module_for_tests_reads_the_environment() -> None:
    """No other module names the variables, or anything that arms a failpoint."""
    for path in PACKAGE.rglob("*.py"):
        if path.name != "failpoints.py" and path.parent.name != "testing":
            assert not re.search(r"ASYNCQ_CRASH|failpoints\.arm|import testing|\.testing import", path.read_text()), (
                path
            )


def test_without_the_variable_nothing_is_armed() -> None:
    """The test settings call `arm_from_environment` in every process of the suite."""
    done = run(ARM + REACH.format(1), {name: value for name, value in os.environ.items() if name != CRASH_VARIABLE})
    assert (done.returncode, done.stdout) == (0, "alive\n")


@pytest.mark.usefixtures("_disarmed")
def test_an_armed_action_is_called_until_it_is_disarmed() -> None:
    """`arm` replaces the action before it; `disarm` leaves none."""
    first: list[str] = []
    second: list[str] = []
    failpoints.reach("enqueue.committed")
    failpoints.arm(first.append)
    failpoints.reach("enqueue.committed")
    failpoints.arm(second.append)
    failpoints.reach("enqueue.pushed")
    failpoints.disarm()
    failpoints.reach("enqueue.committed")
    assert (first, second) == (["enqueue.committed"], ["enqueue.pushed"])


@pytest.mark.parametrize(("nth", "times", "code"), [(1, 1, -signal.SIGKILL), (3, 3, -signal.SIGKILL), (3, 2, 0)])
def test_the_process_is_killed_when_it_reaches_the_point_for_the_nth_time(nth: int, times: int, code: int) -> None:
    """By signal 9, without any clean-up; a line on stderr says so."""
    done = run(ARM + REACH.format(times), crash_at("enqueue.committed", nth=nth))
    assert done.returncode == code
    assert ("alive" in done.stdout) == (code == 0)
    assert ("failpoint enqueue.committed: process" in done.stderr) == (code != 0)


def test_with_a_mark_only_the_first_process_dies(tmp_path: Path) -> None:
    """A successor with the same environment lives."""
    mark = tmp_path / "mark"
    environment = crash_at("enqueue.committed", mark=mark)
    assert run(ARM + REACH.format(1), environment).returncode == -signal.SIGKILL
    pid, point = mark.read_text().split()
    assert (int(pid) > 0, point) == (True, "enqueue.committed")
    assert run(ARM + REACH.format(1), environment).returncode == 0


@pytest.mark.parametrize("value", ["enqueue.comitted", "enqueue.committed:0", "enqueue.committed:x", ":1"])
def test_a_wrong_value_is_refused_when_it_is_armed(value: str) -> None:
    """The error lists the points: a test that waits for a crash which never comes would hide a typing error."""
    done = run(ARM, {**os.environ, CRASH_VARIABLE: value})
    assert done.returncode == 1
    assert "ValueError" in done.stderr
    assert "enqueue.committed" in done.stderr


def test_an_undeclared_point_is_refused_while_armed() -> None:
    """Also by a process that is to die at another point."""
    armed = KillAt("enqueue.committed")
    armed("enqueue.pushed")
    with pytest.raises(ValueError, match="is not a failpoint; the failpoints are"):
        armed("enqueue.forgotten")
    with pytest.raises(ValueError, match="is not a failpoint; the failpoints are"):
        crash_at("enqueue.forgotten")
    with pytest.raises(ValueError, match="n counts from 1"):
        crash_at("enqueue.committed", nth=0)


def test_arrivals_of_all_threads_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 arrivals of four threads have one hundredth."""
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(number))
    armed = KillAt("run.function_returned", 100)
    threads = [threading.Thread(target=lambda: [armed("run.function_returned") for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert killed == [signal.SIGKILL]

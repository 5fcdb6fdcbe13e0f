"""Failpoints: unarmed they do nothing, armed they kill the process."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from django_asyncq.testing import crash_at, failpoints
from django_asyncq.testing.crashes import CRASH_VARIABLE, KillAt

from ..workers import ROOT, environment

ARM = "from django_asyncq.testing import arm_from_environment; arm_from_environment(); "
REACH = (
    "from django_asyncq.testing import failpoints; "
    "[failpoints.reach('enqueue.committed') for _ in range({})]; print('alive')"
)


@pytest.fixture
def _disarmed() -> Iterator[None]:
    """Nothing is armed after the test."""
    yield
    failpoints.disarm()


def run(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_names_are_a_verb_and_what_has_happened() -> None:
    """`<verb>.<what has just happened>`."""
    for name, happened in failpoints.POINTS.items():
        assert re.fullmatch(r"[a-z_]+\.[a-z_]+", name)
        assert "|" not in happened


def test_each_point_has_its_place() -> None:
    """`PLACES` names one statement of one function for each, also after the code there has changed."""
    assert set(failpoints.PLACES) == set(failpoints.POINTS)
    for point, place in failpoints.PLACES.items():
        module = import_module(f"django_asyncq.{place.module}")
        function, names = failpoints._function_of(module, place.function)
        assert function.__code__.co_qualname == ".".join(names)
        found = ast.unparse(failpoints.instrumented(Path(str(module.__file__)).read_text(), {point: place}))
        assert found.count(f".reach({point!r})") == 1
    with pytest.raises(LookupError, match="has 0 statements"):
        failpoints.instrumented("def f(): pass", {"a.b": failpoints.before("conf", "f", "return")})


def test_a_module_that_is_imported_later_has_its_points() -> None:
    """Settings modules arm before anything of the package is imported; what is not armed runs as it is written."""
    code = (
        "from django_asyncq.testing import failpoints; reached = [];"
        "failpoints.arm(reached.append, 'enqueue.committed');"
        "import django; django.setup();"
        "from django_asyncq.lifecycle.enqueueing import Dispatch, admit;"
        "assert 'enqueue.committed' in Dispatch.follow_up.__code__.co_consts;"
        "assert 'enqueue.pushed' not in Dispatch.follow_up.__code__.co_consts;"
        "assert admit([], partial=False) == [] and reached == [];"
        "failpoints.arm(reached.append); assert admit([], partial=False) == [];"
        "failpoints.disarm(); admit([], partial=False); print(reached)"
    )
    done = run(code, environment())
    assert (done.stdout, done.stderr) == ("['enqueue.slot_acquired']\n", "")


def test_the_variable_alone_kills_nothing() -> None:
    """A process lives through its point when it does not call `arm_from_environment`: production never does."""
    done = run(REACH.format(1), crash_at("enqueue.committed"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")


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


def test_removed_points_leave_the_code_as_it_is_written() -> None:
    """And they can be armed once more."""
    from django_asyncq.lifecycle.enqueueing import admit

    failpoints.remove()
    written, seen = admit.__code__, []
    for _ in range(2):
        failpoints.arm(seen.append)
        assert admit.__code__ is not written
        failpoints.remove()
        assert admit.__code__ is written

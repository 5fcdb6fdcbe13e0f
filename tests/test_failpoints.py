"""Failpoints: declared, reached, documented; nothing when unset, a SIGKILL when set."""

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

from .test_imports import MODULES
from .workers import ROOT

REACH = (
    "from django_asyncq import failpoints; [failpoints.reach('enqueue.committed') for _ in range({})]; print('alive')"
)


def reached() -> Iterator[str]:
    """Every name that the code gives to `reach`."""
    for tree in MODULES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "failpoints.reach":
                (argument,) = node.args
                assert isinstance(argument, ast.Constant), "a point is named where it stands"
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
    """With the words of the table, and no other."""
    page = (ROOT / "docs" / "reference" / "failpoints.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \| ([^|]+) \|", page, re.MULTILINE))
    assert rows == dict(failpoints.POINTS)


def test_names_say_a_verb_and_what_has_happened() -> None:
    """`<verb>.<what has just happened>`, and what has not."""
    for name, happened in failpoints.POINTS.items():
        assert re.fullmatch(r"[a-z_]+\.[a-z_]+", name)
        assert "|" not in happened


def test_unset_it_is_a_function_that_does_nothing() -> None:
    """Decided once, at import."""
    assert failpoints.reach is failpoints.pass_by
    assert failpoints.read("") is failpoints.pass_by


@pytest.mark.parametrize(("nth", "times", "code"), [(1, 1, -signal.SIGKILL), (3, 3, -signal.SIGKILL), (3, 2, 0)])
def test_kills_its_process_at_the_nth_time(nth: int, times: int, code: int) -> None:
    """Signal 9, without a way to clean up, and a line that says so."""
    done = run(REACH.format(times), crash_at("enqueue.committed", nth=nth))
    assert done.returncode == code
    assert ("alive" in done.stdout) == (code == 0)
    assert ("failpoint enqueue.committed: process" in done.stderr) == (code != 0)


def test_only_the_first_to_die_leaves_the_mark(tmp_path: Path) -> None:
    """A successor with the same environment lives."""
    environment = crash_at("enqueue.committed", mark=tmp_path / "mark")
    assert run(REACH.format(1), environment).returncode == -signal.SIGKILL
    pid, point = (tmp_path / "mark").read_text().split()
    assert (int(pid) > 0, point) == (True, "enqueue.committed")
    assert run(REACH.format(1), environment).returncode == 0


@pytest.mark.parametrize("value", ["enqueue.comitted", "enqueue.committed:0", "enqueue.committed:x", ":1"])
def test_a_wrong_value_is_refused_at_import(value: str) -> None:
    """Naming what there is: a test that waits for a crash which never comes is a bad way to learn of a typing error."""
    done = run("import django_asyncq.failpoints", {**os.environ, failpoints.VARIABLE: value})
    assert done.returncode == 1
    assert "ValueError" in done.stderr
    assert "enqueue.committed" in done.stderr


def test_an_undeclared_point_is_refused_while_armed() -> None:
    """Also by who only passes."""
    armed = failpoints.read("enqueue.committed")
    armed("enqueue.pushed")
    with pytest.raises(ValueError, match=r"is no failpoint; there are"):
        armed("enqueue.forgotten")
    with pytest.raises(ValueError, match=r"is no failpoint; there are"):
        crash_at("enqueue.forgotten")
    with pytest.raises(ValueError, match="from 1 on"):
        crash_at("enqueue.committed", nth=0)


def test_arrivals_of_all_threads_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many threads one is the n-th."""
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(number))
    armed = failpoints.read("run.ended:100")
    threads = [threading.Thread(target=lambda: [armed("run.ended") for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert killed == [signal.SIGKILL]

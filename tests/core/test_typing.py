"""Type checkers find every wrong call of `@task`, `enqueue`, `cron()` and `every()`, and the lists of options agree."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from django_asyncq.core import compat
from django_asyncq.core.schedules import Declaration, ScheduleOptions
from django_asyncq.tasks import Task, TaskOptions

ROOT = Path(__file__).parent.parent.parent
PYRIGHT = Path(sys.executable).with_name("pyright")
SAMPLE = ROOT / "tests" / "typing_sample.py"
IGNORE = re.compile(r"  # type: ignore\[([a-z,-]+)\]$", re.MULTILINE)


def without_ignores(folder: Path) -> tuple[Path, dict[int, set[str]]]:
    """Return a copy of the sample in which no error is silenced, and mypy's codes for each wrong line."""
    text = SAMPLE.read_text()
    wrong = {
        number: set(found[1].split(","))
        for number, line in enumerate(text.splitlines(), 1)
        if (found := IGNORE.search(line))
    }
    copy = folder / "typing_sample.py"
    copy.write_text(IGNORE.sub("", text))
    return copy, wrong


def test_mypy_finds_exactly_the_wrong_calls(tmp_path: Path) -> None:
    """Each line with a wrong call gives the error that the sample names; no other line gives one."""
    pytest.importorskip("mypy")
    copy, wrong = without_ignores(tmp_path)
    # A cache apart from the one of `mypy` without arguments, which reads the sample under another module name.
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", ".mypy_cache/typing_sample", "--no-pretty"]
    command = [sys.executable, "-m", "mypy", *options, str(copy)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found: dict[int, set[str]] = {}
    for line in run.stdout.splitlines():
        if error := re.search(r"typing_sample\.py:(\d+): error: .*\[([a-z-]+)\]$", line):
            found.setdefault(int(error[1]), set()).add(error[2])
        else:
            assert ": error:" not in line, line
    assert found == wrong, run.stderr


@pytest.mark.skipif(not PYRIGHT.exists(), reason="pyright is not installed")
def test_pyright_finds_exactly_the_wrong_calls(tmp_path: Path) -> None:
    """The same lines as mypy's; its own names for the errors are not compared."""
    copy, wrong = without_ignores(tmp_path)
    settings = {"include": [str(copy)], "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [str(PYRIGHT), "--outputjson", "--pythonpath", sys.executable, "--project", str(tmp_path)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    problems = json.loads(run.stdout)["generalDiagnostics"]
    errors = [problem for problem in problems if problem["severity"] == "error"]
    assert {problem["range"]["start"]["line"] + 1 for problem in errors} == set(wrong), errors


def test_typed_options_of_a_task_are_its_fields() -> None:
    """Those of this backend, and three of the framework's; a task keeps seconds and tuples of what was given."""
    own = {field.name for field in fields(Task)} - {field.name for field in fields(compat.Task)}
    typed = get_type_hints(TaskOptions)
    # These belong to one call.
    own -= {"deadline", "headers", "group", "after", "after_failure"}
    # A batch has overloads of its own: its function takes other arguments than its calls.
    own -= {"batch"}
    assert set(typed) == own | {"priority", "queue_name", "backend"}
    hints = get_type_hints(Task)
    seconds = {"timeout", "expected_seconds", "expires", "soft_timeout", "unique_until"}
    normalised = {*seconds, "retry_on", "give_up_on", "on_missing", "sensitive", "aliases"}
    assert {name for name in own if typed[name] != hints[name]} == normalised


def test_typed_options_of_a_schedule_are_its_fields() -> None:
    """All of them except those that `cron` and `every` take themselves."""
    assert set(get_type_hints(ScheduleOptions)) == {field.name for field in fields(Declaration)} - {
        "cron",
        "interval_seconds",
        "timezone",
    }

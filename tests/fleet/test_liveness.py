"""The liveness file: refused before anything starts, and harmless afterwards."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from django_asyncq.fleet.heartbeat import LivenessFile

from ..workers import environment


@pytest.mark.parametrize("kind", ["missing folder", "folder", "below a file"])
def test_file_that_cannot_be_touched_is_a_command_error(kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    """It names the path and the reason, and nothing has started."""
    monkeypatch.setattr("django_asyncq.fleet.supervisor.Supervisor.run", lambda self: pytest.fail("it has started"))
    file = tmp_path / "file"
    file.write_text("")
    path = {"missing folder": tmp_path / "missing" / "alive", "folder": tmp_path, "below a file": file / "alive"}[kind]
    with pytest.raises(CommandError, match=f"--liveness-file .*{path}"):
        call_command("runworkers", "--liveness-file", str(path))


def test_check_does_not_say_that_processes_are_up(tmp_path: Path) -> None:
    """It makes no file, and leaves the age of one that exists."""
    alive = LivenessFile(tmp_path / "alive")
    alive.check()
    assert not alive.path.exists()
    alive.touch()
    before = alive.path.stat().st_mtime_ns
    alive.check()
    assert alive.path.stat().st_mtime_ns == before


def test_check_makes_no_file_for_an_instant(tmp_path: Path) -> None:
    """A probe that looks then would take processes that have not begun for living ones."""
    program = """
import os, sys
from pathlib import Path
import django
django.setup()
from django_asyncq.fleet.heartbeat import LivenessFile
path, opened = Path(sys.argv[1]), []
sys.addaudithook(lambda event, args: opened.append((str(args[0]), args[2])) if event == "open" else None)
LivenessFile(path).check()
print([flags for name, flags in opened if name == str(path) and flags & os.O_CREAT])
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "alive")],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stderr, done.stdout) == ("", "[]\n")
    assert list(tmp_path.iterdir()) == []


def test_touch_that_fails_is_logged_once_and_once_when_it_works_again(tmp_path: Path, caplog: Any) -> None:
    """The folder vanishes and is made again; the supervisor goes on."""
    caplog.set_level(logging.INFO, logger="django_asyncq.fleet")
    folder = tmp_path / "run"
    alive = LivenessFile(folder / "alive")
    for _ in range(3):
        alive.touch()
    folder.mkdir()
    for _ in range(2):
        alive.touch()
    assert alive.path.exists()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]

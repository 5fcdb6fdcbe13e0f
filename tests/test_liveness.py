"""The liveness file: refused before anything starts, and harmless afterwards."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from django_asyncq.supervisor.liveness import LivenessFile


@pytest.mark.parametrize("kind", ["missing folder", "folder", "below a file"])
def test_file_that_cannot_be_touched_is_a_command_error(kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    """It names the path and the reason, and nothing has started."""
    monkeypatch.setattr("django_asyncq.supervisor.Supervisor.run", lambda self: pytest.fail("it has started"))
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


def test_touch_that_fails_is_logged_once_and_once_when_it_works_again(tmp_path: Path, caplog: Any) -> None:
    """The folder vanishes and is made again; the supervisor goes on."""
    caplog.set_level(logging.INFO, logger="django_asyncq.supervisor")
    folder = tmp_path / "run"
    alive = LivenessFile(folder / "alive")
    for _ in range(3):
        alive.touch()
    folder.mkdir()
    for _ in range(2):
        alive.touch()
    assert alive.path.exists()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]

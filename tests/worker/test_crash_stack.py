"""The stacks that a worker process leaves behind when a signal kills it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.worker.child_process import LARGEST_BYTES, CrashStack

from .. import tasks
from ..workers import ROOT, run_workers


@pytest.mark.django_db(transaction=True)
def test_task_that_crashes_its_process_three_times_says_where(tmp_path: Path) -> None:
    """FAILED with `WorkerLost`, the signal, and the stack with the task's own function; no file is left."""
    result = tasks.reads_nowhere.enqueue()
    done = run_workers(TMPDIR=str(tmp_path))
    record = TaskRecord.objects.get(id=result.id)
    assert (record.state, record.crash_count, record.attempt) == (TaskState.FAILED, 3, 0)
    assert len(record.errors) == 3
    for error in record.errors:
        assert error["exception"] == "django_asyncq.exceptions.WorkerLost"
        assert "SIGSEGV" in error["message"]
        assert "in reads_nowhere" in error["traceback"]
        assert len(error["traceback"]) <= LARGEST_BYTES
    assert "in reads_nowhere" in done.stderr
    assert list(tmp_path.glob("asyncq-stack-*")) == []


@pytest.mark.django_db(transaction=True)
def test_task_that_is_killed_has_no_stack(tmp_path: Path) -> None:
    """SIGKILL leaves no time to write one."""
    result = tasks.kills_its_process.enqueue()
    run_workers(TMPDIR=str(tmp_path))
    assert [error["traceback"] for error in TaskRecord.objects.get(id=result.id).errors] == [""] * 4
    assert list(tmp_path.glob("asyncq-stack-*")) == []


def test_what_was_written_is_read_and_bounded() -> None:
    """The process unlinks the file; the supervisor still reads it, as much as fits."""
    last = CrashStack()
    code = (
        "import sys, os, faulthandler; from django_asyncq.worker.child_process import write_crash_stack\n"
        "write_crash_stack(sys.argv[1]); faulthandler._sigabrt()"
    )
    ended = subprocess.run([sys.executable, "-c", code, last.path], cwd=ROOT, check=False)
    assert ended.returncode == -6
    assert not Path(last.path).exists()
    assert "Fatal Python error: Aborted" in last.take()
    long = CrashStack()
    Path(long.path).write_bytes(b"\xff" * (LARGEST_BYTES + 1))
    assert long.take() == "\ufffd" * LARGEST_BYTES
    assert not Path(long.path).exists()


def test_workers_start_where_no_file_can_be_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The stack is not known then, and the log says so."""

    def full(prefix: str) -> tuple[int, str]:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("tempfile.mkstemp", full)
    last = CrashStack()
    assert (last.path, last.take()) == ("", "")
    assert "No space left" in caplog.text

"""The two entrances: `python -m django_asyncq.doctor`, without Django, and `manage.py asyncq doctor`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.db.backends.base.base import BaseDatabaseWrapper

from django_asyncq.doctor.__main__ import main
from django_asyncq.doctor.printing import VOCABULARIES, progress_on

from .projects import write

SOURCE = (
    "from celery import shared_task\n\n\n@shared_task(max_retries=3, quux=1)\ndef f(a): "
    "...\n\n\nf.delay(7)\nf.delay(8)\n"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a task, two calls, a broken file and a skipped folder."""
    return write(tmp_path / "project", {"shop/tasks.py": SOURCE, "shop/broken.py": "(", "node_modules/a.py": ""})


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m django_asyncq.doctor` with no settings, and with imports of Django and of stores refused."""
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('django', 'redis', 'django_redis', 'asgiref'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "sys.argv[0] = 'doctor'\n"
        "import runpy; runpy.run_module('django_asyncq.doctor', run_name='__main__')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=False,
    )


def test_the_module_needs_no_django(project: Path) -> None:
    """Neither Django nor any settings; it exits with 0, whatever it has found."""
    done = run_module("celery", str(project))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"celery in {project}: 2 files read, 1 of them use it.\n")
    assert "shop/tasks.py:8: f.delay(7)\n    -> f.enqueue(7)\n" in done.stdout
    assert "shop/broken.py:1: could not be read: '(' was never closed" in done.stdout
    assert "not read: node_modules (1 file)" in done.stdout


@pytest.mark.parametrize("arguments", [("quux", "."), ("celery",), ("celery", "/nowhere/at/all"), ()])
def test_a_wrong_call_exits_with_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown queue, no path, or one that is not there."""
    with pytest.raises(SystemExit) as exited:
        main(list(arguments))
    assert exited.value.code == 2
    assert "usage:" in capsys.readouterr().err


DOCUMENT = {"queue", "path", "files", "verdicts", "uses", "findings", "unreadable", "skipped"}


def test_json_has_its_shape(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One document; the sums are those of the findings."""
    assert main(["celery", str(project), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document.keys() == DOCUMENT
    assert document["verdicts"] == {"maps": 2, "maps, but": 0, "does not map": 0, "unknown": 1}
    assert {"use": "Task.delay", "verdict": "maps", "count": 2} in document["uses"]
    assert document["skipped"] == {"node_modules": 1}
    assert [each["file"] for each in document["unreadable"]] == ["shop/broken.py"]
    first = document["findings"][0]
    assert first == {
        "file": "shop/tasks.py", "line": 4, "use": "celery.shared_task",
        "source": "@shared_task(max_retries=3, quux=1)", "verdict": "unknown", "write": "@task(max_attempts=4)",
        "notes": first["notes"],
    }  # fmt: skip
    assert [(each["about"], each["verdict"]) for each in first["notes"]] == [
        ("max_retries", "maps, but"),
        ("quux", "unknown"),
    ]


def test_what_was_said_is_not_said_again(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sentence stands once under a heading; later uses name it."""
    write(project, {"shop/other.py": SOURCE})
    main(["celery", str(project)])
    printed = capsys.readouterr().out
    assert printed.count("max_retries counts the retries") == 1
    assert "    as above: max_retries, quux\n" in printed


def test_texts_of_the_source_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a terminal would obey is shown as an escape."""
    write(tmp_path, {"a.sh": "celery -A \x1b[31mx worker\n"})
    main(["celery", str(tmp_path)])
    assert "\x1b" not in capsys.readouterr().out


def test_the_command_prints_the_same(project: Path) -> None:
    """In both forms, and the document of `--json` too."""
    printed, as_json = StringIO(), StringIO()
    call_command("asyncq", "doctor", "celery", str(project), stdout=printed)
    call_command("asyncq", "doctor", "celery", str(project), "--json", stdout=as_json)
    assert printed.getvalue() == run_module("celery", str(project)).stdout
    assert json.loads(as_json.getvalue()).keys() == DOCUMENT


def test_the_command_needs_no_tables(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks no database; the test has none."""
    monkeypatch.setattr(BaseDatabaseWrapper, "cursor", lambda self: pytest.fail("the database was asked"))
    call_command("asyncq", "doctor", "celery", str(project), stdout=StringIO())


def test_the_command_refuses_a_path_that_is_not_there() -> None:
    """As any wrong call: with code 2."""
    with pytest.raises(CommandError) as refused:
        call_command("asyncq", "doctor", "celery", "/nowhere/at/all", stdout=StringIO())
    assert refused.value.returncode == 2


@pytest.mark.parametrize("queue", VOCABULARIES)
def test_each_queue_has_both_entrances(queue: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A project that does not use it is read all the same."""
    call_command("asyncq", "doctor", queue, str(project), stdout=StringIO())
    assert main([queue, str(project)]) == 0
    assert f"{queue} in " in capsys.readouterr().out


class Terminal(StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_alone() -> None:
    """In one line that changes."""
    terminal, file = Terminal(), StringIO()
    for stream in (terminal, file):
        show = progress_on(stream)
        for done in range(121):
            show(done, 120)
    assert terminal.getvalue() == "\r0 of 120 files\r50 of 120 files\r100 of 120 files\r120 of 120 files\n"
    assert file.getvalue() == ""

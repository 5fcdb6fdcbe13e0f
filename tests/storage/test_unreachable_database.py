"""`manage.py asyncq` while no database can be reached: one line that names it and the remedy, and no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from ..workers import ROOT, environment

ID = "01900000-0000-7000-8000-000000000000"
READ = [
    "tasks list", "tasks failures", f"tasks show {ID}", "queues list", "queues show default", "queues history default",
    "queues scale default", "workers list", "groups list", "schedules list", "schedules history nightly", "gates list",
    "gates show own", "gates audit own --dry-run", "stats", "rebuild --dry-run", "prune --older-than 1 --dry-run",
    "bulk list", f"bulk show {ID}",
]  # fmt: skip
# These say what is wrong of both stores.
SAY_WHAT_IS_WRONG = {"health": 1, "alerts check": 1}
# Each as from a shell, but in one process: a start of Python for each would take a minute.
PROGRAM = """
import contextlib, io, json, sys, traceback
import django
from django.core.management import execute_from_command_line
django.setup()
found = {}
for line in json.loads(sys.argv[1]):
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            execute_from_command_line(["manage.py", "asyncq", *line.split()])
        except SystemExit as error:
            code = error.code
        except BaseException:
            traceback.print_exc()
            code = "traceback"
    found[line] = code, out.getvalue(), err.getvalue()
print(json.dumps(found))
"""


class Said(NamedTuple):
    """What a command has printed, and its exit code."""

    code: int | str
    out: str
    err: str


def run_all(url: str, lines: list[str]) -> dict[str, Said]:
    """Run command lines on a database."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(lines)],
        cwd=ROOT,
        env=environment(DATABASE_URL=url),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return {line: Said(*said) for line, said in json.loads(done.stdout).items()}


UNREACHABLE = {
    "SQLite, no folder": ("sqlite:////nowhere/shop.sqlite3", "sqlite 'default': /nowhere/shop.sqlite3"),
    "PostgreSQL": ("postgres://shop:secret@127.0.0.1:1/shop", "postgresql 'default': shop at 127.0.0.1:1"),
    "MySQL": ("mysql://shop:secret@127.0.0.1:1/shop", "mysql 'default': shop at 127.0.0.1:1"),
}


@pytest.mark.django_db
@pytest.mark.parametrize("kind", UNREACHABLE)
def test_each_command_names_the_database_and_the_remedy(kind: str) -> None:
    """In one line on stderr, with exit code 1, as the docs say."""
    if driver := {"PostgreSQL": "psycopg", "MySQL": "MySQLdb"}.get(kind):
        pytest.importorskip(driver)
    url, name = UNREACHABLE[kind]
    for line, said in run_all(url, READ).items():
        assert (said.code, said.out) == (1, ""), (line, said)
        assert said.err.startswith(f"CommandError: The database is unreachable ({name}): "), (line, said.err)
        assert said.err.endswith("Start it, or correct DATABASES; then run the command again.\n"), (line, said.err)
        assert said.err.count("\n") == 1, (line, said.err)
        assert "secret" not in said.err


@pytest.mark.django_db
def test_commands_about_what_is_wrong_say_it() -> None:
    """Each in its own words."""
    for line, said in run_all(UNREACHABLE["SQLite, no folder"][0], list(SAY_WHAT_IS_WRONG)).items():
        assert said.code == SAY_WHAT_IS_WRONG[line], (line, said)
        assert "unable to open database file" in said.out + said.err, (line, said)
        assert "Traceback" not in said.out + said.err, (line, said)


@pytest.mark.django_db
def test_a_missing_file_of_sqlite_lacks_the_tables(tmp_path: Path) -> None:
    """SQLite makes the file, so the remedy is another one."""
    for line, said in run_all(f"sqlite:///{tmp_path / 'new.sqlite3'}", READ).items():
        assert (said.code, said.out) == (1, ""), (line, said)
        assert "manage.py migrate" in said.err, (line, said.err)
        assert said.err.count("\n") == 1, (line, said.err)

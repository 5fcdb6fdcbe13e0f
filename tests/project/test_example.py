"""Render Studio: its own tests, and its demo, run to completion and interrupted."""

from __future__ import annotations

import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from PIL import Image

from ..workers import fork_servers, kill_all, wait_until, worker_pids

REPOSITORY = Path(__file__).resolve().parents[2]
MANAGE = REPOSITORY / "example_project" / "manage.py"
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def environment(tmp_path: Path, key_prefix: str) -> dict[str, str]:
    """The environment of a studio for one test: without the suite's settings, with its own folder and keys."""
    kept = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    return {
        **kept,
        "PYTHONPATH": str(REPOSITORY),
        "STUDIO_VAR": str(tmp_path),
        "STUDIO_KEY_PREFIX": key_prefix,
        "STUDIO_REDIS_URL": os.environ["ASYNCQ_TEST_REDIS_URL"],
    }


def manage(environment: dict[str, str], *command: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run one management command of the studio."""
    line = [sys.executable, str(MANAGE), *command]
    return subprocess.run(line, env=environment, text=True, capture_output=True, timeout=seconds, check=False)


def test_tests_of_the_studio_pass(environment: dict[str, str]) -> None:
    """The tests of its painters, views and commands pass."""
    done = manage(environment, "test", "renders", seconds=200)
    assert done.returncode == 0, done.stderr[-6000:]
    assert "OK" in done.stderr


def test_studio_passes_system_checks_and_has_all_migrations(environment: dict[str, str]) -> None:
    """The system checks find no problem, and no migration is missing."""
    for command in (("check", "--fail-level", "WARNING"), ("makemigrations", "--check", "--dry-run")):
        done = manage(environment, *command, seconds=60)
        assert done.returncode == 0, done.stdout + done.stderr


ORDERS = """
from datetime import timedelta
from renders.tasks import render
for seed in range(2):
    render.enqueue("mandelbrot", seed=seed)
    render.using(run_after=timedelta(hours=1)).enqueue("julia", seed=seed, palette="ice")
"""


FILM = "from renders.tasks import film; film().enqueue()"
QUEUED, SUCCEEDED = 0, 2


def test_a_deploy_of_the_studio_is_found_safe(environment: dict[str, str]) -> None:
    """With orders that wait, and schedules that its code declares: no mistake where there is none."""
    for command in (("migrate", "-v", "0"), ("shell", "-v", "0", "-c", ORDERS)):
        done = manage(environment, *command, seconds=60)
        assert done.returncode == 0, done.stdout + done.stderr
    done = manage(environment, "asyncq", "check-deploy", seconds=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("safe to deploy: this code can run 4 live tasks of 1 name")


def test_demo_succeeds_and_reports_what_happened(environment: dict[str, str], tmp_path: Path) -> None:
    """A small demo passes every check, its counts add up, and it leaves only its contact sheet."""
    del environment["STUDIO_KEY_PREFIX"], environment["STUDIO_REDIS_URL"]
    done = manage(environment, "demo", "--count", "14", "--seed", "3", seconds=200)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert number_after("recovered", done.stdout) >= 1
    assert number_after("refused (429)", done.stdout) >= 2
    assert "SIGKILL to worker" in done.stdout
    totals = re.search(r"\n *all" + 6 * r"\D+(\d+)", done.stdout).groups()
    queued, running, succeeded, retrying, failed, cancelled = map(int, totals)
    assert (queued, running, retrying) == (0, 0, 0)
    # The visitor's two renders are beside those of the clients.
    assert succeeded + failed == number_after("accepted (202)", done.stdout) + 1
    assert cancelled == number_after("cancelled", done.stdout.split("What happened")[1]) == 1
    assert "the second order got 409, This picture is already being rendered." in done.stdout
    assert " NO  " not in done.stdout
    assert "\x1b" not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["contact-sheet.png"]


def number_after(name: str, text: str) -> int:
    """Return the number beside a name in the table of what happened."""
    return int(re.search(rf"{re.escape(name)}\D+(\d+)", text)[1])


def rows_of_films(folder: Path) -> dict[str, list[int]]:
    """The states of the steps of films, by task."""
    with closing(sqlite3.connect(folder / "studio.sqlite3", timeout=30)) as database:
        found = database.execute(
            "SELECT name, state FROM django_asyncq_taskrecord WHERE workflow_id IS NOT NULL ORDER BY id"
        ).fetchall()
    states: dict[str, list[int]] = defaultdict(list)
    for name, state in found:
        states[name.rpartition(".")[2]].append(state)
    return states


def test_a_film_ends_right_though_its_fleet_is_killed_in_the_middle(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """After kill -9 of everything between tiles and frames, the next fleet makes the film of each step's one value."""
    for command in (("migrate", "-v", "0"), ("ensure_gates",), ("shell", "-v", "0", "-c", FILM)):
        done = manage(environment, *command, seconds=60)
        assert done.returncode == 0, done.stdout + done.stderr
    line = [sys.executable, str(MANAGE), "runworkers", "--processes", "2", "--concurrency", "1"]

    def is_begun() -> bool:
        return rows_of_films(tmp_path)["paint_tile"].count(SUCCEEDED) >= 5

    def is_over() -> bool:
        return rows_of_films(tmp_path)["make_film"] == [SUCCEEDED]

    for awaited in (is_begun, is_over):
        with (tmp_path / "workers.log").open("ab") as log:
            fleet = subprocess.Popen(line, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_until(awaited, (tmp_path / "workers.log").read_text()[-3000:], 100)
        finally:
            kill_all([fleet.pid, *worker_pids(fleet.pid), *fork_servers(fleet.pid)])
            fleet.wait()
        assert awaited is is_over or rows_of_films(tmp_path)["make_film"] == [QUEUED]
    states = rows_of_films(tmp_path)
    assert {name: len(found) for name, found in states.items()} == {"paint_tile": 24, "join_tiles": 6, "make_film": 1}
    assert {state for found in states.values() for state in found} == {SUCCEEDED}
    (made,) = (tmp_path / "images").glob("*.gif")
    with Image.open(made) as moving:
        assert moving.n_frames == 10


@pytest.fixture
def running_demo(environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A demo that keeps running after its checks."""
    del environment["STUDIO_KEY_PREFIX"], environment["STUDIO_REDIS_URL"]
    line = [sys.executable, "-u", str(MANAGE), "demo", "--count", "14", "--serve"]
    demo = subprocess.Popen(line, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    yield demo
    demo.kill()
    demo.wait()
    demo.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_leaves_nothing_behind(
    running_demo: subprocess.Popen[str], tmp_path: Path, number: signal.Signals
) -> None:
    """Ctrl-C and SIGTERM stop Valkey, the site and the workers, and remove the demo's folder."""
    output = ""
    for line in running_demo.stdout:
        output += line
        if "SIGKILL" in line:
            break
    running_demo.send_signal(number)
    output += running_demo.stdout.read()
    assert running_demo.wait(60) == 130, output
    ports = [int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)/", output)]
    supervisor = int(re.search(r"\(supervisor pid (\d+)\)", output)[1])
    assert len(ports) == 2
    assert [port for port in ports if is_open(port)] == []
    assert not is_alive(supervisor)
    assert list(tmp_path.iterdir()) == []


def is_open(port: int) -> bool:
    """Whether a server listens on the port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def is_alive(pid: int) -> bool:
    """Whether the process or one of its children still exists after a moment."""
    for _ in range(20):
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.1)
    return True

"""A small project is moved from Celery and back while both fleets run and are killed: no call lost, none by both.

As the guide "Coming from Celery" and its checklists say, with Celery's worker, django-celery-beat, chains, a rate and
dates. Needs an environment that has them, with a Django that django-celery-beat supports:
`ASYNCQ_TEST_PEERS=…/bin/python python runtests.py -n 0 -m long tests/project/test_move.py`. `.ci/run` does.

Celery's own promises are not the subject. It may run a call twice that a killed worker had. With Redis it loses one if
the kill comes between the command that takes a message out of the list and the one that notes it (`_brpop_read` of
kombu): 2 of 14 kills under load did. So its worker is killed while its processes are busy, and it takes nothing. What
is the subject: that no call is left in a queue that nobody serves any more, and none is run by the other fleet.
"""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import redis

from django_asyncq.testing import EmbeddedRedis

from .. import move_project
from ..move_project import INTERVAL_SECONDS, MAILS_A_SECOND, VISIBILITY_SECONDS
from ..workers import ROOT, child_pids, wait_until, worker_pids
from .test_coming_from import BOTH, blocks, peers, shown
from .test_testing_guide import PLACE

INTERVAL = timedelta(seconds=INTERVAL_SECONDS)
PATIENCE_SECONDS = 60
CELERY_WORKER = ("-m", "celery", "-A", "mysite", "worker", "--concurrency", "2", "--loglevel", "INFO")
CELERY_BEAT = ("-m", "celery", "-A", "mysite", "beat", "--loglevel", "INFO", "--max-interval", "1")
OUR_WORKERS = ("manage.py", "runworkers", "--processes", "2", "--concurrency", "2")
SENT = re.compile(r"^\[([\d-]+ [\d:,]+): INFO/MainProcess\] Scheduler: Sending due task", re.MULTILINE)
SCHEDULE = "shop.tasks.refresh_prices"
# Beat's row, enabled as the admin does it: beat then counts from this moment on.
ENABLE_BEATS = f"""
from django_celery_beat.models import IntervalSchedule, PeriodicTask
interval, _ = IntervalSchedule.objects.get_or_create(every={INTERVAL_SECONDS}, period="seconds")
row, _ = PeriodicTask.objects.get_or_create(name="refresh", defaults={{"task": {SCHEDULE!r}, "interval": interval}})
row.enabled = False
row.save()
row.enabled = True
row.save()
"""


class Program:
    """A process of the project that goes on: a worker, beat, or a producer. Its output is in a file."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str], folder: Path) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    def printed(self) -> str:
        """Return what it has printed until now."""
        return self.log.read_text()

    def stop(self) -> None:
        """Stop it as its operator would, with SIGTERM, and wait until it is over."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.wait()

    def wait(self) -> int:
        """Wait until it is over, and return its exit code. Raises: AssertionError with what it has printed."""
        try:
            return self.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.process.args} is not over:\n{self.printed()}") from None

    def kill(self) -> None:
        """Kill it with SIGKILL, and every process that it has started."""
        for pid in family(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait()


def family(pid: int) -> list[int]:
    """Return the ids of a process and of all that it has started, itself first."""
    return [pid, *(each for child in child_pids(pid) for each in family(child))]


class Move:
    """The project in a folder, its programs and its rows."""

    def __init__(self, folder: Path, address: str, python: str) -> None:
        """address: of a Redis, without a database. python: of the environment that has Celery."""
        self.folder, self.python, self.broker = folder, python, redis.Redis.from_url(f"{address}/0")
        self.programs: list[Program] = []
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("ASYNCQ_", "DATABASE_URL"))},
            "DJANGO_SETTINGS_MODULE": "mysite.settings",
            "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        }
        texts = move_project.files(address)
        for block in blocks(BOTH):
            if block.owner in ("", "Celery"):
                place = PLACE.match(block.text)
                assert place
                texts[place["path"]] = block.text
        for name, text in texts.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.run("manage.py", "migrate", "--run-syncdb", "-v", "0")
        self.run("manage.py", "shell", "-v", "0", "-c", ENABLE_BEATS)

    def run(self, *words: str) -> str:
        """Run Python with these arguments to its end, and return what it prints."""
        done = subprocess.run(
            [self.python, *words],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, *words: str) -> Program:
        """Start Python with these arguments."""
        log = self.folder / f"program-{len(self.programs)}.log"
        program = Program([self.python, *words], log, self.environment, self.folder)
        self.programs.append(program)
        return program

    def produce(self, fleet: str, first: int, last: int) -> Program:
        """Start a process that makes calls with these numbers for a fleet, and prints each."""
        return self.start("-m", "shop.producer", fleet, str(first), str(last))

    def rows(self, query: str) -> list[tuple[str, ...]]:
        """Return what a query finds in the project's database."""
        with closing(sqlite3.connect(self.folder / "db.sqlite3", timeout=20)) as connection:
            return connection.execute(query).fetchall()

    def ran(self, fleet: str) -> list[str]:
        """Return the calls that a fleet has run, in order, each as often as it was run."""
        return [call for (call,) in self.rows(f"SELECT call FROM shop_run WHERE fleet = '{fleet}' ORDER BY id")]

    def in_old_queue(self) -> tuple[int, int]:
        """Return how many messages wait in Celery's list, and how many its workers have."""
        waiting, taken = self.broker.llen("celery"), self.broker.hlen("unacked")
        assert isinstance(waiting, int) and isinstance(taken, int)
        return waiting, taken

    def wait_for_calls(self, producers: list[Program]) -> set[str]:
        """Wait until what producers have called was run, and return it. Raises: AssertionError with what was not."""
        for producer in producers:
            assert producer.wait() == 0, producer.printed()
        made = {call for producer in producers for call in producer.printed().splitlines()}
        try:
            self.wait_until(lambda: made <= {*self.ran("celery"), *self.ran("ours")}, "run of every call")
        except AssertionError as error:
            missing = sorted(made.difference(self.ran("celery"), self.ran("ours")))
            raise AssertionError(f"{missing} were not run: {error}") from None
        return made

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until a condition is true. Raises: AssertionError with the ends of all logs."""
        try:
            wait_until(condition, what, PATIENCE_SECONDS)
        except AssertionError as error:
            logs = "\n".join(f"== {each.process.args}\n{each.printed()[-1500:]}" for each in self.programs)
            raise AssertionError(f"{error}\n{logs}") from None


@contextmanager
def moving(folder: Path) -> Iterator[Move]:
    """Have the project with a Redis; what it has started is killed at the end."""
    python = peers()
    with EmbeddedRedis() as server:
        move = Move(folder, server.url.rpartition("/")[0], python)
        try:
            yield move
        finally:
            for program in move.programs:
                if program.process.poll() is None:
                    program.kill()


def sent_by(beat: Program) -> list[datetime]:
    """Return when beat has sent each occurrence."""
    moments = SENT.findall(beat.printed())
    return [datetime.strptime(each, "%Y-%m-%d %H:%M:%S,%f").replace(tzinfo=UTC) for each in moments]


def takes_nothing(move: Move) -> bool:
    """Return whether Celery's worker is full: messages wait, and for a while it neither takes one nor finishes one."""
    before = move.in_old_queue()
    time.sleep(0.4)  # several times what each other task takes
    return before == move.in_old_queue() and min(before) > 1


def stop_between_occurrences(move: Move, beat: Program) -> list[datetime]:
    """Stop a beat, and return when it has sent each occurrence. Its log says so just before it does."""
    last = sent_by(beat)[-1]
    move.wait_until(lambda: datetime.now(UTC) > last + INTERVAL / 6, "time for beat to send")
    beat.stop()
    return sent_by(beat)


def occurrences_run(move: Move) -> int:
    """Return how many occurrences our workers have run."""
    return len({call for call in move.ran("ours") if call.startswith("refresh")})


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_project_is_moved_and_back_while_both_fleets_are_killed(tmp_path: Path) -> None:
    """Each call is run, by the fleet that it was given to; each occurrence once, first by beat and then by us."""
    with moving(tmp_path) as move:
        # Before: Celery alone.
        celery, beat = move.start(*CELERY_WORKER), move.start(*CELERY_BEAT)
        producers = [move.produce("celery", 0, 15)]
        move.wait_until(lambda: len(move.ran("celery")) > 20, "run of Celery's")

        # Both fleets run. Web processes of the old release and of the new one make calls beside each other.
        ours = move.start(*OUR_WORKERS)
        move.wait_until(lambda: "Ready." in ours.printed(), "workers of ours")
        producers += [move.produce("celery", 15, 40), move.produce("ours", 0, 40)]
        move.wait_until(lambda: len(move.ran("ours")) > 15, "run of ours")
        os.kill(worker_pids(ours.process.pid)[0], signal.SIGKILL)
        move.wait_until(lambda: takes_nothing(move), "moment at which Celery takes nothing")
        celery.kill()
        killed_at = time.monotonic()
        numbers = shown(move.run("manage.py", "both_queues"))
        assert sum(numbers["old"]) > 0
        move.wait_until(lambda: len(move.ran("ours")) > 60, "run after a worker process was killed")
        ours.kill()
        ours = move.start(*OUR_WORKERS)
        move.wait_until(lambda: time.monotonic() - killed_at > VISIBILITY_SECONDS, "time of Celery's")
        celery = move.start(*CELERY_WORKER)

        # The schedule is moved at one instant, between beat's third occurrence from now and its fourth.
        move.wait_until(lambda: "Ready." in ours.printed(), "workers of ours")
        cutover = (sent_by(beat)[-1] + 3.25 * INTERVAL).replace(microsecond=0) + timedelta(seconds=1)
        (tmp_path / "cutover.txt").write_text(cutover.isoformat())
        ours.stop()
        ours = move.start(*OUR_WORKERS)
        move.wait_until(lambda: SCHEDULE in str(move.rows("SELECT name FROM django_asyncq_schedule")), "schedule")
        assert datetime.now(UTC) < cutover, "this machine is too slow for the move at an instant"
        move.wait_until(lambda: cutover - sent_by(beat)[-1] <= INTERVAL, "last occurrence of beat's")
        sent = stop_between_occurrences(move, beat)

        # The old queue is emptied, and its workers are stopped.
        for producer in producers:
            assert producer.wait() == 0, producer.printed()
        numbers = shown(move.run("manage.py", "both_queues", "--until-old-is-empty"))
        assert numbers["old"] == [0, 0, 0]
        celery.stop()
        made = move.wait_for_calls(producers)
        move.wait_until(lambda: occurrences_run(move) > 0, "occurrence of ours")
        ours.kill()
        ours = move.start(*OUR_WORKERS)
        move.wait_until(lambda: occurrences_run(move) > 2, "occurrences of ours after a kill")

        # And back: our schedule is disabled before beat starts, and our workers finish what they have.
        back = move.produce("ours", 40, 50)
        move.run("manage.py", "asyncq", "schedules", "disable", SCHEDULE)
        last_of_ours = move.rows("SELECT max(occurs_at) FROM django_asyncq_occurrence")[0][0]
        move.run("manage.py", "shell", "-v", "0", "-c", ENABLE_BEATS)
        celery, second_beat = move.start(*CELERY_WORKER), move.start(*CELERY_BEAT)
        after = move.produce("celery", 40, 50)
        assert back.wait() == 0, back.printed()
        ours.kill()
        move.run("manage.py", "runworkers", "--burst")
        made |= move.wait_for_calls([back, after])
        move.wait_until(lambda: len(sent_by(second_beat)) > 1, "occurrence of the second beat's")
        sent_after = stop_between_occurrences(move, second_beat)
        assert shown(move.run("manage.py", "both_queues", "--until-old-is-empty"))["old"] == [0, 0, 0]
        celery.stop()

        assert_each_call_was_run_by_its_fleet(move, made)
        assert_each_occurrence_was_run(move, sent, sent_after, cutover, last_of_ours)
        assert_starts_keep_the_rate(move)


def assert_each_call_was_run_by_its_fleet(move: Move, made: set[str]) -> None:
    """None is lost, none is run by the other fleet, and the values are right."""
    by_celery, by_us = ({call for call in move.ran(fleet) if " " in call} for fleet in ("celery", "ours"))
    of_schedules = {call for call in by_celery | by_us if call.startswith("refresh")}
    assert len(made) > 400
    assert (by_celery | by_us) - of_schedules == made
    assert by_celery & by_us == set()
    assert {call.split()[0] for call in by_celery - of_schedules} == {"celery"}
    assert {call.split()[0] for call in by_us - of_schedules} == {"ours"}
    for call, value in move.rows("SELECT DISTINCT call, value FROM shop_run"):
        order, _, step = call.partition(":")
        expected = (
            "03.11.2026 12.50" if re.search("receipt|later", call) else f"reserved {order}" if step == "ship" else ""
        )
        assert value == expected, call
    first = dict(move.rows("SELECT call, min(began_at) FROM shop_run GROUP BY call"))
    assert all(first[call] > first[call.replace(":ship", ":reserve")] for call in made if call.endswith(":ship"))
    # What is FAILED or waits here would be a call that was not run.
    assert move.rows("SELECT id FROM django_asyncq_taskrecord WHERE state <> 2") == []


def assert_each_occurrence_was_run(
    move: Move, sent: list[datetime], sent_after: list[datetime], cutover: datetime, last_of_ours: str
) -> None:
    """Until the instant by Celery, from it on by us without a gap, and after our last one by Celery again."""
    by_celery, by_us = ({c for c in move.ran(fleet) if c.startswith("refresh")} for fleet in ("celery", "ours"))
    assert len(by_celery) == len(sent) + len(sent_after)
    assert timedelta(0) < cutover - sent[-1] <= INTERVAL
    rows = move.rows("SELECT occurs_at, outcome, task_id FROM django_asyncq_occurrence ORDER BY occurs_at")
    moments = [datetime.fromisoformat(moment).replace(tzinfo=UTC) for moment, _, _ in rows]
    assert moments == [cutover + number * INTERVAL for number in range(len(moments))]
    assert len(by_us) == len(rows) == len({task for _, _, task in rows})
    assert sent_after[0] > datetime.fromisoformat(last_of_ours).replace(tzinfo=UTC)
    assert rows[-1][0] == last_of_ours


def assert_starts_keep_the_rate(move: Move) -> None:
    """Ours: in no second do more mails begin than the rate, one, and what the four slots may hold up."""
    starts = [
        float(at)
        for (at,) in move.rows(
            "SELECT min(began_at) FROM shop_run WHERE call LIKE 'ours mail%' GROUP BY call ORDER BY 1"
        )
    ]
    most = max(sum(first <= each < first + 1 for each in starts) for first in starts)
    assert 1 < most <= MAILS_A_SECOND + 1 + 4

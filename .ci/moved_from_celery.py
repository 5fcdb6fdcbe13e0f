"""Move a Celery project over as the guide "Coming from Celery" says: `moved_from_celery.py GUIDE WHEELS [CELERY]`.

The blocks "with Celery" are the project before the move. In it a task is enqueued with Celery, and its beat is started.
Then the guide is followed in order, its blocks "with both" among the others. Commands that run for ever are workers:
they run until they have done their part, Celery's beside ours. The guide's CUTOVER is replaced by an instant some
seconds ahead, and beat is stopped before it, as the guide says. At the end the old queue must be empty, both tasks must
have SUCCEEDED here, and each occurrence of the schedule must have run once: until the instant with Celery, from it on
here.

GUIDE, WHEELS: as for fresh_project.py, which has the mechanism. CELERY: the requirement, by default the version that
the guide names.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fresh_project import BLOCK, Reader
from redis import Redis

from django_asyncq.testing import EmbeddedRedis

WAIT_SECONDS = 60
WITH = re.compile(r"\A(# [\w/]+\.py(?:, at the end)?), with (Celery|both)\n")
BEAT = re.compile(r"`(celery -A \w+ beat)`")
LIST = re.compile(r"`(python manage\.py asyncq schedules list)`")
INSTANT = re.compile(r"(?<=^CUTOVER = )datetime\(.*\)$", re.MULTILINE)
INTERVAL = re.compile(r"every\(seconds=(\d+),")
SENT = re.compile(r"^\[([\d-]+ [\d:,]+): INFO/MainProcess\] Scheduler: Sending due task", re.MULTILINE)
SUCCEEDED_THERE = re.compile(r"Task (shop\.tasks\.\w+)\[([\w-]+)\] succeeded in (.*)")
# How many occurrences of ours are seen to run.
FIRST_ONES = 2
STATE = """
from django_asyncq.models import Occurrence, TaskRecord, TaskState
print("SUCCEEDED", *sorted(set(TaskRecord.objects.succeeded().values_list("name", flat=True))))
for each in Occurrence.objects.select_related("task").order_by("occurs_at"):
    run = each.task and f"{TaskState(each.task.state).name} {each.task.attempt}"
    print("OCCURRED", each.occurs_at.isoformat(), each.outcome, run)
"""


class Program:
    """A program that runs until it is stopped: a worker, or Celery's beat."""

    def __init__(self, mover: Mover, command: str) -> None:
        print(f"$ {command}", flush=True)
        self.command = command
        mover.commands += 1
        mover.programs.append(self)
        self.log = mover.folder / f"program-{mover.commands}.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command.split(), cwd=mover.folder, env=mover.environment, stdout=output, stderr=subprocess.STDOUT
            )

    def wait_until(self, is_enough: Callable[[], bool]) -> None:
        """Wait until it has done its part. Raises: SystemExit if it exits before, or needs more than WAIT_SECONDS."""
        until = time.monotonic() + WAIT_SECONDS
        while not is_enough():
            if self.process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{self.command} has not done its part:\n{self.printed()}")
            time.sleep(0.2)

    def printed(self) -> str:
        """Return what it has printed until now."""
        return self.log.read_text()

    def stop(self) -> None:
        """Stop it as its operator would."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(WAIT_SECONDS)


class Mover(Reader):
    """Follows the guide in a project that had Celery."""

    list_schedules = ""
    interval = timedelta(0)
    beat: Program
    old_workers: Program
    new_workers: Program | None = None
    cutover: datetime

    def make_project_with_celery(self, guide: str, requirement: str) -> None:
        """Make the project as it is before the move, leave a task in Celery's queue, and start its beat."""
        self.programs: list[Program] = []
        self.environment["TZ"] = "UTC"  # the log of beat has local times
        self.list_schedules = LIST.search(guide)[1]
        self.interval = timedelta(seconds=int(INTERVAL.search(guide)[1]))
        for command in (f"pip install -q 'django' '{requirement}'", "django-admin startproject mysite ."):
            self.run(command)
        self.run("python manage.py startapp shop")
        for _, text in BLOCK.findall(guide):
            if (place := WITH.match(text)) and place[2] == "Celery":
                super().write(WITH.sub(r"\1\n", text).replace("redis://127.0.0.1:6379", self.address))
        self.run('python manage.py shell -c "from shop.tasks import send_receipt; send_receipt.delay(6)"')
        self.beat = Program(self, f"{BEAT.search(guide)[1]} --loglevel INFO")

    def write(self, text: str) -> None:
        """Write a block, unless it is of the project before the move. One that has CUTOVER gets an instant ahead."""
        place = WITH.match(text)
        if INSTANT.search(text):
            # Midway between two occurrences of Celery, so that nothing is due; the third one from now is its last.
            self.cutover = (self.sent()[-1] + 3.5 * self.interval).replace(microsecond=0)
            text = INSTANT.sub(f"datetime({self.cutover:%Y, %-m, %-d, %-H, %-M, %-S}, tzinfo=UTC)", text)
        if place is None or place[2] == "both":
            super().write(WITH.sub(r"\1\n", text))

    def run(self, command: str) -> None:
        """Run a command; a worker until it has done its part."""
        if command.startswith("celery -A"):
            self.old_workers = Program(self, command)
            self.old_workers.wait_until(lambda: len({name for name, _, _ in self.ran_there()}) == 2)
        elif command == "python manage.py runworkers":
            # The schedule is moved between its first start and its second.
            is_first = self.new_workers is None
            self.new_workers = Program(self, command)
            if is_first:
                self.new_workers.wait_until(lambda: "shop.tasks.send_receipt" in self.state())
            else:
                self.cut_over(self.new_workers)
            self.new_workers.stop()
        else:
            super().run(command)

    def cut_over(self, workers: Program) -> None:
        """Do the guide's list: see that the schedule is there, stop beat in time. Then let Celery's workers finish."""
        workers.wait_until(lambda: "Ready." in workers.printed())
        super().run(self.list_schedules)
        self.expect("shop.tasks.refresh_prices")
        self.beat.wait_until(lambda: self.cutover - self.sent()[-1] <= self.interval)
        # Its log says so just before it sends.
        time.sleep(self.interval.total_seconds() / 20)
        self.beat.stop()
        workers.wait_until(lambda: self.state().count("queued SUCCEEDED") >= FIRST_ONES)
        self.old_workers.wait_until(lambda: not self.left_in_the_old_queue())
        self.old_workers.stop()

    def stop(self) -> None:
        """Stop what still runs."""
        for program in self.programs:
            program.stop()

    def sent(self) -> list[datetime]:
        """Return when beat has sent each occurrence."""
        moments = SENT.findall(self.beat.printed())
        return [datetime.strptime(moment, "%Y-%m-%d %H:%M:%S,%f").replace(tzinfo=UTC) for moment in moments]

    def ran_there(self) -> list[tuple[str, str, str]]:
        """Return the name, the id and the result of each task that Celery's workers have run."""
        return SUCCEEDED_THERE.findall(self.old_workers.printed())

    def left_in_the_old_queue(self) -> int:
        """Return how many tasks Celery's queue holds."""
        with Redis.from_url(f"{self.address}/0") as old:
            return old.llen("celery") + old.hlen("unacked")

    def state(self) -> str:
        """Return which tasks have succeeded here, and each occurrence of the schedule with its task."""
        command = ["python", "manage.py", "shell", "-v", "0", "-c", STATE]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr

    def check_occurrences(self) -> None:
        """Check that each ran once: until the instant with Celery, from it on here, and none is missing between."""
        sent, ran = self.sent(), [each for name, each, _ in self.ran_there() if name.endswith(".refresh_prices")]
        if not len(sent) == len(ran) == len(set(ran)):
            raise SystemExit(f"beat has sent {len(sent)} occurrences, and Celery's workers have run {ran}")
        if not timedelta(0) < self.cutover - sent[-1] <= self.interval:
            raise SystemExit(f"beat's last occurrence, {sent[-1]}, is not the last one before {self.cutover}")
        state = self.state()
        ours = [line.split(" ", 2) for line in state.splitlines() if line.startswith("OCCURRED")]
        due = [(self.cutover + number * self.interval).isoformat() for number in range(len(ours))]
        ran_once = [how == "queued SUCCEEDED 1" for _, _, how in ours[:FIRST_ONES]]
        if [moment for _, moment, _ in ours] != due or ran_once != [True] * FIRST_ONES:
            raise SystemExit(f"each occurrence from {self.cutover} on should have run once:\n{state}")


def main(guide: Path, wheels: Path, requirement: str = "") -> None:
    """Move a project over, and check what it ends with."""
    began = time.monotonic()
    text = guide.read_text()
    requirement = requirement or f"celery[redis]=={re.search(r'against celery ([0-9.]+[0-9])', text)[1]}"
    with tempfile.TemporaryDirectory(prefix="asyncq-moved-") as folder, EmbeddedRedis() as server:
        mover = Mover(Path(folder), wheels.resolve(), server.url)
        try:
            mover.make_project_with_celery(text, requirement)
            mover.follow(text)
        finally:
            mover.stop()
        results = {result for _, _, result in mover.ran_there()}
        if not any("receipt for order 6" in result for result in results):
            raise SystemExit(f"Celery's worker should have run the task that was queued before:\n{results}")
        if left := mover.left_in_the_old_queue():
            raise SystemExit(f"Celery's queue should be empty, but has {left} tasks")
        if "SUCCEEDED shop.tasks.refresh_prices shop.tasks.send_receipt\n" not in mover.state():
            raise SystemExit(f"both tasks should have succeeded:\n{mover.state()}")
        mover.check_occurrences()
        print(
            f"moved from {requirement} to Django {mover.django_version()}: {mover.commands} commands, "
            f"{len(mover.files)} files, {time.monotonic() - began:.0f} s; "
            f"{len(mover.sent())} occurrences with Celery before {mover.cutover}\n{mover.state()}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])

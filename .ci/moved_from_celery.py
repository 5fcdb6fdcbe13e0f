"""Move a Celery project over as the guide "Coming from Celery" says: `moved_from_celery.py GUIDE WHEELS [CELERY]`.

The blocks "with Celery" are the project before the move. In it a task is enqueued with Celery. Then the guide is
followed in order, its blocks "with both" among the others. Commands that run for ever are workers: they run until they
have done their part. At the end the old queue must be empty, both tasks must have SUCCEEDED here, and the schedule must
have fired.

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
from pathlib import Path

from fresh_project import BLOCK, Reader
from redis import Redis

from django_asyncq.testing import EmbeddedRedis

WAIT_SECONDS = 60
WITH = re.compile(r"\A(# [\w/]+\.py(?:, at the end)?), with (Celery|both)\n")
STATE = """
from django_asyncq.models import Occurrence, OccurrenceOutcome, TaskRecord
succeeded = set(TaskRecord.objects.succeeded().values_list("name", flat=True))
print("SUCCEEDED", *sorted(succeeded))
print("FIRED", Occurrence.objects.filter(outcome=OccurrenceOutcome.QUEUED).count())
"""


class Mover(Reader):
    """Follows the guide in a project that had Celery."""

    old_tasks = ""
    has_run_workers = False

    def make_project_with_celery(self, guide: str, requirement: str) -> None:
        """Make the project as it is before the move, and leave a task in Celery's queue."""
        for command in (f"pip install -q 'django' '{requirement}'", "django-admin startproject mysite ."):
            self.run(command)
        self.run("python manage.py startapp shop")
        for _, text in BLOCK.findall(guide):
            if (place := WITH.match(text)) and place[2] == "Celery":
                super().write(WITH.sub(r"\1\n", text).replace("redis://127.0.0.1:6379", self.address))
        self.run('python manage.py shell -c "from shop.tasks import send_receipt; send_receipt.delay(6)"')

    def write(self, text: str) -> None:
        """Write a block, unless it is of the project before the move."""
        place = WITH.match(text)
        if place is None or place[2] == "both":
            super().write(WITH.sub(r"\1\n", text))

    def run(self, command: str) -> None:
        """Run a command; a worker until it has done its part."""
        if command.startswith("celery -A"):
            self.run_until(command, lambda output: "succeeded in" in output)
        elif command == "python manage.py runworkers":
            # The schedule is moved between its first start and its second.
            is_enough = self.is_done if self.has_run_workers else self.has_sent_receipt
            self.run_until(command, lambda output: is_enough())
            self.has_run_workers = True
        else:
            super().run(command)

    def run_until(self, command: str, is_enough: Callable[[str], bool]) -> None:
        """Run a worker until it has done its part, and stop it as its operator would.

        Raises: SystemExit if it exits by itself, or has not done its part within WAIT_SECONDS.
        """
        print(f"$ {command}", flush=True)
        log = self.folder / "worker.log"
        with log.open("wb") as output:
            worker = subprocess.Popen(
                command.split(), cwd=self.folder, env=self.environment, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            until = time.monotonic() + WAIT_SECONDS
            while not is_enough(log.read_text()):
                if worker.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"{command} has not done its part:\n{log.read_text()}\n{self.state()}")
                time.sleep(0.5)
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.wait(WAIT_SECONDS)
        self.old_tasks += "".join(re.findall(r"Task shop\.tasks\.\w+\[.*succeeded in .*", log.read_text()))
        self.commands += 1

    def state(self) -> str:
        """Return which tasks have succeeded, and how often the schedule has fired."""
        command = ["python", "manage.py", "shell", "-v", "0", "-c", STATE]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr

    def has_sent_receipt(self) -> bool:
        """Whether the task that a caller has enqueued has succeeded."""
        return "shop.tasks.send_receipt" in self.state()

    def is_done(self) -> bool:
        """Whether both tasks have succeeded and the schedule has fired."""
        state = self.state()
        return "SUCCEEDED shop.tasks.refresh_prices shop.tasks.send_receipt\n" in state and "FIRED 0" not in state


def main(guide: Path, wheels: Path, requirement: str = "") -> None:
    """Move a project over, and check what it ends with."""
    began = time.monotonic()
    text = guide.read_text()
    requirement = requirement or f"celery[redis]=={re.search(r'against celery ([0-9.]+[0-9])', text)[1]}"
    with tempfile.TemporaryDirectory(prefix="asyncq-moved-") as folder, EmbeddedRedis() as server:
        mover = Mover(Path(folder), wheels.resolve(), server.url)
        mover.make_project_with_celery(text, requirement)
        mover.follow(text)
        if "receipt for order 6" not in mover.old_tasks:
            raise SystemExit(f"Celery's worker should have run the task that was queued before:\n{mover.old_tasks}")
        with Redis.from_url(f"{mover.address}/0") as old:
            if left := old.llen("celery") + old.hlen("unacked"):
                raise SystemExit(f"Celery's queue should be empty, but has {left} tasks")
        if not mover.is_done():
            raise SystemExit(f"both tasks should have succeeded and the schedule fired:\n{mover.state()}")
        print(
            f"moved from {requirement} to Django {mover.django_version()}: {mover.commands} commands, "
            f"{len(mover.files)} files, {time.monotonic() - began:.0f} s\n{mover.state()}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])

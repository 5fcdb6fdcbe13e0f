"""Run the shell commands of the docs: `python -m tests.docs_commands` prints a line of JSON for each.

Those of `sh` blocks, in prose, and of `manage.py` in files of other programs, such as a crontab or a Procfile.

They are run in a small project, with a fleet of workers beside them and some tasks that have failed. `manage.py` runs
in this process, at a terminal where somebody answers yes; what goes on until it is stopped, and what sets variables, is
given to a shell.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^( *)```(\S*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# Languages of blocks that are files or output, in which `manage.py` is called.
FILES = ("dockerfile", "ini", "text")
MANAGE = re.compile(r"\S*manage\.py (?!asyncq$)[a-z]\w+.*")
# With more than one word, a name in prose is a command if it begins so.
PROGRAMS = re.compile(
    r"(?:[A-Z_]+=\S* )*(?:bash|cd|celery|curl|django-admin|docker|git|go|kubectl|manage\.py(?! asyncq$)|mypy|npm|"
    r"openssl|php|pip|psql|pytest|python|redis-cli|rm|ruff|sh|sudo|systemctl) "
)
ADDRESS = "redis://127.0.0.1:6379"
PATIENCE_SECONDS = 30.0
# Pages whose commands are typed elsewhere: by scripts of `.ci/run`, or by tests that make a project of the page.
# Those of Docker itself are typed only where it runs; elsewhere the script reads each and fails on an unknown one.
FOLLOWED = {
    "getting-started": ".ci/fresh_project.py",
    "coming-from/celery": ".ci/moved_from_celery.py",
    "containers": ".ci/docker_image.py",
    "testing": "tests/project/test_testing_guide.py",
}
# Commands that are not run here: how they begin, and what runs them instead.
ELSEWHERE = {
    "pip install -e": "`.ci/run`, which makes its environments so",
    "pip install": "`.ci/run`, with the wheel; `test_packaging.py` has the extras",
    "python -m django_asyncq.doctor": "`tests/doctor/test_entrances.py`, with imports of Django refused",
    "python runtests.py": "by hand where it is long, else by `.ci/run`",
    "DATABASE_URL=": "by hand: it takes long, and needs a database of its own",
    "ASYNCQ_TEST_ROWS=": "by hand: it takes hours",
    "ruff check": "`.ci/run`",
    "python example_project/manage.py demo": "`.ci/run`",
    "python -W error::DeprecationWarning": "an option, shown with its program",
    "python manage.py createsuperuser": "Django's own; it asks for a password",
    "python manage.py runserver": "Django's own, which goes on",
    "python manage.py test": "`test_testing_guide.py`",
    "rm db.sqlite3": "it would empty the project",
    "python manage.py both_queues": "`test_coming_from.py`, in a project that has the command",
    "python manage.py asyncq adopt": "`test_prefix_ownership.py` and `test_copies.py`; no workers may run",
    "python manage.py asyncq import": "`test_importing.py`; it needs what another queue left",
    "python manage.py flush": "`test_prefix_ownership.py`; it would empty the project",
    "docker": "`.ci/docker_image.py`, where Docker runs",
    "celery": "Celery's; its worker and its beat by `.ci/moved_from_celery.py`",
    "export DATABASE_URL=": "it is for the line after it",
    "python -m tests.": "by hand: it takes long",
}
SETTINGS = """
SECRET_KEY = "docs"
USE_TZ = True
ALLOWED_HOSTS = ["shop.example.com"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", {framework} "django_asyncq", "shop"]
DATABASES = {{
    "default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "{folder}/db.sqlite3"}},
    "tasks": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "{folder}/tasks.sqlite3"}},
}}
DATABASES["default"]["OPTIONS"] = {{
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
    "transaction_mode": "IMMEDIATE",
    "timeout": 20,
}}
TASKS = {{
    "default": {{"BACKEND": "django_asyncq.backend.AsyncqBackend", "QUEUES": []}},
    "reports": {{"BACKEND": "django_asyncq.backend.AsyncqBackend", "QUEUES": []}},
}}
ASYNCQ = {{
    "REDIS": {redis!r},
    "TASK_LOCK_DIR": "{folder}/locks",
    "BEAT_SECONDS": 0.5,
    "ALERTS": {{"mail": ["ops@example.com"]}},
}}
EMAIL_BACKEND = "django.core.mail.backends.dummy.EmailBackend"
"""
# As the page on failpoints has it.
TEST_SETTINGS = """
from django_asyncq.testing import arm_from_environment
from shop.settings import *
arm_from_environment()
"""
TASKS = """
from django_asyncq import every, task
@task
def send_receipt(order_id): ...
@task
def send_letter(order_id=0): ...
@task(inbox=True, queue_name="mails")
def send_mail(user_id): ...
@task
def charge(order_id=0):
    if order_id == 2:
        raise ConnectionError("the provider is down")
    if order_id == 3:
        raise TimeoutError("the provider is slow")
@task(schedule=every(seconds=3600, name="nightly"))
def report(): ...
@task(rate="600/m", rate_per="maps", burst=50)
def fetch(path): ...
"""


class Command(NamedTuple):
    """A command of a page, without its comment. is_typed: in a block of a shell, not in prose or in a file."""

    page: str
    text: str
    is_typed: bool = True


def commands() -> Iterator[Command]:
    """Yield the commands of all pages, those of a page in their order."""
    for path in PAGES:
        page = path.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/").removeprefix("guides/")
        written = path.read_text()
        for indent, language, block in BLOCK.findall(written):
            for line in block.replace("\\\n", " ").splitlines():
                text = re.sub(r"\s+#.*", "", line.removeprefix(indent)).strip()
                if language == "sh" and text:
                    yield Command(page, text)
                # What Docker runs in a container can be run without one.
                if (found := MANAGE.search(text)) and (language in FILES or text.startswith("docker ")):
                    yield Command(page, of_manage(found[0].partition(" >")[0]), is_typed=False)
        for span in re.findall(r"`([^`]+)`", BLOCK.sub("", written)):
            if PROGRAMS.match(text := " ".join(span.split())):
                yield Command(page, of_manage(text), is_typed=False)


def of_manage(text: str) -> str:
    """Return a command with the Python that calls a `manage.py` which stands alone."""
    return f"python {text}" if text.startswith("manage.py ") else text


def elsewhere(command: Command) -> str:
    """Return what runs a command instead of this; "" if it is run here."""
    if command.is_typed and command.page in FOLLOWED:
        return FOLLOWED[command.page]
    return next((where for start, where in ELSEWHERE.items() if command.text.startswith(start)), "")


class Project:
    """A project in a folder, with a Redis."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder = folder
        self.fleets = 0
        self.address = redis_url.rpartition("/")[0]
        (folder / "shop").mkdir()
        framework = "" if django_version() >= (6, 0) else '"django_tasks",'
        settings = SETTINGS.format(framework=framework, folder=folder, redis=redis_url)
        for name, text in {
            "shop/__init__.py": "",
            "shop/settings.py": settings,
            "shop/test_settings.py": TEST_SETTINGS,
            "shop/tasks.py": TASKS,
            "manage.py": "import sys\nfrom django.core.management import execute_from_command_line\n"
            "if __name__ == '__main__':\n    execute_from_command_line(sys.argv)\n",
        }.items():
            (folder / name).write_text(text)
        # A tool of Redis that may not be installed.
        (folder / "redis-cli").write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {redis_url} "$@"\n')
        (folder / "redis-cli").chmod(0o755)
        path = f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        os.environ.update(DJANGO_SETTINGS_MODULE="shop.settings", PYTHONPATH=f"{folder}{os.pathsep}{ROOT}", PATH=path)
        os.environ.pop("DATABASE_URL", None)
        sys.path.insert(0, str(folder))
        os.chdir(folder)

    def run(self, text: str) -> str:
        """Run a command; return what is wrong with how it ended, "" for nothing."""
        words = shlex.split(text)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        if not text.startswith("export ") and words[:2] != ["python", "manage.py"] and words[:1] != ["redis-cli"]:
            return "a kind of command that is not run here: run it elsewhere, and say so in ELSEWHERE"
        words = shlex.split(text)
        if "runworkers" in words and "--burst" not in words:
            return self.run_until_stopped(text)
        if words[:2] != ["python", "manage.py"] or "--burst" in words:
            return self.run_in_shell(text)
        return self.manage(words[1:])

    def manage(self, words: list[str]) -> str:
        """Run `manage.py` in this process."""
        from django.core.management import execute_from_command_line

        printed = io.StringIO()
        stdin, sys.stdin = sys.stdin, Terminal("yes\n" * 5)
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                execute_from_command_line(words)
        except SystemExit as error:
            return "" if error.code in (None, 0) else f"exit code {error.code}: {printed.getvalue()}"
        finally:
            sys.stdin = stdin
        return ""

    def run_in_shell(self, text: str) -> str:
        """Run a command that ends. One that is killed by a failpoint must say so, and any other succeed."""
        if text.startswith("export "):
            os.environ.update([text.removeprefix("export ").split("=", 1)])
            return ""
        done = subprocess.run(
            ["bash", "-c", text], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )
        if "ASYNCQ_CRASH=" in text:
            return "" if "kills itself" in done.stderr else f"it was not killed: {done.stderr}"
        return "" if done.returncode == 0 else f"exit code {done.returncode}: {done.stdout}{done.stderr}"

    def run_until_stopped(self, text: str) -> str:
        """Run workers until they are ready, and stop them in order."""
        with self.fleet(text):
            return ""

    @contextlib.contextmanager
    def fleet(self, text: str) -> Iterator[None]:
        """Have workers beside what is done within. Raises: RuntimeError when they are not ready, or do not stop."""
        self.fleets += 1
        log = self.folder / f"workers-{self.fleets}.log"
        with log.open("w") as output:
            process = subprocess.Popen(["bash", "-c", f"exec env {text}"], stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while "Ready." not in log.read_text():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"no workers are ready: {log.read_text()}")
                time.sleep(0.05)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(PATIENCE_SECONDS)
        if code:
            raise RuntimeError(f"exit code {code}: {log.read_text()}")


class Terminal(io.StringIO):
    """Somebody at a terminal."""

    def isatty(self) -> bool:
        """Whether it is one."""
        return True


def django_version() -> tuple[Any, ...]:
    """Return Django's version."""
    import django

    return django.VERSION


def prepare(project: Project) -> dict[str, str]:
    """Make tables and tasks; return what stands for the words in capitals of the pages."""
    project.manage(["manage.py", "migrate", "-v", "0"])
    from shop.tasks import charge, send_letter  # type: ignore[import-not-found]

    from django_asyncq.models import TaskRecord

    results = [charge.enqueue(number) for number in (1, 2, 3)]
    for _ in range(2):
        send_letter.enqueue()
    project.run_in_shell("python manage.py runworkers --burst")
    letter = TaskRecord.objects.filter(name=send_letter.module_path).first()
    TaskRecord.objects.filter(id=letter.id).update(id="0198c7a2-6f5e-7cc1-9a50-3f8a1de0c6b4")
    newest = max(path.stem for path in (ROOT / "django_asyncq" / "migrations").glob("[0-9]*.py"))
    return {"ID": str(results[0].id), "POD": "host1", "<number>": newest}


def here(text: str, places: dict[str, str]) -> str:
    """Return a command with what is in this project in the place of the words in capitals."""
    nouns = {"gates": "gpt-large", "schedules": "nightly", "queues": "default"}
    words = text.split()
    names = {"NAME": nouns[words[words.index("NAME") - 2]]} if "NAME" in words else {}
    for place, name in {**places, **names}.items():
        text = re.sub(rf"(?<!\S){place}(?!\S)", name, text)
    return text


def run_here() -> list[Command]:
    """Return the commands that are run here, each once."""
    first: dict[str, Command] = {}
    for command in commands():
        if not elsewhere(command):
            first.setdefault(command.text, command)
    return list(first.values())


def main() -> None:
    """Run every command that is run here, and print what became of it."""
    from django_asyncq.testing.redis_server import EmbeddedRedis

    with tempfile.TemporaryDirectory() as temporary, EmbeddedRedis() as server:
        project = Project(Path(temporary), server.url)
        places = prepare(project)
        with project.fleet("python manage.py runworkers --worker-id host1"):
            for command in run_here():
                text = here(command.text, places).replace(ADDRESS, project.address).replace("/tmp/", f"{temporary}/")
                try:
                    error = project.run(text)
                except BaseException:  # noqa: BLE001 - the test shows it
                    error = traceback.format_exc()
                print(json.dumps({"page": command.page, "command": command.text, "error": error}), flush=True)


def redis_cli(url: str, words: list[str]) -> None:
    """Send a command of Redis, as `redis-cli` does."""
    import redis

    print(redis.Redis.from_url(url).execute_command(*words))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        redis_cli(sys.argv[1], sys.argv[2:])
    else:
        main()

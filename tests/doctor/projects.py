"""Small projects for the doctor to read, and snippets that use what an entry of its tables is about."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from django_asyncq.doctor.examination import examine
from django_asyncq.doctor.findings import Finding, Report
from django_asyncq.doctor.printing import VOCABULARIES
from django_asyncq.doctor.vocabulary import Use, Vocabulary


def write(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files below a folder, and return it."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def report_on(queue: str, folder: Path, files: Mapping[str, str | bytes]) -> Report:
    """Return what the doctor says of a project of these files."""
    return examine(VOCABULARIES[queue], write(folder, files))


def findings_of(queue: str, folder: Path, source: str, file: str = "shop/tasks.py") -> list[Finding]:
    """Return what the doctor says of one file."""
    return list(report_on(queue, folder, {file: source}).findings)


# How a value of each kind is made: the lines before, and the expression.
CELERY = "from celery import Celery, chord, shared_task\n\napp = Celery()\n\n\n@shared_task\ndef work(a): ...\n\n\n"
RQ = "import rq\nimport rq_scheduler\n\nqueue = rq.Queue()\n\n\n@rq.job\ndef work(a): ...\n\n\n"
HUEY = "import huey\n\nqueue = huey.RedisHuey()\n\n\n@queue.task()\ndef work(a): ...\n\n\n"
DRAMATIQ = "import dramatiq\n\n\n@dramatiq.actor\ndef work(a): ...\n\n\n"
KINDS: dict[str, dict[str, tuple[str, str]]] = {
    "celery": {
        "Task": (CELERY, "work"),
        "App": (CELERY, "app"),
        "Signature": (CELERY, "work.s(1)"),
        "Chord": (CELERY, "chord([work.s(1)])"),
        "AsyncResult": (CELERY, "work.delay(1)"),
        "Inspect": (CELERY, "app.control.inspect()"),
        "Connection": (CELERY, "app.connection()"),
    },
    "rq": {
        "Task": (RQ, "work"),
        "Queue": (RQ, "queue"),
        "Job": (RQ, "work.delay(1)"),
        "Worker": (RQ, "rq.Worker()"),
        "Scheduler": (RQ, "rq_scheduler.Scheduler()"),
    },
    "huey": {
        "Task": (HUEY, "work"),
        "Huey": (HUEY, "queue"),
        "Signature": (HUEY, "work.s(1)"),
        "Result": (HUEY, "work(1)"),
        "djhuey": ("from huey.contrib import djhuey\n\n", "djhuey"),
    },
    "dramatiq": {
        "Task": (DRAMATIQ, "work"),
        "Signature": (DRAMATIQ, "work.message(1)"),
        "Result": (DRAMATIQ, "work.send(1)"),
        "Broker": (DRAMATIQ, "dramatiq.get_broker()"),
    },
    "q2": {"AsyncTask": ("from django_q.tasks import AsyncTask\n\n", "AsyncTask(work)")},
}
# A chain of two steps in each vocabulary.
CHAINS = {
    "celery": f"{CELERY}from celery import chain\n\nchain(work.s(1), work.s())\n",
    "dramatiq": f"{DRAMATIQ}dramatiq.pipeline([work.message(1), work.message()])\n",
}
STARTS = {
    "celery": "celery -A shop {}",
    "rq": "python manage.py {}",
    "huey": "python manage.py {}",
    "dramatiq": "python manage.py {}",
    "q2": "python manage.py {}",
}
ANY = "anything"


def expression(vocabulary: Vocabulary, path: str) -> tuple[str, str]:
    """Return the lines before and the expression that has this path."""
    start, rest = (found[1], found[2]) if (found := re.match(r"(\w+)(.*)", path)) else (path, "")
    before, made = KINDS[vocabulary.name].get(start, (f"import {start}\n\n", start))
    rest = rest.replace("[]", '["x"]').removesuffix("*")
    rest = f"{rest}{ANY}" if rest.endswith(".") else rest
    return before, f"{made} | {made}" if rest == "|" else f"{made}{rest}"


def setting_source(vocabulary: Vocabulary, name: str, value: str = "None") -> str:
    """Return an assignment to a setting, by its name within "settings"; keys of dictionaries behind a dot."""
    first, *keys = name.split(".")
    for key in reversed(keys):
        value = f'{{"{ANY if key == "*" else key}": {value}}}'
    return f"{f'CELERY_{first.upper()}' if vocabulary.name == 'celery' else first} = {value}\n"


def snippet(vocabulary: Vocabulary, path: str) -> tuple[str, str]:
    """Return a file and its text that use what an entry of the tables is about."""
    kind, _, name = path.partition(" ")
    if path == "migration":
        app = next(each for each in vocabulary.uses if re.fullmatch(r"app \w+", each)).removeprefix("app ")
        return "migrations/0001_initial.py", f'dependencies = [("{app}", "0001_initial")]\n'
    if path.startswith("settings."):
        return "settings.py", setting_source(vocabulary, path.removeprefix("settings."), "{}")
    if kind == "class":
        return "classes.py", class_source(vocabulary, name)
    if name.startswith("celery-") and kind == "command":
        return "run.sh", f"{STARTS['celery'].format(name.removeprefix('celery-'))}\n"
    if kind == "command":
        return "commands.py", f'from django.core.management import call_command\n\ncall_command("{name}")\n'
    if kind == "package":
        return "requirements.txt", f"{name}>=1.0\n"
    if kind == "fixture":
        return "test_a.py", f"import celery\n\n\ndef test_a({name}): ...\n"
    if kind == "app":
        return "settings.py", f'INSTALLED_APPS = ["{name}"]\n'
    if path.endswith(">"):
        return "chain.py", CHAINS[vocabulary.name]
    before, text = expression(vocabulary, path.removesuffix(":"))
    return "use.py", f"{before}def f(a: {text}): ...\n" if path.endswith(":") else f"{before}{text}\n"


def class_source(vocabulary: Vocabulary, name: str) -> str:
    """Return a class that derives from a class of the other queue, with the member that its entry names."""
    parts = name.split(".")
    member = ""
    if f"class {'.'.join(parts[:-1])}" in vocabulary.uses and parts[-1] != "*":
        *parts, member = parts
    base = ".".join([*parts[:-1], "Anything"] if parts[-1] == "*" else parts)
    before, text = expression(vocabulary, base)
    return f"{before}class Own({text}):\n    {f'{member} = None' if member else '...'}\n"


def with_option(vocabulary: Vocabulary, path: str, use: Use, option: str) -> tuple[str, str]:
    """Return a file and its text that use an entry of the tables with one of its options."""
    name, _, value = option.partition("=")
    if path.startswith("command "):
        verb = path.removeprefix("command ").removeprefix("celery-")
        return "run.sh", f"{STARTS[vocabulary.name].format(verb)} {option} 7\n"
    if path.startswith("settings."):
        key = path.removeprefix("settings.")
        if not name:
            return "settings.py", setting_source(vocabulary, key, value)
        return "settings.py", setting_source(vocabulary, key, f'{{"{name}": {value or "seven"}}}')
    before, text = expression(vocabulary, path.removesuffix("()"))
    return "use.py", f"{before}{text}({name}={value or 'seven'})\n"


__all__ = ["VOCABULARIES", "findings_of", "report_on", "snippet", "with_option", "write"]

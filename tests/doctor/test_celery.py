"""Celery's uses as projects write them: the verdict, the line number and the line to write."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from django_asyncq import task
from django_asyncq.doctor.findings import Verdict

from .projects import findings_of, report_on

MAPS, BUT, NOT, UNKNOWN = Verdict.MAPS, Verdict.BUT, Verdict.NOT, Verdict.UNKNOWN
TASKS = """from celery import shared_task

@shared_task
def send(order_id): ...

"""

# The source behind TASKS, and of its last finding the verdict and the line.
LINES = [
    ("send.delay(7)", MAPS, "send.enqueue(7)"),
    ("send.delay(7, kind='a')", MAPS, 'send.enqueue(7, kind="a")'),
    ("send.apply_async((7,), countdown=60, queue='m')", MAPS,
     'send.using(run_after=timedelta(seconds=60), queue_name="m").enqueue(7)'),
    ("send.apply_async(args=[7], kwargs={'a': 1})", MAPS, "send.enqueue(7, a=1)"),
    ("send.apply_async(args=args, kwargs=kwargs)", MAPS, "send.enqueue(*args, **kwargs)"),
    ("send.apply_async((7,), eta=moment, expires=60)", MAPS, "send.using(run_after=moment, expires=60).enqueue(7)"),
    ("send.apply_async((7,), priority=3)", BUT, "send.using(priority=3).enqueue(7)"),
    ("send.apply_async((7,), link=send.s())", NOT, "send.enqueue(7)"),
    ("send.apply_async((7,), quux=1)", UNKNOWN, "send.enqueue(7)"),
    ("send.apply_async((7,), **{'countdown': 5})", MAPS, "send.using(run_after=timedelta(seconds=5)).enqueue(7)"),
    ("send.apply_async((7,), **given)", UNKNOWN, "send.enqueue(7)"),
    ("send.delay(timezone.now())", BUT, "send.enqueue(timezone.now())"),
    ("send.apply_async((Order.objects.get(pk=7),))", BUT, "send.enqueue(Order.objects.get(pk=7))"),
    ("send(7)", BUT, "send.func(7)"),
    ("send.quux", UNKNOWN, ""),
    ("send.delay(7).get(timeout=3)", BUT, "send.enqueue(7).wait(timeout=3)"),
    ("result = send.delay(7)\nresult.state", BUT, "result.status"),
    ("import celery as c\nc.chain(send.s(1), send.s())()", BUT,
     'chain(send.step(1), send.using(after={"order_id": previous}).step()).enqueue()'),
    ("(send.s(1) | send.si(2)).delay()", BUT, "chain(send.step(1), send.step(2)).enqueue()"),
    ("from celery import group\ngroup(send.s(i) for i in ids).apply_async()", BUT,
     "group([send.step(i) for i in ids]).enqueue()"),
    ("from celery import chord\nchord([send.s(1), send.s(2)])(send.s())", BUT,
     "group([send.step(1), send.step(2)], then=send.step()).enqueue()"),
    ("from celery.schedules import crontab\ncrontab(minute=0, hour=6)", MAPS, 'cron("0 6 * * *")'),
    ("from celery.schedules import crontab\ncrontab(day_of_week='sunday', hour='*/3')", MAPS, 'cron("* */3 * * SUN")'),
    ("from celery.schedules import crontab\ncrontab(day_of_week=1, day_of_month=2)", BUT, 'cron("* * 2 * 1")'),
    ("from celery.schedules import crontab\ncrontab(minute=n)", BUT, 'cron("… … … … …")'),
    ("from celery.schedules import solar\nsolar('sunset', 1, 2)", NOT, ""),
    ("from celery import current_app as a\na.control.revoke(id, terminate=True)", BUT, "task.get_result(id).cancel()"),
    ("from celery import current_app as a\na.send_task('shop.send', args=(7,))", BUT, "send.enqueue(7)"),
    ("CELERY_TASK_ROUTES = ([('shop.*', {'queue': 'm'})],)", MAPS, ""),
    ("from django.db import transaction\ntransaction.on_commit(lambda: send.delay(7))", MAPS, "send.enqueue(7)"),
    ("from celery.signals import task_failure\ntask_failure.connect(f)", BUT, "@receiver(task_failed)"),
    ("other.apply_async((7,))", UNKNOWN, "other.enqueue(7)"),
    ("from celery.nowhere import quux\nquux(7)", UNKNOWN, ""),
    ("from celery import *", UNKNOWN, ""),
]  # fmt: skip


@pytest.mark.parametrize(("source", "verdict", "write"), LINES, ids=[source[-40:] for source, _, _ in LINES])
def test_a_use_has_its_verdict_and_its_line(source: str, verdict: Verdict, write: str, tmp_path: Path) -> None:
    """The last line of the source is found, and what is found first on it is the whole of it."""
    number = len(f"{TASKS}{source}".split("\n"))
    first = next(each for each in findings_of("celery", tmp_path, f"{TASKS}{source}\n") if each.line == number)
    if "lambda" in source:
        assert [note.about for note in first.notes] == ["on_commit"]
    assert (first.verdict, first.write) == (verdict, write)


DECLARATIONS = [
    ("", MAPS, "@task"),
    ("(bind=True, max_retries=3)", BUT, "@task(takes_context=True, max_attempts=4)"),
    ("(max_retries=n)", BUT, "@task(max_attempts=n + 1)"),
    ("(max_retries=None)", BUT, "@task(max_attempts=1_000_000)"),
    ("(bind=False, acks_late=True)", MAPS, "@task"),
    ("(acks_late=False)", BUT, "@task"),
    ("(autoretry_for=(OSError,))", BUT, "@task(retry_on=(OSError,), max_attempts=4)"),
    ("(autoretry_for=(OSError,), retry_kwargs={'max_retries': 5, 'countdown': 9})", BUT,
     "@task(retry_on=(OSError,), max_attempts=6, backoff=timedelta(seconds=9))"),
    ("(rate_limit='10/m', queue='m')", BUT, '@task(rate="10/m", queue_name="m")'),
    ("(rate_limit=10)", BUT, '@task(rate="10/s")'),
    ("(rate_limit=0.5)", BUT, '@task(rate="30/m")'),
    ("(rate_limit=0.01)", BUT, '@task(rate="36/h")'),
    ("(serializer='json', ignore_result=False)", MAPS, "@task"),
    ("(serializer='pickle')", NOT, "@task"),
    ("(base=Own)", NOT, "@task"),
    ("(quux=1)", UNKNOWN, "@task"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "verdict", "write"), DECLARATIONS, ids=[each[0] for each in DECLARATIONS])
def test_a_declaration_keeps_its_options(options: str, verdict: Verdict, write: str, tmp_path: Path) -> None:
    """They are those of `@task`, filled from the source."""
    source = f"from celery import shared_task as st\n\n\n@st{options}\ndef f(a): ...\n"
    (found,) = findings_of("celery", tmp_path, source)
    assert (found.line, found.source, found.verdict, found.write) == (
        4,
        f"@st{options}".replace("'", '"'),
        verdict,
        write,
    )


def test_a_lines_options_can_be_declared() -> None:
    """The lines of the declarations above are accepted by the real decorator."""
    for _, verdict, write in DECLARATIONS:
        if verdict in (MAPS, BUT):
            options = eval(
                write.removeprefix("@").replace("task", "dict", 1) + ("" if "(" in write else "()"),
                {"timedelta": timedelta, "n": 3},
            )  # its own
            assert isinstance(task(**options), partial)


PROJECT = {
    "manage.py": "",
    "proj/__init__.py": "from .celery import app as celery_app\n",
    "proj/celery.py": "from celery import Celery\n\napp = Celery('proj')\napp.autodiscover_tasks()\n",
    "shop/__init__.py": "from .tasks import *\n",
    "shop/tasks.py": (
        "from proj import celery_app\n\n\n@celery_app.task(bind=True)\ndef send(self, a):\n"
        "    self.update_state(state='X')\n    raise self.retry(countdown=2 ** self.request.retries)\n"
    ),
    "shop/views.py": "import shop\n\n\ndef view(request):\n    shop.send.delay(1)\n",
    "shop/other.py": "from shop import send as mail\n\nmail.delay(2)\n",
    "shop/unrelated.py": "def delay(): ...\n",
    "shop/tests.py": "from unittest import mock\n\n\n@mock.patch('shop.tasks.send.delay')\ndef test(_): ...\n",
}


def test_names_are_followed_from_module_to_module(tmp_path: Path) -> None:
    """Through relative imports, aliases, star imports and packages; a task keeps what it is."""
    report = report_on("celery", tmp_path, PROJECT)
    found = {(each.file, each.line): each.write for each in report.findings}
    assert found["shop/views.py", 5] == "shop.send.enqueue(1)"
    assert found["shop/other.py", 3] == "mail.enqueue(2)"
    assert found["shop/tests.py", 4] == "shop.tasks.send.enqueue(…)"
    assert found["shop/tasks.py", 4] == "@task(takes_context=True)"
    assert "context.attempt - 1" in found["shop/tasks.py", 7]
    assert report.by_verdict()[UNKNOWN] == 0
    assert not [each for each in report.findings if each.file == "shop/unrelated.py"]


def test_an_app_that_cannot_be_seen_is_known_by_what_is_called_on_it(tmp_path: Path) -> None:
    """Such as one whose class is named by a setting."""
    source = "app = make()\napp.autodiscover_tasks()\n\n\n@app.task\ndef f(): ...\n\n\nf.delay()\n"
    found = findings_of("celery", tmp_path, source)
    assert [each.write for each in found] == ["", "@task", "f.enqueue()"]


def test_a_schedule_in_the_settings_becomes_options_of_its_tasks(tmp_path: Path) -> None:
    """Each entry of the dictionary is a use; a number is an interval in seconds."""
    source = (
        "from celery.schedules import crontab\n\nCELERY_BEAT_SCHEDULE = {\n"
        "    'a': {'task': 'shop.tasks.send', 'schedule': 10.0},\n"
        "    'b': {'task': 'shop.tasks.send', 'schedule': crontab(minute=5), 'quux': 1},\n}\n"
        "CELERY_TASK_ROUTES = {'shop.*': {'queue': 'm'}}\nCELERY_QUUX = 1\nCELERYD_CONCURRENCY = 8\n"
    )
    found = {
        each.line: each for each in findings_of("celery", tmp_path, source, "settings.py") if "crontab" not in each.use
    }
    assert found[4].write == '@task(schedule=every(seconds=10.0))  # "shop.tasks.send"'
    assert (found[5].write, found[5].verdict) == ('@task(schedule=cron("5 * * * *"))  # "shop.tasks.send"', UNKNOWN)
    assert found[7].use == "settings.task_routes.*" and found[7].write == '@task(queue_name="m")'
    assert (found[8].use, found[8].verdict) == ("settings.quux", UNKNOWN)
    assert found[9].use == "settings.worker_concurrency"


def test_settings_are_found_wherever_they_are_named(tmp_path: Path) -> None:
    """As an attribute, a keyword, a text, a key of the app's configuration, and in an environment."""
    files = {
        "shop/a.py": "from django.conf import settings\n\nsettings.CELERY_TASK_ALWAYS_EAGER\ngetattr(settings, "
        "'CELERY_TIMEZONE')\n",
        "shop/b.py": "override_settings(CELERY_TASK_ALWAYS_EAGER=True)\n",
        "shop/c.py": "from celery import "
        "current_app\n\ncurrent_app.conf.update(timezone='UTC')\ncurrent_app.conf['enable_utc'] = 1\n",
        ".env": "CELERY_BROKER_URL=redis://x\n",
    }
    found = {(each.file, each.line): each.use for each in report_on("celery", tmp_path, files).findings}
    assert found["shop/a.py", 3] == found["shop/b.py", 1] == "settings.task_always_eager"
    assert found["shop/a.py", 4] == found["shop/c.py", 3] == "settings.timezone"
    assert found["shop/c.py", 4] == "settings.enable_utc"
    assert found[".env", 1] == "settings.broker_url"


COMMANDS = [
    ("Procfile", "worker: celery -A proj worker -c 8 -Q a,b --loglevel=INFO",
     "python manage.py runworkers --processes 8 --concurrency 1 --queues a,b"),
    ("deploy.service", "ExecStart=/srv/venv/bin/celery -A proj worker --max-tasks-per-child=100",
     "python manage.py runworkers --max-tasks 100"),
    ("compose.yml", '    command: ["celery", "-A", "proj", "worker", "-c4"]',
     "python manage.py runworkers --processes 4 --concurrency 1"),
    ("run.sh", "exec celery -A proj beat -s /tmp/x && true", ""),
    ("run.sh", "celery -A proj worker --quux 3", "python manage.py runworkers"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "line", "write"), COMMANDS, ids=[file for file, _, _ in COMMANDS])
def test_a_command_line_keeps_its_options(file: str, line: str, write: str, tmp_path: Path) -> None:
    """In the forms of process managers and shells; an unknown option is said to be."""
    (found,) = findings_of("celery", tmp_path, f"# celery -A x worker\n{line}\n", file)
    assert (found.line, found.write) == (2, write)
    assert ("--quux" in line) == (found.verdict == UNKNOWN)


def test_a_command_in_a_list_of_words_is_one(tmp_path: Path) -> None:
    """As a container's command in YAML."""
    text = "command:\n  - celery\n  - -A\n  - proj\n  - worker\n  - --concurrency=2\nother:\n  - x\n"
    (found,) = findings_of("celery", tmp_path, text, "compose.yaml")
    assert (found.line, found.write) == (2, "python manage.py runworkers --processes 2 --concurrency 1")


def test_an_import_is_a_use_where_the_name_is_not_used(tmp_path: Path) -> None:
    """So nothing that comes from the other queue is passed over."""
    source = "from celery import shared_task, quux\nimport kombu.nowhere\nfrom celery import chain\n"
    found = findings_of("celery", tmp_path, source)
    assert {each.line: each.verdict for each in found} == {1: UNKNOWN, 2: NOT, 3: BUT}


def test_a_class_of_tasks_is_found_with_its_hooks(tmp_path: Path) -> None:
    """Also when it derives from another one of the project."""
    source = (
        "from celery import Task\n\n\nclass Base(Task):\n    max_retries = 3\n\n    def on_failure(self, *args):\n"
        "        return self.request.id\n\n\nclass Own(Base):\n    def run(self): ...\n"
    )
    found = {each.line: each.use for each in findings_of("celery", tmp_path, source)}
    assert found == {
        4: "class celery.Task", 5: "class celery.Task.max_retries", 7: "class celery.Task.on_failure",
        8: "Task.request.id", 12: "class celery.Task.run",
    }  # fmt: skip

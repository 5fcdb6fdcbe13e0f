"""The uses of RQ, huey, dramatiq and django-q2 as projects write them: the verdict, the line number and the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from django_asyncq.doctor.findings import Verdict

from ..project.test_coming_from import FOLDER, blocks
from .projects import findings_of, report_on

MAPS, BUT, NOT, UNKNOWN = Verdict.MAPS, Verdict.BUT, Verdict.NOT, Verdict.UNKNOWN
RQ = (
    "import django_rq\nfrom datetime import timedelta\nfrom django_rq import job\nfrom rq import "
    "Retry\n\n@job\ndef send(a): ...\n\n"
)
HUEY = "from huey import crontab\nfrom huey.contrib.djhuey import db_task\n\n@db_task()\ndef send(a): ...\n\n"
DRAMATIQ = "import dramatiq\n\n@dramatiq.actor(max_retries=0, time_limit=1000)\ndef send(a): ...\n\n"
Q2 = "from django_q.tasks import async_task, schedule, result\nfrom shop.tasks import send\n\n"

LINES = [
    ("rq", RQ, "send.delay(7)", MAPS, "send.enqueue(7)"),
    ("rq", RQ, "django_rq.enqueue(send, 7, job_timeout=60)", BUT, "send.using(timeout=60).enqueue(7)"),
    ("rq", RQ, "django_rq.get_queue('m').enqueue_in(timedelta(days=1), send, 7)", BUT,
     "send.using(run_after=timedelta(days=1)).enqueue(7)"),
    ("rq", RQ, "django_rq.enqueue(send, retry=Retry(max=4, interval=10))", BUT,
     "send.using(max_attempts=5, backoff=10).enqueue()"),
    ("rq", RQ, "django_rq.enqueue(send, retry=other)", BUT, "send.enqueue()"),
    ("rq", RQ, "django_rq.enqueue(send, depends_on=[a, b])", BUT, "send.using(after=[a, b]).enqueue()"),
    ("rq", RQ, "django_rq.enqueue(send, depends_on=a, on_failure=f)", NOT, "send.using(after=[a]).enqueue()"),
    ("rq", RQ, "django_rq.enqueue(send, at_front=True)", BUT, "send.using(priority=100).enqueue()"),
    ("rq", RQ, "from rq import get_current_job\nget_current_job()", BUT, "current_task()"),
    ("rq", RQ, "from rq import cron\ncron.register(send, 'default', cron='0 6 * * *')", BUT,
     '@task(schedule=cron("0 6 * * *"))'),
    ("rq", RQ, "django_rq.quux()", UNKNOWN, ""),
    ("rq", RQ, "RQ_QUEUES = {'default': {'URL': 'redis://x'}, 'm': {'QUUX': 1}}", UNKNOWN, 'ASYNCQ = {"REDIS": …}'),
    ("huey", HUEY, "send(7)", BUT, "send.enqueue(7)"),
    ("huey", HUEY, "send.schedule(args=(7,), delay=60)", MAPS,
     "send.using(run_after=timedelta(seconds=60)).enqueue(7)"),
    ("huey", HUEY, "send.call_local(7)", MAPS, "send.func(7)"),
    ("huey", HUEY, "send.s(1).then(send, 2)", BUT, "chain(send.step(1), send, 2)"),
    ("huey", HUEY, "crontab(minute='0', hour='6')", MAPS, 'cron("0 6 * * *")'),
    ("huey", HUEY, "crontab(day='1', day_of_week='1')", BUT, 'cron("* * 1 * 1")'),
    ("huey", HUEY, "@db_task(retries=4, retry_delay=10)\ndef f(): ...", BUT, "@task(max_attempts=5, backoff=10)"),
    ("huey", HUEY, "from huey.contrib import djhuey as h\n@h.db_periodic_task(crontab(minute='1'))\ndef f(): ...", MAPS,
     '@task(schedule=cron("1 * * * *"))'),
    ("huey", HUEY, "from huey.exceptions import RetryTask\nRetryTask(delay=30)", BUT, "context.retry(in_=30)"),
    ("huey", HUEY, "HUEY = {'consumer': {'quux': 4}}", UNKNOWN, ""),
    ("dramatiq", DRAMATIQ, "send.send(7)", MAPS, "send.enqueue(7)"),
    ("dramatiq", DRAMATIQ, "send.send_with_options(args=(7,), delay=60_000)", MAPS,
     "send.using(run_after=timedelta(seconds=60)).enqueue(7)"),
    ("dramatiq", DRAMATIQ, "@dramatiq.actor\ndef f(): ...", BUT, "@task(max_attempts=21)"),
    ("dramatiq", DRAMATIQ, "@dramatiq.actor(max_retries=4, priority=3, time_limit=5000)\ndef f(): ...", BUT,
     "@task(max_attempts=5, priority=-3, timeout=5)"),
    ("dramatiq", DRAMATIQ, "dramatiq.pipeline([send.message(1), send.message()]).run()", MAPS,
     'chain(send.step(1), send.using(after={"a": previous}).step()).enqueue()'),
    ("dramatiq", DRAMATIQ, "dramatiq.group([send.message(1), send.message(2)])", MAPS,
     "group([send.step(1), send.step(2)])"),
    ("dramatiq", DRAMATIQ, "send.send(7).get_result(block=True, timeout=3000)", BUT, "send.enqueue(7).wait(timeout=3)"),
    ("dramatiq", DRAMATIQ, "class M(dramatiq.Middleware):\n    def before_enqueue(self): ...", BUT, ""),
    ("q2", Q2, "async_task('shop.tasks.send', 7)", BUT, "send.enqueue(7)"),
    ("q2", Q2, "async_task(send, 7, timeout=3, group='m')", BUT, "send.using(timeout=3).enqueue(7)"),
    ("q2", Q2, "async_task(send, 7, hook=f)", NOT, "send.enqueue(7)"),
    ("q2", Q2, "schedule('shop.tasks.send', cron='0 6 * * *')", BUT, '@task(schedule=cron("0 6 * * *"))  # send'),
    ("q2", Q2, "result(id, 200)", BUT, "task.get_result(id).wait(timeout=0.2)"),
    ("q2", Q2, "Q_CLUSTER = {'workers': 4}", BUT, 'ASYNCQ = {"PROCESSES": 4, "CONCURRENCY": 1}'),
    ("q2", Q2, "Q_CLUSTER = {'quux': 4}", UNKNOWN, ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("queue", "before", "source", "verdict", "write"), LINES, ids=[f"{each[0]} {each[2][-45:]}" for each in LINES]
)
def test_a_use_has_its_verdict_and_its_line(
    queue: str, before: str, source: str, verdict: Verdict, write: str, tmp_path: Path
) -> None:
    """The last use in the source; of a chain of calls the whole of it; of settings the last key."""
    lines = f"{before}{source}".split("\n")
    number = len(lines) - (lines[-1].startswith("def f"))
    found = [each for each in findings_of(queue, tmp_path, f"{before}{source}\n") if each.line == number]
    finding = found[-1] if source[:2].isupper() else found[0]
    assert (finding.verdict, finding.write) == (verdict, write)


COMMANDS = [
    ("rq", "python manage.py rqworker default --max-jobs 5 --with-scheduler",
     "python manage.py runworkers --max-tasks 5"),
    ("rq", "rqworker-pool -n 3", "python manage.py runworkers --processes 3 --concurrency 1"),
    ("huey", "python manage.py run_huey -w 4 -k process", "python manage.py runworkers --processes 4 --concurrency 1"),
    ("dramatiq", "python manage.py rundramatiq --processes 2 --threads 8",
     "python manage.py runworkers --processes 2 --concurrency 8"),
    ("q2", "python manage.py qcluster --run-once", "python manage.py runworkers --burst"),
]  # fmt: skip


@pytest.mark.parametrize(("queue", "line", "write"), COMMANDS)
def test_a_command_line_keeps_its_options(queue: str, line: str, write: str, tmp_path: Path) -> None:
    """In the words of `runworkers`."""
    (found,) = findings_of(queue, tmp_path, f"worker: {line}\n", "Procfile")
    assert (found.line, found.write) == (1, write)


def test_a_call_of_a_task_is_found_in_a_module_that_does_not_name_the_queue(tmp_path: Path) -> None:
    """Its tree is read since it imports the task, also through a module between."""
    files = {
        "shop/tasks.py": HUEY,
        "shop/__init__.py": "",
        "shop/api.py": "from shop.tasks import send as mail\n",
        "shop/views.py": "from shop.api import mail\n\nmail(7)\n",
        "shop/other.py": "import shop.tasks as t\nfrom . import tasks\n\nt.send(8)\ntasks.send(9)\n",
        "shop/unrelated.py": "def send(a): ...\n\n\nsend(7)\n",
    }
    found = {(each.file, each.line): each.write for each in report_on("huey", tmp_path, files).findings}
    assert found["shop/views.py", 3] == "mail.enqueue(7)"
    assert (found["shop/other.py", 4], found["shop/other.py", 5]) == ("t.send.enqueue(8)", "tasks.send.enqueue(9)")
    assert not [file for file, _ in found if file == "shop/unrelated.py"]


GUIDES = ("django-rq", "huey", "dramatiq", "django-q2", "celery")


@pytest.mark.parametrize("page", GUIDES)
def test_nothing_in_the_guides_is_unknown(page: str, tmp_path: Path) -> None:
    """The other queue's part of each guide "Coming from …" is read as a project: every use of it is in the tables."""
    files: dict[str, str] = {}
    for block in blocks(FOLDER / f"{page}.md"):
        if block.owner not in ("", "both"):
            name = block.text.split("\n")[0].removeprefix("# ").removesuffix(", at the end")
            files[name] = files.get(name, "") + block.text
    report = report_on(page.removeprefix("django-"), tmp_path, files)
    assert [each for each in report.findings if each.verdict == UNKNOWN] == []
    assert len(report.findings) > 5
    assert list(report.unreadable) == []

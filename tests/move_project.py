"""A small project that is moved from Celery and back by `project/test_move.py`: its files, as text.

Its tasks write a row for each run: which call, by which fleet, and when. Celery acknowledges late, and takes what a
dead worker had again after a few seconds. The project has no test settings: both fleets run it as it is, on an SQLite
database in a file.
"""

from __future__ import annotations

import re

# How often the prices are refreshed.
INTERVAL_SECONDS = 3
# After what time Celery delivers again what a killed worker had.
VISIBILITY_SECONDS = 5
MAILS_A_SECOND = 20
# Four boxes are packed after the call with this number: while two are, Celery's worker with its two processes takes
# nothing from its queue.
PACKED = 20
PACK_SECONDS = 1.5

FILES = {
    "manage.py": """
import sys
from django.core.management import execute_from_command_line

if __name__ == "__main__":
    execute_from_command_line(sys.argv)
""",
    "mysite/__init__.py": "from .celery import app as celery_app\n",
    "mysite/celery.py": """
from celery import Celery

app = Celery("mysite")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(related_name="celery_tasks")
""",
    "mysite/settings.py": """
from datetime import datetime
from pathlib import Path

BASE_DIR = Path(__file__).parent.parent
SECRET_KEY = "moved" * 10
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django_celery_beat", "django_asyncq", "shop"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": BASE_DIR / "db.sqlite3",
        "OPTIONS": {
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
        },
    }
}
TASKS = {"default": {"BACKEND": "django_asyncq.backend.AsyncqBackend", "QUEUES": ["default"]}}
ASYNCQ = {"REDIS": "ADDRESS/1", "LEASE_SECONDS": 6, "BEAT_SECONDS": 1, "TASK_LOCK_DIR": str(BASE_DIR / "locks")}
CELERY_BROKER_URL = "ADDRESS/0"
CELERY_BROKER_TRANSPORT_OPTIONS = {"visibility_timeout": VISIBILITY_SECONDS, "unacked_restore_throttle": 1}
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_TASK_IGNORE_RESULT = True
CELERY_WORKER_PREFETCH_MULTIPLIER = 2
CELERY_BEAT_SCHEDULER = "django_celery_beat.schedulers:DatabaseScheduler"
# A deployment of the move: the instant from which the schedules are ours.
deployed = BASE_DIR / "cutover.txt"
CUTOVER = datetime.fromisoformat(deployed.read_text()) if deployed.exists() else None
""",
    "shop/__init__.py": "",
    "shop/models.py": """
from django.db import models


class Run(models.Model):
    call = models.CharField(max_length=80)
    fleet = models.CharField(max_length=10)
    value = models.CharField(max_length=80)
    began_at = models.FloatField()
""",
    "shop/tasks.py": """
import time
from datetime import date
from decimal import Decimal

from django.conf import settings
from django_asyncq import every, task
from django_asyncq.context import current_task

from shop.models import Run


def note(call, value=""):
    began_at, fleet = time.time(), "ours" if current_task() else "celery"
    time.sleep(0.03)
    Run.objects.create(call=call, fleet=fleet, value=value, began_at=began_at)


@task(typed_arguments=True)
def send_receipt(call, day, amount):
    assert (type(day), type(amount)) == (date, Decimal)
    note(call, f"{day:%d.%m.%Y} {amount}")


@task
def reserve(call):
    note(f"{call}:reserve")
    return f"reserved {call}"


@task
def ship(call, reserved):
    note(f"{call}:ship", reserved)


@task
def pack(call):
    time.sleep(PACK_SECONDS)
    note(call)


@task(rate="MAILS_A_SECOND/s")
def send_mail(call):
    note(call)


schedule = every(seconds=INTERVAL_SECONDS, starts_at=settings.CUTOVER, missed="all") if settings.CUTOVER else None


@task(schedule=schedule)
def refresh_prices(message_id=""):
    note(f"refresh {message_id or current_task().task_id}")
""",
    "shop/celery_tasks.py": """
from celery import shared_task

from shop import tasks

send_receipt = shared_task(name="shop.tasks.send_receipt")(tasks.send_receipt.func)
pack = shared_task(name="shop.tasks.pack")(tasks.pack.func)
reserve = shared_task(name="shop.tasks.reserve")(tasks.reserve.func)
send_mail = shared_task(name="shop.tasks.send_mail", rate_limit="MAILS_A_SECOND/s")(tasks.send_mail.func)


@shared_task(name="shop.tasks.ship")
def ship(reserved, call):
    tasks.ship.func(call, reserved)


@shared_task(name="shop.tasks.refresh_prices", bind=True)
def refresh_prices(self):
    tasks.refresh_prices.func(self.request.id)
""",
    "shop/producer.py": """
# `python -m shop.producer FLEET FIRST LAST`: makes calls as the web processes of a release do, and prints each.
import sys
import time
from datetime import date, timedelta
from decimal import Decimal

import django

django.setup()

from celery import chain as celery_chain
from django.db import transaction
from django_asyncq import chain, previous

from shop import celery_tasks, tasks

BOUGHT = (date(2026, 11, 3), Decimal("12.50"))


def by_celery(number):
    receipt, mail = f"celery receipt {number}", f"celery mail {number}"
    celery_tasks.send_receipt.delay_on_commit(receipt, *BOUGHT)
    if number % 5 == 0:
        later = f"celery later {number}"
        celery_tasks.send_receipt.apply_async((later, *BOUGHT), countdown=2)
        yield later
    if number == PACKED:
        for box in range(4):
            celery_tasks.pack.delay(f"celery box {box}")
            yield f"celery box {box}"
    order = f"celery order {number}"
    celery_chain(celery_tasks.reserve.s(order), celery_tasks.ship.s(order)).apply_async()
    celery_tasks.send_mail.delay(mail)
    yield from (receipt, mail, f"{order}:reserve", f"{order}:ship")


def by_us(number):
    receipt, mail = f"ours receipt {number}", f"ours mail {number}"
    tasks.send_receipt.enqueue(receipt, *BOUGHT)
    if number % 5 == 0:
        later = f"ours later {number}"
        tasks.send_receipt.using(run_after=timedelta(seconds=2)).enqueue(later, *BOUGHT)
        yield later
    order = f"ours order {number}"
    chain(tasks.reserve.step(order), tasks.ship.using(after={"reserved": previous}).step(order)).enqueue()
    tasks.send_mail.enqueue(mail)
    yield from (receipt, mail, f"{order}:reserve", f"{order}:ship")


fleet, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for number in range(first, last):
    with transaction.atomic():
        calls = list((by_celery if fleet == "celery" else by_us)(number))
    for call in calls:
        print(call, flush=True)
    time.sleep(0.02)
""",
}


def files(address: str) -> dict[str, str]:
    """Return the text of each file. address: of a Redis, without a database."""
    words = {
        "ADDRESS": address,
        "INTERVAL_SECONDS": INTERVAL_SECONDS,
        "MAILS_A_SECOND": MAILS_A_SECOND,
        "PACKED": PACKED,
        "PACK_SECONDS": PACK_SECONDS,
        "VISIBILITY_SECONDS": VISIBILITY_SECONDS,
    }
    filled = dict(FILES)
    for word, value in words.items():
        filled = {name: re.sub(rf"\b{word}\b", str(value), text) for name, text in filled.items()}
    return filled

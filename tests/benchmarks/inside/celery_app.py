"""The application of Celery's measures; BENCH_RESULTS=1: with django-celery-results."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

WITH_RESULTS = bool(os.environ.get("BENCH_RESULTS"))
if WITH_RESULTS:
    import django

    django.setup()

import kinds  # noqa: E402 - celery is imported when Django has been set up
import probe  # noqa: E402
from celery import Celery, group  # noqa: E402

app = Celery("bench", broker=os.environ["BENCH_REDIS_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=False,
    worker_disable_rate_limits=True,
    task_ignore_result=not WITH_RESULTS,
)
if WITH_RESULTS:
    from django.db.transaction import atomic as transaction  # noqa: F401

    app.conf.result_backend = "django-db"
    app.conf["CELERY_DB_REUSE_MAX"] = 10**9

TASKS: dict[str, Any] = {kind: app.task(name=kind)(body) for kind, body in kinds.PLAIN.items()}
TASKS["fail_once"] = app.task(
    name="fail_once", autoretry_for=(probe.FirstAttempt,), max_retries=1, default_retry_delay=0, retry_backoff=False
)(kinds.fail_once)


def enqueue(kind: str, number: int) -> None:
    """One task; after the commit, where there is a transaction, as Celery's guide for Django says."""
    if WITH_RESULTS:
        TASKS[kind].delay_on_commit(**kinds.arguments(kind, number))
    else:
        TASKS[kind].delay(**kinds.arguments(kind, number))


def enqueue_many(kind: str, numbers: Iterable[int]) -> None:
    """Many tasks; publishes one by one all the same."""
    group(TASKS[kind].s(**kinds.arguments(kind, number)) for number in numbers).apply_async()


def fill(kind: str, numbers: Sequence[int]) -> None:
    """Publish one message, then copies of it with ids and arguments of their own: not timed, and 20 times as fast."""
    import base64

    import redis

    enqueue(kind, numbers[0])
    client = redis.Redis.from_url(os.environ["BENCH_REDIS_URL"])
    message = json.loads(client.lindex("celery", 0))
    copies = []
    for number in numbers[1:]:
        id = str(uuid.uuid4())
        message["headers"]["id"] = message["headers"]["root_id"] = message["properties"]["correlation_id"] = id
        message["properties"]["delivery_tag"] = str(uuid.uuid4())
        body = [[], kinds.arguments(kind, number), {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
        message["body"] = base64.b64encode(json.dumps(body).encode()).decode()
        copies.append(json.dumps(message))
    if copies:
        client.lpush("celery", *copies)

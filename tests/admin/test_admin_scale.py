"""Every page beside millions of tasks: how many queries, and none that reads all of the table. Prints the seconds.

`ASYNCQ_TEST_ROWS=5000000 python runtests.py -n 0 -s -m long tests/admin/test_admin_scale.py`
Figures: docs/explanation/large-tables.md.
"""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from django.utils.http import urlencode

from django_asyncq.broker import Broker
from django_asyncq.broker.keys import QueueKeys, alive_key
from django_asyncq.models import FailureReason, Gate, TaskRecord, TaskState
from django_asyncq.storage.routing import writing_database

from ..admin_cases import LIST, client_with, error
from ..workflow_cases import make_large

pytestmark = [pytest.mark.long, pytest.mark.django_db(transaction=True), pytest.mark.timeout(3_000)]

ROWS = int(os.environ.get("ASYNCQ_TEST_ROWS", 1_000_000))
QUEUES = [f"queue-{number:02}" for number in range(50)]
NAMES = [f"shop.tasks.task_{number:02}" for number in range(40)]
GATES = [f"gate-{number}" for number in range(10)]
BASE = 2_000
MOST_QUERIES = 15
SLOW_SECONDS = 0.5
APP = "/admin/django_asyncq/"


def base_rows() -> list[TaskRecord]:
    """Return the rows to copy: 89 % succeeded, 9 % failed, 1 % queued, 0.5 % retrying, 0.5 % lost with their worker."""
    now = timezone.now()
    found = []
    for number in range(BASE):
        row = TaskRecord(
            name=NAMES[number % len(NAMES)],
            queue_name="rare" if number == 777 else QUEUES[number % len(QUEUES)],
            gate=GATES[number % 10] if number % 4 == 0 else "",
            args=[number, "x" * 100],
            kwargs={"customer": number},
            state=TaskState.SUCCEEDED,
            attempt=1,
            worker_ids=["host-1-1"],
            return_value={"ok": True},
            finished_at=now,
        )
        kind = number % 200
        if kind < 18:
            row.state, row.reason = TaskState.FAILED, FailureReason.EXCEPTION
            row.last_exception = f"shop.errors.Error{number % 30}"
            row.errors = [error("no luck with " + "y" * 200, traceback="z" * 1_500)]
        elif kind < 20:
            row.state, row.finished_at = TaskState.QUEUED, None
            row.attempt, row.worker_ids = 0, []
        elif kind == 20:
            row.state, row.reason, row.finished_at = TaskState.FAILED, FailureReason.EXCEPTION, None
            row.retry_at = now + timedelta(hours=1)
            row.last_exception = "shop.errors.Later"
            row.errors = [error("later")]
        elif kind == 21:
            row.state, row.reason = TaskState.FAILED, FailureReason.WORKER_LOST
            row.errors = [error("lost")]
        found.append(row)
    return found


def fill() -> None:
    """Copy the rows in the database until there are enough, with ids and times of one month."""
    TaskRecord.objects.bulk_create(base_rows())
    connection = connections[writing_database(TaskRecord)]
    table = TaskRecord._meta.db_table
    columns = [field.column for field in TaskRecord._meta.concrete_fields]
    copies = ROWS // BASE
    last = int(time.time() * 1000) - 60_000
    step = 30 * 86_400_000 // ROWS
    # Milliseconds of the copy's id, and its number.
    at, number = f"({last} - ({copies} - c.copy) * {BASE * step} + b.row * {step})", f"(c.copy * {BASE} + b.row)"
    if connection.vendor == "postgresql":
        id = f"(lpad(to_hex({at}), 12, '0') || '70008000' || lpad(to_hex({number}), 12, '0'))::uuid"
        moment = f"to_timestamp({at} / 1000.0)"
        numbers = f"SELECT copy::bigint FROM generate_series(1, {copies}) AS copy"
    elif connection.vendor == "sqlite":
        id = f"printf('%012x70008000%012x', {at}, {number})"
        moment = f"strftime('%Y-%m-%d %H:%M:%f', {at} / 1000.0, 'unixepoch')"
        counting = f"SELECT 1 UNION ALL SELECT copy + 1 FROM n WHERE copy < {copies}"
        numbers = f"WITH RECURSIVE n(copy) AS ({counting}) SELECT * FROM n"
    else:
        id = f"CONCAT(LPAD(HEX({at}), 12, '0'), '70008000', LPAD(HEX({number}), 12, '0'))"
        id = id if connection.features.has_native_uuid_field is False else f"CAST({id} AS UUID)"
        moment = f"FROM_UNIXTIME({at} / 1000.0)"
        numbers = f"SELECT seq AS copy FROM seq_1_to_{copies}"
    quoted = {column: connection.ops.quote_name(column) for column in columns}
    values = {column: f"b.{quoted[column]}" for column in columns}
    values["id"], values["enqueued_at"] = id, moment
    values["finished_at"] = f"CASE WHEN b.finished_at IS NULL THEN NULL ELSE {moment} END"
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {table} ({', '.join(quoted.values())}) SELECT {', '.join(values[each] for each in columns)} "
            f"FROM (SELECT *, ROW_NUMBER() OVER (ORDER BY id) - 1 AS row FROM {table}) AS b CROSS JOIN ({numbers}) AS c"
        )
        # What autovacuum does within a minute of such an INSERT.
        statements = {"mysql": "ANALYZE TABLE", "postgresql": "VACUUM ANALYZE"}
        cursor.execute(f"{statements.get(connection.vendor, 'ANALYZE')} {table}")


def fill_redis() -> None:
    """Let Redis know 50 queues, each with a week of counters, as busy as counters can be."""
    broker = Broker()
    client = broker.client
    client.set(alive_key(), int(time.time()) - 30 * 86_400)
    hour = timezone.now().replace(minute=0, second=0, microsecond=0)
    counters = {f"{letter}{minute}": 5 for letter in "pf" for minute in range(60)}
    for queue in QUEUES:
        broker.register_queue(queue)
        with client.pipeline(transaction=False) as pipe:
            for ago in range(170):
                key = QueueKeys(queue).minutes(f"{hour - timedelta(hours=ago):%Y-%m-%dT%H}")
                pipe.hset(key, mapping=counters)
            pipe.execute()


class Looked(NamedTuple):
    """A page that was looked at twice. queries: of the second time; slow: those that took over half a second."""

    title: str
    first: float
    second: float
    queries: list[str]
    slow: list[str]


def look(client: Client, title: str, address: str) -> Looked:
    """Look at a page twice."""
    seconds = []
    for _ in range(2):
        with CaptureQueriesContext(connections[writing_database(TaskRecord)]) as queries:
            began = time.perf_counter()
            response = client.get(address)
            seconds.append(time.perf_counter() - began)
        assert response.status_code == 200, (title, response.status_code)
    found = [(each["sql"], float(each["time"])) for each in queries.captured_queries]
    slow = [f"{taken:.3f} s {sql}" for sql, taken in found if taken > SLOW_SECONDS]
    return Looked(title, seconds[0], seconds[1], [sql for sql, _ in found], slow)


def reads_all(sql: str) -> bool:
    """Whether a statement counts, or makes distinct, all rows of the table of tasks."""
    if TaskRecord._meta.db_table not in sql:
        return False
    return re.search(r"\b(COUNT|DISTINCT)\b", sql) is not None and not re.search(r"\b(WHERE|LIMIT)\b", sql)


def test_every_page_reads_little() -> None:
    """At most 15 queries, none of them an unfiltered COUNT or DISTINCT."""
    began = time.perf_counter()
    fill()
    fill_redis()
    Gate.objects.bulk_create(Gate(name=name, limit=5_000) for name in GATES)
    print(f"\n{connections[writing_database(TaskRecord)].vendor}: {ROWS:,} rows in {time.perf_counter() - began:.0f} s")
    client, workflow_id = client_with(is_superuser=True), make_large(10_000)
    failed = TaskRecord.objects.filter(state=TaskState.FAILED).order_by("id")[ROWS // 40]
    middle = TaskRecord.objects.order_by("id")[ROWS // 2]
    pages: dict[str, str | dict[str, Any]] = {
        "overview": APP,
        "overview, 24 h": f"{APP}?span=24h",
        "overview, 7 d": f"{APP}?span=7d",
        "list": {},
        "list, a page in the middle": {"before": middle.pk},
        **{
            f"list, {state}": {"state": state}
            for state in ("queued", "running", "succeeded", "failed", "retrying", "stuck")
        },
        "list, failed and old": {"state": "failed", "before": failed.pk},
        "list, name": {"name": NAMES[3]},
        "list, name and state": {"name": NAMES[3], "state": "failed"},
        "list, queue": {"queue": QUEUES[3]},
        "list, queue that is rare": {"queue": "rare"},
        "list, queue that has none": {"queue": "nothing"},
        "list, queue and failed": {"queue": QUEUES[3], "state": "failed"},
        "list, queue that is rare, failed": {"queue": "rare", "state": "failed"},
        "list, gate": {"gate": GATES[2]},
        "list, gate and queued": {"gate": GATES[2], "state": "queued"},
        "list, error": {"error": "shop.errors.Error3"},
        "list, error that has none": {"error": "shop.errors.Nothing"},
        "list, reason": {"reason": "worker_lost"},
        "list, reason that has none": {"reason": "expired"},
        "list, worker": {"worker": "host-1-1"},
        "list, within an hour": {"within": "1h"},
        "list, failed within an hour": {"within": "1h", "state": "failed"},
        "search, whole id": {"q": str(middle.pk)},
        "search, end of an id": {"q": str(middle.pk)[-8:]},
        "search, name": {"q": "task_07"},
        "search, what Go calls it": {"q": "order-7"},
        "search, error": {"q": "no luck"},
        "search, nothing": {"q": "nothing like it"},
        "task": f"{LIST}{failed.pk}/change/",
        "workflows": f"{LIST}workflows/",
        "workflows, running": f"{LIST}workflows/?state=running",
        "workflows, name that none has": f"{LIST}workflows/?q=nothing",
        "workflow of 10,000 tasks": f"{LIST}workflow/?id={workflow_id}",
        "list, workflow": {"workflow": workflow_id},
        "queues": f"{LIST}queues/",
        "workers": f"{LIST}workers/",
        "failures": f"{LIST}failures/",
        "failures, all": f"{LIST}failures/?span=all",
        "enqueue": f"{LIST}enqueue/",
        "gates": f"{APP}gate/",
        "gate": f"{APP}gate/{Gate.objects.get(name=GATES[2]).pk}/change/",
        "bulk actions": f"{APP}bulkaction/",
        # Each is answered by an address with the moment behind which no task is meant.
        **{
            f"question: {query}": client.get(f"{LIST}bulk/?{query}")["Location"]
            for query in (
                f"kind=delete&queue={QUEUES[3]}",
                "kind=delete&queue=rare",
                f"kind=retry&queue={QUEUES[3]}",
                "kind=retry&error=shop.errors.Error3",
                # The queue of those that wait: where there is nothing to do, the page leads back to the list.
                f"kind=cancel&queue={QUEUES[18]}",
                f"kind=delete&task={NAMES[3]}",
            )
        },
        "schedules": f"{APP}schedule/",
        "history of a task": f"{LIST}{failed.pk}/history/",
    }
    client.get(APP)  # what a process does once
    found = []
    for title, page in pages.items():
        address = page if isinstance(page, str) else f"{LIST}?{urlencode(page)}"
        looked = look(client, title, address)
        print(f"{looked.first:8.3f} {looked.second:8.3f} s {len(looked.queries):3} queries  {title}", flush=True)
        print("\n".join(looked.slow))
        found.append(looked)
    assert {each.title: each.queries for each in found if len(each.queries) > MOST_QUERIES} == {}
    assert [sql for each in found for sql in each.queries if reads_all(sql)] == []

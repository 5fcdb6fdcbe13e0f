"""Statements that name ids find their rows by them, whatever the statistics of PostgreSQL say of the states.

The statistics here are those of an almost empty table; a backlog has come since, sooner than autovacuum looks again.
They say that no row is queued, so that the index on states seems to be the shortest way to any that is.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from django.db import connection, transaction
from django.db.models import QuerySet
from django.utils import timezone

from django_asyncq import lifecycle
from django_asyncq.broker import Broker, Lease
from django_asyncq.lifecycle import members, remote_seen
from django_asyncq.lifecycle.claimed_runs import Run
from django_asyncq.maintenance.reconciler import Reconciler
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.signals import task_state_changing
from django_asyncq.storage import batches
from django_asyncq.storage.isolation import pages_of
from django_asyncq.storage.matching import checked, rows_matching
from django_asyncq.storage.row_conditions import as_check

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.skipif(connection.vendor != "postgresql", reason="only PostgreSQL plans by statistics that may be old"),
]

TABLE = "django_asyncq_taskrecord"
NAME = "tests.tasks.add"
ROWS_OF_EACH = 5_000
BATCHES = 50
SOME = 50
# Whether a statement names ids: others look for rows, and need the index on states.
NAMES_IDS = re.compile(r'"(?:id|batch_id)" (?:IN \(|= %s)|v\.task_id')
SCAN = re.compile(rf"(?:Index (?:Only )?Scan (?:Backward )?using|Bitmap Index Scan on) (\w*)|(Seq Scan on {TABLE})")
# The last is that of log lines, which begins with the id of their task.
BY_ID = {"django_asyncq_taskrecord_pkey", "asyncq_batch_id", "asyncq_one_log_line"}


class Kind(NamedTuple):
    """Rows of a backlog. number: of the kind, in the ids of its rows. columns: name → its SQL; n numbers the rows."""

    number: int
    columns: dict[str, str]
    count: int = ROWS_OF_EACH


def id_of(kind: int, row: str) -> str:
    """Return the SQL of a row's id, older than all that are made by the clock."""
    return f"('0190000000007000800{kind}' || lpad(to_hex({row}), 12, '0'))::uuid"


def ids_of(kind: str, count: int = SOME) -> list[UUID]:
    """Return the ids of the first rows of a kind."""
    return [UUID(f"0190000000007000800{KINDS[kind].number}{row:012x}") for row in range(1, count + 1)]


def rows(kind: str, count: int = SOME) -> list[TaskRecord]:
    """Return the first rows of a kind, found by their ids alone."""
    return list(TaskRecord.objects.filter(id__in=ids_of(kind, count)).order_by("id"))


KINDS = {
    "over": Kind(0, {"state": "2", "finished_at": "now()"}, 20),
    "delayed": Kind(1, {"state": "0", "run_after": "now() + interval '1 hour'", "gate": "'g'"}),
    "late": Kind(2, {"state": "0", "expires_at": "now() - interval '1 hour'", "cancel_requested_at": "now()"}),
    "retrying": Kind(3, {"state": "3", "reason": "1", "retry_at": "now() - interval '1 second'"}),
    "running": Kind(4, {"state": "1", "fence": "1"}),
    "batches": Kind(5, {"state": "0", "waits_for": "100"}, BATCHES),
    "members": Kind(6, {"state": "1", "batch_id": id_of(5, f"1 + n % {BATCHES}")}),
    "orphans": Kind(7, {"state": "0", "batch_id": id_of(9, f"1 + n % {BATCHES}"), '"group"': "'g'"}),
    "remote": Kind(8, {"state": "0", "is_remote": "true"}),
}


def insert(kind: Kind) -> None:
    """Insert the rows of a kind."""
    names, values = ", ".join(kind.columns), ", ".join(kind.columns.values())
    moment = "now() - interval '1 hour'"
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {TABLE} (id, name, backend, enqueued_at, {names}) "
            f"SELECT {id_of(kind.number, 'n')}, '{NAME}', 'default', {moment}, {values} "
            f"FROM generate_series(1, {kind.count}) AS n"
        )


@pytest.fixture
def backlog() -> None:
    """Fill the table behind the back of its statistics. No autovacuum sees rows that are not committed."""
    with connection.cursor() as cursor:
        # Other tests leave pages behind, which the planner counts.
        cursor.execute(f"TRUNCATE {TABLE} CASCADE")
    insert(KINDS["over"])
    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE {TABLE}")
    for kind in list(KINDS.values())[1:]:
        insert(kind)


def statements_of(act: Callable[[], Any]) -> list[tuple[str, Any]]:
    """Call a function; return its statements that name ids of tasks, with their parameters."""
    sent: list[tuple[str, Any]] = []

    def keep(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        sent.append((sql, params))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(keep):
        act()
    return [(sql, params) for sql, params in sent if TABLE in sql and NAMES_IDS.search(sql)]


def scans_of(sql: str, params: Any) -> tuple[set[str], str]:
    """Return the names of the indexes that a statement reads, with that of the table if it reads all, and its plan."""
    with connection.cursor() as cursor:
        # The table is so small here that reading all of it may be the cheapest way.
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute(f"EXPLAIN {sql}", params)
        plan = "\n".join(row[0] for row in cursor.fetchall())
    return {index or table for index, table in SCAN.findall(plan)}, plan


# --- what names ids


def release_batches() -> None:
    """Have the members of some batches go back with them, of others without them, and those of lost ones too."""
    found = rows("batches", 4)
    for record in found[2:]:
        record.state, record.finished_at = TaskState.SUCCEEDED, timezone.now()
    members.follow([batches.FencedWrite(record, 1) for record in found], "default", patient=True)
    assert lifecycle.release_orphans() == ROWS_OF_EACH


def load_members() -> None:
    """Read the members of some batches."""
    runs = [Run(record, Lease(record.redis_id, 1)) for record in rows("batches", 4)]
    members.load_members(runs)
    assert all(run.members for run in runs)


def refuse_retries() -> None:
    """Have a receiver veto what is due."""

    def veto(**_: Any) -> None:
        raise ValueError("not now")

    task_state_changing.connect(veto)
    try:
        assert lifecycle.retry_without_redis(ids_of("retrying", 2)) == 0
    finally:
        task_state_changing.disconnect(veto)


def write_outcomes() -> None:
    """Write the outcomes of runs."""
    found = rows("running")
    for record in found:
        record.state, record.finished_at = TaskState.SUCCEEDED, timezone.now()
    assert len(batches.write_fenced([batches.FencedWrite(record, 1) for record in found], "default")) == SOME


def follow_remote() -> None:
    """Push what another program shall run and Redis does not know."""
    now = timezone.now()
    assert lifecycle.follow_remote(Broker(), rows("remote"), 1, now) == SOME


def prune() -> None:
    """Delete rows whose time is over."""
    assert lifecycle.prune(Broker(), ids_of("over", 5), as_check(finished_at__isnull=False)) == 5
    assert len(lifecycle.delete(ids_of("over", 20))) == 15


def choose() -> None:
    """Read what an action on many tasks is about."""
    found = checked("cancel", {"ids": [str(id) for id in ids_of("delayed")]})
    assert len(rows_matching(found).order_by("id")) == SOME


ACTS: dict[str, Callable[[], Any]] = {
    "park": lambda: lifecycle.park(rows("delayed"), timedelta(seconds=60)),
    "hurry": lambda: lifecycle.hurry(ids_of("delayed")),
    "make batches": lambda: lifecycle.make_batches(rows("delayed")),
    "load members": load_members,
    "release batches": release_batches,
    "cancel": lambda: lifecycle.cancel([*ids_of("delayed", 10), *ids_of("running", 10), *ids_of("batches", 1)]),
    "retry": lambda: lifecycle.retry(ids_of("retrying"), by_person=False),
    "retry by a person": lambda: lifecycle.retry(ids_of("retrying"), by_person=True),
    "refuse retries": refuse_retries,
    "close cancelled": lambda: lifecycle.close_cancelled(ids_of("late")),
    "expire": lambda: lifecycle.expire(ids_of("late")),
    "note remote tasks": lambda: remote_seen.note_seen(rows("remote")),
    "follow remote tasks": follow_remote,
    "write outcomes": write_outcomes,
    "prune": prune,
    "choose by ids": choose,
    "page of queued": lambda: next(Reconciler(Broker()).rows_to_push(young=False)),
    "page of retrying": lambda: next(Reconciler(Broker()).rows_to_park()),
}


@pytest.mark.parametrize("act", ACTS)
def test_statement_with_ids_finds_its_rows_by_them(act: str, backlog: None) -> None:
    """A condition beside the ids is a check; it never becomes the way to the rows."""
    statements = statements_of(ACTS[act])
    assert statements
    for sql, params in statements:
        scans, plan = scans_of(sql, params)
        assert scans and scans <= BY_ID, f"{sql[:1000]}\n{plan[:2000]}"


@pytest.mark.parametrize(
    ("kind", "by", "index"), [("delayed", "", "asyncq_state_id"), ("retrying", "retry_at", "asyncq_retry_at")]
)
def test_a_page_of_a_walk_is_read_in_the_order_of_its_index(kind: str, by: str, index: str) -> None:
    """Beside rows that are kept, and with statistics of those alone. A page that is sorted reads all that is left."""
    insert(KINDS["over"]._replace(count=20_000))
    insert(Kind(9, {"state": "3", "reason": "1", "finished_at": "now()"}, 2_000))
    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE {TABLE}")
    insert(KINDS[kind])
    walked = TaskRecord.objects.queued() if kind == "delayed" else TaskRecord.objects.retrying()
    sent: list[tuple[str, Any]] = []

    def keep(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        sent.append((sql, params))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(keep):
        pages = [len(page) for _, page in zip(range(2), pages_of(walked, size=1000, by=by), strict=False)]
    assert pages == [1000, 1000]
    for sql, params in sent:
        scans, plan = scans_of(sql, params)
        assert scans == {index} and "Sort" not in plan, plan


def test_these_statistics_mislead(backlog: None) -> None:
    """Otherwise the test above could not fail: with a plain condition the same ids are looked for among all queued."""
    some = TaskRecord.objects.filter(id__in=ids_of("delayed"))
    plain, check = some.filter(state=TaskState.QUEUED), some.filter(as_check(state=TaskState.QUEUED))
    assert set(plain) == set(check)
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
    assert "taskrecord_pkey" not in plain.explain()
    assert "taskrecord_pkey" in check.explain()


@pytest.mark.long
@pytest.mark.timeout(1_200)
def test_time_of_a_check_beside_a_million_rows() -> None:
    """Print what a statement with 500 ids takes beside a backlog, with a plain condition and with a check."""
    count = int(os.environ.get("ASYNCQ_TEST_ROWS", 1_000_000))
    insert(KINDS["over"])
    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE {TABLE}")
    insert(KINDS["delayed"]._replace(count=count))
    some = TaskRecord.objects.filter(id__in=ids_of("delayed", 500)).order_by("id")
    shapes = {"plain": some.filter(state=TaskState.QUEUED), "check": some.filter(as_check(state=TaskState.QUEUED))}
    acts: dict[str, Callable[[QuerySet[TaskRecord]], Any]] = {
        "SELECT": list,
        "SELECT FOR UPDATE": lambda found: list(found.select_for_update()),
        "UPDATE": lambda found: found.order_by().update(priority=1),
    }
    seconds: dict[tuple[str, str], float] = {}
    for what, act in acts.items():
        for shape, found in shapes.items():
            act(found.all())
            begun = time.perf_counter()
            act(found.all())
            seconds[what, shape] = time.perf_counter() - begun
            print(f"{what}, {shape}, beside {count:,} queued: {seconds[what, shape] * 1000:,.1f} ms")
    assert all(seconds[what, "check"] < seconds[what, "plain"] for what in acts)


@pytest.mark.long
@pytest.mark.timeout(1_200)
def test_drain_of_a_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print how long the outcomes of 300,000 waiting tasks take: with a guard that is an OR, and with ours."""
    count = int(os.environ.get("ASYNCQ_TEST_ROWS", 300_000))
    way = "(t.state = 1 AND t.fence = v.held_fence) OR (t.state = 0 AND t.fence < v.held_fence)"
    seconds = {}
    for name, guard in {"OR": way, "CASE": batches.GUARD}.items():
        monkeypatch.setattr(batches, "GUARD", guard)
        batches._update_from_json.cache_clear()
        with transaction.atomic():
            insert(KINDS["over"])
            with connection.cursor() as cursor:
                cursor.execute(f"ANALYZE {TABLE}")
            insert(KINDS["delayed"]._replace(count=count))
            ids = ids_of("delayed", count)
            for start in range(0, count, 500):
                found = batches.read_rows([str(id) for id in ids[start : start + 500]], "default")
                for record in found:
                    record.state, record.finished_at = TaskState.SUCCEEDED, timezone.now()
                began = time.perf_counter()
                written = batches.write_fenced([batches.FencedWrite(record, 1) for record in found], "default")
                seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began
                assert len(written) == len(found)
            transaction.set_rollback(True)
        print(f"{name}: {seconds[name]:.1f} s for {count:,}, {seconds[name] / count * 1e6:.0f} µs a row")
    batches._update_from_json.cache_clear()
    assert seconds["CASE"] < seconds["OR"]

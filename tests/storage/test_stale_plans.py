"""Statements that name ids find their rows by them, whatever the statistics of PostgreSQL say of the states.

The statistics here are those of an almost empty table; a backlog has come since, sooner than autovacuum looks again.
They say that no row is queued, so that the index on states seems to be the shortest way to any that is.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from django.db import connection, transaction
from django.db.models import QuerySet
from django.utils import timezone

from django_asyncq import interop, lifecycle
from django_asyncq.broker import Broker, Lease
from django_asyncq.core.after import Edge, Parent
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.lifecycle import children, dispatching, members
from django_asyncq.lifecycle.base import Run
from django_asyncq.models import TaskEdge, TaskRecord, TaskState
from django_asyncq.signals import task_state_changing
from django_asyncq.storage import batches
from django_asyncq.storage.matching import checked, rows_matching
from django_asyncq.storage.routing import as_check
from django_asyncq.storage.walking import EVERY, QUEUED, RUNNING, TO_RETRY, pages

from ..leading import leading

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.skipif(connection.vendor != "postgresql", reason="only PostgreSQL plans by statistics that may be old"),
]

TABLE = "django_asyncq_taskrecord"
NAME = "tests.tasks.add"
ROWS_OF_EACH = 5_000
BATCHES = 50
SOME = 50
# Of each of two kinds that nobody waits for; and the most that one statement of the leader may read beside them: a
# page, and all of these rows that wait or run.
KEPT = 100_000
WAITING_OF_EACH = 500
MOST_READ = 10_000
TIMES_EXPLAINED = 3
PAGE = 1_000
WAYS = {"every": EVERY, "queued": QUEUED, "running": RUNNING, "to retry": TO_RETRY}
# Whether a statement names ids: others look for rows, and need the index on states.
NAMES_IDS = re.compile(r'"(?:id|batch_id)" (?:IN \(|= %s)|v\.task_id')
SCAN = re.compile(rf"(?:Index (?:Only )?Scan (?:Backward )?using|Bitmap Index Scan on) (\w*)|(Seq Scan on {TABLE})")
# PostgreSQL multiplies their lengths, and then rather reads the whole table.
TWO_LISTS = re.compile(r'"id" IN \(…\).*"id" IN \(…\)')
# The last is that of log lines, which begins with the id of their task.
BY_ID = {"django_asyncq_taskrecord_pkey", "asyncq_batch_id", "asyncq_one_log_line"}


class Kind(NamedTuple):
    """Rows of a backlog. number: of the kind, in the ids of its rows. columns: name → its SQL; n numbers the rows."""

    number: int
    columns: dict[str, str]
    count: int = ROWS_OF_EACH


def id_of(kind: int, row: str) -> str:
    """Return the SQL of a row's id, older than all that are made by the clock."""
    return f"('0190000000007000800{kind:x}' || lpad(to_hex({row}), 12, '0'))::uuid"


def ids_of(kind: str, count: int = SOME) -> list[UUID]:
    """Return the ids of the first rows of a kind."""
    return [UUID(f"0190000000007000800{KINDS[kind].number:x}{row:012x}") for row in range(1, count + 1)]


def rows(kind: str, count: int = SOME) -> list[TaskRecord]:
    """Return the first rows of a kind, found by their ids alone."""
    return list(TaskRecord.objects.filter(id__in=ids_of(kind, count)).order_by("id"))


KINDS = {
    "over": Kind(0, {"state": "2", "finished_at": "now()"}, 20),
    "delayed": Kind(1, {"state": "0", "run_after": "now() + interval '1 hour'", "gate": "'g'"}),
    "late": Kind(2, {"state": "0", "expires_at": "now() - interval '1 hour'", "cancel_requested_at": "now()"}),
    "retrying": Kind(3, {"state": "3", "reason": "1", "retry_at": "now() - interval '1 second'"}),
    "running": Kind(4, {"state": "1", "fence": "1"}),
    "batches": Kind(5, {"state": "0", "batch_size": "100"}, BATCHES),
    "members": Kind(6, {"state": "1", "batch_id": id_of(5, f"1 + n % {BATCHES}")}),
    "orphans": Kind(7, {"state": "0", "batch_id": id_of(9, f"1 + n % {BATCHES}"), '"group"': "'g'"}),
    "remote": Kind(8, {"state": "0", "is_remote": "true"}),
    "behind": Kind(10, {"state": "0", "waits_for": "2", "workflow_id": id_of(10, "n")}),
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
    fill(ROWS_OF_EACH)


def fill(most: int, statistics: str = "of a few rows") -> None:
    """Have the statistics say that there are a few rows, then insert those of each kind, at most so many.

    statistics: "none": as of a table that was just made.
    """
    with connection.cursor() as cursor:
        # Other tests leave pages behind, which the planner counts.
        cursor.execute(f"TRUNCATE {TABLE} CASCADE")
        if statistics == "none":
            # Only a superuser may.
            cursor.execute("DELETE FROM pg_statistic WHERE starelid = %s::regclass", [TABLE])
    insert(KINDS["over"])
    if statistics != "none":
        with connection.cursor() as cursor:
            cursor.execute(f"ANALYZE {TABLE}")
    for kind in list(KINDS.values())[1:]:
        insert(kind._replace(count=min(kind.count, most)))


@pytest.fixture
def unobserved() -> Iterator[None]:
    """Have autovacuum leave the table alone, though its rows are committed."""
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {TABLE} SET (autovacuum_enabled = off)")
    yield
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {TABLE} RESET (autovacuum_enabled)")
        cursor.execute(f"ANALYZE {TABLE}")


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
    members.follow([batches.FencedWrite(record, 1, 0) for record in found], "default", patient=True)
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
        assert lifecycle.retry_due(Broker(), "default", [str(id) for id in ids_of("retrying", 2)]) == 0
    finally:
        task_state_changing.disconnect(veto)


def write_outcomes() -> None:
    """Write the outcomes of runs."""
    found = rows("running")
    for record in found:
        record.state, record.finished_at = TaskState.SUCCEEDED, timezone.now()
    assert len(batches.write_fenced([batches.FencedWrite(record, 1, 0) for record in found], "default")) == SOME


def behind() -> list[UUID]:
    """Put tasks behind others; return the ids of these."""
    found = ids_of("retrying") + ids_of("running")
    wanted = zip(found, [*ids_of("behind"), *ids_of("behind")], strict=True)
    TaskEdge.objects.bulk_create([TaskEdge(parent_id=parent, child_id=child) for parent, child in wanted])
    return found


def settle() -> None:
    """Count tasks out of those that wait for them, and fail some."""
    ended = [children.Ended(id, NAME, "" if number % 2 else "has failed") for number, id in enumerate(behind())]
    children.settle(ended)
    assert TaskRecord.objects.filter(reason=6).exists()


def settle_deleted() -> None:
    """Ask those that wait for deleted tasks."""
    behind()
    children.settle_deleted(rows("running"))


def enqueue_behind() -> None:
    """Put new tasks behind others."""
    parents = [Parent(id, "default") for id in ids_of("running")]
    found = [TaskRecord(name=NAME) for _ in range(SOME)]
    for record in found:
        record.edges = tuple(Edge(parent, "", -1, runs_anyway=False) for parent in parents)
    lifecycle.enqueue(found)
    assert found[0].waits_for == SOME


def retry_before_others() -> None:
    """Bring back what has failed for retried tasks."""
    behind()
    late, final = {"reason": 6, "finished_at": timezone.now()}, {"retry_at": None, "finished_at": timezone.now()}
    TaskRecord.objects.filter(id__in=ids_of("behind")).update(state=3, **late)
    TaskRecord.objects.filter(id__in=ids_of("retrying")).update(workflow_id=ids_of("behind")[0], **final)
    lifecycle.retry(ids_of("retrying"), by_person=True)


def follow_remote() -> None:
    """Push what another program shall run and Redis does not know."""
    now = timezone.now()
    assert interop.follow_remote(Broker(), rows("remote"), 1, now) == SOME


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
    "note remote tasks": lambda: dispatching.note_seen(rows("remote")),
    "follow remote tasks": follow_remote,
    "write outcomes": write_outcomes,
    "settle": settle,
    "settle what was deleted": settle_deleted,
    "enqueue behind others": enqueue_behind,
    "retry before others": retry_before_others,
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


# --- what the leader sends


def shape_of(sql: str) -> str:
    """Return a statement without its values: how long its lists of ids are."""
    return re.sub(r"(%s(::\w+)?, )+", "…, ", re.sub(r"\(%s(, %s)*\)", "(…)", sql))


def rows_read(plan: dict[str, Any]) -> int:
    """Return how many tasks a statement has read, by its plan, those that a condition refused too."""
    own = 0
    if plan.get("Relation Name") == TABLE and plan["Node Type"] != "ModifyTable":
        refused = plan.get("Rows Removed by Filter", 0) + plan.get("Rows Removed by Index Recheck", 0)
        own = round((plan["Actual Rows"] + refused) * plan["Actual Loops"])
    return own + sum(rows_read(each) for each in plan.get("Plans", []))


class Reads:
    """Counts what each statement on tasks reads, before it is sent, a few times for each that differs."""

    def __init__(self) -> None:
        self.most: dict[str, tuple[int, str]] = {}
        self._times: dict[str, int] = {}

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        """Explain a statement, then send it."""
        shape = shape_of(sql)
        if TABLE in sql and sql.startswith(("SELECT", "UPDATE", "DELETE", "WITH", "INSERT")):
            self._times[shape] = self._times.get(shape, 0) + 1
            if self._times[shape] <= TIMES_EXPLAINED:
                self._explain(execute, sql, params, context, shape)
        return execute(sql, params, many, context)

    def _explain(self, execute: Any, sql: str, params: Any, context: Any, shape: str) -> None:
        cursor = context["cursor"]
        is_open = context["connection"].in_atomic_block
        execute("SAVEPOINT explained" if is_open else "BEGIN", None, False, context)
        if NAMES_IDS.search(sql):
            # For so many ids it may be cheaper to read all of so small a table.
            execute("SET LOCAL enable_seqscan = off", None, False, context)
        execute(f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {sql}", params, False, context)
        plan = cursor.fetchone()[0][0]["Plan"]
        # What it has changed is changed by the statement itself.
        execute("ROLLBACK TO SAVEPOINT explained" if is_open else "ROLLBACK", None, False, context)
        self.most[shape] = max(self.most.get(shape, (0, "")), (rows_read(plan), json.dumps(plan, indent=1)))


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("statistics", ["of a few rows", "none"])
def test_no_statement_of_the_leader_reads_what_is_kept(
    statistics: str, unobserved: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that it sends in two minutes, beside rows that are kept and of which the statistics say nothing."""
    fill(WAITING_OF_EACH, statistics)
    for number, state in enumerate(("2", "3")):
        columns = {"state": state, "reason": "0" if state == "2" else "1", "finished_at": "now()"}
        insert(Kind(0xA + number, columns, KEPT))
    reads = Reads()
    with leading(monkeypatch) as leader, connection.execute_wrapper(reads):
        leader.pass_seconds(120)
    assert len(reads.most) > 20
    assert not [shape for shape in reads.most if TWO_LISTS.search(shape)]
    found = {shape: most for shape, most in reads.most.items() if most[0] > MOST_READ}
    assert not found, "\n".join(
        f"{count:,} rows: {shape[:600]}\n{plan[:3000]}" for shape, (count, plan) in found.items()
    )


@pytest.mark.parametrize("statistics", ["of a few rows", "none"])
@pytest.mark.parametrize("way", WAYS)
def test_no_statement_of_a_walk_reads_more_than_a_page(way: str, statistics: str) -> None:
    """If it sorted what is left, or passed over what was read before, a walk would become slow with its length."""
    fill(ROWS_OF_EACH, statistics)
    insert(Kind(0xA, {"state": "3", "reason": "1", "finished_at": "now()"}, 20_000))
    reads = Reads()
    with connection.execute_wrapper(reads):
        found = [len(page) for page in pages(WAYS[way], size=PAGE)]
    assert found[0] == PAGE and sum(found) >= ROWS_OF_EACH
    for shape, (count, plan) in reads.most.items():
        assert count <= 1.1 * PAGE, f"{count:,} rows: {shape}\n{plan}"


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
    way = "(t.state = 1 AND t.fence = v.held_fence) OR (t.state = 0 AND t.fence = v.read_fence)"
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
                written = batches.write_fenced([batches.FencedWrite(record, 1, 0) for record in found], "default")
                seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began
                assert len(written) == len(found)
            transaction.set_rollback(True)
        print(f"{name}: {seconds[name]:.1f} s for {count:,}, {seconds[name] / count * 1e6:.0f} µs a row")
    batches._update_from_json.cache_clear()
    assert seconds["CASE"] < seconds["OR"]

"""The INSERT of new tasks writes what Django's `save` would write, for any values."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import IntegrityError, connections, transaction
from django.db.models.signals import post_init, post_save, pre_save
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_asyncq.core.names import uuid7
from django_asyncq.models import TaskRecord
from django_asyncq.storage import inserting

pytestmark = pytest.mark.django_db(transaction=True)

# Not the proxy: `insert` gets the connection of the thread.
connection = connections["default"]
NOON = datetime(2026, 5, 4, 12, 30, 15, 123456, tzinfo=UTC)
FULL: dict[str, Any] = {
    "name": "tests.tasks.add",
    "backend": "other",
    "queue_name": "mail",
    "args": [1, 2.5, 'it\'s 100 % \\ "é" \N{SNOWMAN}', None, True, [], {}, 2**64 - 1],
    "kwargs": {"key": {"deep": [{"a": "'; --"}]}, "é": "\n\t"},
    "priority": -7,
    "run_after": NOON,
    "attempt": 3,
    "max_attempts": 4,
    "crash_count": 1,
    "fence": 2**62,
    "timeout_seconds": 0.1,
    "gate": "gpt/large:1",
    "queue_limit": 0,
    "expected_seconds": 12.25,
    "group": "a",
    "return_value": {"x": None},
    "progress": 0,
    "errors": [{"message": "no"}],
    "last_exception": "a.B",
    "headers": {"trace": "é"},
    "expires_at": NOON + timedelta(days=1),
    "suspicion": 2,
    "soft_timeout_seconds": 0.5,
    "unique_until": NOON,
    "parent_id": uuid7(),
    "after_id": uuid7(),
    "retried_from": uuid7(),
    "workflow_id": uuid7(),
    "waits_for": 3,
    "delay_seconds": 1.5,
    "batch_size": 2,
    "wire_id": "any text, é",
    "is_remote": True,
    "cancel_requested_at": NOON,
    "cancelled_by": "ann",
    "worker_ids": ["host:1"],
    "started_at": NOON + timedelta(seconds=1),
    "last_attempted_at": NOON + timedelta(microseconds=1),
}


def stored(record: TaskRecord) -> dict[str, Any]:
    """Return the row as the database has it, without its id and the time, which the database notes by itself."""
    found: dict[str, Any] = TaskRecord.objects.filter(id=record.id).values().get()
    return {name: value for name, value in found.items() if name not in ("id", "enqueued_at")}


@pytest.mark.parametrize("given", [{"name": "a"}, FULL], ids=["defaults", "everything"])
@pytest.mark.parametrize("count", [1, 3])
def test_insert_writes_what_save_writes(given: dict[str, Any], count: int) -> None:
    """Each field of each row reads as in a row that Django has saved."""
    given = {"enqueued_at": NOON, **given}
    saved = TaskRecord(**given)
    saved.save()
    records = [TaskRecord(**given) for _ in range(count)]
    inserting.insert(records, connection)
    assert [stored(record) for record in records] == [stored(saved)] * count
    assert [(record._state.adding, record._state.db) for record in records] == [(False, "default")] * count


def test_rows_of_one_statement_may_differ_in_every_field() -> None:
    """One row has a default, even NULL, where another has a value: each row keeps its own."""
    records = [TaskRecord(name="a", enqueued_at=NOON), TaskRecord(**FULL, enqueued_at=NOON), TaskRecord(name="c")]
    with CaptureQueriesContext(connection) as queries:
        inserting.insert(records, connection)
    assert sum(query["sql"].startswith("INSERT") for query in queries.captured_queries) == 1
    first, second, third = (TaskRecord.objects.get(id=record.id) for record in records)
    assert {name: getattr(second, name) for name in FULL} == FULL
    assert (first.args, first.return_value, first.timeout_seconds, first.run_after) == ([], None, None, None)
    assert third.name == "c"
    assert not TaskRecord.objects.filter(id=first.id, return_value__isnull=False).exists()


def test_rows_can_be_filtered_by_arguments() -> None:
    """As after Django's own INSERT, although SQLite compares JSON as text."""
    for records in ([TaskRecord(name="a", args=["é", 1])], [TaskRecord(name="b", args=["é", 1]) for _ in "ab"]):
        inserting.insert(records, connection)
    assert TaskRecord.objects.filter(args=["é", 1]).count() == 3


def test_save_signals_are_sent_for_a_single_task() -> None:
    """Both, around the INSERT; for several tasks neither, as with `bulk_create`."""
    seen: list[tuple[str, Any, bool]] = []

    def before(instance: TaskRecord, **kwargs: Any) -> None:
        instance.progress = "set by a receiver"
        seen.append(("before", kwargs["using"], instance._state.adding))

    def after(instance: TaskRecord, created: bool, **kwargs: Any) -> None:
        seen.append(("after", created, TaskRecord.objects.filter(id=instance.id).exists()))

    pre_save.connect(before, sender=TaskRecord)
    post_save.connect(after, sender=TaskRecord)
    try:
        record = TaskRecord(name="a")
        inserting.insert([record], connection)
        inserting.insert([TaskRecord(name="b"), TaskRecord(name="c")], connection)
    finally:
        pre_save.disconnect(before, sender=TaskRecord)
        post_save.disconnect(after, sender=TaskRecord)
    assert seen == [("before", "default", True), ("after", True, True)]
    assert stored(record)["progress"] == "set by a receiver"


@pytest.mark.parametrize("count", [0, 1, 3])
def test_several_statements_are_all_or_nothing(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the last statement leaves no row of the ones before."""
    monkeypatch.setattr(inserting, "ROWS_PER_STATEMENT", 2)
    there = TaskRecord.objects.create(name="there")
    records = [*(TaskRecord(name="new") for _ in range(count)), TaskRecord(id=there.id, name="again")]
    with pytest.raises(IntegrityError):
        inserting.insert(records, connection)
    assert list(TaskRecord.objects.values_list("name", flat=True)) == ["there"]
    inserting.insert([TaskRecord(name="later") for _ in range(5)], connection)
    assert TaskRecord.objects.filter(name="later").count() == 5


def test_error_marks_the_surrounding_transaction_for_rollback() -> None:
    """As with `save`: a transaction that cannot be committed refuses further queries."""
    there = TaskRecord.objects.create(name="there")
    with transaction.atomic():
        with pytest.raises(IntegrityError):
            inserting.insert([TaskRecord(id=there.id, name="again")], connection)
        with pytest.raises(transaction.TransactionManagementError):
            TaskRecord.objects.count()
        transaction.set_rollback(True)
    with pytest.raises(IntegrityError):
        inserting.insert([TaskRecord(id=uuid7(), name="a", priority=101)], connection)


def test_name_that_is_too_long_is_refused(settings: Any) -> None:
    """The database refuses it and does not cut it; SQLite has no lengths."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no lengths")
    for count in (1, 2):
        with pytest.raises(Exception, match=r"(?i)too long"):
            inserting.insert([TaskRecord(name="x" * 201) for _ in range(count)], connection)


class TracedCursor:
    """The cursor of a tracing tool, which must see every statement."""

    def __init__(self, cursor: Any) -> None:
        self.cursor = cursor
        self.executed: list[str] = []

    def execute(self, sql: str, params: Any = None) -> Any:
        self.executed.append(sql)
        return self.cursor.execute(sql, params)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cursor, name)


def test_other_tools_see_the_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Django's query log, an `execute_wrapper`, and a cursor that is not Django's own."""
    seen: list[str] = []

    def wrapper(execute: Any, sql: str, *more: Any) -> Any:
        seen.append(sql)
        return execute(sql, *more)

    with CaptureQueriesContext(connection) as captured, connection.execute_wrapper(wrapper):
        inserting.insert([TaskRecord(name="a", args=["it's"])], connection)
    assert len(seen) == 1
    assert seen[0].startswith("INSERT")
    assert "it's" in captured[-1]["sql"].replace("''", "'").replace("\\'", "'")
    traced: list[TracedCursor] = []
    create = connection.create_cursor

    def create_traced(name: str | None = None) -> Any:
        traced.append(TracedCursor(create(name)))
        return traced[-1]

    monkeypatch.setattr(connection, "create_cursor", create_traced)
    inserting.insert([TaskRecord(name="b")], connection)
    assert any(sql.startswith("INSERT") for cursor in traced for sql in cursor.executed)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ([{}], ["id", "name"]),
        ([{"args": [1]}], ["id", "name", "args"]),
        ([{"args": [], "priority": 0, "gate": "", "queue_name": "default"}], ["id", "name"]),
        ([{}, {"priority": 3}, {"kwargs": {"a": 1}}], ["id", "name", "kwargs", "priority"]),
    ],
)
def test_only_columns_that_differ_from_the_defaults_are_named(values: list[dict[str, Any]], named: list[str]) -> None:
    """A plain task does not pay for the columns that it does not use; in a batch, one row that differs is enough."""
    records = [TaskRecord(name="a", **more) for more in values]
    with CaptureQueriesContext(connection) as captured:
        inserting.insert(records, connection)
    (sql,) = (query["sql"] for query in captured if query["sql"].startswith("INSERT"))
    # SQLite has no clock of its own, and gets that of the host.
    named = [*named, "enqueued_at"] if connection.vendor == "sqlite" else named
    assert re.findall(r"\w+", sql.partition("(")[2].partition(")")[0]) == named
    assert [stored(record) for record in records] == [
        {name: value for name, value in vars(record).items() if name not in ("id", "_state", "enqueued_at")}
        for record in records
    ]


def test_an_unnamed_column_gets_the_default_of_the_model() -> None:
    """Each default of the database is that of the field, or the row would not be what the caller has in memory."""
    made = TaskRecord(name="a")
    given = {"id", "name", "enqueued_at"}
    assert {name: value for name, value in inserting.DEFAULTS.items() if name not in given} == {
        name: getattr(made, name) for name in inserting.FIELDS if name not in given
    }


def test_a_row_of_columns_is_that_of_the_constructor() -> None:
    """Also where a project listens to the making of rows, and no two rows share a list."""
    given = {"id": uuid7(), "name": "a", "args": [1], "enqueued_at": timezone.now()}
    (made,), other = TaskRecord.of_columns([given]), TaskRecord(**given)
    assert {**vars(made), "_state": vars(made._state)} == {**vars(other), "_state": vars(other._state)}
    assert made.errors is not TaskRecord.of_columns([given])[0].errors
    heard: list[object] = []
    receive = lambda instance, **kwargs: heard.append(instance)  # noqa: E731
    post_init.connect(receive, sender=TaskRecord)
    try:
        assert TaskRecord.of_columns([given]) == [made]
    finally:
        post_init.disconnect(receive, sender=TaskRecord)
    assert heard == [made]


@pytest.mark.skipif(connection.vendor != "postgresql", reason="JSON is PostgreSQL's form")
def test_postgresql_gets_many_rows_as_one_parameter() -> None:
    """One row has a parameter for each column that it names; several rows are one JSON text."""
    counts: list[int] = []

    def count_parameters(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("INSERT"):
            counts.append(len(params))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(count_parameters):
        inserting.insert([TaskRecord(name="a", args=[1])], connection)
        inserting.insert([TaskRecord(name="b"), TaskRecord(name="c")], connection)
    assert counts == [3, 1]

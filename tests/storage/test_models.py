"""The models: constraints of the database, named states, ids, and rows read and written without the ORM."""

from __future__ import annotations

import copy
import pickle
from typing import Any
from uuid import RFC_4122, UUID

import pytest
from django.core.exceptions import ValidationError
from django.core.management import call_command
from django.db import DataError, IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_asyncq.core.names import uuid7
from django_asyncq.models import FailureReason, Gate, TaskRecord, TaskState
from django_asyncq.storage.batches import FencedWrite, read_rows, write_fenced

pytestmark = pytest.mark.django_db

NOW = timezone.now()


@pytest.mark.parametrize(
    "fields",
    [
        {"state": 4},
        {"state": -1},
        {"priority": 101},
        {"priority": -101},
        {"state": 0, "finished_at": NOW},
        {"state": 1, "finished_at": NOW},
        {"state": 2},
        {"state": 3, "reason": 1},
        {"state": 3, "reason": 1, "retry_at": NOW, "finished_at": NOW},
    ],
)
def test_database_refuses_invalid_rows(fields: dict[str, Any]) -> None:
    """`finished_at` is set exactly when the state is final; states are 0 to 3; priorities are -100 to 100."""
    with pytest.raises(IntegrityError), transaction.atomic():
        TaskRecord.objects.create(name="x", **fields)


def test_id_behaves_like_any_uuid() -> None:
    """It is compared, hashed, ordered, pickled and copied like one, although it is made without the constructor."""
    first, second = uuid7(), uuid7()
    same = UUID(str(first))
    assert (first, hash(first), repr(first), first.is_safe) == (same, hash(same), repr(same), same.is_safe)
    assert pickle.loads(pickle.dumps(first)) == copy.deepcopy(first) == first
    assert (first.version, first.variant) == (7, RFC_4122)
    assert first < second


def test_each_state_has_a_named_filter() -> None:
    """Each row matches one of five filters; FAILED with `retry_at` matches `retrying` and not `failed`."""
    failed = {"state": TaskState.FAILED, "reason": FailureReason.EXCEPTION}
    rows = {
        "queued": TaskRecord.objects.create(name="x"),
        "running": TaskRecord.objects.create(name="x", state=TaskState.RUNNING),
        "succeeded": TaskRecord.objects.create(name="x", state=TaskState.SUCCEEDED, finished_at=NOW),
        "failed": TaskRecord.objects.create(name="x", **failed, finished_at=NOW),
        "retrying": TaskRecord.objects.create(name="x", **failed, retry_at=NOW),
    }
    for name, row in rows.items():
        assert list(getattr(TaskRecord.objects, name)()) == [row]
        assert row.is_final == (name in ("succeeded", "failed"))


def test_ids_sort_in_order_of_creation() -> None:
    """Ids are UUIDv7, and their texts sort in order of creation even within one millisecond."""
    ids = [str(TaskRecord(name="x").id) for _ in range(5000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == 5000
    assert all(id[14] == "7" and id[19] in "89ab" for id in ids)


def test_migration_is_up_to_date() -> None:
    """The models need no other migration than the initial one."""
    call_command("makemigrations", "django_asyncq", check=True, dry_run=True, verbosity=0)


@pytest.mark.parametrize("name", ["", "a b", "{x}", "x" * 201, "a\nb"])
def test_gate_names_that_would_break_a_redis_key_are_refused(name: str) -> None:
    """The error is at the field `name`."""
    with pytest.raises(ValidationError) as caught:
        Gate(name=name, limit=1).full_clean()
    assert "name" in caught.value.message_dict


# Values that a handwritten SQL statement could corrupt: quotes, a backslash, large numbers, nesting, an empty key.
AWKWARD = {"text": "%s '\"\\ {}[] \u00e9\U0001f600", "number": 2**63, "deep": [{"a": [None, 1.5, True]}], "": ""}


def stored(record: TaskRecord) -> dict[str, object]:
    """All column values of a row."""
    return {field.attname: getattr(record, field.attname) for field in TaskRecord._meta.concrete_fields}


def test_read_rows_returns_what_the_orm_returns() -> None:
    """Every column is equal, JSON is decoded, and an id without a row gives nothing."""
    plain = TaskRecord.objects.create(name="x")
    full = TaskRecord.objects.create(
        name="y",
        args=[AWKWARD],
        kwargs={"a": []},
        group="g",
        state=TaskState.SUCCEEDED,
        return_value=AWKWARD,
        progress=0,
        headers={"trace": AWKWARD},
        last_exception="a.É",
        wire_id="any text",
        parent_id=uuid7(),
        expires_at=NOW,
        worker_ids=["w"],
        finished_at=NOW,
    )
    found = {row.id: row for row in read_rows([str(plain.id), str(full.id), str(uuid7())], "default")}
    assert set(found) == {plain.id, full.id}
    for record in TaskRecord.objects.all():
        assert stored(found[record.id]) == stored(record)
        assert not found[record.id]._state.adding


@pytest.mark.skipif(connection.vendor != "postgresql", reason="elsewhere Django reads the rows")
def test_read_rows_raises_the_database_errors_of_django() -> None:
    """An error of the driver is raised as Django's, because the worker handles only those."""
    with pytest.raises(DataError), transaction.atomic():
        read_rows(["no uuid"], "default")


def test_fenced_write_stores_every_value_unchanged() -> None:
    """Every written column reads back equal, whatever its value; other columns do not change."""
    records = [TaskRecord.objects.create(name="x", args=[n]) for n in range(3)]
    for record, value in zip(records, (AWKWARD, None, "null"), strict=True):
        record.state, record.fence, record.attempt, record.crash_count = TaskState.SUCCEEDED, 7, 2, 1
        record.started_at = record.last_attempted_at = record.finished_at = NOW
        record.return_value, record.worker_ids, record.last_exception = value, ["h:1:2:é"], "a.É"
        record.errors = [{"message": 'it\'s \\ "so"\n', "traceback": "%d"}]
    assert write_fenced([FencedWrite(record, 7, 0) for record in records], "default") == {
        record.id for record in records
    }
    for record in records:
        assert stored(TaskRecord.objects.get(id=record.id)) == stored(record)


def test_fenced_write_refuses_a_row_with_a_newer_fence() -> None:
    """Of a batch, only the rows whose fence is unchanged are written."""
    mine, theirs = (TaskRecord.objects.create(name="x", state=TaskState.RUNNING, fence=fence) for fence in (3, 4))
    for record in (mine, theirs):
        record.state, record.fence, record.finished_at = TaskState.SUCCEEDED, 3, NOW
    assert write_fenced([FencedWrite(mine, 3, 0), FencedWrite(theirs, 3, 0)], "default") == {mine.id}
    assert TaskRecord.objects.get(id=theirs.id).state == TaskState.RUNNING


def finished(record: TaskRecord, fence: int = 1) -> FencedWrite:
    record.state, record.fence, record.finished_at = TaskState.SUCCEEDED, fence, NOW
    return FencedWrite(record, fence, 0)


def test_a_fenced_write_frees_the_slots_of_its_unique_tasks_alone() -> None:
    """In one batch: a task that keeps its slot, one that frees it, and a plain one."""
    ended, throttled, retrying, plain = (
        TaskRecord.objects.create(name="x", **values)
        for values in (
            {"unique_key": "a", "unique_slot": "a"},
            {"unique_key": "b", "unique_slot": "b", "unique_until": NOW},
            {"unique_key": "c", "unique_slot": "c"},
            {},
        )
    )
    writes = [finished(record) for record in (ended, throttled, plain)]
    retrying.state, retrying.fence, retrying.retry_at, retrying.reason = TaskState.FAILED, 1, NOW, 1
    assert len(write_fenced([*writes, FencedWrite(retrying, 1, 0)], "default")) == 4
    slots = dict(TaskRecord.objects.values_list("id", "unique_slot"))
    assert slots == {ended.id: None, throttled.id: "b", retrying.id: "c", plain.id: None}


def test_a_refused_write_frees_no_slot() -> None:
    """The slot belongs to the run that holds the row."""
    record = TaskRecord.objects.create(name="x", unique_key="a", unique_slot="a", state=TaskState.RUNNING, fence=2)
    assert write_fenced([finished(record, 1)], "default") == set()
    assert TaskRecord.objects.get().unique_slot == "a"


def test_a_task_that_is_unique_until_it_starts_frees_its_slot_when_it_is_written_as_running() -> None:
    """The write of RUNNING frees it, and it is not taken again by a retry."""
    record = TaskRecord.objects.create(name="x", unique_key="a", unique_slot="a", unique_until_start=True)
    record.state, record.fence = TaskState.RUNNING, 1
    write_fenced([FencedWrite(record, 1, 0)], "default")
    assert TaskRecord.objects.get().unique_slot is None


def test_a_write_without_progress_keeps_that_of_the_row() -> None:
    """Beside one that has some, and in a batch where none has."""
    told, silent, alone = (TaskRecord.objects.create(name="x", progress={"done": n}) for n in (1, 2, 3))
    told.progress, silent.progress = {"done": 9, "message": "é"}, None
    write_fenced([finished(told), finished(silent)], "default")
    alone.progress = None
    write_fenced([finished(alone)], "default")
    stored = dict(TaskRecord.objects.values_list("id", "progress"))
    assert stored == {told.id: {"done": 9, "message": "é"}, silent.id: {"done": 2}, alone.id: {"done": 3}}


def test_a_batch_of_plain_tasks_writes_no_column_of_other_tasks() -> None:
    """The statement of plain tasks is the one without these columns."""
    records = [TaskRecord.objects.create(name="x") for _ in range(2)]
    with CaptureQueriesContext(connection) as queries:
        write_fenced([finished(record) for record in records], "default")
    update = next(query["sql"] for query in queries if query["sql"].startswith(("WITH", "UPDATE")))
    assert "unique_slot" not in update
    assert "progress" not in update

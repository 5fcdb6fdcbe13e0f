"""The rows: what the database itself refuses, and the states by name."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.core.management import call_command
from django.db import IntegrityError, transaction
from django.utils import timezone

from django_asyncq.models import Gate, TaskRecord, TaskState

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
        {"state": 3},
        {"state": 3, "retry_at": NOW, "finished_at": NOW},
    ],
)
def test_the_database_refuses_rows_that_cannot_be(fields: dict[str, Any]) -> None:
    """Final (2, or 3 without retry_at) if and only if finished_at; states 0 to 3; priorities -100 to 100."""
    with pytest.raises(IntegrityError), transaction.atomic():
        TaskRecord.objects.create(name="x", **fields)


def test_states_by_name() -> None:
    """Each row is in one of five sets; a failed one that waits for its retry is not `failed`."""
    rows = {
        "queued": TaskRecord.objects.create(name="x"),
        "running": TaskRecord.objects.create(name="x", state=TaskState.RUNNING),
        "succeeded": TaskRecord.objects.create(name="x", state=TaskState.SUCCEEDED, finished_at=NOW),
        "failed": TaskRecord.objects.create(name="x", state=TaskState.FAILED, finished_at=NOW),
        "retrying": TaskRecord.objects.create(name="x", state=TaskState.FAILED, retry_at=NOW),
    }
    for name, row in rows.items():
        assert list(getattr(TaskRecord.objects, name)()) == [row]
        assert row.is_final == (name in ("succeeded", "failed"))


def test_ids_are_in_order_of_their_making() -> None:
    """UUIDv7, also within one millisecond; its text sorts as it was made."""
    ids = [str(TaskRecord(name="x").id) for _ in range(5000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == 5000
    assert all(id[14] == "7" and id[19] in "89ab" for id in ids)


def test_the_migration_is_up_to_date() -> None:
    """The models say nothing that the one initial migration does not."""
    call_command("makemigrations", "django_asyncq", check=True, dry_run=True, verbosity=0)


@pytest.mark.parametrize("name", ["", "a b", "{x}", "x" * 201, "a\nb"])
def test_gate_names_that_would_break_a_key_are_refused(name: str) -> None:
    """At the field, in the admin's form."""
    with pytest.raises(ValidationError) as caught:
        Gate(name=name, limit=1).full_clean()
    assert "name" in caught.value.message_dict

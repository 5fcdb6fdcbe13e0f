"""Rows and transactions are of the database that the routers give for writing. `shape.py` has the rule for the code."""

from __future__ import annotations

from typing import Any

import pytest
from django.apps import apps
from django.contrib import admin
from django.db import connections, router
from django.db.models import Model
from django.db.models.signals import post_delete
from django.test import RequestFactory
from django.test.utils import CaptureQueriesContext

from django_asyncq.broker.inspection import Inspection
from django_asyncq.lifecycle import deletion
from django_asyncq.models import Gate, Occurrence, Schedule, StartupRun, TaskRecord
from django_asyncq.storage import routing

from .. import tasks
from ..admin_cases import make

# --- the door


class Split:
    """Routers of a project with a replica, or with a database for the app."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        """Name the replica."""
        return "replica"

    def db_for_write(self, model: Any, **hints: Any) -> str:
        """Name the primary."""
        return "primary"


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers that name two databases, neither of which is `default`."""
    monkeypatch.setattr(router, "routers", [Split()])


@pytest.mark.usefixtures("split")
def test_rows_and_transactions_are_of_the_database_that_is_written_to() -> None:
    """What the package reads is never the replica's, and never `default` when the routers name another."""
    for model in apps.get_app_config("django_asyncq").get_models():
        assert routing.writing_database(model) == "primary"
        assert routing.rows_of(model).db == "primary"
        assert routing.transaction_of(model).using == "primary"
    assert TaskRecord.objects.all().db == "replica"


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("model", [TaskRecord, Gate, Schedule, StartupRun])
def test_the_admin_reads_the_database_that_is_written_to(model: type[Model]) -> None:
    """A page that showed a replica would offer buttons for what is no longer so."""
    assert admin.site.get_model_admin(model).get_queryset(RequestFactory().get("/")).db == "primary"


@pytest.mark.usefixtures("split")
def test_a_filter_by_what_refers_to_a_task_stays_in_its_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """No constraint reaches into another database, so no query does."""
    relation = Occurrence._meta.get_field("task").remote_field
    monkeypatch.setattr(relation.field, "db_constraint", True)
    rows = routing.rows_of(TaskRecord)
    assert "EXISTS" in str(deletion.without_referrers(rows).query)
    assert "EXISTS" not in str(deletion.without_referrers(rows.using("archive")).query)


@pytest.mark.django_db(transaction=True)
def test_the_deletion_of_a_copy_leaves_the_task_alone() -> None:
    """A row deleted from an archive, with the id of a task that waits, is not the task."""
    result = tasks.add.enqueue(1, 2)
    record = TaskRecord.objects.get(id=result.id)
    post_delete.send(TaskRecord, instance=record, using="archive")
    assert state_of(result.id) == "pending"
    post_delete.send(TaskRecord, instance=record, using=routing.writing_database(TaskRecord))
    assert state_of(result.id) == ""


def state_of(id: str) -> str:
    """Return the state of a task's entry; empty when Redis does not know it."""
    return Inspection("worker").entry_states("default", [id])[0].state


@pytest.mark.django_db(transaction=True)
def test_rows_that_are_locked_are_not_written() -> None:
    """Not even as they are: a trigger would see a finished row change. On SQLite nobody else writes meanwhile."""
    row = make()
    connection = connections[routing.writing_database(TaskRecord)]
    with routing.transaction_of(TaskRecord), CaptureQueriesContext(connection) as queries:
        before = connection.connection.total_changes if connection.vendor == "sqlite" else 0
        assert routing.lock_free_rows(routing.rows_of(TaskRecord)) == {row.pk}
        if connection.vendor == "sqlite":
            assert connection.connection.total_changes == before and connection.connection.in_transaction
            assert queries.captured_queries[0]["sql"].startswith("UPDATE")
        else:
            assert "FOR UPDATE" in queries.captured_queries[0]["sql"]

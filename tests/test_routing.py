"""Every query and every transaction of the package names its database: the one that the routers give for writing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.contrib import admin
from django.db import router
from django.db.models import Model
from django.db.models.signals import post_delete
from django.test import RequestFactory

from django_asyncq.broker.inspection import Inspection
from django_asyncq.lifecycle import deletion
from django_asyncq.models import Gate, Occurrence, Schedule, StartupRun, TaskRecord
from django_asyncq.storage import routing

from . import tasks

PACKAGE = Path(__file__).parent.parent / "django_asyncq"
# It alone asks the routers, and opens transactions by a model.
DOOR = "storage.routing"
# Others that ask the routers, each with the reason.
MAY_ASK = {
    "storage.database_clock": "user code declares tasks before Django has loaded the models",
    "context": "user code imports it before Django has loaded the models",
}
MANAGERS = {"objects", "_default_manager", "_base_manager"}
# What chooses a database by name; `model._meta` has no rows.
CHOOSES = {"using", "db_manager"}
# Functions of `django.db.transaction` → at which place the database stands.
TRANSACTIONS = {
    "atomic": 0,
    "on_commit": 1,
    "get_connection": 0,
    "get_autocommit": 0,
    "set_autocommit": 1,
    "commit": 0,
    "rollback": 0,
    "savepoint": 0,
    "savepoint_rollback": 1,
    "savepoint_commit": 1,
    "clean_savepoints": 0,
    "get_rollback": 0,
    "set_rollback": 1,
    "mark_for_rollback_on_error": 0,
}
# They read through the default manager of a model, or through the database that it was read from.
SHORTCUTS = {"get_object_or_404", "get_list_or_404", "aget_object_or_404", "aget_list_or_404"}
REFRESHES = {"refresh_from_db", "arefresh_from_db"}


def faults(tree: ast.AST) -> Iterator[str]:
    """Yield each query and transaction that names no database, and each question to the routers."""
    named = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in CHOOSES}
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    modules, functions = transaction_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "django.db":
            yield from (f"import {name.name}" for name in node.names if name.name in ("router", "connection"))
        elif isinstance(node, ast.Attribute):
            is_transaction = isinstance(node.value, ast.Name) and node.value.id in modules and node.attr in TRANSACTIONS
            if (
                (node.attr in MANAGERS and id(node) not in named)
                or (is_transaction and not names_database(calls.get(id(node)), TRANSACTIONS[node.attr]))
                or (node.attr in REFRESHES and not names_database(calls.get(id(node)), 0))
            ):
                yield ast.unparse(node)
        elif isinstance(node, ast.Name) and node.id in functions:
            if not names_database(calls.get(id(node)), TRANSACTIONS[functions[node.id]]):
                yield node.id
        elif isinstance(node, ast.Name) and node.id in SHORTCUTS:
            yield node.id


def transaction_names(tree: ast.AST) -> tuple[set[str], dict[str, str]]:
    """Return under which names a module knows `django.db.transaction`, and under which its functions."""
    modules, functions = set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "django.db":
            modules |= {each.asname or each.name for each in node.names if each.name == "transaction"}
        if isinstance(node, ast.ImportFrom) and node.module == "django.db.transaction":
            functions |= {each.asname or each.name: each.name for each in node.names if each.name in TRANSACTIONS}
    return modules, functions


def names_database(call: ast.Call | None, place: int) -> bool:
    """Whether a call gives a database, by keyword or at its place; a function that is only named gives none."""
    if call is None:
        return False
    return len(call.args) > place or any(keyword.arg in ("using", "from_queryset") for keyword in call.keywords)


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield every module of the package by its dotted name."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "migrations" not in path.parts:
            yield ".".join(path.relative_to(PACKAGE).with_suffix("").parts), ast.parse(path.read_text(), str(path))


@pytest.mark.parametrize(("name", "tree"), [pytest.param(name, tree, id=name) for name, tree in modules()])
def test_each_query_and_transaction_names_its_database(name: str, tree: ast.Module) -> None:
    """A bare `atomic()` is one of `default`, and a bare manager reads a replica."""
    found = set(faults(tree)) - ({"import router"} if name in MAY_ASK else set())
    assert name == DOOR or not found, "begin with rows_of or transaction_of of storage.routing, or name the database"


@pytest.mark.parametrize(
    "source",
    [
        "TaskRecord.objects.filter(id=1)",
        "rows = TaskRecord.objects",
        "TaskRecord._default_manager.all()",
        "Occurrence.objects.create(schedule=row).save(using='a')",
        "from django.db import transaction\nwith transaction.atomic(): pass",
        "from django.db import transaction\nwith transaction.atomic(savepoint=False): pass",
        "from django.db import transaction\ndef f(fenced=transaction.atomic): pass",
        "from django.db import transaction\n@transaction.atomic\ndef f(): pass",
        "from django.db import transaction as t\nt.on_commit(f)",
        "from django.db import transaction as t\nt.on_commit(f, robust=True)",
        "from django.db.transaction import atomic\nwith atomic(): pass",
        "from django.db.transaction import atomic as a\nwith a(durable=True): pass",
        "from django.db import router\nrouter.db_for_read(TaskRecord)",
        "from django.db import connection",
        "row.refresh_from_db()",
        "get_object_or_404(TaskRecord, id=1)",
    ],
)
def test_checker_sees_what_names_no_database(source: str) -> None:
    """Each way to use the default database or a replica without a word would be found."""
    assert list(faults(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "rows_of(TaskRecord).filter(id=1)",
        "Gate.objects.using(using).filter(id=1)",
        "LogEntry.objects.db_manager(writing_database(LogEntry)).log_actions()",
        "from django.db import transaction\nwith transaction.atomic(using=database, durable=True): pass",
        "from django.db import transaction\nwith transaction.atomic(database, savepoint=False): pass",
        "from django.db import transaction\ntransaction.on_commit(f, using=using, robust=True)",
        "from django.db import connections\nconnections[database].on_commit(f)",
        "row.refresh_from_db(using=database)",
        "task.atomic\nself.task.atomic",
    ],
)
def test_checker_accepts_what_names_a_database(source: str) -> None:
    """The door, and the other forms that the package uses."""
    assert not list(faults(ast.parse(source)))


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

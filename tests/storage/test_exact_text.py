"""Names are compared by the database as Python and Redis compare them, on each database."""

from __future__ import annotations

import pytest
from django.apps import apps
from django.db.models import CharField, Field

from django_asyncq import gates
from django_asyncq.core.fields import ExactCharField
from django_asyncq.models import Gate, LockTerm, Schedule, StartupRun, TaskRecord

# Nothing is found by these, or they are written in one way only.
OTHER_TEXTS = {
    "TaskRecord.unique_key",
    "TaskRecord.unique_slot",
    "TaskRecord.cancelled_by",
    "TaskLogLine.logger",
    "Schedule.cron",
    "Pause.paused_by",
    "Pause.note",
    "BulkAction.key",
    "BulkAction.created_by",
    "Schedule.zone",
    "StartupRun.holder",
    "LockTerm.holder",
}


def char_fields() -> list[Field]:
    """The text columns of all models without choices."""
    models = apps.get_app_config("django_asyncq").get_models()
    return [
        field
        for model in models
        for field in model._meta.concrete_fields
        if isinstance(field, CharField) and not field.choices
    ]


def test_every_column_of_names_is_exact() -> None:
    """A new text column is exact, or stands among the others above."""
    others = {
        f"{field.model.__name__}.{field.name}" for field in char_fields() if not isinstance(field, ExactCharField)
    }
    assert others == OTHER_TEXTS


@pytest.mark.django_db
def test_names_that_differ_by_case_are_two() -> None:
    """In unique columns, in the primary key, and for a filter."""
    for name in ("mail", "Mail"):
        Gate.objects.create(name=name, limit=1)
        Schedule.objects.create(name=name, task=f"tests.tasks.{name}", interval_seconds=60)
        LockTerm.objects.create(name=name)
        TaskRecord.objects.create(name=f"tests.tasks.{name}", queue_name=name, group=name)
    assert Gate.objects.get(name="Mail").name == "Mail"
    assert Schedule.objects.filter(task="tests.tasks.mail").count() == 1
    assert LockTerm.objects.filter(name="mail").update(number=1) == 1
    assert TaskRecord.objects.filter(name="tests.tasks.Mail", queue_name="Mail", group="Mail").count() == 1


@pytest.mark.django_db
def test_ids_of_other_programs_are_compared_to_their_last_character() -> None:
    """Not by the case, nor by the beginning alone that the index holds."""
    texts = ["order-7", "Order-7", "bestellung-ü", "%s", "a" * 16_000, "a" * 15_999 + "b", "🦄" * 200, "x' OR 1=1 --"]
    rows = {text: TaskRecord.objects.create(name="a.b", wire_id=text).pk for text in texts}
    TaskRecord.objects.create(name="a.b")
    for text, pk in rows.items():
        assert TaskRecord.objects.get(wire_id=text).pk == pk, text[:20]
    assert TaskRecord.objects.filter(wire_id="order").count() == 0
    assert TaskRecord.objects.exclude(wire_id="order-7").count() == len(texts)
    assert TaskRecord.objects.filter(wire_id=None).count() == 1


@pytest.mark.django_db(transaction=True)
def test_audit_of_a_gate_counts_the_tasks_of_no_other() -> None:
    """The live rows of `Mail` hold no slots of `mail`."""
    for name in ("mail", "Mail"):
        TaskRecord.objects.create(name="tests.tasks.add", gate=name, queue_limit=5)
    gates.audit("mail")
    assert len(gates.slots("mail")) == 1


@pytest.mark.django_db
def test_search_ignores_case() -> None:
    """As the search fields of the admin do on each database."""
    Schedule.objects.create(name="Nightly", task="shop.tasks.Report", interval_seconds=60)
    StartupRun.objects.create(name="shop.Warm", holder="h", term=1, begun_at="2026-01-01T00:00:00Z")
    assert Schedule.objects.filter(name__icontains="NIGHT", task__icontains="report").count() == 1
    assert StartupRun.objects.filter(name__icontains="WARM").count() == 1

"""Create the gates of the catalogue, and read how full each is."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import Count

from django_asyncq.models import Gate, TaskRecord, TaskRecordQuerySet

from .catalogue import MODELS, Model


@dataclass(frozen=True, slots=True)
class Meter:
    """How full a model's gate is. limit: 0 or less means no limit. waiting: renders that wait for a slot."""

    model: Model
    limit: int
    occupancy: int
    waiting: int = 0

    @property
    def text(self) -> str:
        """Describe the meter in words."""
        if self.limit <= 0:
            return f"{self.occupancy} queued or running, no limit"
        full = ", full" if self.is_full else ""
        waiting = f", {self.waiting} waiting" if self.waiting else ""
        return f"{self.occupancy} of {self.limit} slots{full}{waiting}"

    @property
    def is_full(self) -> bool:
        """Whether the gate would refuse a render now."""
        return 0 < self.limit <= self.occupancy


def ensure_gates() -> int:
    """Create the missing Gate rows and return how many. Existing rows keep the limits that a person has set."""
    added = 0
    for model in MODELS.values():
        defaults = {"limit": model.limit, "expected_seconds": model.expected_seconds}
        added += Gate.objects.get_or_create(name=model.name, defaults=defaults)[1]
    return added


def occupancies() -> dict[str, int]:
    """Return how many tasks hold a slot of each gate, according to the database."""
    return _by_gate(TaskRecord.objects.holding_slot())


def _by_gate(tasks: TaskRecordQuerySet) -> dict[str, int]:
    return dict(tasks.order_by().values_list("gate").annotate(Count("id")))


def meters() -> list[Meter]:
    """Return one meter per model, in the order of the catalogue."""
    limits = dict(Gate.objects.values_list("name", "limit"))
    held, waiting = occupancies(), _by_gate(TaskRecord.objects.waiting_at_gate())
    return [
        Meter(model, limits.get(name, model.limit), held.get(name, 0), waiting.get(name, 0))
        for name, model in MODELS.items()
    ]

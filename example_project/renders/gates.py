"""The gates of the catalogue as rows, and how full each is."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import Count

from django_asyncq.models import Gate, TaskRecord, TaskState

from .catalogue import MODELS, Model


@dataclass(frozen=True, slots=True)
class Meter:
    """How full a model's gate is. limit 0 or less: it has none."""

    model: Model
    limit: int
    occupancy: int

    @property
    def text(self) -> str:
        """The meter in words."""
        if self.limit <= 0:
            return f"{self.occupancy} under way, no limit"
        full = ", full" if self.is_full else ""
        return f"{self.occupancy} of {self.limit} slots{full}"

    @property
    def is_full(self) -> bool:
        """Whether the gate would refuse now."""
        return 0 < self.limit <= self.occupancy


def ensure_gates() -> int:
    """Add the Gate rows that are missing and return how many; those that exist keep what a person has set."""
    added = 0
    for model in MODELS.values():
        defaults = {"limit": model.limit, "expected_seconds": model.expected_seconds}
        added += Gate.objects.get_or_create(name=model.name, defaults=defaults)[1]
    return added


def occupancies() -> dict[str, int]:
    """Return how many tasks of each gate are queued or running, by the rows."""
    live = TaskRecord.objects.filter(state__in=(TaskState.QUEUED, TaskState.RUNNING)).exclude(gate="")
    return dict(live.order_by().values_list("gate").annotate(Count("id")))


def meters() -> list[Meter]:
    """Return a meter per model, in the order of the catalogue."""
    limits = dict(Gate.objects.values_list("name", "limit"))
    held = occupancies()
    return [Meter(model, limits.get(model.name, model.limit), held.get(model.name, 0)) for model in MODELS.values()]

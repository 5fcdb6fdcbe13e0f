"""Whether a gate is paused, as its row says. `audit.build` writes it to Redis."""

from __future__ import annotations

from ..models import Pause, PauseKind
from ..storage.routing import rows_of


def is_paused(gate: str) -> bool:
    """Return whether a gate admits no new task until it is resumed."""
    return rows_of(Pause).filter(kind=PauseKind.GATE, name=gate).exists()

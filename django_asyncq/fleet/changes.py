"""Learn with one statement what has changed that loops of the leader act on, so that none of them asks for itself.

Hardly ever has anything changed, and each loop would ask every few seconds: about paused queues, actions on many tasks,
schedules, the identity of the database. What is read here is only compared with what was read before; whoever is
concerned reads the rows. So it does not matter whether a loop has seen a change already.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from django.db.models import CharField, Count, Exists, QuerySet, Subquery, Value
from django.db.models.functions import Cast

from ..models import BulkAction, BulkState, Pause, PauseKind, Schedule
from ..storage import identity
from ..storage.routing import rows_of

# Most changes send a message, which wakes the loop at once. A change by `QuerySet.update`, or by a process that died
# before it had told Redis, is found by the next look: within five seconds.
LOOK_SECONDS = 4.0


class Changes(NamedTuple):
    """What may have changed since the last look. actions: whether one is running, changed or not."""

    identity: bool = True
    schedules: bool = True
    pauses: bool = True
    actions: bool = True


class ChangeLook:
    """Looks, again and again. Used by one thread."""

    def __init__(self) -> None:
        self._seen: dict[str, Any] | None = None

    def forget(self) -> None:
        """Have the next look find that everything may have changed."""
        self._seen = None

    def tick(self) -> Changes:
        """Return what may have changed since the last call. Raises: django.db.Error."""
        before, self._seen = self._seen, _read()
        if before is None or self._seen is None:
            return Changes()
        different = {name for name, value in self._seen.items() if value != before[name]}
        return Changes(
            identity="own" in different,
            schedules="next_at" in different,
            pauses=not different.isdisjoint(("latest_pause", "paused_at", "pauses")),
            actions=bool(self._seen["has_actions"]),
        )


def _read() -> dict[str, Any] | None:
    """Read what tells one state of these rows from another, as text; None while the database has no identity."""
    # A gate that is paused is found by the audit of gates.
    pauses = rows_of(Pause).exclude(kind=PauseKind.GATE)
    count = pauses.order_by().annotate(one=Value(1)).values("one").annotate(count=Count("pk")).values("count")
    found: Any = (
        identity.row()
        .values(
            own=_text("value"),
            has_actions=Exists(rows_of(BulkAction).filter(state=BulkState.RUNNING)),
            next_at=_first(rows_of(Schedule).firing(), "next_occurrence_at"),
            latest_pause=_first(pauses, "pk", is_last=True),
            paused_at=_first(pauses, "paused_at", is_last=True),
            pauses=Subquery(count),
        )
        .first()
    )
    return None if found is None else dict(found)


def _first(rows: QuerySet[Any], column: str, *, is_last: bool = False) -> Subquery:
    return Subquery(rows.order_by(f"-{column}" if is_last else column).values(text=_text(column))[:1])


def _text(column: str) -> Cast:
    # SQLite and MySQL may hold values that cannot be read.
    return Cast(column, CharField())

"""Enable and disable schedules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from uuid import UUID

from ..exceptions import InvalidOption
from ..models import Schedule
from ..storage import database_clock
from ..storage.routing import rows_of, transaction_of


@dataclass
class Switched:
    """The result of enabling or disabling schedules.

    never_firing: enabled schedules with no occurrence left. broken: schedules that cannot be enabled, and why.
    """

    changed: list[Schedule] = field(default_factory=list)
    unchanged: list[Schedule] = field(default_factory=list)
    never_firing: list[Schedule] = field(default_factory=list)
    broken: list[tuple[Schedule, InvalidOption]] = field(default_factory=list)


def switch(pks: Iterable[UUID], *, enabled: bool) -> Switched:
    """Enable or disable schedules. An enabled one continues with its next occurrence; earlier ones are not missed."""
    switched = Switched()
    for pk in pks:
        with transaction_of(Schedule):
            row = rows_of(Schedule).select_for_update().filter(pk=pk).first()
            if row is None:
                continue
            if row.enabled == enabled:
                switched.unchanged.append(row)
                continue
            row.enabled = enabled
            try:
                if enabled:
                    row.plan_next(database_clock.now())
            except InvalidOption as error:
                switched.broken.append((row, error))
                continue
            row.save(update_fields=["enabled", "next_occurrence_at"])
            switched.changed.append(row)
            if enabled and row.next_occurrence_at is None:
                switched.never_firing.append(row)
    return switched

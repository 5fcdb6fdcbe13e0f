"""The gates, for an `Inspector`."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime

from django.core.exceptions import ValidationError

from .. import gates, pausing
from ..definitions.names import check_gate_name
from ..exceptions import InvalidOption
from ..models import Gate, Pause, PauseKind
from ..storage.routing import rows_of, transaction_of, writing_database
from .counts import GateStats, gate_stats
from .values import GateDetails, GateDrift, GateInfo


class Gates:
    """List, repair and set gates."""

    def all(self) -> list[GateInfo]:
        """Return every gate with a row, an unfinished task or a task that waits, by name."""
        expected, paused = _expected_seconds(), _paused()
        return [_info(each, expected.get(each.gate), is_paused=each.gate in paused) for each in gate_stats()]

    def get(self, name: str) -> GateDetails | None:
        """Return a gate with who holds its slots; None when nothing is known of it."""
        found = [each for each in self.all() if each.gate == name]
        if not found:
            return None
        info = {each.name: getattr(found[0], each.name) for each in fields(GateInfo)}
        slots = [(slot.id, datetime.fromtimestamp(min(slot.expires_at, LATEST), UTC)) for slot in gates.slots(name)]
        return GateDetails(**info, slots=slots, waiters=gates.waiters(name))

    def audit(self, name: str, *, dry_run: bool = False) -> GateDrift:
        """Make the slots of a gate agree with the rows, which decide who holds one. dry_run: only count."""
        check_gate_name(name)
        return GateDrift(*gates.audit(name, dry_run=dry_run))

    def set(self, name: str, *, limit: int | None = None, expected_seconds: float | None = None) -> GateInfo:
        """Set the limit of a gate, or how long its tasks take; make its row when it has none. Takes effect at once.

        limit: 0 or less means no limit; required for a gate without a row. expected_seconds: of a new row by default
        what the tasks of the gate say. Raises: InvalidOption.
        """
        check_gate_name(name)
        with transaction_of(Gate):
            row = rows_of(Gate).select_for_update().filter(name=name).first()
            if row is None:
                if limit is None:
                    raise InvalidOption(f"gate {name} has no row yet: give a limit for it")
                row = Gate(name=name)
                if expected_seconds is None:
                    row.expected_seconds = gates.expected_seconds_of(name)
            row.limit = row.limit if limit is None else limit
            row.expected_seconds = row.expected_seconds if expected_seconds is None else expected_seconds
            try:
                row.clean_fields()
            except ValidationError as error:
                raise InvalidOption(f"gate {name} cannot be set: {'; '.join(error.messages)}") from error
            row.save(using=writing_database(Gate))
        (info,) = [each for each in self.all() if each.gate == name]
        return info

    def pause(self, name: str, *, by: str = "", note: str = "") -> bool:
        """Let a gate admit nothing new; return whether it admitted. by: who; note: why. Raises: InvalidOption."""
        return pausing.pause(PauseKind.GATE, name, by=by, note=note)

    def resume(self, name: str) -> bool:
        """Let a gate admit again; return whether it was paused. Raises: InvalidOption."""
        return pausing.resume(PauseKind.GATE, name)


# Where the year has four digits; a score may be any number.
LATEST = 253_370_764_800


def _info(each: GateStats, expected_seconds: float | None, *, is_paused: bool) -> GateInfo:
    return GateInfo(each.gate, each.limit, expected_seconds, each.occupancy, each.live, each.waiting, is_paused)


def _expected_seconds() -> dict[str, float]:
    return dict(rows_of(Gate).values_list("name", "expected_seconds"))


def _paused() -> set[str]:
    return set(rows_of(Pause).filter(kind=PauseKind.GATE).values_list("name", flat=True))

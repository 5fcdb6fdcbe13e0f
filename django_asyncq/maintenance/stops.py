"""Close what was cancelled or has expired, and ask the workers of cancelled tasks again.

A part of each quick pass of the reconciler. So the gate slots of a queue without workers are released, and no cancel is
forgotten: a message may be lost, and Redis may forget the field with everything else, but the row does not. Each
statement reads an index that holds hardly any row.
"""

from __future__ import annotations

from .. import lifecycle
from ..faults import Parts


class StopRepairs:
    """The repairs of tasks that must not go on."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def tick(self) -> int:
        """Do each of them; return how many tasks were closed. Raises: BrokerUnavailable, django.db.Error."""
        attempt = self._parts.attempt
        cancelled = attempt("closing of cancelled tasks", lifecycle.close_cancelled, 0)
        expired = attempt("closing of expired tasks", lifecycle.expire, 0)
        attempt("requests to stop", lifecycle.ask_again, 0)
        return cancelled + expired

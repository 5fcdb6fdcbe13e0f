"""Conditions that a database checks in rows that it has found by their ids, and never takes for the way to them."""

from __future__ import annotations

from typing import Any

from django.db.models import BooleanField, Case, Q, Value, When


def as_check(*conditions: Q, **lookups: Any) -> Case:
    """Return what `filter(*conditions, **lookups)` means, for statements that name ids or batches as well.

    It is a CASE, which no planner takes for an access path. When the statistics of PostgreSQL are older than a backlog,
    they say that hardly any row is queued; from ids beside a plain condition on the state it would choose the index on
    states, and read every queued row to find a few.
    """
    met = When(Q(*conditions, **lookups), then=Value(True))
    return Case(met, default=Value(False), output_field=BooleanField())

"""The time by Redis's clock, which decides leases, slots, locks, and when a task that is due is pushed.

A script reads `TIME` itself. This is for what a script cannot do: the name of a key of today, comparisons in Python.
It is measured with one small script and carried on by this host's monotonic clock.
"""

from __future__ import annotations

from ..clocks import MEASURED_SECONDS, MeasuredClock, steady_seconds
from . import clients, replies, scripts
from .keys import alive_key, prefix

# By key prefix: in tests, each has a server of its own.
_clocks: dict[str, MeasuredClock] = {}


def seconds(role: clients.Role = "worker") -> float:
    """Return Redis's time in Unix seconds; measure it if that was over a minute ago. Raises: BrokerUnavailable."""
    clock = _clocks.setdefault(prefix(), MeasuredClock())
    shown = clock.seconds() if clock.age_seconds <= MEASURED_SECONDS else None
    return measure(role) if shown is None else shown


def measure(role: clients.Role = "worker") -> float:
    """Ask Redis for its time; return it in Unix seconds. Raises: BrokerUnavailable."""
    client = clients.client(role)
    asked_at = steady_seconds()
    found = scripts.run("time", client, [alive_key()])
    clock = _clocks.setdefault(prefix(), MeasuredClock())
    clock.note(asked_at, steady_seconds(), replies.count(found[0]) + replies.count(found[1]) / 1e6)
    return clock.seconds() or 0.0

"""Gates: strict admission limits. At most N tasks of a gate are queued or running.

A task that names a gate holds a slot of it while it is QUEUED or RUNNING. `receivers` acquires and releases the slots
when a task changes its state; the other modules know the slots in Redis and never change a task.
"""

from __future__ import annotations

from .admission import (
    Admission,
    acquire,
    admit,
    by_gate,
    confirm,
    give_back,
    release,
    release_deleted,
    release_uncommitted,
    retry_after,
)
from .audit import LIVE_STATES, Drift, audit, audit_waiters, build, look, occupied
from .expected import expected_seconds_of
from .members import Keys, Slot, forget_built, hold_seconds, keys, keys_for, noted_ids, release_ids, slots, trim_noted
from .pauses import is_paused
from .row_slots import slots_taken
from .waiters import forget_gate, settle, waiters, waiting_gates

__all__ = [
    "LIVE_STATES",
    "Admission",
    "Drift",
    "Keys",
    "Slot",
    "acquire",
    "admit",
    "audit",
    "audit_waiters",
    "build",
    "by_gate",
    "confirm",
    "expected_seconds_of",
    "forget_built",
    "forget_gate",
    "give_back",
    "hold_seconds",
    "is_paused",
    "keys",
    "keys_for",
    "look",
    "noted_ids",
    "occupied",
    "release",
    "release_deleted",
    "release_ids",
    "release_uncommitted",
    "retry_after",
    "settle",
    "slots",
    "slots_taken",
    "trim_noted",
    "waiters",
    "waiting_gates",
]

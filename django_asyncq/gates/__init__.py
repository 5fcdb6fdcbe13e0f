"""Strict admission limits: at most N tasks of a gate are queued or running."""

from __future__ import annotations

from .slots import (
    LIVE_STATES,
    Admission,
    Drift,
    Slot,
    acquire,
    admit,
    audit,
    build,
    by_gate,
    confirm,
    forget_built,
    hold_seconds,
    keys,
    keys_for,
    occupied,
    release,
    release_ids,
    release_uncommitted,
    retry_after,
    slots,
)

__all__ = [
    "LIVE_STATES",
    "Admission",
    "Drift",
    "Slot",
    "acquire",
    "admit",
    "audit",
    "build",
    "by_gate",
    "confirm",
    "forget_built",
    "hold_seconds",
    "keys",
    "keys_for",
    "occupied",
    "release",
    "release_ids",
    "release_uncommitted",
    "retry_after",
    "slots",
]

"""The parts of the package's log lines that the chaos suite looks for.

A reworded line would let a check pass unseen, so `test_checker.py` fails for a text that the package no longer logs.
"""

from __future__ import annotations

LEADS = "leadership acquired"
WORKER_STARTED = "started: %d slot%s"
WORKER_DIED = "exited unexpectedly: "
LEASE_LOST = "lost its lease"
LEASES_NOT_RENEWED = "leases cannot be renewed"
CANNOT_FETCH = "cannot fetch"
CANNOT_LISTEN = "cannot listen to"
WAITS_FOR_A_STORE = "the %s loop cannot reach a store"
NOT_ACKNOWLEDGED = "not acknowledged in Redis yet"

ALL = (
    LEADS,
    WORKER_STARTED,
    WORKER_DIED,
    LEASE_LOST,
    LEASES_NOT_RENEWED,
    CANNOT_FETCH,
    CANNOT_LISTEN,
    WAITS_FOR_A_STORE,
    NOT_ACKNOWLEDGED,
)
# What is a complaint, in the words that stay when the values are filled in.
COMPLAINTS = (
    LEASES_NOT_RENEWED,
    CANNOT_FETCH,
    CANNOT_LISTEN,
    WAITS_FOR_A_STORE.removeprefix("the %s loop "),
    NOT_ACKNOWLEDGED,
    "Traceback",
)

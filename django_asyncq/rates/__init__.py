"""Rates: at most so many starts of tasks in a time, whichever worker starts them.

A worker asks as soon as it has claimed tasks, and again when a run begins; `worker.rates` does. What may not start yet
waits in `scheduled` until it is looked at next. `counting` knows what Redis holds of a rate, `placing` publishes a
changed row, and places those that wait anew. Nothing here changes a task.
"""

from __future__ import annotations

from .counting import (
    EARLY_US,
    IDS_PER_CALL,
    Answer,
    State,
    Waiter,
    ask,
    build,
    forget_built,
    forget_waiting,
    give_back,
    reading_look_at,
    reading_states,
    reading_waiting_names,
    row_of,
    waiting_in,
    waiting_names,
)
from .placing import Placed, changed_names, check_rows, is_idle, place_anew

__all__ = [
    "EARLY_US",
    "IDS_PER_CALL",
    "Answer",
    "Placed",
    "State",
    "Waiter",
    "ask",
    "build",
    "changed_names",
    "check_rows",
    "forget_built",
    "forget_waiting",
    "give_back",
    "is_idle",
    "place_anew",
    "reading_look_at",
    "reading_states",
    "reading_waiting_names",
    "row_of",
    "waiting_in",
    "waiting_names",
]

"""Wait for results: `result.wait()`, `await result.await_()`, `wait_all()`.

| module     | what it does                                                                    |
|------------|---------------------------------------------------------------------------------|
| `waits`    | one wait: mark the tasks as waited for, read the rows, say how long to sleep     |
| `waiters`  | what waits in this process, and the one thread and connection that wake it       |
| `refusals` | waits that could never return                                                    |
| `outcomes` | a finished row as a value, or as an error                                        |
| `reader`   | the thread and the connection that read rows for the long polls of pages         |
"""

from __future__ import annotations

from .outcomes import results_by_id, take_outcomes, values_of
from .refusals import checked_seconds, refuse_deadlocks
from .waits import Waiting, sleep_until, wait, wait_async, waker_of

__all__ = [
    "Waiting",
    "checked_seconds",
    "refuse_deadlocks",
    "results_by_id",
    "sleep_until",
    "take_outcomes",
    "values_of",
    "wait",
    "wait_async",
    "waker_of",
]

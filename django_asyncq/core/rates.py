"""How many runs of a task may start in a time: read the options, and count by a clock that is given. Uses no store.

A rate is GCRA, the leaky bucket as a meter. It keeps one time, `until`: each start moves it on by one interval, from
now if it is over, and a start is allowed while it then lies at most `burst` intervals ahead. So in any window there are
at most rate × window + burst starts. Source: ITU-T I.371, annex A; redis-cell. `lua/rate_take.lua` counts the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

SECONDS_OF = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
RATE = re.compile(r"([0-9]{1,9})/([0-9]{0,8})([smhd])")
RATE_HINT = "give '10/s', '600/m', '10/30s' or the like: how many starts per s, m, h or d"
# A longer one is no limit on starts that anybody waits for.
LONGEST_SECONDS = 366 * 86_400
MOST_STARTS = 1_000_000
MOST_BURST = 1_000_000
MICROSECONDS = 1_000_000
# Redis keeps `until` as whole microseconds, which Lua counts exactly up to the year 2255.
LONGEST_BURST_US = 10 * LONGEST_SECONDS * MICROSECONDS


class StartRate(NamedTuple):
    """At most one start per `interval_us` microseconds, and `burst` of them at once."""

    interval_us: int
    burst: int


def interval_of(starts: int, seconds: int) -> int:
    """Return the microseconds between two starts, rounded up: the rate is never above what was asked for."""
    return -(-seconds * MICROSECONDS // starts)


@lru_cache(maxsize=1024)
def parsed(rate: str) -> tuple[int, int] | None:
    """Return how many starts per how many seconds a text like "600/m" or "10/30s" means; None when it means nothing."""
    found = RATE.fullmatch(rate)
    if found is None:
        return None
    starts, seconds = int(found[1]), int(found[2] or 1) * SECONDS_OF[found[3]]
    return (starts, seconds) if 1 <= starts <= MOST_STARTS and 1 <= seconds <= LONGEST_SECONDS else None


def why_not_burst(starts: int, seconds: int, burst: object) -> str | None:
    """Say what is wrong with a burst; None when nothing is."""
    if type(burst) is not int or not 1 <= burst <= MOST_BURST:
        return f"give a whole number from 1 to {MOST_BURST:,}: how many may start at once"
    if burst * interval_of(starts, seconds) > LONGEST_BURST_US:
        return "so many starts take more than ten years at this rate: give fewer"
    return None


@lru_cache(maxsize=1024)
def _rate(rate: str, burst: int) -> StartRate:
    found = parsed(rate)
    assert found is not None  # noqa: S101 - `check_rate` has refused it
    return StartRate(interval_of(*found), burst)


def rate_of(task: Any) -> StartRate:
    """Return the rate that a task declares. task: with a `rate`."""
    return _rate(task.rate, task.burst)


def check_rate(task: Any, refuse: Callable[[str, str], NoReturn]) -> None:
    """Refuse a rate that can never work. refuse: raises for an option, with the remedy."""
    if task.rate is not None:
        found = parsed(task.rate) if isinstance(task.rate, str) else None
        if found is None:
            refuse("rate", RATE_HINT)
        if (remedy := why_not_burst(*found, task.burst)) is not None:
            refuse("burst", remedy)
    if task.rate_per is not None and not isinstance(task.rate_per, str) and not callable(task.rate_per):
        refuse("rate_per", "give a name, a format such as '{api}', or a callable of the arguments")
    if task.batch is not None and is_of_arguments(task.rate_per):
        refuse("rate_per", "a batch is one start, and its calls may have other arguments: give a name without {}")


def is_of_arguments(rate_per: Any) -> bool:
    """Return whether the name of a rate depends on the arguments of a call."""
    return callable(rate_per) or (isinstance(rate_per, str) and "{" in rate_per)


# --- The count itself, as the test kit needs it; workers ask Redis.


def next_start_us(rate: StartRate, starts: Iterable[int]) -> int:
    """Return the time from which the next start is allowed. starts: the earlier ones, in order; all in microseconds."""
    until = 0
    for start in starts:
        until = max(until, start) + rate.interval_us
    return until - (rate.burst - 1) * rate.interval_us

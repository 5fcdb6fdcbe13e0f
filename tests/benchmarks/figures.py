"""Arithmetic of the figures: percentiles, spreads, ratios, waits. Knows no server."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from .probing import Times


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share (0 to 1) does not exceed: nearest rank, no interpolation.

    Raises: ValueError without values.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Spread:
    """Of the rounds' values."""

    least: float
    middle: float
    most: float


def spread(values: Iterable[float]) -> Spread:
    """Return least, median and most. Raises: ValueError without values."""
    found = list(values)
    if not found:
        raise ValueError("no values")
    return Spread(min(found), median(found), max(found))


def ratios(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Divide our value by theirs in each round that has both; a disturbed round disturbs both."""
    return [ours[number] / theirs[number] for number in sorted(ours) if theirs.get(number)]


def ratio_between(ours: Sequence[float], theirs: Sequence[float], resamples: int = 1000) -> tuple[float, float, float]:
    """Divide our median by theirs; return the ratio and its 95 % interval (bootstrap over turns).

    ours, theirs: one value for each turn; a turn is drawn for both.
    """
    draw = random.Random(0)
    turns = range(len(ours))
    drawn = []
    for _ in range(resamples):
        chosen = draw.choices(turns, k=len(turns))
        drawn.append(median([ours[turn] for turn in chosen]) / median([theirs[turn] for turn in chosen]))
    return median(ours) / median(theirs), percentile(drawn, 0.025), percentile(drawn, 0.975)


def longest_idle_wait_ms(waiting: Sequence[Times], running: Sequence[Times], slots: int) -> float:
    """Return how long, at most, one task waited in all while fewer than `slots` tasks ran.

    waiting: the tasks whose wait counts, from enqueued to begun. running: all tasks, those included.
    """
    changes = sorted([(task.begun_ns, 1) for task in running] + [(task.ended_ns, -1) for task in running])
    idle: list[tuple[int, int]] = []
    count, since = 0, min((task.enqueued_ns for task in waiting), default=0)
    for at, change in changes:
        if count < slots and at > since:
            idle.append((since, at))
        count += change
        since = max(since, at)
    longest = 0
    for task in waiting:
        begin, end = task.enqueued_ns, task.begun_ns
        longest = max(longest, sum(max(0, min(end, to) - max(begin, since)) for since, to in idle))
    return longest / 1e6

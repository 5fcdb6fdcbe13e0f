"""How long to wait before the next attempt."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..durations import Duration

Backoff = Duration | Callable[[BaseException, Any], Duration | None]
"""A duration, or a callable of the exception and the result that returns one, or None for no retry."""


@dataclass(frozen=True, slots=True)
class ExponentialBackoff:
    """Wait a random time of up to base * 2^n seconds after the n-th failure (from 0), never more than the cap.

    Full jitter spreads the retries of tasks that failed together over the whole time.
    Source: Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """

    base_seconds: float = 5
    cap_seconds: float = 3600

    def __call__(self, exception: BaseException, result: Any) -> float:
        """Return the seconds to wait after `result.attempts` attempts."""
        exponent = min(max(result.attempts - 1, 0), 32)
        return random.uniform(0, min(self.cap_seconds, self.base_seconds * 2**exponent))  # noqa: S311

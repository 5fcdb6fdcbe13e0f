"""A clock for tests that must not wait."""

from __future__ import annotations


class Clock:
    """Seconds that pass only when a test moves them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now

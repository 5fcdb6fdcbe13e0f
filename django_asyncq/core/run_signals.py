"""A signal about one run, which monitors hear without being its receivers.

One of them, Sentry, traces each receiver of a signal. That costs more than what the integrations do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.dispatch import Signal


class RunSignal(Signal):
    """A signal whose receivers are looked up once, not for each run. direct: what is called before them.

    Only `lifecycle.base.announce_runs` calls that, with what the receivers get, except `sender` and `signal`.
    """

    def __init__(self) -> None:
        super().__init__(use_caching=True)
        self.direct: list[Callable[..., Any]] = []

    def connect_directly(self, receiver: Callable[..., Any]) -> None:
        """Have a function called directly; once, however often it is given."""
        if receiver not in self.direct:
            self.direct.append(receiver)

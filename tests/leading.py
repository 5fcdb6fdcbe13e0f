"""A leader whose time a test moves: its loops take their turns as they would, and nobody waits."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from django.db import connection

from django_asyncq.broker import redis_clock
from django_asyncq.fleet.leader import Loop, MaintenanceService
from django_asyncq.storage import database_clock


class Sent(NamedTuple):
    """A statement. loop: of the leader, which has sent it."""

    loop: str
    sql: str
    params: Any


class Leader:
    """The loops of a leader, in a time of their own that goes from one due step to the next."""

    def __init__(self, service: MaintenanceService, monkeypatch: pytest.MonkeyPatch) -> None:
        self.service = service
        self.passed = 0.0
        self.sent: list[Sent] = []
        real, real_clock = time.monotonic, time.clock_gettime
        monkeypatch.setattr(time, "monotonic", lambda: real() + self.passed)
        monkeypatch.setattr(time, "clock_gettime", lambda clock: real_clock(clock) + self.passed)
        self._numbers = itertools.count()
        # When the next step of each loop is due, in seconds that have passed.
        self._due: list[tuple[float, int, Loop]] = []
        service.seek_leadership()
        assert service.is_leader
        for loop in service._loops:
            self._plan(loop, 0.0)

    def _plan(self, loop: Loop, at: float) -> None:
        heapq.heappush(self._due, (at, next(self._numbers), loop))

    def pass_seconds(self, seconds: float) -> None:
        """Let the loops do what they do in this time."""
        end = self.passed + seconds
        while self._due and self._due[0][0] <= end:
            at, _, loop = heapq.heappop(self._due)
            self.passed = max(self.passed, at)
            loop._wakeup.clear()
            with connection.execute_wrapper(self._keep_of(loop)):
                pause = loop.tick()
            if pause is not None:
                self._plan(loop, self.passed + pause)
            self._wake()
        self.passed = end

    def _wake(self) -> None:
        """Let the loops that were woken take their turn now."""
        self._due = [(self.passed if loop._wakeup.is_set() else at, number, loop) for at, number, loop in self._due]
        heapq.heapify(self._due)

    def _keep_of(self, loop: Loop) -> Callable[..., Any]:
        def keep(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            self.sent.append(Sent(loop.name, sql, params))
            return execute(sql, params, many, context)

        return keep


@contextmanager
def leading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Leader]:
    """Lead in the block."""
    service = MaintenanceService([], single_instance=True)
    try:
        with monkeypatch.context() as patched:
            try:
                yield Leader(service, patched)
            finally:
                service.coordinator.release(service.lock_name)
    finally:
        # They were measured in that time.
        for clocks in (database_clock._clocks, redis_clock._clocks):
            clocks.clear()

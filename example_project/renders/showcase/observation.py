"""Observe the demo from outside: sample rows and gate slots while it runs, and kill one worker during a render.

This module reads Redis by the key names of the wire format and not through django_asyncq, so that the two are
independent.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import redis
from django.conf import settings
from django.utils import timezone

from django_asyncq.models import TaskRecord, TaskState

from ..catalogue import MODELS
from ..gates import occupancies
from ..presentation import renders, state_counts

SLOW_MODEL = "reaction"
# A slow render takes 2 to 5 seconds, so at this age it is in the middle.
MID_RENDER = timedelta(seconds=0.4)
RELEASE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Kill:
    """A worker process that was killed. task_ids: the tasks that it was running, according to the rows."""

    pid: int
    worker_id: str
    task_ids: tuple[str, ...]
    at_seconds: float


@dataclass(slots=True)
class Observer:
    """Samples of the demo. max_rows, max_slots: gate → maximum of tasks and of slots in any sample."""

    redis_url: str
    supervisor_pid: int
    kill: Kill | None = None
    samples: int = 0
    max_rows: Counter[str] = field(default_factory=Counter)
    max_slots: Counter[str] = field(default_factory=Counter)
    begun_at: float = field(default_factory=time.monotonic)
    _client: Any = None

    def __enter__(self) -> Observer:
        self._client = redis.Redis.from_url(self.redis_url, protocol=2, socket_timeout=5)
        return self

    def __exit__(self, *exception: object) -> None:
        self._client.close()

    @property
    def seconds(self) -> float:
        """The seconds since the demo started."""
        return time.monotonic() - self.begun_at

    def sample(self) -> dict[str, int]:
        """Sample the rows and slots once; return the counts by state."""
        self.samples += 1
        for gate, held in occupancies().items():
            self.max_rows[gate] = max(self.max_rows[gate], held)
        for gate, held in self.slots().items():
            self.max_slots[gate] = max(self.max_slots[gate], held)
        return state_counts()

    def slots(self) -> dict[str, int]:
        """Return how many slots of each gate are taken, according to Redis."""
        pipeline = self._client.pipeline(transaction=False)
        for name in MODELS:
            pipeline.zcard(self._key(name))
        return dict(zip(MODELS, pipeline.execute(), strict=True))

    def slots_still_held(self, ids: Collection[str]) -> dict[str, list[str]]:
        """Return the slots that these tasks still hold after all have finished, by gate.

        A slot is released shortly after its row is written, so this waits a moment.
        """
        deadline = time.monotonic() + RELEASE_SECONDS
        while (left := self._slots_of(ids)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def _slots_of(self, ids: Collection[str]) -> dict[str, list[str]]:
        members = {name: self._client.zrange(self._key(name), 0, -1) for name in MODELS}
        held = {name: [id.decode() for id in found if id.decode() in ids] for name, found in members.items()}
        return {name: found for name, found in held.items() if found}

    @staticmethod
    def _key(gate: str) -> str:
        return f"{settings.ASYNCQ['GATE_PREFIX']}{gate}"

    def kill_worker(self) -> Kill | None:
        """Kill the worker process of a slow render in its middle, once; return the kill."""
        if self.kill is not None:
            return None
        started_before = timezone.now() - MID_RENDER
        running = renders().filter(state=TaskState.RUNNING)
        for record in running.filter(last_attempted_at__lt=started_before).order_by("-last_attempted_at"):
            pid = self._pid_of(record)
            if record.args[0] == SLOW_MODEL and pid is not None:
                worker_id = record.worker_ids[-1]
                victims = tuple(str(row.id) for row in running if row.worker_ids[-1:] == [worker_id])
                os.kill(pid, signal.SIGKILL)
                self.kill = Kill(pid, worker_id, victims, self.seconds)
                return self.kill
        return None

    def _pid_of(self, record: TaskRecord) -> int | None:
        """Return the pid of the task's worker if it is a child of this demo's supervisor."""
        parts = record.worker_ids[-1].split(":") if record.worker_ids else []
        if len(parts) < 4 or parts[-3] != str(self.supervisor_pid) or not parts[-2].isdigit():
            return None
        return int(parts[-2])


def forget_keys(redis_url: str, prefix: str) -> int:
    """Delete the keys of the demo from a server that it did not start; return how many."""
    client = redis.Redis.from_url(redis_url, protocol=2, socket_timeout=5)
    with closing(client):
        keys = [*client.scan_iter(f"{prefix}:*"), *client.scan_iter(f"{{{prefix}:*")]
        return sum(client.delete(key) for key in keys)

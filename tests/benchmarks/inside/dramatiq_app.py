"""The application of dramatiq's measures."""

from __future__ import annotations

import os
from typing import Any

import dramatiq
import kinds
from dramatiq.brokers.redis import RedisBroker

dramatiq.set_broker(RedisBroker(url=os.environ["BENCH_REDIS_URL"]))
TASKS: dict[str, Any] = {kind: dramatiq.actor(body) for kind, body in kinds.PLAIN.items()}
TASKS["fail_once"] = dramatiq.actor(kinds.fail_once, max_retries=1, min_backoff=1, max_backoff=1)


def enqueue(kind: str, number: int) -> None:
    """One task."""
    TASKS[kind].send(**kinds.arguments(kind, number))

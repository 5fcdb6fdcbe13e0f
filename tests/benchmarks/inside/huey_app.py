"""The application of huey's measures."""

from __future__ import annotations

import os
from typing import Any

import kinds
from huey import RedisHuey

huey = RedisHuey("bench", url=os.environ["BENCH_REDIS_URL"])
TASKS: dict[str, Any] = {kind: huey.task()(body) for kind, body in kinds.PLAIN.items()}
TASKS["fail_once"] = huey.task(retries=1, retry_delay=0)(kinds.fail_once)


def enqueue(kind: str, number: int) -> None:
    """One task."""
    TASKS[kind](**kinds.arguments(kind, number))

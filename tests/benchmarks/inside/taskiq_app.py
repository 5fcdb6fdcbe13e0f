"""The application of taskiq's measures."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import kinds
import uvloop
from taskiq import SimpleRetryMiddleware
from taskiq.serializers import ORJSONSerializer
from taskiq_redis import ListQueueBroker

ASYNC = True
asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
broker = (
    ListQueueBroker(os.environ["BENCH_REDIS_URL"], socket_timeout=None)
    .with_serializer(ORJSONSerializer())
    .with_middlewares(SimpleRetryMiddleware())
)
TASKS: dict[str, Any] = {kind: broker.task(task_name=kind)(body) for kind, body in kinds.ASYNC.items()}
TASKS["nap"] = broker.task(task_name="nap")(kinds.nap)
TASKS["fail_once"] = broker.task(task_name="fail_once", retry_on_error=True, max_retries=2)(kinds.afail_once)
AT_ONCE = 100


async def open() -> None:
    """Connect."""
    await broker.startup()


async def close() -> None:
    """Disconnect."""
    await broker.shutdown()


async def enqueue(kind: str, number: int) -> None:
    """One task."""
    await TASKS[kind].kiq(**kinds.arguments(kind, number))


async def enqueue_many(kind: str, numbers: Sequence[int]) -> None:
    """A hundred at once: there is no bulk call."""
    for begin in range(0, len(numbers), AT_ONCE):
        await asyncio.gather(*(enqueue(kind, number) for number in numbers[begin : begin + AT_ONCE]))

"""Many tasks of the same body, each of which can be paused by its own name."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from django_asyncq import task
from django_asyncq.context import TaskContext

COUNT = 50


def note(event: str, **more: Any) -> None:
    """Append one line, whole, to the history."""
    if path := os.environ.get("ASYNCQ_TEST_HISTORY"):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, (json.dumps({"at": time.monotonic(), "event": event, **more}) + "\n").encode())
        os.close(descriptor)


def _declare(number: int) -> Any:
    def body(context: TaskContext, seconds: float) -> None:
        note("begin", id=context.task_result.id, of=number)
        time.sleep(seconds)
        note("end", id=context.task_result.id, of=number)

    body.__name__ = body.__qualname__ = f"held_{number}"
    globals()[body.__name__] = task(takes_context=True)(body)
    return globals()[body.__name__]


HELD = [_declare(number) for number in range(COUNT)]

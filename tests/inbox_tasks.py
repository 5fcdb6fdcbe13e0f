"""Tasks that any program may enqueue through an inbox, and one that it may not."""

from __future__ import annotations

import json
import os
from typing import Any

from django_asyncq import task
from django_asyncq.context import TaskContext

QUEUE = "letters"


@task(inbox=True, queue_name=QUEUE, takes_context=True)
def letter(context: TaskContext, number: int = 0, *, text: str = "") -> dict[str, Any]:
    """Return what came in, and note the run in the history of the test."""
    if path := os.environ.get("ASYNCQ_TEST_HISTORY"):
        line = {"event": "begin", "id": str(context.record.id), "attempt": context.attempt, "number": number}
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, json.dumps(line).encode() + b"\n")
        os.close(descriptor)
    return {"number": number, "text": text, "headers": context.headers}


@task(inbox=True, queue_name=QUEUE, wire_name="letter:send", gate="letters-{number}", queue_limit=1)
def gated_letter(number: int) -> int:
    """A task of a gate for each number, that another program may also call `letter:send`."""
    return number


@task(inbox=True, queue_name=QUEUE, unique="{number}")
def unique_letter(number: int) -> int:
    """A task of which there is one for each number at a time."""
    return number


@task(inbox=True, queue_name=QUEUE, gate="nobody-has-set-its-limit")
def limitless_letter(number: int) -> int:
    """A task of a gate without a limit."""
    return number


@task(queue_name=QUEUE)
def private_letter(number: int) -> int:
    """A task that no other program may enqueue."""
    return number


@task(inbox="tests orders", queue_name=QUEUE)
def order(value: Any) -> Any:
    """Return a value of a list in JSON."""
    return value


@task(inbox="tests:lines", payload="bytes", queue_name=QUEUE)
def line(value: str) -> str:
    """Return a value of a list of texts."""
    return value


@task(inbox="tests:gated", queue_name=QUEUE, gate="values-{value}", queue_limit=1)
def gated_value(value: int) -> int:
    """Return a value of a list, one of a kind at a time."""
    return value


@task(inbox="tests:charges", queue_name=QUEUE, takes_context=True)
def charge(context: TaskContext, value: dict[str, int]) -> Any:
    """Do as `letter` with a value of a list."""
    return letter.func(context, value["number"])

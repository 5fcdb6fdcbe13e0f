"""Tasks that run messages of other programs."""

from __future__ import annotations

from typing import Any

from django_asyncq import Batch, BatchItem, task

# What the bodies have got: (function, arguments).
heard: list[tuple[str, Any]] = []


@task(wire_name="email:deliver", queue_name="mail")
def deliver(to: str, subject: str = "", copies: int = 1) -> dict[str, Any]:
    """Take keyword arguments."""
    heard.append(("deliver", (to, subject, copies)))
    if subject == "fail":
        raise ValueError("no such address")
    return {"sent": copies}


@task(wire_name="image:*", payload="bytes", queue_name="mail", takes_context=True)
def image(context: Any, data: bytes) -> int:
    """Take bytes, for any type with the prefix."""
    heard.append(("image", (context.wire_type, data, context.headers)))
    return len(data)


@task(wire_name="any:value", queue_name="mail")
def any_value(*args: Any, **kwargs: Any) -> None:
    """Take whatever comes."""
    heard.append(("any_value", (args, kwargs)))


@task(wire_name="gated", queue_name="mail", gate="wire-gate", queue_limit=1)
def gated() -> None:
    """Go through a gate."""
    heard.append(("gated", ()))


def one_event(name: str) -> None:
    """Take what one call takes."""


@task(wire_name="event:add", queue_name="mail", batch=Batch(size=3, within=60, call=one_event), max_attempts=3)
def events(items: list[BatchItem]) -> None:
    """Run calls together."""
    heard.append(("events", [item.kwargs["name"] for item in items]))


@task(wire_name="event:gated", queue_name="mail", batch=Batch(size=3, within=60), gate="wire-batch", queue_limit=1)
def gated_events(items: list[BatchItem]) -> None:
    """Run calls together that go through a gate."""


@task(wire_name="event:bytes", payload="bytes", queue_name="mail", batch=Batch(size=2, within=60))
def raw_events(items: list[BatchItem]) -> dict[str, int]:
    """Take bytes."""
    heard.append(("raw", [item.args for item in items]))
    return {item.id: len(item.args[0]) for item in items}

"""The tasks of django_asyncq's measures."""

from __future__ import annotations

from typing import Any

import probe

from django_asyncq import task

# Above any number of tasks that wait: the measure is what a gate costs, not what it refuses.
OPEN_GATE = 10_000_000


@task
def noop(n: int, s: str) -> None:
    """Do nothing."""
    probe.hit()


@task(gate="bench", queue_limit=OPEN_GATE, expected_seconds=60)
def gated(n: int, s: str) -> None:
    """Do nothing, with a slot."""
    probe.hit()


@task
def stamp(n: int) -> None:
    """Note when it began."""
    probe.stamp(n)


@task
def nap(n: int) -> None:
    """Sleep 10 ms."""
    probe.sleep(n, probe.NAP_SECONDS)


@task
async def anap(n: int) -> None:
    """Sleep 10 ms in the event loop."""
    await probe.asleep(n, probe.NAP_SECONDS)


@task
def short(n: int) -> None:
    """Sleep 1 ms."""
    probe.sleep(n, probe.SHORT_SECONDS)


@task
def long(n: int) -> None:
    """Sleep 1 s."""
    probe.sleep(n, probe.LONG_SECONDS)


@task(max_attempts=2, backoff=0)
def fail_once(n: int) -> None:
    """Fail at the first attempt."""
    probe.fail_once(n)


BY_KIND: dict[str, Any] = {each.func.__name__: each for each in (noop, gated, stamp, nap, anap, short, long, fail_once)}

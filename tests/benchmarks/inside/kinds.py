"""Arguments and bodies that peers share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import probe

TEXT = "x" * 64


def arguments(kind: str, number: int) -> dict[str, Any]:
    """The same for every peer: a number, and 64 characters where nothing else is measured."""
    return {"n": number, "s": TEXT} if kind in ("noop", "gated") else {"n": number}


def noop(n: int, s: str) -> None:
    """Do nothing."""
    probe.hit()


def stamp(n: int) -> None:
    """Note when it began."""
    probe.stamp(n)


def nap(n: int) -> None:
    """Sleep 10 ms."""
    probe.sleep(n, probe.NAP_SECONDS)


def short(n: int) -> None:
    """Sleep 1 ms."""
    probe.sleep(n, probe.SHORT_SECONDS)


def long(n: int) -> None:
    """Sleep 1 s."""
    probe.sleep(n, probe.LONG_SECONDS)


def fail_once(n: int) -> None:
    """Fail at the first attempt."""
    probe.fail_once(n)


async def anoop(n: int, s: str) -> None:
    """Do nothing."""
    probe.hit()


async def astamp(n: int) -> None:
    """Note when it began."""
    probe.stamp(n)


async def anap(n: int) -> None:
    """Sleep 10 ms in the event loop."""
    await probe.asleep(n, probe.NAP_SECONDS)


async def ashort(n: int) -> None:
    """Sleep 1 ms."""
    await probe.asleep(n, probe.SHORT_SECONDS)


async def along(n: int) -> None:
    """Sleep 1 s."""
    await probe.asleep(n, probe.LONG_SECONDS)


async def afail_once(n: int) -> None:
    """Fail at the first attempt."""
    probe.fail_once(n)


PLAIN: dict[str, Callable[..., None]] = {f.__name__: f for f in (noop, stamp, nap, short, long)}
ASYNC: dict[str, Callable[..., Awaitable[None]]] = {
    "noop": anoop,
    "stamp": astamp,
    "anap": anap,
    "short": ashort,
    "long": along,
}

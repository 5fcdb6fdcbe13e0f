"""Options that do nothing without another one: which, and what else to write.

Such an option is refused where it is given alone: it looks as if it limited something.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple


class Need(NamedTuple):
    """What an option does nothing without.

    unset: the value with which it asks for nothing. is_met: of the task, or of what else has the option. remedy: what
    else to write.
    """

    unset: Any
    is_met: Callable[[Any], object]
    remedy: str


@lru_cache(maxsize=1024)
def is_awaited(function: Callable[..., Any]) -> bool:
    """Return whether the body is an `async def`, also within decorators that are none: it is awaited all the same."""
    return inspect.iscoroutinefunction(inspect.unwrap(function))


GATE = Need(None, lambda task: task.gate is not None, "it needs gate=…, the name of the admission limit that it is of")
WAITS = 'it needs on_full="wait": a call at a full gate is refused otherwise'
RATE = Need(None, lambda task: task.rate is not None, "it needs rate=…, which says how many runs may start")
UNIQUE = Need("end", lambda task: task.unique, "it needs unique=…, which says what makes two calls the same")
NEEDS_OF_TASK = {
    "queue_limit": GATE,
    "expected_seconds": GATE,
    "on_full": GATE._replace(unset="reject"),
    "max_waiting": Need(1000, lambda task: task.on_full == "wait", WAITS),
    "ordered": Need(False, lambda task: task.on_full == "wait", WAITS),
    "fair_weight": Need(1, lambda task: task.fair is not None, "it needs fair=…, which says whose share it weighs"),
    "rate_per": RATE,
    "burst": RATE._replace(unset=1),
    "on_duplicate": UNIQUE._replace(unset="reject"),
    "unique_until": UNIQUE,
    "soft_timeout": Need(
        None,
        lambda task: task.takes_context or task.isolated or is_awaited(task.func),
        "it needs takes_context=True, and a function that calls context.check(): nothing else stops a `def`. Or give "
        "isolated=True, or make it an `async def`",
    ),
    "payload": Need(
        "json",
        lambda task: task.wire_name is not None or isinstance(task.inbox, str),
        "it needs wire_name=…, or inbox='a list': only what other programs send holds bytes",
    ),
    "upgrade": Need(
        None, lambda task: task.version > 1, "it needs version=2 or more: what was enqueued without a version is of 1"
    ),
    "group": Need(
        None,
        lambda task: task.batch is not None or task.is_remote,
        "only calls that run together have a group: declare the task with batch=Batch(…), or remove it",
    ),
}
RETRIED = Need((), lambda of: of.attempts > 1, "Give the task max_attempts=2 or more, or remove the option.")
# Of a task and its `attempts`, which the settings may decide.
NEEDS_OF_RETRIES = {
    "retry_on": RETRIED._replace(unset=(Exception,)),
    "give_up_on": RETRIED,
    # `context.retry(counted=False)` waits so after the last attempt too.
    "backoff": RETRIED._replace(unset=None, is_met=lambda of: of.attempts > 1 or of.takes_context),
}
NEEDS_OF_SCHEDULE = {"missed_cap": Need(10, lambda schedule: schedule.missed == "all", 'it needs missed="all"')}


def lacking(options: Any, needs: Mapping[str, Need]) -> Iterator[tuple[str, str]]:
    """Yield each option that does nothing because another one is not given, and the remedy.

    options: has them as attributes; one that is missing asks for nothing.
    """
    for option, need in needs.items():
        if getattr(options, option, need.unset) != need.unset and not need.is_met(options):
            yield option, need.remedy

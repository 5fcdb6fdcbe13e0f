"""Batches: calls of a task that are run together, `@task(batch=Batch(size=100, within=2, per="{account}"))`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..exceptions import InvalidOption
from .calls import filled
from .time import MORE_THAN_ZERO, Duration, is_duration, seconds_of

LARGEST_SIZE = 1000
# Of `TaskRecord.group`.
LONGEST_GROUP = 200
# A longer wait is a schedule. Scripts reckon in milliseconds, as whole numbers.
LONGEST_SECONDS = 30 * 86_400

# Name of the task → how its calls are run together.
_declared: dict[str, Batch] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Run up to `size` calls as one: the function gets a list of `BatchItem`.

    within: how long the first call may wait for others, in seconds or as a timedelta. quiet: a batch also begins after
    this time without a new call; None: only `size` and `within` decide. per: a format over the arguments such as
    "{account}"; only calls for which it gives the same text are run together.
    call: a function that takes what one call takes; it is never called. Calls with other arguments are refused when
    they are enqueued; without it a call may have any arguments.
    Raises: InvalidOption.
    """

    size: int = 100
    within: Duration = 2.0
    quiet: Duration | None = None
    per: str = ""
    call: Callable[..., object] | None = None

    def __post_init__(self) -> None:
        if type(self.size) is not int or not 1 <= self.size <= LARGEST_SIZE:
            remedy = f"give a whole number from 1 to {LARGEST_SIZE:,}"
            raise InvalidOption(f"Batch(size={self.size!r}) is not valid: {remedy}")
        for name in ("within", "quiet"):
            value = getattr(self, name)
            if value is None and name == "quiet":
                continue
            if not is_duration(value):
                raise InvalidOption(f"Batch({name}={value!r}) is not valid: give {MORE_THAN_ZERO}")
            seconds = seconds_of(value)
            if seconds > LONGEST_SECONDS:
                raise InvalidOption(f"Batch({name}={value!r}) is not valid: give at most 30 days")
            object.__setattr__(self, name, seconds)
        if not isinstance(self.per, str):
            raise InvalidOption(f"Batch(per={self.per!r}) is not valid: give a format such as '{{account}}'")
        if self.call is not None and not callable(self.call):
            raise InvalidOption(
                f"Batch(call={self.call!r}) is not valid: give a function with the parameters of a call"
            )

    @property
    def within_seconds(self) -> float:
        """How long the first call may wait for others."""
        return float(seconds_of(self.within))

    @property
    def quiet_seconds(self) -> float | None:
        """After which time without a new call a batch begins."""
        return None if self.quiet is None else float(seconds_of(self.quiet))

    @property
    def rules(self) -> str:
        """The rules as the scripts read them: size, and times in whole milliseconds."""
        quiet = 0 if self.quiet_seconds is None else max(round(self.quiet_seconds * 1000), 1)
        return f"{self.size} {max(round(self.within_seconds * 1000), 1)} {quiet}"


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One call of a batch, as its function gets it.

    id: of the task, as `result.id`. attempt: of this task, from 1. headers: of the call, empty for most.
    """

    id: str
    args: list[Any]
    kwargs: dict[str, Any]
    headers: Mapping[str, str]
    attempt: int = 1


def declare(task: Any) -> None:
    """Remember how the calls of a declared task are run together, under each of its names; or that they are not."""
    for name in (task.module_path, *task.aliases):
        if task.batch is None:
            _declared.pop(name, None)
        else:
            _declared[name] = task.batch


def are_declared() -> bool:
    """Return whether this process has a task whose calls run together."""
    return bool(_declared)


def batch_of(name: str) -> Batch | None:
    """Return how the calls of a task are run together; None if each runs by itself, or this process lacks the code."""
    return _declared.get(name)


def group_of(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the group that a call of a task joins; "" for none. args, kwargs: as the row keeps them.

    Raises: InvalidOption when `per` cannot be filled from the arguments.
    """
    if task.is_remote:
        return task.group or ""
    if task.batch is None:
        return ""
    if task.group is not None:
        return _named(task.module_path, task.group)
    if not task.batch.per:
        return str(task.module_path)
    return _named(task.module_path, filled(task, "per", task.batch.per, args, kwargs))


def group_of_others(task: Any, group: str) -> str:
    """Return the group of the row of a call that another program has put into a group of its own."""
    return group if len(group) <= LONGEST_GROUP and group.isprintable() else _named(task.module_path, group)


def _named(name: str, text: str) -> str:
    if len(name) + 1 + len(text) <= LONGEST_GROUP and text.isprintable():
        return f"{name}:{text}"
    digest = hashlib.sha256(f"{name}:{text}".encode("utf-8", "surrogatepass")).hexdigest()
    return f"{name[: LONGEST_GROUP - 1 - len(digest)]}:{digest}"

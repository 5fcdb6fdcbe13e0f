"""Fair shares of a queue: `@task(fair="{tenant}", fair_weight=2)`.

Tasks that wait in one queue with one priority run in fair order: each key gets its share, whatever the others have
enqueued. This module says which key a call has, and what it pays for a place; `broker/lua/lines.lua` keeps the order.
Nothing of it is in the row: the key is computed anew at each push, from the declaration and the arguments. A process
that lacks the code of the task pushes it as a plain task.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ..exceptions import InvalidOption
from . import payload
from .calls import filled
from .guard import attempt, get_logger
from .logs import log_extra
from .versions import seen_by_options

if TYPE_CHECKING:
    from ..models import TaskRecord

LEAST_WEIGHT, MOST_WEIGHT = 0.01, 100
LONGEST_KEY = 200
# What a task of weight 1 pays, and a plain one. As `PLAIN_STEP` in `lua/lines.lua`.
UNIT = 8192
WEIGHT = f"give a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}, or a callable of the arguments"

FairKey = str | Callable[..., str]
FairWeight = float | Callable[..., float]

# Name of the task, and each former one → the task. A name that is not here is that of a plain task.
declared: dict[str, Any] = {}

logger = get_logger("django_asyncq.core.fairness")


class Share(NamedTuple):
    """Under which key a call waits. step: what it pays for its place: UNIT / weight, a whole number."""

    key: str
    step: int

    @property
    def text(self) -> str:
        """The share as an entry has it: "<step> <key>"."""
        return f"{self.step} {self.key}"


def declare(task: Any) -> None:
    """Remember a declared task under each of its names, if its calls have keys."""
    for name in (task.module_path, *task.aliases):
        if task.fair is None:
            declared.pop(name, None)
        else:
            declared[name] = task


def check_fair(task: Any, refuse: Callable[[str, str], NoReturn]) -> None:
    """Refuse keys and weights that can never work. refuse: raises for an option, with the remedy."""
    if task.fair is not None and not callable(task.fair) and not (isinstance(task.fair, str) and task.fair):
        refuse("fair", "give a format such as '{tenant}', or a callable of the arguments")
    if not callable(task.fair_weight) and not _is_weight(task.fair_weight):
        refuse("fair_weight", WEIGHT)
    if task.fair is not None and task.batch is not None:
        refuse("fair", "calls of a batch run together, so none of them has a place of its own; remove it")


def share_of_call(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Share:
    """Return the share of a call. args, kwargs: as the row keeps them.

    Raises: InvalidOption when the format or a callable gives no key or no weight for these arguments.
    """
    if isinstance(task.fair, str):
        key = filled(task, "fair", task.fair, args, kwargs) if "{" in task.fair else task.fair
    else:
        key = _answer(task, "fair", args, kwargs)
    if not isinstance(key, str) or not key:
        raise InvalidOption(f"task {task.module_path}: fair={task.fair!r} gave {key!r}: the key is a text, not empty")
    weight = task.fair_weight
    if callable(weight):
        weight = _answer(task, "fair_weight", args, kwargs)
        if not _is_weight(weight):
            raise InvalidOption(f"task {task.module_path}: fair_weight gave {weight!r}: {WEIGHT}")
    return Share(_bounded(key), max(round(UNIT / weight), 1))


def share_of(record: TaskRecord) -> Share | None:
    """Return the share of a task; None for a plain one, and for one whose key its code does not say now."""
    task = declared.get(record.name)
    # The arguments of a message of another program are in the message.
    if task is None or record.wire_id is not None:
        return None
    share: Share | None
    share, error = attempt(_share_now, task, record)
    if error is not None:
        # The code has changed since the call was accepted. It must run all the same.
        text = "task %s %s: it is queued without its fair key: %s"
        logger.warning(text, record.id, record.name, error, extra=log_extra(record))
    return share


def _share_now(task: Any, record: TaskRecord) -> Share:
    return share_of_call(task, *seen_by_options(task, record))


def _answer(task: Any, option: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    # Copies: a callable that changes what it gets must not change what the task is run with.
    answer, error = attempt(getattr(task, option), *payload.copied(list(args)), **payload.copied(dict(kwargs)))
    if error is not None:
        raise InvalidOption(f"task {task.module_path}: {option} raised {error!r} for these arguments") from error
    return answer


def _is_weight(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and LEAST_WEIGHT <= value <= MOST_WEIGHT


def _bounded(key: str) -> str:
    """Return a key that Redis and a terminal can show; a digest stands for any other."""
    if len(key) <= LONGEST_KEY and key.isprintable() and key.strip():
        return key
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()

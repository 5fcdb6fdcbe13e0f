"""Refuse names that nothing has: a misspelt one would be paused, or shown as empty, and nobody would notice.

The methods of an `Inspector` take any name, because Python code may name a queue before its first task. Commands ask
here first.
"""

from __future__ import annotations

from .. import gates
from ..broker import Broker
from ..broker.inspection import QueueReading
from ..core import compat
from ..core.aliases import redis_aliases
from ..core.names import check_gate_name, check_queue_name, did_you_mean, did_you_mean_path
from ..core.registry import load_task_modules, registered_names
from ..exceptions import InvalidOption
from ..models import Pause, PauseKind, TaskRecord, TaskState
from ..storage.routing import rows_of
from .counts import gate_stats

LIVE = (TaskState.QUEUED, TaskState.RUNNING)


def check_queue(queue: str, alias: str) -> None:
    """Refuse a queue that is not in the QUEUES of an alias, and that no store knows. An empty list allows every name.

    The stores are asked only about a queue that is not in the list. An alias without Redis is not looked at.
    Raises: InvalidOption, BrokerUnavailable, django.db.Error.
    """
    check_queue_name(queue)
    if alias not in redis_aliases():
        return
    allowed: set[str] = compat.task_backends[alias].queues
    if not allowed or queue in allowed:
        return
    used = used_queues(alias)
    if queue not in used:
        raise InvalidOption(
            f"no queue of TASKS[{alias!r}] is called {queue!r}. {did_you_mean(queue, sorted(allowed | used))}"
            f"Its QUEUES are {', '.join(map(repr, sorted(allowed)))}"
        )


def check_queue_of_any(queue: str, backend: str | None) -> None:
    """Refuse a queue that none of the aliases has. backend: only this alias. Raises: as `check_queue`."""
    refused: InvalidOption | None = None
    for alias in [backend] if backend else redis_aliases():
        try:
            check_queue(queue, alias)
        except InvalidOption as error:
            refused = refused or error
        else:
            return
    if refused is not None:
        raise refused


def used_queues(alias: str) -> set[str]:
    """Return the queues that Redis, a live row or a pause knows, those of other programs too.

    Raises: BrokerUnavailable, django.db.Error.
    """
    live = rows_of(TaskRecord).filter(backend=alias, state__in=LIVE).order_by().values_list("queue_name").distinct()
    paused = rows_of(Pause).filter(kind=PauseKind.QUEUE, backend=alias).values_list("name")
    in_redis = {*Broker("worker", alias).queues(), *QueueReading("worker", alias).of_asynq()}
    return in_redis | {name for rows in (live, paused) for (name,) in rows}


def check_task(name: str) -> None:
    """Refuse the path of a task that is not declared, not paused, and that no row has. Raises: InvalidOption."""
    load_task_modules()
    declared = registered_names()
    if name in declared or rows_of(Pause).filter(kind=PauseKind.TASK, name=name).exists():
        return
    if not rows_of(TaskRecord).filter(name=name).exists():
        raise InvalidOption(
            f"no task is called {name!r}, and no row has this name. {did_you_mean_path(name, declared)}"
            f"Give the whole path, such as shop.tasks.send"
        )


def check_gate(name: str) -> None:
    """Refuse a gate without a row, a slot or a waiting task. Raises: InvalidOption, and as `check_queue`."""
    check_gate_name(name)
    known = [each.gate for each in gate_stats()]
    if name not in known and not gates.slots(name):
        raise no_gate(name, known)


def no_gate(name: str, known: list[str]) -> InvalidOption:
    """Return the error of a gate that nothing knows."""
    return InvalidOption(
        f"no gate is called {name!r}. {did_you_mean(name, known)}`asyncq gates list` shows those with a row, a slot or "
        f"a waiting task"
    )

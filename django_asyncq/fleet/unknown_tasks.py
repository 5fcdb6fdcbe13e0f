"""Bring back the tasks that waited for code that has them, as soon as a worker has it.

A supervisor does so when it has just shown new processes: whoever takes such a task from then on sees them, and leaves
it to them. The leader looks again and again for what was put aside in between.
"""

from __future__ import annotations

from collections.abc import Iterable

from django.db.models import Q

from ..broker import Broker, servers
from ..broker.reading import read
from ..broker.unknown_tasks import UnknownTasks, make_known, reading_unknown
from ..core.aliases import aliases_beside, one_alias_per_prefix
from ..core.guard import get_logger
from ..core.registry import known_versions

logger = get_logger("django_asyncq.fleet")

LOOK_SECONDS = 10.0


def is_known() -> Q:
    """Return the condition that this code has the task of a row, and the version of its arguments."""
    known = known_versions()
    condition = Q(version=1, name__in=sorted(known))
    for name, version in known.items():
        if version > 1:
            condition |= Q(name=name, version__lte=version)
    return condition


def waiting_in(broker: Broker, queues: Iterable[str]) -> list[UnknownTasks]:
    """Return which tasks of these queues wait for code that has them. Raises: BrokerUnavailable."""
    return read(broker.role, reading_unknown(broker.alias, queues))


def bring_back(broker: Broker, tasks: Iterable[UnknownTasks]) -> None:
    """Make tasks due whose code is here. Raises: BrokerUnavailable."""
    for each in tasks:
        if count := make_known(broker, each):
            text = "queue %s: %d of task %s are due: they waited for a worker whose code has it"
            logger.info(text, each.queue, count, each.name, extra={"queue": each.queue, "task": each.name})


def look() -> float:
    """Bring back what a living worker knows; return the seconds until the next look. Raises: BrokerUnavailable."""
    for alias in one_alias_per_prefix():
        broker, aliases = Broker("worker", alias), aliases_beside(alias)
        if not (waiting := waiting_in(broker, broker.known_queues())):
            continue
        alive = servers.workers(alias, "worker")
        known = [
            each
            for each in waiting
            if any(worker.knows(of, each.queue, each.name, each.version) for worker in alive for of in aliases)
        ]
        bring_back(broker, known)
    return LOOK_SECONDS

"""Find members of batches that were deleted, and groups that nobody would take."""

from __future__ import annotations

from .. import lifecycle
from ..broker import Broker
from ..broker.groups import Groups
from ..lifecycle.dispatching import by_queue
from ..models import TaskRecord, TaskState
from ..storage.routing import rows_of

MOST_GROUPS = 1000


def repair_groups(broker: Broker) -> int:
    """Have every waiting member taken in time; return how many members and groups nobody would have taken.

    A member whose batch was deleted joins its group again. A group of ours is made known again: the recoverer of a Go
    server forgets the name of a group to which it returns members. Any number of processes may do this at once.
    Raises: BrokerUnavailable, django.db.Error.
    """
    repaired = lifecycle.release_orphans()
    waiting = rows_of(TaskRecord).filter(state=TaskState.QUEUED, batch_id=None, waits_for=None).exclude(group="")
    names = ("name", "backend", "queue_name", "group", "is_remote")
    found = [TaskRecord(**values) for values in waiting.order_by().values(*names).distinct()[:MOST_GROUPS]]
    for of_alias, queue, records in by_queue(broker, found):
        if rules := lifecycle.rules_of_groups(records):
            repaired += Groups(of_alias.role, of_alias.alias).ensure(queue, rules)
    return repaired

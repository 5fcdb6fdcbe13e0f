"""asynq's own unique lock, for unique tasks that other programs can see.

A task that is unique by all its arguments, and that another program may enqueue too (it has a wire name) or runs
(`remote`), takes the lock that a Go client would take for the same message. Among ours the row decides, as always; the
lock keeps other programs out.

| when                                 | the lock                                                              |
|--------------------------------------|-----------------------------------------------------------------------|
| before the INSERT                    | is taken for the row's id, for PROVISIONAL_SECONDS                    |
| a rollback, a veto, a duplicate      | is released, or expires if the process died                           |
| the push                             | lasts LOCK_SECONDS beyond the due time, or until `unique_until`       |
| the task has finished, or is removed | is released by the script that says so, if the id holds it            |
| Redis was emptied                    | is taken again by the push of the row, unless another program has it  |

A committed row is pushed in any case: if another program holds the lock by then, without it. While Redis is unreachable
the task is accepted, as other unique tasks are. With `unique_until="start"`, and for followers, there is no lock:
asynq's lasts until the end. Nor has a task with `batch` one: its entry leaves Redis when the batch is formed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from uuid import UUID

from .. import conf
from ..aliases import through_redis, uses_redis
from ..broker import Broker, unique_locks
from ..broker.decoding import decode_message
from ..broker.keys import keys_of
from ..broker.server_of_tests import is_foreign
from ..definitions.go_json import lock_digest, wire_payload
from ..definitions.unique_keys import unique_digest
from ..definitions.wire_names import exact_task
from ..exceptions import BrokerUnavailable
from ..guard import attempt, get_logger
from ..models import TaskRecord
from ..storage import database_clock
from .ownership import load_rows

logger = get_logger("django_asyncq.lifecycle")

# As long as a Go server keeps what it has finished. asynq's lock needs an end; a task that lasts longer loses it.
LOCK_SECONDS = 86_400


class Lock(NamedTuple):
    """asynq's lock of a task. seconds: how long it lasts from the push on."""

    key: str
    seconds: int


class Refused(NamedTuple):
    """A task whose lock another one holds. holder: its id in Redis. row: the live row with this id, if there is one."""

    record: TaskRecord
    holder: str
    row: UUID | None


def lock_of(record: TaskRecord) -> Lock | None:
    """Return asynq's lock of a task; None for a task that has none, which is known without any store."""
    key = _key_of(record) if record.unique_key or record.wire_message is not None else ""
    return Lock(key, _seconds(record)) if key else None


def prepare(records: Iterable[TaskRecord]) -> None:
    """Write the lock into the messages of new tasks that another program runs: it releases the lock at the end."""
    for record in records:
        if record.wire_message is not None and not record.unique_until_start:
            message = decode_message(bytes(record.wire_message))
            key = keys_of(record.queue_name, record.backend).unique(message.type, lock_digest(message.payload))
            record.wire_message = message._replace(unique_key=key).encode()


def take(records: Sequence[TaskRecord]) -> list[Refused]:
    """Take the locks of new tasks, for PROVISIONAL_SECONDS; return those that other tasks hold.

    A lock whose holder is a finished row is taken: it is about to be released.
    """
    refused: list[Refused] = []
    for broker, locked in _by_queue(records):
        try:
            refused += _take(broker, locked)
        except BrokerUnavailable:
            continue  # the push that follows says so
    return refused


def give_back(records: Sequence[TaskRecord]) -> None:
    """Release the locks of tasks that are not enqueued after all. Never raises for Redis: they expire."""
    for broker, locked in _by_queue(records):
        try:
            unique_locks.release(broker, [(key, record.redis_id) for record, key in locked])
        except BrokerUnavailable as error:
            logger.info(
                "queue %s: unique locks expire by themselves: %s", broker.name_of(locked[0][0].queue_name), error
            )


def holders(records: Iterable[TaskRecord]) -> list[TaskRecord]:
    """Return the tasks that have a lock in Redis."""
    return [record for record in records if uses_redis(record.backend) and record.unique_key and _key_of(record)]


def _take(broker: Broker, locked: Sequence[tuple[TaskRecord, str]]) -> list[Refused]:
    seconds = conf.current().provisional_seconds
    locks = [(key, record.redis_id) for record, key in locked]
    met = unique_locks.acquire(broker, locks, seconds=seconds)
    if not any(met):
        return []
    rows = load_rows(set(filter(None, met)))
    over = [holder if holder in rows and rows[holder].is_final else "" for holder in met]
    if any(over):
        met = unique_locks.acquire(broker, locks, seconds=seconds, over=over)
    return [
        Refused(record, holder, rows[holder].id if holder in rows else None)
        for (record, _), holder in zip(locked, met, strict=True)
        if holder
    ]


def _by_queue(records: Sequence[TaskRecord]) -> Iterator[tuple[Broker, list[tuple[TaskRecord, str]]]]:
    """Group the tasks that have a lock by alias and queue. The tests of a project use no Redis but their own."""
    groups: dict[tuple[str, str], list[tuple[TaskRecord, str]]] = {}
    for record in through_redis([record for record in records if record.unique_key]):
        if key := _key_of(record):
            groups.setdefault((record.backend, record.queue_name), []).append((record, key))
    if not groups or is_foreign():
        return
    for (alias, _), locked in groups.items():
        yield Broker("producer", alias), locked


def _key_of(record: TaskRecord) -> str:
    if record.unique_until_start or record.after_id is not None:
        return ""
    if record.wire_message is not None:
        message, error = attempt(decode_message, bytes(record.wire_message))
        return "" if error is not None else str(message.unique_key)
    task = exact_task(record.name, record.backend)
    if task is None or task.payload != "json" or task.batch is not None:
        return ""
    by_all = task.using(unique=True)
    args, kwargs = record.args, record.kwargs
    payload, error = attempt(wire_payload, by_all, args, kwargs)
    # A key of another kind: such calls may differ in their arguments.
    if error is not None or unique_digest(by_all, record.backend, args, kwargs) != record.unique_key:
        return ""
    return keys_of(record.queue_name, record.backend).unique(task.wire_name, lock_digest(payload))


def _seconds(record: TaskRecord) -> int:
    now = database_clock.now()
    if record.unique_key and record.unique_until is not None:
        return max(int((record.unique_until - now).total_seconds()), 1)
    due = record.retry_at or record.run_after
    delay = 0 if due is None else max(int((due - now).total_seconds()), 0)
    return LOCK_SECONDS + delay

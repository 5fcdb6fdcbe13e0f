"""Enqueue what other programs have pushed to the inboxes of queues: documents in JSON become tasks.

Only the leader does so. It moves documents out of an inbox, each under an id; inserts the rows in a transaction that
commits only while it leads; and then settles the documents. If it dies in between, the next leader takes them again,
finds the rows that are there, and inserts the others. So a document becomes a task at least once; and once, as far as
its row still exists.

| a document                                     | what becomes of it                                                |
|------------------------------------------------|-------------------------------------------------------------------|
| names a task with `inbox=True` of the alias    | a task in that task's own queue, under the id of the document     |
| repeats the id of one whose row exists         | nothing: it is that task                                          |
| finds the gate full, or Redis has lost it      | it stays taken, and is looked at again after TAKEN_SECONDS        |
| can be no task                                 | it is kept in the queue's list of rejected ones, with the reason  |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID, uuid5

from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseError

from .. import compat, conf, failpoints, lifecycle
from ..aliases import uses_redis
from ..broker import Broker
from ..broker.inbox import Inbox
from ..broker.many_queues import queues_with
from ..definitions.calls import check_call
from ..definitions.inbox_documents import Document, read_document
from ..definitions.names import ROW_ID, uuid7
from ..definitions.wire_names import task_of
from ..exceptions import AsyncqError, DuplicateTask, EnqueueRefused, InvalidOption
from ..faults import Parts, concerns_one_row, one_line
from ..guard import class_name, get_logger, is_a
from ..models import TaskRecord
from ..prefixes import prefix_of, redis_aliases
from ..registry import every_task, find, why_missing
from ..results import result_of, sender_of
from ..storage import identity
from ..storage.routing import rows_of
from ..tasks import Arguments

logger = get_logger("django_asyncq.maintenance.inbox")

LOOK_SECONDS = 0.5
# Inboxes of queues on which no such task is declared: a program may have confused two queues of the alias.
LOOK_ELSEWHERE_SECONDS = 5.0
PER_PAGE = 200
# Of those that were taken before: a full gate must not keep new documents waiting.
AGAIN_PER_PAGE = 100
# Pages of one inbox before those of the others get theirs.
MOST_PAGES = 10
WARNING_SECONDS = 60.0
LONGEST_REASON = 1_000
LONGEST_NAME = 200


class Call(NamedTuple):
    """A document that is a valid call. ids: of the documents that ask for it; several may call themselves the same.

    row: of its task, not saved.
    """

    ids: list[str]
    data: bytes
    task: Any
    row: TaskRecord


class Settled(NamedTuple):
    """What became of documents; the others stay taken. enqueued: ids. rejected: (id, document, reason)."""

    enqueued: list[str]
    rejected: list[tuple[str, bytes, str]]

    def reject(self, ids: Sequence[str], data: bytes, error: Exception) -> None:
        """Note that documents can be no task."""
        text = one_line(error)
        reason = text if isinstance(error, InvalidOption | DuplicateTask) else f"{class_name(error)}: {text}"
        self.rejected.extend((id, data, reason[:LONGEST_REASON]) for id in ids)


class InboxService:
    """Look into the inboxes of all aliases. fenced: makes a transaction that commits only while this process leads."""

    def __init__(self, broker: Broker, fenced: Callable[[], AbstractContextManager[int]]) -> None:
        self.broker = broker
        self._fenced = fenced
        self._parts = Parts(logger)
        self._look_elsewhere_at = 0.0
        self._is_failing = False
        # Key of a list of rejected documents → monotonic seconds before which no other line is logged about it.
        self._quiet_until: dict[str, float] = {}

    def tick(self, now: float) -> float:
        """Look where it is due; return the seconds until the next look. now: monotonic seconds.

        Raises: BrokerUnavailable, LockLost, django.db.Error; the next look finds the same documents.
        """
        places = _declared_places()
        if not places:
            return LOOK_ELSEWHERE_SECONDS
        if now >= self._look_elsewhere_at:
            self._look_elsewhere_at = now + LOOK_ELSEWHERE_SECONDS
            for alias in {prefix: alias for (prefix, _), alias in places.items()}.values():
                for queue in self.broker.of_alias(alias).known_queues():
                    places.setdefault((prefix_of(alias), queue), alias)
        for alias in sorted(set(places.values())):
            broker = self.broker.of_alias(alias)
            queues = [queue for (_, queue), of in sorted(places.items()) if of == alias]
            for queue in queues_with(broker, queues, "inbox", "inbox_taken", "inbox_due"):
                what = f"reading the inbox of queue {broker.name_of(queue)}"
                self._parts.attempt(what, partial(self.read, alias, queue), None)
        return LOOK_SECONDS

    def read(self, alias: str, queue: str) -> None:
        """Enqueue the documents of one inbox, at most MOST_PAGES pages of them. Raises: as `tick`."""
        inbox = Inbox(self.broker.role, alias)
        if self._is_failing:
            # While no row can be inserted, documents stay where they have an order.
            with self._fenced():
                self._is_failing = False
        for _ in range(MOST_PAGES):
            ids = [str(uuid7()) for _ in range(PER_PAGE)]
            largest = conf.current().max_inbox_bytes
            taken = inbox.take(queue, ids, largest_bytes=largest, most_again=AGAIN_PER_PAGE)
            if not taken.documents:
                return
            failpoints.reach("inbox.taken")
            try:
                settled = self._enqueue(alias, taken.documents)
            except BaseException:
                self._is_failing = True
                raise
            failpoints.reach("inbox.committed")
            inbox.settle(queue, settled.enqueued, settled.rejected)
            self._warn(inbox, queue, settled.rejected)
            if not taken.left:
                return

    def _enqueue(self, alias: str, documents: Sequence[tuple[str, bytes]]) -> Settled:
        """Insert the tasks of documents: those of plain tasks together if that is possible, the others one by one."""
        settled = Settled([], [])
        calls = self._read_calls(alias, documents, settled)
        plain = [call for call in calls if not call.task.unique]
        alone = [call for call in calls if call.task.unique]
        try:
            settled.enqueued.extend(self._insert(plain))
        except Exception as error:
            if _concerns_all(error):
                raise
            # One of them is at fault, or the project's code that looks at them.
            alone += plain
        for call in alone:
            try:
                settled.enqueued.extend(self._insert([call]))
            except Exception as error:
                if _concerns_all(error):
                    raise
                if not is_a(error, EnqueueRefused) or is_a(error, DuplicateTask):
                    settled.reject(call.ids, call.data, error)
        return settled

    def _read_calls(self, alias: str, documents: Sequence[tuple[str, bytes]], settled: Settled) -> list[Call]:
        calls: dict[UUID, Call] = {}
        for id, data in documents:
            try:
                call = read_call(alias, id, data)
            except Exception as error:
                # A gate or a unique key may be computed by the project's code, which may raise anything.
                if _concerns_all(error):
                    raise
                settled.reject([id], data, error)
            else:
                # Of two documents that call themselves the same, the first one counts.
                calls.setdefault(call.row.id, call).ids.append(id)
        return list(calls.values())

    def _insert(self, calls: Sequence[Call]) -> list[str]:
        """Insert the tasks of calls, all that their gates admit; return the ids of the documents that are tasks.

        calls: of plain tasks, or one of a unique task. Raises: as `lifecycle.enqueue`; nothing was written.
        """
        if not calls:
            return []
        with self._fenced():
            ids = [call.row.id for call in calls]
            # The reader before this one may have inserted some. Their gate slots must not be asked for again.
            found = set(rows_of(TaskRecord).filter(id__in=ids).values_list("id", flat=True))
            if new := [call for call in calls if call.row.id not in found]:
                found |= _enqueue_rows(new)
        return [id for call in calls if call.row.id in found for id in call.ids]

    def _warn(self, inbox: Inbox, queue: str, rejected: Sequence[tuple[str, bytes, str]]) -> None:
        now, key = time.monotonic(), inbox.keys(queue).rejected
        if rejected and now >= self._quiet_until.get(key, 0.0):
            self._quiet_until[key] = now + WARNING_SECONDS
            text = "inbox of queue %s: a document is rejected: %s; %s has it, and those of the minute to come"
            logger.warning(text, inbox.name_of(queue), rejected[-1][2], key)


def read_call(alias: str, id: str, data: bytes) -> Call:
    """Return the call that a document in an inbox of an alias asks for, without ids. id: under which it is taken.

    Raises: InvalidOption, which says why it can be none; django.db.Error; what the project's code raises.
    """
    settings = conf.current()
    document = read_document(data, largest_bytes=settings.max_inbox_bytes, max_depth=settings.max_depth)
    task = _task_of(document.task, alias)
    check_call(task, document.args, document.kwargs)
    call = Arguments(tuple(document.args), document.kwargs)
    try:
        used = task.using(**_options_of(document))
        (row,) = used.get_backend().new_rows(used, [call], [_row_id(task.backend, id, document.id)])
    except compat.InvalidTask as error:
        raise InvalidOption(str(error)) from error
    return Call([], data, task, row)


def _options_of(document: Document) -> dict[str, Any]:
    """Return what the document says of this call beside its arguments."""
    return {"headers": document.headers, "run_after": document.run_after, "priority": document.priority}


def _task_of(name: str, alias: str) -> Any:
    """Return the task that a document names. Raises: InvalidOption."""
    if len(name) > LONGEST_NAME:
        raise InvalidOption(f"its 'task' has {len(name):,} characters, more than {LONGEST_NAME}")
    same = [each for each in redis_aliases() if prefix_of(each) == prefix_of(alias)]
    task = find(name) or next(filter(None, (task_of(name, each) for each in same)), None)
    if task is None:
        raise InvalidOption(f"no task is called {name!r}: {why_missing(name)}")
    if not getattr(task, "inbox", False):
        raise InvalidOption(f"task {name!r} takes no documents: declare it with inbox=True")
    if task.backend not in same:
        raise InvalidOption(
            f"task {name!r} belongs to the alias {task.backend!r}: push to "
            f"{prefix_of(task.backend)}:{{{task.queue_name}}}:inbox"
        )
    return task


def _row_id(alias: str, id: str, given: str | None) -> UUID:
    """Return the id of a document's row: always the same for what the document calls itself, else that of the taker."""
    if given is not None:
        return uuid5(_identity(), f"inbox\n{alias}\n{given}")
    if ROW_ID.fullmatch(id):
        return UUID(id)
    # Another program has put it there, under a name of its own.
    return uuid5(_identity(), f"taken\n{id.encode('utf-8', 'surrogateescape')!r}")


def _identity() -> UUID:
    return identity.own() or identity.ensure()


def _enqueue_rows(calls: Sequence[Call]) -> set[UUID]:
    """Insert rows; return the ids of those that are settled. Raises: as `lifecycle.enqueue`."""
    rows = [call.row for call in calls]
    task = calls[0].task
    if task.unique:
        lifecycle.enqueue_unique(rows, on_duplicate=task.on_duplicate, on_committed=_announce)
        return {row.id for row in rows}
    return {row.id for row in lifecycle.enqueue(rows, partial=True, on_committed=_announce)}


def _announce(rows: Sequence[TaskRecord]) -> None:
    for row in rows:
        compat.task_enqueued.send_robust(sender_of(row.backend), task_result=result_of(row))


def _declared_places() -> dict[tuple[str, str], str]:
    """Return prefix and queue of every task that takes documents, and an alias that has them."""
    return {
        (prefix_of(task.backend), task.queue_name): task.backend
        for task in every_task()
        if getattr(task, "inbox", False) and uses_redis(task.backend)
    }


def _concerns_all(error: Exception) -> bool:
    """Return whether an error says nothing about the document at which it was met."""
    if isinstance(error, DatabaseError):
        return not concerns_one_row(error)
    if isinstance(error, AsyncqError):
        return not isinstance(error, InvalidOption | EnqueueRefused)
    return isinstance(error, ImproperlyConfigured)

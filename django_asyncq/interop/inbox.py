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

A task with `inbox="orders"` gets the values of that list in the same way: each is its one argument, and has no id.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID, uuid5

from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseError

from .. import conf, lifecycle
from ..broker import Broker
from ..broker.access import queues_with
from ..broker.foreign import Inbox
from ..core import compat
from ..core.aliases import prefix_of, redis_aliases, uses_redis
from ..core.calls import check_call
from ..core.guard import attempt, class_name, get_logger, is_a
from ..core.headers import checked_headers
from ..core.names import ROW_ID, task_of, uuid7
from ..core.payload import MAX_DEPTH, UNREADABLE, loads_untrusted
from ..core.registry import every_task, find, why_missing
from ..core.time import checked_aware
from ..core.typed import is_typed, names_instance
from ..exceptions import AsyncqError, DuplicateTask, EnqueueRefused, InvalidOption
from ..models import TaskRecord
from ..results import result_of, sender_of
from ..storage import identity
from ..storage.errors import Parts, concerns_one_row, one_line
from ..storage.routing import rows_of
from ..tasks import Arguments
from .adopt import together

# --- What a document in an inbox says: a task to enqueue, as any program may write it in JSON. Uses no store.
#
# `{"task": …, "args": […], "kwargs": {…}, "id": …, "headers": {…}, "run_after": …, "priority": …}`. Only `task`
# must be there; null is as good as no key. The name of the task is only ever looked up among those that are
# declared with `inbox=True`.

KEYS = ("task", "args", "kwargs", "id", "headers", "run_after", "priority")
LONGEST_ID = 200
# Four times MAX_ARGUMENTS_BYTES as it is by default; small arguments may come with 8 KiB of headers.
LEAST_LIMIT_BYTES = 1_048_576
# Around the arguments are the document itself, and a list or an object.
LEVELS_AROUND = 2


class Document(NamedTuple):
    """One call. task: a dotted name or a wire name. id: of the document, in the words of its author; None for none.

    run_after: a moment, or how long from now. headers, run_after, priority: None for none.
    """

    task: str
    args: list[Any]
    kwargs: dict[str, Any]
    id: str | None
    headers: dict[str, str] | None
    run_after: datetime | timedelta | None
    priority: int | None


def largest_bytes() -> int:
    """Return the largest size of a document.

    JSON may write a character with three times the bytes that it takes in UTF-8 (`\\u00e9`), and headers come with the
    arguments: what is larger than this holds too large arguments in any case.
    """
    return max(LEAST_LIMIT_BYTES, 4 * conf.current().max_arguments_bytes)


def read_document(data: bytes, *, largest_bytes: int) -> Document:
    """Read a document. Raises: InvalidOption, which says what is wrong with it."""
    found = _read_object(data, largest_bytes)
    if unknown := sorted(set(found) - set(KEYS)):
        names = ", ".join(repr(name[:50]) for name in unknown[:5])
        raise InvalidOption(f"it has the unknown key {names}: it may have {', '.join(KEYS)}")
    given = {key: value for key, value in found.items() if value is not None}
    headers = given.get("headers")
    return Document(
        task=_read(given, "task", str, "a text, the name of a task", lambda value: bool(value)),
        args=_read({"args": [], **given}, "args", list, "a list"),
        kwargs=_read({"kwargs": {}, **given}, "kwargs", dict, "an object"),
        id=_read(given, "id", str, f"a text of 1 to {LONGEST_ID} characters", _is_id) if "id" in given else None,
        headers=None if headers is None else checked_headers(headers),
        run_after=_read_moment(given["run_after"]) if "run_after" in given else None,
        priority=_read(given, "priority", int, "a whole number") if "priority" in given else None,
    )


def _read_object(data: bytes, largest_bytes: int) -> dict[str, Any]:
    found = _read_json(data, largest_bytes)
    if not isinstance(found, dict):
        raise InvalidOption(f"it is {_named(found)}, not an object")
    return found


def _read_json(data: bytes, largest_bytes: int) -> Any:
    levels = MAX_DEPTH + LEVELS_AROUND
    found = loads_untrusted(_read_text(data, largest_bytes), max_bytes=largest_bytes, max_depth=levels)
    if found is UNREADABLE:
        raise InvalidOption(
            f"it is not JSON, or holds what databases do not store: NaN, Infinity, half a character, or more than "
            f"{levels} lists and objects within each other"
        )
    return found


def _read_text(data: bytes, largest_bytes: int) -> str:
    if len(data) > largest_bytes:
        raise InvalidOption(f"it takes more than {largest_bytes:,} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidOption(f"it is not UTF-8: byte {error.start} cannot be read") from error


def _read(
    given: Mapping[str, Any], key: str, kind: type, what: str, holds: Callable[[Any], bool] = lambda value: True
) -> Any:
    if key not in given:
        raise InvalidOption(f"it has no {key!r}: give {what}")
    value = given[key]
    if type(value) is not kind or not holds(value):
        raise InvalidOption(f"its {key!r} is {_named(value)}: give {what}")
    return value


def _read_moment(value: Any) -> datetime | timedelta:
    try:
        if type(value) is str:
            return checked_aware("run_after", datetime.fromisoformat(value))
        if type(value) in (int, float) and value >= 0:
            return timedelta(seconds=value)
    except (ValueError, OverflowError) as error:
        raise InvalidOption(f"its 'run_after' is not valid: {error}") from error
    what = "seconds from now, or a time such as '2026-12-24T18:00:00+01:00'"
    raise InvalidOption(f"its 'run_after' is {_named(value)}: give {what}")


def _is_id(value: str) -> bool:
    return 0 < len(value) <= LONGEST_ID


def _named(value: Any) -> str:
    """Return a value in words, as JSON calls it; a long one is not shown."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {value!r:.40}" if isinstance(value, float) or abs(value) < 10**30 else "a huge number"
    if isinstance(value, str):
        return f"the text {value!r}" if len(value) <= 50 else f"a text of {len(value):,} characters"
    return "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else "null"


logger = get_logger("django_asyncq.interop")

LOOK_SECONDS = 0.5
# Inboxes of queues on which no such task is declared.
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
    """What became of documents; the others stay taken. enqueued: ids. rejected: (id, document, reason).

    source: what a reason begins with.
    """

    enqueued: list[str]
    rejected: list[tuple[str, bytes, str]]
    source: str = ""

    def reject(self, ids: Sequence[str], data: bytes, error: BaseException) -> None:
        """Note that documents can be no task."""
        text = one_line(error)
        reason = self.source + (text if is_a(error, (InvalidOption, DuplicateTask)) else f"{class_name(error)}: {text}")
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
        opened = [task for task in every_task() if getattr(task, "inbox", False) and uses_redis(task.backend)]
        of_lists = [task for task in opened if task.inbox is not True]
        places = {(prefix_of(task.backend), task.queue_name): task.backend for task in opened if task.inbox is True}
        if not places and not of_lists:
            return LOOK_ELSEWHERE_SECONDS
        # A program may have confused two queues of the alias.
        if places and now >= self._look_elsewhere_at:
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
        # Last: Redis may refuse the name of another program's list, and then the round ends.
        for task in of_lists:
            what = f"reading the list {task.inbox}"
            self._parts.attempt(what, partial(self.read, task.backend, task.queue_name, task), None)
        return LOOK_SECONDS

    def read(self, alias: str, queue: str, task: Any = None) -> None:
        """Enqueue the documents of one inbox, at most MOST_PAGES pages of them. Raises: as `tick`.

        task: has a list of its own, which is read instead.
        """
        inbox, from_list = Inbox(self.broker.role, alias), "" if task is None else task.inbox
        if self._is_failing:
            # While no row can be inserted, documents stay where they have an order.
            with self._fenced():
                self._is_failing = False
        for _ in range(MOST_PAGES):
            ids = [str(uuid7()) for _ in range(PER_PAGE)]
            taken = inbox.take(
                queue, ids, largest_bytes=largest_bytes(), most_again=AGAIN_PER_PAGE, from_list=from_list
            )
            if not taken.documents:
                return
            try:
                settled = self._enqueue(alias, taken.documents, task)
            except BaseException:
                self._is_failing = True
                raise
            inbox.settle(queue, settled.enqueued, settled.rejected, from_list=from_list)
            self._warn(inbox, queue, settled.rejected)
            if not taken.left:
                return

    def _enqueue(self, alias: str, documents: Sequence[tuple[str, bytes]], task: Any) -> Settled:
        """Insert the tasks of documents: those of plain tasks together if that is possible, the others one by one."""
        settled = Settled([], [], "" if task is None else f"in the list {task.inbox}: ")
        calls = self._read_calls(alias, documents, task, settled)
        plain = [call for call in calls if not call.task.unique]
        for part in (plain, *([call] for call in calls if call.task.unique)):
            enqueued, at_fault = together(part, self._insert, _concerns_all)
            settled.enqueued.extend(enqueued)
            for call, error in at_fault:
                if not is_a(error, EnqueueRefused) or is_a(error, DuplicateTask):
                    settled.reject(call.ids, call.data, error)
        return settled

    def _read_calls(
        self, alias: str, documents: Sequence[tuple[str, bytes]], task: Any, settled: Settled
    ) -> list[Call]:
        calls: dict[UUID, Call] = {}
        for id, data in documents:
            # A gate or a unique key may be computed by the project's code, which may raise anything.
            call, error = attempt(read_call, alias, id, data, task)
            if error is None:
                # Of two documents that call themselves the same, the first one counts.
                calls.setdefault(call.row.id, call).ids.append(id)
            elif _concerns_all(error):
                raise error
            else:
                settled.reject([id], data, error)
        return list(calls.values())

    def _insert(self, calls: Sequence[Call]) -> list[str]:
        """Insert the tasks of calls, all that their gates admit; return the ids of the documents that are tasks.

        calls: of plain tasks, or one of a unique task. Raises: as `lifecycle.enqueue`; nothing was written.
        """
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
            text = "inbox of queue %s: document rejected: %s; kept in %s (next warning in a minute)"
            logger.warning(text, inbox.name_of(queue), rejected[-1][2], key)


def read_call(alias: str, id: str, data: bytes, task: Any = None) -> Call:
    """Return the call that a document in an inbox of an alias asks for, without ids. id: under which it is taken.

    task: that of whose list it is a value. Raises: InvalidOption, which says why it can be none; django.db.Error; what
    the project's code raises.
    """
    if task is None:
        document = read_document(data, largest_bytes=largest_bytes())
        task = _task_of(document.task, alias)
    else:
        read = _read_text if task.payload == "bytes" else _read_json
        document = Document(task.module_path, [read(data, largest_bytes())], {}, None, None, None, None)
    check_call(task, document.args, document.kwargs)
    if is_typed(task) and names_instance(document.args, document.kwargs):
        # A right to write to Redis is none to have any row of any model loaded.
        raise InvalidOption("an instance of a model is no argument in a document: send its primary key")
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
    if getattr(task, "inbox", False) is not True:
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


def _concerns_all(error: BaseException) -> bool:
    """Return whether an error says nothing about the document at which it was met."""
    if is_a(error, DatabaseError):
        return not concerns_one_row(error)
    is_of_call = is_a(error, (InvalidOption, EnqueueRefused))
    return is_a(error, ImproperlyConfigured) or (is_a(error, AsyncqError) and not is_of_call)

"""Work on many rows so that one odd row stops nothing: it is set aside, visibly, and the others go on.

A batch is one statement. Only when it fails for the values of a row (`ErrorKind.ROW`) is it halved, again and again,
until the rows at fault are alone. Those are logged once with the remedy, and this process does not touch them for
SET_ASIDE_SECONDS. So an operator who has corrected a row need not restart anything.

More than MOST_AT_ONCE in one pass are no odd rows: something is wrong with the database or with this code, and the
whole pass fails as if the database were unreachable.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from django.db import Error as DatabaseError
from django.db import OperationalError, connections, transaction
from django.db.models import CharField, Model, QuerySet
from django.db.models.functions import Cast
from django.template.defaultfilters import pluralize

from ..core.guard import get_logger
from ..core.logs import log_extra_of_ids
from ..exceptions import AsyncqError
from ..models import TaskRecord
from .errors import DECODE_ERRORS, ErrorKind, kind_of

logger = get_logger("django_asyncq.storage")

MOST_AT_ONCE = 100
SET_ASIDE_SECONDS = 300.0
# Of all rows that were ever set aside, this many are remembered; a row that was forgotten is logged again.
MOST_REMEMBERED = 1000
IDS_IN_A_LINE = 20
ROW_ERRORS = (DatabaseError, *DECODE_ERRORS)

Item = TypeVar("Item")
Found = TypeVar("Found")


class OddRow(NamedTuple):
    """A row that was set aside. table: or what was tried. id: as text. reason: the error. again_at: monotonic."""

    table: str
    id: str
    reason: str
    again_at: float


class SetAside:
    """The rows that this process has set aside. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, str], OddRow] = {}

    def add(self, table: str, errors: Sequence[tuple[str, BaseException]]) -> None:
        """Set rows aside, and log those that are new in one line. errors: id and error of each."""
        if not errors:
            return
        again_at = time.monotonic() + SET_ASIDE_SECONDS
        with self._lock:
            new = [(id, error) for id, error in errors if (table, id) not in self._rows]
            for id, error in errors:
                self._rows.pop((table, id), None)
                self._rows[table, id] = OddRow(table, id, _in_words(error), again_at)
            for key in list(self._rows)[: max(len(self._rows) - MOST_REMEMBERED, 0)]:
                del self._rows[key]
        if new:
            ids = ", ".join(id for id, _ in new[:IDS_IN_A_LINE]) + (", …" if len(new) > IDS_IN_A_LINE else "")
            error = new[0][1]
            logger.error(
                "%s: %d row%s cannot be used: %s (%s); correct or delete each in the database; until then it is "
                "skipped, and read again within %d s",
                table,
                len(new),
                pluralize(len(new)),
                ids,
                _in_words(error),
                SET_ASIDE_SECONDS,
                # A driver's error says it all; one of Python may be a fault of this code.
                exc_info=None if isinstance(error, DatabaseError) else error,
                extra=log_extra_of_ids([id for id, _ in new]) if table == table_of(TaskRecord) else None,
            )

    def holds(self, table: str, id: str) -> bool:
        """Return whether a row is set aside now."""
        found = self._rows.get((table, id))
        return found is not None and found.again_at > time.monotonic()

    def drop(self, table: str, ids: Iterable[str]) -> None:
        """Forget rows that could be used."""
        with self._lock:
            for id in ids:
                self._rows.pop((table, id), None)

    def rows(self) -> list[OddRow]:
        """Return what is remembered, the oldest first."""
        with self._lock:
            return list(self._rows.values())

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._rows.clear()

    def __bool__(self) -> bool:
        return bool(self._rows)


set_aside = SetAside()


def table_of(model: type[Model]) -> str:
    """Return the name under which rows of a model are set aside."""
    return model._meta.db_table


def each_alone(
    table: str,
    items: Sequence[Item],
    act: Callable[[Sequence[Item]], list[Found]],
    *,
    database: str,
    key: Callable[[Item], Hashable] = lambda item: item,
) -> list[Found]:
    """Return what `act` returns for these items, without those at whose rows it fails.

    items: ids, or rows with `key` for their id. `act` is called with all of them, and with parts of them after an error
    of a row; a call that fails must have changed nothing. table: of `table_of`, or with what is done to the rows.
    database: of the rows; within a transaction of it, each part has a savepoint.
    Raises: what `act` raises for other reasons; OperationalError when more than MOST_AT_ONCE rows are at fault.
    """
    wanted = [item for item in items if not set_aside.holds(table, str(key(item)))] if set_aside else items
    if not wanted:
        return []
    found, error = _result_or_error(act, wanted)
    if error is not None:
        return _Halves(table, act, key, database).of(wanted, error)
    if set_aside:
        set_aside.drop(table, (str(key(item)) for item in wanted))
    return found


def _result_or_error(
    act: Callable[[Sequence[Item]], list[Found]], items: Sequence[Item]
) -> tuple[list[Found], BaseException | None]:
    """Return what `act` returns, and the error of a row instead of raising it; other errors are raised."""
    try:
        return act(items), None
    except AsyncqError:
        raise
    except ROW_ERRORS as error:
        if kind_of(error) is not ErrorKind.ROW:
            raise
        return [], error


class _Halves:
    """One pass of `each_alone` over a batch that has failed."""

    def __init__(self, table: str, act: Callable[[Any], list[Any]], key: Callable[[Any], Any], database: str) -> None:
        self._table = table
        self._act = act
        self._key = key
        self._database = database
        self._at_fault: list[tuple[str, BaseException]] = []

    def of(self, items: Sequence[Any], error: BaseException) -> list[Any]:
        """Return what can be found; set the rest aside."""
        found = self._split(items, error)
        set_aside.add(self._table, self._at_fault)
        return found

    def _split(self, items: Sequence[Any], error: BaseException) -> list[Any]:
        if len(items) == 1:
            self._at_fault.append((str(self._key(items[0])), error))
            if len(self._at_fault) > MOST_AT_ONCE:
                raise too_many(self._table, error)
            return []
        middle = len(items) // 2
        return self._try(items[:middle]) + self._try(items[middle:])

    def _try(self, items: Sequence[Any]) -> list[Any]:
        found, error = _result_or_error(self._in_savepoint, items)
        return found if error is None else self._split(items, error)

    def _in_savepoint(self, items: Sequence[Any]) -> list[Any]:
        if not connections[self._database].in_atomic_block:
            return self._act(items)
        # So that an error of the server does not spoil the caller's transaction.
        with transaction.atomic(using=self._database):
            return self._act(items)


def too_many(table: str, error: BaseException) -> OperationalError:
    """Return the error of a pass with more than MOST_AT_ONCE odd rows; it has no code, so it is UNAVAILABLE."""
    return OperationalError(f"{table}: more than {MOST_AT_ONCE} rows cannot be used; the last: {_in_words(error)}")


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:200]}"


# --- pages of ids


def page_of(rows: QuerySet[Any], *columns: str, size: int | None) -> list[tuple[Any, ...]]:
    """Return the primary keys and some columns of the first rows, without the rows where that cannot be read.

    rows: ordered by primary key, not sliced. size: more than MOST_AT_ONCE, so that only the last page can be empty, or
    None for all rows. SQLite and MySQL keep a UUID as text, so there can be texts that are none. The next page begins
    after the last key returned.
    """
    try:
        return list(rows.values_list("pk", *columns)[:size])
    except ROW_ERRORS as error:
        if kind_of(error) is not ErrorKind.ROW:
            raise
    field = rows.model._meta.pk
    good, odd = [], []
    texts = rows.annotate(key_text=Cast("pk", CharField())).values_list("key_text", flat=True)
    for text in texts[:size]:
        try:
            good.append(field.to_python(text))
        except Exception as error:  # noqa: BLE001 - Django raises a ValidationError here, drivers and Python others
            odd.append((str(text), error))
    if len(odd) > MOST_AT_ONCE:
        raise too_many(table_of(rows.model), odd[-1][1])
    table = table_of(rows.model)
    set_aside.add(table, odd)
    return each_alone(
        table,
        good,
        lambda part: list(rows.filter(pk__in=part).values_list("pk", *columns)),
        database=rows.db,
    )


# --- rows whose values no database refuses and no code can use


_TEXT, _NUMBER, _OPTIONAL = (str,), (int,), (float, int, type(None))
TYPES: dict[str, tuple[type, ...]] = {
    "name": _TEXT,
    "backend": _TEXT,
    "queue_name": _TEXT,
    "gate": _TEXT,
    "state": _NUMBER,
    "fence": _NUMBER,
    "priority": _NUMBER,
    "attempt": _NUMBER,
    "max_attempts": _NUMBER,
    "crash_count": _NUMBER,
    "timeout_seconds": _OPTIONAL,
}
_types_of = attrgetter(*TYPES)
# Combinations of types that were found to be right: one look-up for each row.
_known: set[tuple[type, ...]] = set()


def _checked(rows: Iterable[TaskRecord]) -> list[TaskRecord]:
    """Return the rows. Raises: TypeError when a value of one is of a type that no code here expects.

    A JSON column may hold any JSON; SQLite keeps any value in any column.
    Arguments of the wrong shape are no fault here: such a task fails with TaskNotRunnable.
    """
    checked = list(rows)
    for row in checked:
        errors = row.errors
        if type(errors) is not list or type(row.worker_ids) is not list:
            raise TypeError("errors or worker_ids is no list")
        if errors and not (isinstance(errors[-1], dict) and "message" in errors[-1]):
            raise TypeError("errors holds something else than errors")
        found = tuple(map(type, _types_of(row)))
        if found not in _known:
            for (name, allowed), kind in zip(TYPES.items(), found, strict=True):
                if not issubclass(kind, allowed):
                    raise TypeError(f"{name} is of the type {kind.__name__}")
            _known.add(found)
    return checked


def usable_rows(
    ids: Sequence[Any], read: Callable[[Sequence[Any]], Iterable[TaskRecord]], *, database: str
) -> list[TaskRecord]:
    """Return the tasks of these ids that `read` finds and that can be used; set the others aside. ids: str or UUID."""
    return each_alone(table_of(TaskRecord), ids, lambda part: _checked(read(part)), database=database)


def is_set_aside(id: str) -> bool:
    """Return whether a task's row exists but cannot be used. id: a UUID in its usual form."""
    return bool(set_aside) and set_aside.holds(table_of(TaskRecord), id)

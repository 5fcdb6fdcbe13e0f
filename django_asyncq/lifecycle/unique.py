"""Enqueue unique tasks: of all rows with one key, one holds the key's slot.

The row decides. `unique_slot` has a unique index, and the INSERT skips a row whose slot is taken. So no lock outlives
its task: a rollback or a deletion frees the slot with the row, and an emptied Redis changes nothing.

| unique_until | the slot is freed                                                                              |
|--------------|------------------------------------------------------------------------------------------------|
| "end"        | by the UPDATE that makes the row final; a person's retry takes it again                        |
| "start"      | by the UPDATE that makes the row RUNNING, before the body is called; no retry takes it again   |
| a duration   | by the first `enqueue` with this key after `unique_until`                                      |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from functools import partial as partial_of
from typing import Literal, NamedTuple
from uuid import UUID

from django.db import IntegrityError, connections
from django.db.models import BooleanField, Case, QuerySet, Value, When

from .. import gates
from ..exceptions import DuplicateTask
from ..models import TaskRecord
from ..storage import database_clock
from ..storage.inserting import insert
from ..storage.routing import rows_of, transaction_of, writing_database
from .base import load_rows
from .enqueueing import admit, dispatch_after_commit, enqueue_rows, require_redis
from .following import follower_slot
from .parents import enqueue_after
from .replacing import replace_follower, replace_holder

OnDuplicate = Literal["reject", "return", "replace", "follow"]

# How often the holder of a slot may finish between the look and the INSERT before the call is refused.
ROUNDS = 3


class Holder(NamedTuple):
    """A row that holds a slot, as far as a decision needs it. is_over: whether it has a time, and that is over."""

    id: UUID
    unique_slot: str
    is_over: bool


def enqueue_unique(
    records: Sequence[TaskRecord],
    *,
    on_duplicate: OnDuplicate,
    partial: bool = False,
    on_committed: Callable[[list[TaskRecord]], None] | None = None,
) -> list[TaskRecord | None]:
    """Queue unique tasks; return for each call, in their order, the row that stands for it: a new or an existing one.

    records: new rows with their slots. partial: the row of a call that is refused is None; otherwise all or none.

    | check    | a live holder of the slot: the call is settled as `on_duplicate` says |
    |          | `task_state_changing`, as in `enqueue`, for the others                |
    | row      | INSERT as QUEUED; one whose slot was taken meanwhile is not inserted, |
    |          | its gate slot is released at once, and its holder is looked for again |
    | Redis    | after the commit, as in `enqueue`                                     |
    | announce | after the commit, as in `enqueue`                                     |

    Rows are inserted in the order of their slots, so two calls with the same keys wait for each other and do not
    deadlock. Raises: DuplicateTask, and what `enqueue` raises: nothing was written then.
    """
    if on_duplicate == "reject" and not partial:
        _refuse_repeated(records)
    require_redis(records)
    rows = partial_of(enqueue_unique_rows, records, on_duplicate, partial=partial, on_committed=on_committed)
    return enqueue_after(records, rows) if [record for record in records if record.edges] else rows()


def enqueue_unique_rows(
    records: Sequence[TaskRecord],
    on_duplicate: OnDuplicate,
    *,
    partial: bool,
    on_committed: Callable[[list[TaskRecord]], None] | None,
) -> list[TaskRecord | None]:
    """Do what `enqueue_unique` does, behind what it checks for all."""
    connection = connections[writing_database(TaskRecord)]
    is_superseding = on_duplicate in ("replace", "follow")
    enqueueing = (_Superseding if is_superseding else _Enqueueing)(on_duplicate, partial=partial)
    try:
        # What several rounds insert is written together, or not at all. A single row is one statement.
        with transaction_of(TaskRecord) if len(records) > 1 else nullcontext():
            left = list(records)
            for number in range(enqueueing.rounds):
                left = enqueueing.attempt(left, is_first=number == 0) if left else left
            for record in left:
                enqueueing.refuse(record, None)
    except BaseException:
        gates.release_uncommitted(enqueueing.inserted)
        raise
    if enqueueing.inserted:
        dispatch_after_commit(enqueueing.inserted, connection, on_committed)
    return [enqueueing.standing[record.id] for record in records]


class _Enqueueing:
    """The calls of one `enqueue_unique`. standing: for each settled call, by its id, the row that stands for it."""

    rounds = ROUNDS

    def __init__(self, on_duplicate: OnDuplicate, *, partial: bool) -> None:
        self.on_duplicate = on_duplicate
        self.partial = partial
        self.standing: dict[UUID, TaskRecord | None] = {}
        self.inserted: list[TaskRecord] = []

    def attempt(self, records: Sequence[TaskRecord], *, is_first: bool) -> list[TaskRecord]:
        """Look, ask the gates, insert; return the calls that are not settled: others have taken their slots."""
        calls: dict[str, list[TaskRecord]] = {}
        for record in records:
            calls.setdefault(record.unique_key, []).append(record)
        holders = live_holders(calls, is_first=is_first)
        self._settle([(record, holder) for key, holder in holders.items() for record in calls[key]])
        # The others of a list with the same key meet it in the next round.
        if free := [group[0] for key, group in calls.items() if key not in holders]:
            self._insert(free)
        return [record for record in records if record.id not in self.standing]

    def _insert(self, records: Sequence[TaskRecord]) -> None:
        """Insert the rows that their gates admit, except those whose slot was taken meanwhile."""
        admitted = sorted(admit(records, partial=self.partial), key=lambda record: record.unique_slot or "")
        ids = {record.id for record in admitted}
        self.standing |= {record.id: None for record in records if record.id not in ids}
        if not admitted:
            return
        try:
            inserted = insert(admitted, connections[writing_database(TaskRecord)])
        except BaseException:
            gates.release_uncommitted(admitted)
            raise
        self.inserted += inserted
        self.standing |= {record.id: record for record in inserted}
        if lost := [record for record in admitted if record.id not in self.standing]:
            gates.release_uncommitted(lost)

    def _settle(self, met: Sequence[tuple[TaskRecord, Holder]]) -> None:
        """Decide what calls become whose slots other rows hold. Raises: DuplicateTask."""
        if self.on_duplicate != "return":
            for record, holder in met:
                self.refuse(record, holder)
            return
        known = {str(record.id): record for record in self.inserted}
        ids = {str(holder.id) for _, holder in met}
        rows = known | load_rows(sorted(ids.difference(known)))
        # One that is not there was deleted at this moment, or cannot be read; the next round looks again.
        self.standing |= {record.id: rows[str(holder.id)] for record, holder in met if str(holder.id) in rows}

    def refuse(self, record: TaskRecord, holder: Holder | None) -> None:
        """Refuse a call. Raises: DuplicateTask, unless the others may be enqueued without it."""
        if not self.partial:
            raise DuplicateTask(record.name, holder.id if holder else None)
        self.standing[record.id] = None


class _Superseding(_Enqueueing):
    """Calls that replace the arguments of a task that has not begun, or follow one that has.

    A follower always gets the newest arguments: it runs last. In one list the last call of a key stands for all of
    them; with "follow" the first becomes the holder, if there is none.
    """

    # A key that is busy changes between look and write, each time because another call has come further.
    rounds = 20

    def attempt(self, records: Sequence[TaskRecord], *, is_first: bool) -> list[TaskRecord]:
        """Look, then replace or insert; return the calls that are not settled: what they met has just changed."""
        calls: dict[str, list[TaskRecord]] = {}
        for record in records:
            calls.setdefault(record.unique_key, []).append(record)
        slots = [slot for key in calls for slot in (key, follower_slot(key))]
        holders = live_holders(slots, is_first=is_first)
        new: list[TaskRecord] = []
        # In one order, as the INSERT: two calls with the same keys wait for each other.
        for key, group in sorted(calls.items()):
            holder, follower = holders.get(key), holders.get(follower_slot(key))
            row = None
            if follower is not None:
                row = replace_follower(group[-1])
            elif holder is None:
                new.append(_as_holder(group[0] if self.on_duplicate == "follow" else group[-1]))
            elif self.on_duplicate == "follow" or (row := replace_holder(group[-1])) is None:
                new.append(_as_follower(group[-1], holder.id))
            if row is not None:
                self.standing |= {record.id: row for record in group}
        if new:
            self._insert(new)
        for record in new:
            if record.id in self.standing and (record.after_id is not None or self.on_duplicate == "replace"):
                self.standing |= {other.id: self.standing[record.id] for other in calls[record.unique_key]}
        return [record for record in records if record.id not in self.standing]


def _as_holder(record: TaskRecord) -> TaskRecord:
    record.unique_slot, record.after_id = record.unique_key, None
    return record


def _as_follower(record: TaskRecord, holder: UUID) -> TaskRecord:
    record.unique_slot, record.after_id = follower_slot(record.unique_key), holder
    return record


def _refuse_repeated(records: Sequence[TaskRecord]) -> None:
    """Refuse a list in which two calls have the same key, before anything is asked. Raises: DuplicateTask."""
    if len({record.unique_slot for record in records}) < len(records):
        raise DuplicateTask(records[0].name, None, in_list=True)


def live_holders(slots: Collection[str], *, is_first: bool = True) -> dict[str, Holder]:
    """Return the rows that hold slots, by slot; free those whose time is over.

    is_first: False after an INSERT met a row that the transaction's snapshot may not show.
    """
    rows = rows_of(TaskRecord)
    found = _holders(rows.filter(unique_slot__in=slots))
    connection = connections[rows.db]
    if not is_first and connection.vendor == "mysql" and connection.in_atomic_block:
        # A snapshot above READ COMMITTED may not show a row that the INSERT met and has locked; a locking read does.
        # One at a time, in the order of the INSERT, because a statement for several may lock them in another.
        for slot in sorted(set(slots).difference(holder.unique_slot for holder in found)):
            found += _holders(rows.filter(unique_slot=slot).select_for_update())
    if over := [holder.id for holder in found if holder.is_over]:
        is_over = {"unique_until__lte": database_clock.expression(connection), "after_id": None}
        rows_of(TaskRecord).filter(id__in=over, **is_over).update(unique_slot=None)
    return {holder.unique_slot: holder for holder in found if not holder.is_over}


def _holders(rows: QuerySet[TaskRecord]) -> list[Holder]:
    # The time of a follower begins when it moves up. Until then nothing but its end frees its place. By the database's
    # clock as it is now: by an estimate, a call would be accepted a little sooner, or refused a little longer.
    over = When(unique_until__lte=database_clock.expression(connections[rows.db]), after_id=None, then=Value(True))
    is_over = Case(over, default=Value(False), output_field=BooleanField())
    return [Holder(*values) for values in rows.values_list("id", "unique_slot", is_over)]


class Taken(NamedTuple):
    """A task that cannot be retried now. holder: the task that holds its slot; None when it finished meanwhile."""

    record: TaskRecord
    holder: UUID | None


def holds_until_final(record: TaskRecord) -> bool:
    """Whether a task holds its slot until its row is final, so that a person's retry must take it again."""
    return bool(record.unique_key) and record.unique_until is None and not record.unique_until_start


def already_taken(records: Iterable[TaskRecord]) -> list[Taken]:
    """Return which of these FAILED tasks cannot be retried by a person, because others hold their slots.

    Of several with one key, the first is not among them.
    """
    wanted = [record for record in records if holds_until_final(record)]
    if not wanted:
        return []
    holders: dict[str, UUID] = {key: holder.id for key, holder in live_holders({r.unique_key for r in wanted}).items()}
    taken = []
    for record in wanted:
        holder = holders.setdefault(record.unique_key, record.id)
        if holder != record.id:
            taken.append(Taken(record, holder))
    return taken


def take_again(rows: QuerySet[TaskRecord], records: Iterable[TaskRecord]) -> list[Taken]:
    """Have retried tasks hold their slots again, in the caller's transaction; return those whose slot was just taken.

    rows: locked. records: none of `already_taken`.
    """
    taken = []
    for record in sorted(filter(holds_until_final, records), key=lambda record: record.unique_key):
        try:
            with transaction_of(TaskRecord):
                rows.filter(id=record.id).update(unique_slot=record.unique_key)
        except IntegrityError:
            holder = live_holders([record.unique_key], is_first=False).get(record.unique_key)
            taken.append(Taken(record, holder.id if holder else None))
        else:
            record.unique_slot = record.unique_key
    return taken


def without(records: Sequence[TaskRecord], taken: Iterable[Taken]) -> list[TaskRecord]:
    """Return the tasks that are not among those whose slots others hold."""
    ids = {each.record.id for each in taken}
    return [record for record in records if record.id not in ids] if ids else list(records)


def enqueue_together(
    records: Sequence[TaskRecord], *, on_committed: Callable[[list[TaskRecord]], None] | None = None
) -> None:
    """Queue new tasks that wait for each other, all or none; a unique one whose key is taken is refused.

    records: parents first. As `enqueue` and `enqueue_unique`, in one transaction. Raises: as these.
    """
    require_redis(records)
    unique = [record for record in records if record.unique_slot is not None]
    plain = [record for record in records if record.unique_slot is None]

    def insert_all() -> list[TaskRecord | None]:
        found: list[TaskRecord | None] = []
        if unique:
            _refuse_repeated(unique)
            found += enqueue_unique_rows(unique, "reject", partial=False, on_committed=on_committed)
        if plain:
            found += enqueue_rows(plain, partial=False, on_committed=on_committed)
        return found

    enqueue_after(records, insert_all)

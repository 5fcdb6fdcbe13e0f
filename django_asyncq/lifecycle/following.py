"""Tasks that follow the one that holds their key: they wait as rows alone, and move up when the slot is free.

A follower is a QUEUED row with `after_id`; its `unique_slot` is not the key's digest but that of the place behind it,
so a key has one follower at most. It is never pushed while it follows. Moving up writes the key's digest and clears
`after_id`, in the transaction that frees the slot; after the commit the task is pushed like any other.

Three find a follower whose slot is free: the write that frees it, the commit of the follower itself, because the slot
may have been freed before the row was visible, and the reconciler.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from uuid import UUID

from django.db import IntegrityError, connections
from django.db.models import Exists, F, OuterRef

from .. import gates
from ..core.time import Delay
from ..exceptions import BrokerUnavailable, GateUnavailable
from ..models import TaskRecord
from ..storage import batches, database_clock
from ..storage.batches import FencedWrite
from ..storage.isolation import each_alone, table_of
from ..storage.routing import rows_of, transaction_of, writing_database
from .base import CommitHook
from .children import linked_since, write_outcomes
from .dispatching import dispatch, note_failed_push
from .members import follow

# In one pass of the reconciler; the next one follows within seconds.
MOST_AT_ONCE = 1000


class Promotion(CommitHook):
    """Pushes the followers that moved up in a transaction."""

    def follow_up(self) -> None:
        dispatch(self.records)


def follower_slot(unique_key: str) -> str:
    """Return the digest that the follower of a key holds. unique_key: the digest of the key."""
    return hashlib.sha256(f"{unique_key} next".encode()).hexdigest()


def write_fenced(writes: Sequence[FencedWrite], database: str, *, patient: bool = True) -> set[UUID]:
    """Do what `batches.write_fenced` does; in the same transaction the followers of freed slots move up.

    So are the tasks counted that waited for one of these (`children`). The members of batches are written with them, or
    follow them; the ids of those that were written are returned too.
    """
    freeing = {
        write.record.id: write.record.unique_key
        for write in writes
        if write.record.unique_key and write.record.frees_slot
    }
    of_batches = [write for write in writes if write.record.batch_size is not None]
    if not (freeing or of_batches or [write for write in writes if write.record.workflow_id is not None]):
        # One statement, and no transaction around it, for rows that nothing hangs on.
        accepted = batches.write_fenced(writes, database, patient=patient, unlinked=True)
        if len(accepted) == len(writes):
            return accepted
        writes = [write for write in writes if write.record.id not in accepted]
        return accepted | _write_linked(writes, database, patient=patient)
    with transaction_of(TaskRecord):
        accepted, freed = write_outcomes(writes, database, patient=patient)
        if of_batches:
            written, freed_by_members = follow(
                [each for each in of_batches if each.record.id in accepted], database, patient=patient
            )
            accepted |= written.keys()
            freeing |= {id: key for id, key in written.items() if key}
            freed |= freed_by_members
        if not patient:
            batches.shorten_waits(connections[database])
        move_up(freed | {key for id, key in freeing.items() if id in accepted})
    return accepted


def _write_linked(writes: Sequence[FencedWrite], database: str, *, patient: bool) -> set[UUID]:
    """Write outcomes that their rows have refused, where these have got children since."""
    linked = linked_since(writes)
    return write_fenced(linked, database, patient=patient) if linked else set()


def write_usable(writes: Sequence[FencedWrite], database: str) -> set[UUID]:
    """Do what `write_fenced` does, but set aside the rows that the database refuses; their ids are not returned."""

    def write(part: Sequence[FencedWrite]) -> list[UUID]:
        return list(write_fenced(part, database))

    return set(each_alone(table_of(TaskRecord), writes, write, key=lambda write: write.record.id, database=database))


def move_up(keys: Collection[str]) -> int:
    """Have the followers of freed keys move up, in the caller's transaction; return how many.

    keys: digests; one that a task holds again, or still, is left alone. A follower that a producer is changing right
    now is skipped, because its transaction may last: its commit looks again.

    | check    | no row holds the key                                                          |
    | row      | QUEUED stays QUEUED; `unique_slot` becomes the key's digest, `after_id` null |
    | Redis    | after the commit: pending or scheduled                                        |
    | announce | nothing: the state is the same                                                |

    If we die after the commit, the reconciler pushes the row.
    """
    if not keys:
        return 0
    connection = connections[writing_database(TaskRecord)]
    rows = rows_of(TaskRecord)
    followers = rows.filter(unique_slot__in=[follower_slot(key) for key in sorted(keys)], after_id__isnull=False)
    skip_locked = connection.features.has_select_for_update_skip_locked
    found = list(followers.select_for_update(skip_locked=skip_locked).order_by("id"))
    if not found:
        return 0
    wanted = [record.unique_key for record in found]
    held = set(rows.filter(unique_slot__in=wanted).values_list("unique_slot", flat=True))
    found = [record for record in found if record.unique_key not in held]
    try:
        # The savepoint: a write that is repeated, or that frees no slot of its own, may meet a new holder.
        with transaction_of(TaskRecord):
            _write_promotions(found)
    except IntegrityError:
        return 0
    if found:
        hook = Promotion.of_transaction(connection)
        hook.records.extend(found)
        hook.register(connection)
    return len(found)


def _write_promotions(records: Sequence[TaskRecord]) -> None:
    rows = rows_of(TaskRecord)
    if records:
        ids = [record.id for record in records]
        rows.filter(id__in=ids).update(unique_slot=F("unique_key"), after_id=None)
    for record in records:
        record.unique_slot, record.after_id = record.unique_key, None
        if record.unique_until is not None:
            # Its time counts from now on.
            delay = Delay(record.unique_until - record.enqueued_at)
            rows.filter(id=record.id).update(unique_until=database_clock.expression(connections[rows.db], delay))
            record.unique_until = delay.after(database_clock.now(rows.db))


def free_slots(records: Iterable[TaskRecord]) -> None:
    """Free the slots of tasks that were closed before they ran, in the caller's transaction; their followers move up.

    A throttled task keeps its slot until `unique_until`; a follower that was closed leaves its place to another one.
    """
    freeing = [r for r in records if r.unique_slot is not None and (r.unique_until is None or r.after_id is not None)]
    if not freeing:
        return
    rows_of(TaskRecord).filter(id__in=[record.id for record in freeing]).update(unique_slot=None, after_id=None)
    keys = {record.unique_key for record in freeing if record.after_id is None}
    for record in freeing:
        record.unique_slot = record.after_id = None
    move_up(keys)


def move_up_waiting(keys: Collection[str] | None = None) -> int:
    """Find followers whose key no task holds any more, and have them move up; return how many.

    keys: digests; None for all, at most MOST_AT_ONCE of them. The slot of a throttled task whose time is over is freed.
    """
    rows = rows_of(TaskRecord)
    now = database_clock.expression(connections[rows.db])
    holders = rows.filter(unique_slot=OuterRef("unique_key")).exclude(unique_until__lte=now)
    followers = rows.filter(after_id__isnull=False)
    if keys is not None:
        followers = followers.filter(unique_slot__in=[follower_slot(key) for key in sorted(keys)])
    free = list(followers.filter(~Exists(holders)).values_list("unique_key", flat=True)[:MOST_AT_ONCE])
    if not free:
        return 0
    with transaction_of(TaskRecord):
        # First a write, so that SQLite takes its lock before anything is read.
        rows.filter(unique_slot__in=free, unique_until__lte=now).update(unique_slot=None)
        return move_up(free)


def settle_followers(records: Iterable[TaskRecord]) -> None:
    """Follow up the commit of new or changed followers: their gate slots last, and a free slot is theirs.

    Never raises for Redis: the auditor of gates corrects what could not be confirmed.
    """
    followers = [record for record in records if record.after_id is not None]
    if not followers:
        return
    try:
        # One that has lost its slot asks again when it is pushed.
        gates.confirm([record for record in followers if record.gate and not record.waits_for_slot])
    except (BrokerUnavailable, GateUnavailable) as error:
        note_failed_push(error, followers)
    move_up_waiting({record.unique_key for record in followers})

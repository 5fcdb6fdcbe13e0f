"""Gates that other programs share: their members count, and nothing of ours takes them away."""

from __future__ import annotations

import time

import pytest

from django_asyncq import QueueFull, conf, gates
from django_asyncq.broker import Broker
from django_asyncq.core.django_internals import delete_rows
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.models import Gate, TaskRecord
from django_asyncq.storage.routing import transaction_of, writing_database

from .. import acl, tasks

pytestmark = pytest.mark.django_db(transaction=True)

THEIRS = [f"go-task-{number}" for number in range(5)]


def join(gate: str, ids: list[str], seconds: int = 3600) -> None:
    """Put members of another program into a gate, as the Go service does."""
    expires_at = int(time.time()) + seconds
    acl.unrestricted(Broker().client).zadd(gates.keys(gate).members, dict.fromkeys(ids, expires_at))


def members(gate: str) -> set[str]:
    """Return the ids that hold a slot."""
    return {slot.id for slot in gates.slots(gate)}


def test_five_of_theirs_and_five_of_ours_over_three_sweeps() -> None:
    """The gate is full, and stays so: no member of either is removed, and no eleventh admitted."""
    Gate.objects.create(name="g", limit=10)
    join("g", THEIRS)
    ours = {tasks.gated.enqueue("g").id for _ in range(5)}
    reconciler = Reconciler(Broker())
    for _ in range(3):
        reconciler.sweep()
        reconciler.quick_repairs()
        assert members("g") == ours | set(THEIRS)
        with pytest.raises(QueueFull) as caught:
            tasks.gated.enqueue("g")
        assert (caught.value.limit, caught.value.occupancy) == (10, 10)


def test_their_members_leave_by_their_own_expiry() -> None:
    """A member whose score has passed is gone at the next request, and its slot free."""
    join("g", THEIRS)
    with pytest.raises(QueueFull):
        tasks.gated.enqueue("g")
    join("g", THEIRS[:1], seconds=-1)
    tasks.gated.enqueue("g")
    assert members("g").issuperset(THEIRS[1:])


def test_a_slot_of_ours_without_a_row_is_still_removed() -> None:
    """It was noted when it was acquired; that of a stranger beside it stays."""
    join("g", THEIRS[:2])
    result = tasks.gated.enqueue("g")
    delete_rows(TaskRecord.objects.filter(id=result.id), writing_database(TaskRecord))
    reconciler = Reconciler(Broker())
    reconciler.sweep()
    reconciler.quick_repairs()
    assert members("g") == set(THEIRS[:2])
    assert gates.noted_ids("g") == set()


def test_a_stranger_with_the_form_of_our_ids_stays() -> None:
    """Whose a member is does not depend on what its id looks like."""
    stranger = str(TaskRecord().id)
    join("g", [stranger])
    tasks.gated.enqueue("g")
    for _ in range(3):
        gates.audit("g")
    assert stranger in members("g")


def test_a_crash_between_acquire_and_commit_frees_our_slot() -> None:
    """The slot was provisional: it expires by itself, and the note of it is forgotten."""
    record = TaskRecord(name=tasks.gated.module_path, gate="g", queue_limit=5)
    gates.acquire([record])
    join("g", THEIRS[:1])
    (slot,) = [slot for slot in gates.slots("g") if slot.id == str(record.id)]
    assert slot.expires_at <= time.time() + conf.PROVISIONAL_SECONDS
    assert gates.noted_ids("g") == {str(record.id)}
    # What its expiry does, without the wait.
    join("g", [str(record.id)], seconds=-1)
    tasks.gated.enqueue("g")
    assert str(record.id) not in members("g")
    gates.audit("g")
    assert str(record.id) not in gates.noted_ids("g")
    assert THEIRS[0] in members("g")


def test_every_script_that_adds_a_member_notes_it() -> None:
    """Acquire, build and renew; release forgets it."""
    result = tasks.gated.enqueue("g")
    assert gates.noted_ids("g") == {result.id}
    client = acl.unrestricted(Broker().client)
    client.delete(gates.keys("g").ours)
    gates.audit("g")
    assert gates.noted_ids("g") == {result.id}
    client.delete(*gates.keys("g"))
    gates.build("g")
    assert gates.noted_ids("g") == {result.id}
    assert 80_000 < client.ttl(gates.keys("g").ours) <= 90_000
    gates.release_ids("g", [result.id])
    assert gates.noted_ids("g") == set()


def test_an_emptied_redis_forgets_strangers_but_not_ours() -> None:
    """The gate is built from the rows, which do not know the others: the guide says so."""
    join("g", THEIRS[:2])
    ours = {tasks.gated.enqueue("g").id for _ in range(3)}
    acl.unrestricted(Broker().client).delete(*gates.keys("g"))
    tasks.gated.enqueue("g")
    assert ours < members("g")
    assert not set(THEIRS) & members("g")


def test_a_trim_keeps_the_note_of_a_slot_that_was_acquired_meanwhile() -> None:
    """The script looks itself: the audit's list may be older."""
    result = tasks.gated.enqueue("g")
    gates.trim_noted("g", [result.id, "gone"])
    assert gates.noted_ids("g") == {result.id}


def test_a_rollback_releases_the_note_with_the_slot() -> None:
    """Nothing of a rolled-back task is left beside the members of others."""
    join("g", THEIRS[:2])
    with pytest.raises(LookupError), transaction_of(TaskRecord):
        tasks.gated.enqueue("g")
        raise LookupError
    tasks.gated.enqueue("other")
    assert members("g") == set(THEIRS[:2])
    assert gates.noted_ids("g") == set()

"""What both stores hold, read in the words of the model; an id in two lists at once is an error."""

from __future__ import annotations

import json
import time
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import redis
from django.utils import timezone

from django_asyncq import conf, gates
from django_asyncq.broker import clients
from django_asyncq.broker.keys import QueueKeys, prefix
from django_asyncq.core.names import lowest_uuid7_at
from django_asyncq.lifecycle.spill import SIGNATURE_BYTES
from django_asyncq.models import FailureReason, Gate, TaskRecord

from .model import Model
from .values import ALONE, GATE, QUEUES, WORKERS, Entry, Row

ZSETS = ("priority", "suspects", "scheduled", "retry", "archived")
PLACES = {"priority": "pending", "suspects": "pending"}
HOLDERS = (*WORKERS, ALONE)
# As in `lua/waking.lua`.
MOST_TOKENS = 32

CLOSED = {FailureReason.CANCELLED: "cancelled", FailureReason.EXPIRED: "expired"}

# An effect of a task in the database: the limit of an unused gate rises by one.
effects = Gate.objects.filter(name="effects")
Picture = dict[str, Any]


# An id says when its task was enqueued. All of them are young, however long the sequences take.
FIRST_ID = lowest_uuid7_at(timezone.now() + timedelta(days=1)).int


def id_of(name: str) -> UUID:
    """Return the id of a task of the model: `t07` is number 7, so ids are ordered as names are."""
    return UUID(int=FIRST_ID + int(name[1:]))


def name_of(id: str | bytes) -> str:
    """Return the model's name of an id."""
    text = id.decode() if isinstance(id, bytes) else id
    return f"t{UUID(text).int - FIRST_ID:02}"


def dropped_key(queue: str) -> str:
    """Return the list, of these tests alone, of the ids that were dropped from pending."""
    return f"{QueueKeys(queue).base}dropped"


def client() -> redis.Redis:
    """The client that reads, and that acts as other programs."""
    return clients.client("worker")


def flush() -> None:
    """Let Redis lose its memory: only the keys of this test are deleted."""
    for pattern in (f"{prefix()}*", f"{{{prefix()}*"):
        if found := client().keys(pattern):
            client().delete(*found)


def expected(model: Model) -> Picture:
    """What the stores must hold by the model."""
    return {
        "rows": {name: _row(row) for name, row in sorted(model.rows.items())},
        "entries": {name: _entry(entry) for name, entry in sorted(model.entries.items())},
        "pending": model.pending,
        "held": {f"{queue}/{worker}": held for (queue, worker), held in sorted(model.held.items()) if held},
        "dropped": {queue: names for queue, names in sorted(model.dropped.items()) if names},
        "members": dict(sorted(model.members.items())),
        "waiters": model.waiters,
        "counters": model.counters,
        "effects": model.effects,
    }


def _row(row: Row) -> tuple[Any, ...]:
    plain = (row.state, row.fence, row.attempt, row.crashes, row.suspicion)
    return (*plain, row.waits, row.closed, row.asked, row.late, row.workers, row.retry_at, row.run_after)


def _entry(entry: Entry) -> tuple[Any, ...]:
    is_active = entry.place == "active"
    due = entry.due if entry.place in ("scheduled", "retry") else ""
    worker, expired = (entry.worker, entry.expired) if is_active else ("", False)
    return entry.queue, entry.place, entry.fence, worker, expired, due, entry.outcome and entry.outcome.row.fence


def observed() -> Picture:
    """What the stores hold."""
    entries: dict[str, tuple[Any, ...]] = {}
    pending: dict[str, list[str]] = {}
    held: dict[str, dict[str, int]] = {}
    dropped: dict[str, list[str]] = {}
    counters: dict[str, list[int]] = {}
    for queue in QUEUES:
        _read_queue(queue, entries, pending, held, dropped, counters)
    horizon = time.time() + conf.PROVISIONAL_SECONDS
    now = time.time()
    slots = [slot for slot in gates.slots(GATE) if slot.expires_at > now]
    return {
        "rows": _rows(),
        "entries": dict(sorted(entries.items())),
        "pending": pending,
        "held": held,
        "dropped": dropped,
        "members": dict(sorted((name_of(slot.id), slot.expires_at <= horizon) for slot in slots)),
        "waiters": [name_of(id) for id in gates.waiters(GATE)],
        "counters": counters,
        "effects": effects.get().limit,
    }


def _rows() -> dict[str, tuple[Any, ...]]:
    now = timezone.now()

    def when(moment: datetime | None) -> str:
        return "" if moment is None else "future" if moment > now else "past"

    plain_fields = ("id", "state", "fence", "attempt", "crash_count", "suspicion")
    fields = (*plain_fields, "reason", "cancel_requested_at", "expires_at", "worker_ids", "retry_at", "run_after")
    rows = TaskRecord.objects.order_by("id").values_list(*fields)
    return {
        name_of(str(id)): (
            *plain,
            reason == FailureReason.GATE_FULL,
            CLOSED.get(reason, ""),
            asked_at is not None,
            when(expires_at) == "past",
            tuple(workers),
            when(retry_at),
            when(run_after),
        )
        for id, *plain, reason, asked_at, expires_at, workers, retry_at, run_after in rows
    }


def _read_queue(
    queue: str,
    entries: dict[str, tuple[Any, ...]],
    pending: dict[str, list[str]],
    held: dict[str, dict[str, int]],
    dropped: dict[str, list[str]],
    counters: dict[str, list[int]],
) -> None:
    keys, now = QueueKeys(queue), time.time()
    pipe = client().pipeline(transaction=False)
    for key in (keys.pending, keys.active):
        pipe.lrange(key, 0, -1)
    for word in (*ZSETS, "lease", "due"):
        pipe.zrange(getattr(keys, word), 0, -1, withscores=True)
    for worker in HOLDERS:
        pipe.hgetall(keys.held(worker))
    pipe.lrange(dropped_key(queue), 0, -1)
    pipe.llen(keys.wake)
    pipe.mget(keys.processed, keys.failed)
    pipe.keys(f"{keys.base.replace('{', '[{]')}t:*")
    in_pending, in_active, *found, in_dropped, tokens, counted, hashes = pipe.execute()
    assert tokens <= MOST_TOKENS, f"queue {queue} has {tokens} tokens"
    zsets, all_held = found[: -len(HOLDERS)], found[-len(HOLDERS) :]
    scores = {word: dict(found) for word, found in zip((*ZSETS, "lease", "due"), zsets, strict=True)}
    # An id may stay in pending when it does not wait, or be there twice; `dequeue` drops it.
    waiting = {id for id in {*in_pending, *in_dropped} if _is_pending(keys, id)}
    places = [(id, "pending") for id in waiting] + [(id, "active") for id in in_active]
    places += [(id, word) for word in ZSETS for id in scores[word]]
    assert len({id for id, _ in places}) == len(places), f"an id is in two places of queue {queue}: {places}"
    assert set(scores["lease"]) == set(in_active), f"leases {scores['lease']} of tasks that are not active: {in_active}"
    assert set(scores["due"]) <= set(scores["scheduled"]), "due (ms) has ids that are not scheduled"
    assert {key.rpartition(b"t:")[2] for key in hashes} == {id for id, _ in places}, "hashes and places differ"
    for id, place in places:
        fields = ("msg", "state", "fence", "worker", "outcome")
        message, state, fence, worker, outcome = client().hmget(keys.task(id.decode()), *fields)
        assert message is not None, f"{name_of(id)} is in {place} without a message"
        assert state.decode() == PLACES.get(place, place), f"{name_of(id)} is in {place}, its hash says {state}"
        is_active = place == "active"
        expired = is_active and scores["lease"][id] <= now
        due = scores[place][id] if place in ("scheduled", "retry") else None
        when = "" if due is None else "future" if due > now else "past"
        holder = worker.decode() if is_active and worker else ""
        left = json.loads(outcome[SIGNATURE_BYTES:])["fence"] if outcome else None
        entries[name_of(id)] = (queue, place, int(fence or 0), holder, expired, when, left)
    pending[queue] = [name_of(id) for id in in_pending]
    if in_dropped:
        dropped[queue] = [name_of(id) for id in in_dropped]
    for worker, found in zip(HOLDERS, all_held, strict=True):
        if found:
            held[f"{queue}/{worker}"] = {name_of(id): int(fence) for id, fence in found.items()}
    counters[queue] = [int(count or 0) for count in counted]


def _is_pending(keys: QueueKeys, id: bytes) -> bool:
    state, suspect = client().hmget(keys.task(id.decode()), "state", "suspect")
    return state == b"pending" and suspect is None

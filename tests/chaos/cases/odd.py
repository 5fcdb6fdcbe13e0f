"""Odd keys and values in Redis, written at random while producers and workers run."""

from __future__ import annotations

import time
from typing import Any

from tests import odd_values

from ..rig import Report, Rig

FIELDS = ("state", "fence", "priority", "pending_since", "worker", "unique_key", "group", "parked_at", "outcome", "msg")
ZSETS = ("priority", "suspects", "lease", "scheduled", "due", "retry", "archived", "completed")


def odd(rig: Rig, report: Report, scale: float) -> None:
    """Write odd data 400 times under load: keys of wrong types, odd fields of tasks, odd scores, odd members."""
    times = max(30, round(400 * scale))
    with rig.redis() as server, rig.fleet(2, 4) as fleet:
        rig.wait_ready(fleet, 2)
        load = rig.producer("load", times * 8, 30, 5, rig.seed)
        written: dict[str, int] = {}
        with server.client() as client:
            for _ in range(times):
                time.sleep(rig.random.uniform(0, 0.1))
                what = write_one(rig, client)
                written[what] = written.get(what, 0) + 1
                rig.note("fault", kind="odd data", pids=fleet.workers())
            rig.ended_well(load)
            rig.settle(150)
            # What was written last is still there, and may make a task run again.
            rig.note("fault", kind="odd data", pids=fleet.workers())
            report.figure("written", ", ".join(f"{count} {what}" for what, count in sorted(written.items())))
            report.figure("set aside", sum(1 for _ in client.scan_iter("*odd:*")))
            report.figure("keys of a wrong type that nothing reads", remove_wrong_types(client))
        rig.check(report, agreement_seconds=40, others_write=True)
        report.goal("supervisors that ended", int(fleet.process.poll() is not None), at_most=0)
        log = fleet.log.read_text(errors="replace")
        report.goal("worker processes that ended", log.count("exited unexpectedly"), at_most=0)


def remove_wrong_types(client: Any) -> int:
    """Delete the keys of a wrong type, which the checker could not read; return how many there were."""
    from django_asyncq.broker import keys

    names = keys.QueueKeys("default")
    of_kind = {getattr(names, kind): right for kind, right in keys.QUEUE_TYPES.items()}
    expected = {key.encode(): right for key, right in of_kind.items() if isinstance(key, str)}
    for part in ("t", "held"):
        expected |= dict.fromkeys(client.scan_iter(f"{names.base}{part}:*"), "hash")
    wrong = [key for key, right in expected.items() if client.type(key) not in (right.encode(), b"none")]
    return int(client.delete(*wrong)) if wrong else 0


def write_one(rig: Rig, client: Any) -> str:
    """Write one odd thing; return what it is."""
    what = rig.random.choice(("key", "field", "score", "member"))
    {"key": _key, "field": _field, "score": _score, "member": _member}[what](rig, client)
    return what


def _key(rig: Rig, client: Any) -> None:
    key, right = rig.random.choice(_keys(rig, client))
    wrong = rig.random.choice([kind for kind in odd_values.TYPES if kind != right])
    odd_values.write(client, key, wrong, _value(rig))


def _keys(rig: Rig, client: Any) -> list[tuple[Any, str]]:
    """Return the keys of every kind with the type they should have; one of each kind that has many."""
    from django_asyncq.broker import keys

    names = keys.QueueKeys("default")
    found: list[tuple[Any, str]] = []
    for kind, right in keys.QUEUE_TYPES.items():
        if isinstance(key := getattr(names, kind), str):
            found.append((key, right))
    # Not the locks: the case is about tasks, and a leader may take up to a lock's life to follow.
    found += [(keys.queues_key(), "set"), (keys.alive_key(), "string"), (keys.reachability_key(), "hash")]
    for part, right in (("t", "hash"), ("held", "hash")):
        several = sorted(client.scan_iter(f"{names.base}{part}:*"))
        if several:
            found.append((rig.random.choice(several), right))
    return found


def _field(rig: Rig, client: Any) -> None:
    several = sorted(client.scan_iter(f"{rig.prefix}:{{default}}:t:*", _type="hash"))
    if several:
        client.hset(rig.random.choice(several), rig.random.choice(FIELDS), _value(rig))


def _score(rig: Rig, client: Any) -> None:
    from django_asyncq.broker import keys

    key = getattr(keys.QueueKeys("default"), rig.random.choice(ZSETS))
    if client.type(key) == b"zset" and (there := client.zrange(key, 0, 20)):
        # Not one that has gone since: nobody would ever look at it again.
        client.zadd(key, {rig.random.choice(there): rig.random.choice(list(odd_values.SCORES.values()))}, xx=True)


def _member(rig: Rig, client: Any) -> None:
    key, right = rig.random.choice(_keys(rig, client))
    value, score = _value(rig), rig.random.choice(list(odd_values.SCORES.values()))
    # A string in the key `paused` pauses the queue, as it should; it never exists here.
    if client.type(key) != right.encode():
        return
    if right == "list":
        client.rpush(key, value)
    elif right == "set":
        client.sadd(key, value)
    elif right == "zset":
        client.zadd(key, {value: score})
    elif right == "string":
        client.set(key, value)
    else:
        client.hset(key, value, value)


def _value(rig: Rig) -> bytes:
    return rig.random.choice(list(odd_values.VALUES.values()))

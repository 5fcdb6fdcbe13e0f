"""Forged messages and deleted keys in Redis."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from tests.workers import wait_until

from ..rig import Report, Rig


def forged(rig: Rig, report: Report, scale: float) -> None:
    """Forge 200 entries of each of seven kinds among 1,000 real tasks: only the real ones run."""
    from django_asyncq.models import TaskRecord

    each, honest = max(5, round(200 * scale)), max(50, round(1_000 * scale))
    # An entry without a row is archived by the first worker that meets it, not after ten minutes.
    rig.more["ASYNCQ_TEST_PATIENCE"] = "0"
    with rig.redis() as server, rig.fleet(2, 4):
        rig.ended_well(rig.producer("load", honest // 2, 5, 0, rig.seed))
        rig.settle(60)
        done = [str(id) for id in TaskRecord.objects.values_list("id", flat=True)[:each]]
        late = rig.producer("load", honest // 2, 5, 2, rig.seed + 1)
        with server.client() as client:
            for number in range(each):
                for forge in KINDS:
                    forge(rig, client, done[number % len(done)])
                time.sleep(rig.random.uniform(0, 0.01))
        rig.ended_well(late)
        rig.settle(60)
        _wait_for_pending(rig)
        report.figure("forged entries", each * len(KINDS))
        rig.check(report)
        with server.client() as client:
            report.figure("parked in the archive", client.zcard(f"{rig.prefix}:{{default}}:archived"))
    unwanted = sum(line["event"] == "begin" and line["got"].get("payload") == "forged" for line in rig.history())
    report.goal("forged arguments that ran", unwanted, at_most=0)
    report.goal("tasks failed", TaskRecord.objects.failed().count(), at_most=0)


def _wait_for_pending(rig: Rig) -> None:
    deadline = time.monotonic() + 20
    while rig.places().get("pending") and time.monotonic() < deadline:
        time.sleep(0.1)


def _push(rig: Rig, client: Any, id: str | bytes, message: bytes | None) -> None:
    base = f"{rig.prefix}:{{default}}:".encode()
    raw = id.encode() if isinstance(id, str) else id
    if message is not None:
        client.hset(base + b"t:" + raw, mapping={"msg": message, "state": "pending"})
    client.lpush(base + b"pending", raw)


def _message(name: str, id: str) -> bytes:
    from django_asyncq.lifecycle.messages import message_of
    from django_asyncq.models import TaskRecord

    record = TaskRecord(name=name, args=[1, "forged"], kwargs={}, queue_name="default")
    record.id = uuid.UUID(id)
    return message_of(record)


def stranger(rig: Rig, client: Any, done: str) -> None:
    """A well-formed message for a registered task, of an id without a row."""
    id = str(uuid.uuid4())
    _push(rig, client, id, _message("tests.chaos.tasks.work", id))


def dotted(rig: Rig, client: Any, done: str) -> None:
    """A message that names what must never be imported."""
    id = str(uuid.uuid4())
    _push(rig, client, id, _message("os.system", id))


def replayed(rig: Rig, client: Any, done: str) -> None:
    """The id of a finished task, with other arguments."""
    _push(rig, client, done, _message("tests.chaos.tasks.work", done))


def garbage(rig: Rig, client: Any, done: str) -> None:
    """Bytes that are no message."""
    _push(rig, client, str(uuid.uuid4()), rig.random.randbytes(200))


def huge(rig: Rig, client: Any, done: str) -> None:
    """A message of 256 KiB."""
    _push(rig, client, str(uuid.uuid4()), b"\x0a" * 262_144)


def no_uuid(rig: Rig, client: Any, done: str) -> None:
    """An id that is neither a UUID nor text."""
    _push(rig, client, rig.random.randbytes(20), b"x")


def without_hash(rig: Rig, client: Any, done: str) -> None:
    """An id in the pending list without a hash."""
    _push(rig, client, str(uuid.uuid4()), None)


KINDS: tuple[Callable[[Rig, Any, str], None], ...] = (
    stranger,
    dotted,
    replayed,
    garbage,
    huge,
    no_uuid,
    without_hash,
)


def vanished(rig: Rig, report: Report, scale: float) -> None:
    """Delete one key of the queue under load, twenty times, as a server that evicts keys would."""
    times = max(5, round(20 * scale))
    with rig.redis() as server, rig.fleet(2, 4) as fleet:
        rig.wait_ready(fleet, 2)
        load = rig.producer("bulk", times * 100, 40, rig.seed)
        wait_until(lambda: rig.places().get("pending"), "tasks that wait", 30)
        names = ["pending", "active", "lease", "held", "task"]
        gone: dict[str, int] = {}
        for number in range(times):
            time.sleep(rig.random.uniform(0.2, 0.6))
            gone_now = _delete_one(rig, server, names[number % len(names)])
            gone[names[number % len(names)]] = gone.get(names[number % len(names)], 0) + gone_now
            rig.note("fault", kind="evicted", pids=[pid for fleet in rig.fleets for pid in fleet.workers()])
        rig.ended_well(load)
        rig.settle(30)
        report.figure("keys deleted", ", ".join(f"{count} {name}" for name, count in gone.items()))
        rig.check(report)


def _delete_one(rig: Rig, server: Any, name: str) -> int:
    patterns = {"held": "held:*", "task": "t:*"}
    with server.client() as client:
        keys = sorted(client.scan_iter(f"{rig.prefix}:{{default}}:{patterns.get(name, name)}"))
        return int(client.delete(rig.random.choice(keys))) if keys else 0

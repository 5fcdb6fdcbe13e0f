"""The verdicts on jobs of rq-scheduler and on what rq's cron scheduler keeps; no pickle is ever read."""

from __future__ import annotations

import json
import os
import pickle
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from django.core.management import CommandError

from django_asyncq.testing import EmbeddedRedis

from ..old_queues import by_name, run

pytestmark = pytest.mark.django_db(transaction=True)

CUTOVER = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
AT = ("rq-scheduler", "--cutover", CUTOVER.isoformat())
SIX = datetime(2026, 11, 22, 6, 0, tzinfo=UTC)


@pytest.fixture
def server(settings: Any) -> Iterator[redis.Redis]:
    """A Redis of rq's own, which RQ_QUEUES names."""
    with EmbeddedRedis() as found:
        settings.RQ_QUEUES = {
            "default": {"URL": found.url},
            "mails": {"URL": found.url},
            "cached": {"USE_REDIS_CACHE": "default"},
        }
        client = redis.Redis.from_url(found.url, protocol=2)
        yield client
        client.close()


class Runs:
    """An object whose pickle runs code when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Set a variable of the environment."""
        return os.putenv, ("ASYNCQ_PICKLE", "was read")


def add(server: redis.Redis, id: str, data: Any, meta: Any = None, at: datetime = SIX, **fields: Any) -> None:
    """Add a job of rq-scheduler. data, meta: as JSON, unless they are bytes."""
    data, meta = (each if isinstance(each, bytes) else json.dumps(each).encode() for each in (data, meta or {}))
    job = {"data": zlib.compress(data), "meta": meta, "description": f"job {id}", "origin": "default", **fields}
    server.hset(f"rq:job:{id}", mapping=job)
    server.zadd("rq:scheduler:scheduled_jobs", {id: at.timestamp()})


def call(task: str = "tests.tasks.tidy", *args: Any, **kwargs: Any) -> list[Any]:
    """Return what rq writes of a call."""
    return [task, None, list(args), kwargs]


# Id → data, meta, verdict, a part of its reasons, and the timing.
JOBS: dict[str, tuple[Any, Any, str, str, Any]] = {
    "interval": (call(), {"interval": 600}, "same", "", 600),
    "cron": (call(), {"cron_string": "0 6 * * *"}, "same", "", "0 6 * * *"),
    "both days": (call(), {"cron_string": "0 6 1-7 * 7"}, "same", "", "0 6 * * 0#1"),
    "sixth field": (call(), {"cron_string": "0 6 * * * 2027"}, "not", "has 6 fields", None),
    "once": (call(), {}, "same, but", "it fires once", 86_400),
    "repeat": (call(), {"interval": 600, "repeat": 2}, "same, but", "it ends after 2 more", 600),
    "arguments": (call("tests.tasks.tally", "eu", pages=3), {"interval": 600}, "same", "", 600),
    "wrong": (call(weeks=3), {"interval": 600}, "not", "cannot be called with", None),
    "pickle": (pickle.dumps(Runs()), pickle.dumps(Runs()), "not", "a pickle, which may run any code", None),
    "a method": (["run", {"a": 1}, [], {}], {"interval": 1}, "not", "not one of a function", None),
    "odd interval": (call(), {"interval": "soon"}, "not", "'soon'", None),
    "odd repeat": (call(), {"interval": 6, "repeat": "often"}, "not", "its repeat 'often'", None),
    "odd JSON": (b"[", {}, "not", "is never read", None),
}


def test_each_verdict_on_a_job(server: redis.Redis) -> None:
    """Its kind, its reason and its timing."""
    for id, (data, meta, *_) in JOBS.items():
        add(server, id, data, meta)
    add(server, "queue", call(), {"interval": 5}, origin="mails")
    server.zadd("rq:scheduler:scheduled_jobs", {"expired": 5, b"\xff\xfe": 7})
    found = {each["key"]: each for each in by_name(*AT).values()}
    wrong = []
    for id, (_, _, verdict, reason, timing) in JOBS.items():
        each = found[id]
        has_reason = any(reason in text for text in each["reasons"]) if reason else not each["reasons"]
        if each["verdict"] != verdict or not has_reason or (each["cron"] or each["interval_seconds"]) != timing:
            wrong.append((id, each))
    assert wrong == []
    assert "its queue 'mails'" in found["queue"]["reasons"][0]
    assert "expired" in found["expired"]["reasons"][0]
    assert "job pickle" in found["pickle"]["reasons"][0]
    assert os.environ.get("ASYNCQ_PICKLE") is None
    assert len(found) == len(JOBS) + 3


def test_a_bomb_is_not_unpacked(server: redis.Redis) -> None:
    """Of compressed data only so much is unpacked as a schedule may have."""
    add(server, "bomb", b"[" + b" " * 300_000_000)
    (found,) = by_name(*AT).values()
    assert found["verdict"] == "not"


def cron(**values: Any) -> dict[str, Any]:
    """Return an entry of rq's cron scheduler."""
    return {"func_name": "tests.tasks.tidy", "queue_name": "default", "args": None, "kwargs": None, **values}


def test_each_verdict_on_a_cron_of_rq(server: redis.Redis) -> None:
    """Its kind and its timing; two processes with the same schedules count once."""
    latest = (CUTOVER - timedelta(minutes=3)).isoformat().replace("+00:00", "Z")
    jobs = [
        cron(name="cron", cron="0 6 * * 1-5"),
        cron(name="interval", interval=600, latest_enqueue_time=latest),
        cron(name="new", interval=600, args="[7]"),
        cron(name="twice", cron="0 6 13 * 5"),
        cron(name="twice", cron="0 7 * * *", queue_name="mails"),
        cron(name="no JSON", interval=5, args="<not JSON serializable>"),
        cron(name="nothing"),
        7,
    ]
    for process in ("one", "two"):
        server.zadd("rq:cron_schedulers", {process: 1})
        server.hset(f"rq:cron_scheduler:{process}", "cron_jobs", json.dumps(jobs))
    server.zadd("rq:cron_schedulers", {"gone": 1, "odd": 2})
    server.hset("rq:cron_scheduler:odd", "cron_jobs", b"\xff")
    found = by_name(*AT)
    assert {name: (each["verdict"], each["cron"] or each["interval_seconds"]) for name, each in found.items()} == {
        "cron": ("same", "0 6 * * 1-5"),
        "interval": ("same", 600),
        "new": ("same, but", 600),
        "twice": ("same", "0 6 13 * 5"),
        "twice (0 7 * * *)": ("same, but", "0 7 * * *"),
        "no JSON": ("not", None),
        "nothing": ("not", None),
        "entry 7": ("not", None),
        "entry 8": ("not", None),
    }
    assert found["interval"]["starts_at"].startswith("2026-11-21T12:07:00")


def test_no_redis_and_nothing_in_it_are_said(server: redis.Redis, settings: Any) -> None:
    """With what to give."""
    with pytest.raises(CommandError, match=r"neither jobs of rq-scheduler .* --redis URL"):
        run("rq-scheduler")
    settings.RQ_QUEUES = {"default": {"USE_REDIS_CACHE": "default"}}
    with pytest.raises(CommandError, match="RQ_QUEUES names no Redis by its URL"):
        run("rq-scheduler")
    with pytest.raises(CommandError, match=r"127\.0\.0\.1:1/0 is unreachable"):
        run("rq-scheduler", "--redis", "redis://user:secret@127.0.0.1:1/0")

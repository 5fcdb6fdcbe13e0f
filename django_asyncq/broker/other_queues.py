"""Read what rq and rq-scheduler keep in their Redis, whose address the settings of django-rq have. Writes nothing.

What is read is bytes that any program may have written; nothing is parsed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from . import redis_py
from .clients import broker_errors, server_name

CONNECT_SECONDS = 5.0
JOBS_KEY, JOB_KEY = "rq:scheduler:scheduled_jobs", "rq:job:{}"
CRONS_KEY, CRON_KEY = "rq:cron_schedulers", "rq:cron_scheduler:{}"
FIELDS = ("data", "meta", "description", "origin")
# More schedules than a project has; the rest is not read.
MOST_READ = 10_000
PER_ROUND = 500
# What django-rq gives to redis-py → its name there.
OPTIONS = {"HOST": "host", "PORT": "port", "DB": "db", "USERNAME": "username", "PASSWORD": "password"}


class RqScheduled(NamedTuple):
    """A job of rq-scheduler. score: Unix seconds of its next time. data: b"" for one that has expired."""

    id: str
    score: float
    data: bytes
    meta: bytes
    description: bytes
    origin: bytes


class RqCron(NamedTuple):
    """What a process of rq's cron scheduler says of itself. schedules: JSON."""

    name: str
    schedules: bytes


class RqFound(NamedTuple):
    """What one server has. server: its place, without credentials."""

    server: str
    scheduled: list[RqScheduled]
    crons: list[RqCron]


def address_of(queues: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return how to reach the servers of RQ_QUEUES, each once: options of redis-py, or `url`.

    Raises: ValueError, with the reason, when none of them is named by its URL, its host or its socket.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for queue in queues.values():
        if not isinstance(queue, Mapping):
            continue
        if "URL" in queue:
            options: dict[str, Any] = {"url": queue["URL"]}
        elif "UNIX_SOCKET_PATH" in queue:
            options = {"unix_socket_path": queue["UNIX_SOCKET_PATH"], "db": queue.get("DB") or 0}
        elif "HOST" in queue:
            options = {name: queue[key] for key, name in OPTIONS.items() if queue.get(key)}
            options |= {"ssl": True} if queue.get("SSL") else {}
        else:
            continue
        found[tuple(sorted((name, str(value)) for name, value in options.items()))] = options
    if not found:
        raise ValueError("RQ_QUEUES names no Redis by its URL, HOST or UNIX_SOCKET_PATH")
    return list(found.values())


def read_rq(options: Mapping[str, Any]) -> RqFound:
    """Return what one server has. options: as `address_of` returns them. Raises: BrokerUnavailable, ValueError."""
    more = {"socket_timeout": CONNECT_SECONDS, "socket_connect_timeout": CONNECT_SECONDS, "protocol": 2}
    url = options.get("url")
    client: Any = redis_py.Redis.from_url(url, **more) if url else redis_py.Redis(**{**options, **more})
    scheduled, crons = [], []
    try:
        with broker_errors(client):
            listed = client.zrange(JOBS_KEY, 0, MOST_READ - 1, withscores=True)
            for start in range(0, len(listed), PER_ROUND):
                part = [(id.decode("utf-8", "replace"), score) for id, score in listed[start : start + PER_ROUND]]
                pipe = client.pipeline(transaction=False)
                for id, _ in part:
                    pipe.hmget(JOB_KEY.format(id), FIELDS)
                scheduled += [
                    RqScheduled(id, score, *(value or b"" for value in values))
                    for (id, score), values in zip(part, pipe.execute(), strict=True)
                ]
            for name in client.zrange(CRONS_KEY, 0, MOST_READ - 1):
                text = name.decode("utf-8", "replace")
                if (value := client.hget(CRON_KEY.format(text), "cron_jobs")) is not None:
                    crons.append(RqCron(text, value))
    finally:
        client.close()
    return RqFound(server_name(client), scheduled, crons)

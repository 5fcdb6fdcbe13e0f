"""py-asynq 0.0.4 of PyPI, another implementation of asynq's client: our workers run what it enqueues.

It needs redis-py 3 and protobuf 3, so it is in an environment of its own; ASYNCQ_TEST_PY_ASYNQ is the path of its
Python, and without it these tests are skipped. `.ci/run` makes that environment:

    python3.11 -m venv env && env/bin/pip install py-asynq==0.0.4 'protobuf<3.21'

What it offers is `Client.enqueue`, at once and at a time, always with the prefix `asynq`. It has no server, so it can
run no task of ours, no command to pause or to look, and its `unique_ttl` fails: its own script names a key that it
does not pass. It writes neither `pending_since` nor whole seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.testing import EmbeddedRedis

from ..workers import history, wait_until, workers

PYTHON = os.environ.get("ASYNCQ_TEST_PY_ASYNQ", "")
pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(not PYTHON, reason="ASYNCQ_TEST_PY_ASYNQ names no Python that has py-asynq 0.0.4"),
]
CLIENT = """
import json, sys, time
import redis
from py_asynq.client import Client
from py_asynq.task import Option, Task

client = Client(redis.Redis.from_url(sys.argv[1]))
for type, payload, options in json.loads(sys.argv[2]):
    option = Option()
    for name, value in options.items():
        setattr(option, name, time.time() + value if name == "process_at" else value)
    client.enqueue(Task(type, payload), option)
"""


def enqueue(url: str, *calls: tuple[str, Any, dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    """Enqueue with py-asynq. calls: type, payload, and the attributes of its Option."""
    command = [PYTHON, "-c", CLIENT, url, json.dumps(calls)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={})


@pytest.fixture
def server(own_redis: EmbeddedRedis, own_keys: None, settings: Any, monkeypatch: pytest.MonkeyPatch) -> EmbeddedRedis:
    """A server of its own with asynq's prefix, which py-asynq cannot change."""
    monkeypatch.setenv("ASYNCQ_TEST_PREFIX", "asynq")
    settings.ASYNCQ = {**settings.ASYNCQ, "KEY_PREFIX": "asynq"}
    return own_redis


def test_our_workers_run_what_py_asynq_enqueues(server: EmbeddedRedis, tmp_path: Path) -> None:
    """At once and at a time, with a retry, in two queues; each has a row with its result, and Redis keeps nothing."""
    log = tmp_path / "history"
    done = enqueue(
        server.url,
        ("fleet:ours", {"number": 1}, {"queue": "mail"}),
        ("fleet:ours", {"number": 2, "fails": True}, {"queue": "mail", "retry": 2}),
        ("fleet:ours", {"number": 3, "fails": True}, {"queue": "mail", "retry": 0}),
        ("fleet:ours", {"number": 4}, {"queue": "mail", "process_at": 2}),
        ("fleet:ours", {"number": 5}, {"queue": "default"}),
        ("fleet:ours", {"none": 6}, {"queue": "mail"}),
    )
    assert done.returncode == 0, done.stderr
    began_at = time.time()
    with workers(tmp_path, "--queues", "mail,default", ASYNCQ_TEST_HISTORY=str(log)):
        wait_until(
            lambda: len([row for row in TaskRecord.objects.all() if row.is_final]) == 6, "six rows that are final", 90
        )
    # The sixth had arguments that the function does not take, so its row has none.
    rows = {row.kwargs.get("number", 6): row for row in TaskRecord.objects.all()}
    states = {number: row.state for number, row in rows.items()}
    good = dict.fromkeys((1, 2, 4, 5), TaskState.SUCCEEDED)
    assert states == {**good, 3: TaskState.FAILED, 6: TaskState.FAILED}
    assert {number: row.return_value for number, row in rows.items() if number in good} == {
        n: {"number": n} for n in good
    }
    assert (rows[2].attempt, rows[3].attempt, rows[5].queue_name) == (2, 1, "default")
    assert "InvalidArguments" in (rows[6].last_exception or "")
    assert rows[4].started_at is not None and rows[4].started_at.timestamp() > began_at
    assert sorted(line["number"] for line in history(log)) == [1, 2, 2, 3, 4, 5]
    assert {line["type"] for line in history(log)} == {"fleet:ours"}
    client = redis.Redis.from_url(server.url)
    places = [client.llen(f"asynq:{{mail}}:{place}") for place in ("pending", "active")]
    assert [*places, client.zcard("asynq:{mail}:lease"), client.zcard("asynq:{mail}:scheduled")] == [0, 0, 0, 0]


def test_its_unique_tasks_fail_in_its_own_client(server: EmbeddedRedis) -> None:
    """And leave nothing; so there is nothing that we could run."""
    done = enqueue(server.url, ("fleet:ours", {"number": 1}, {"queue": "mail", "unique_ttl": 60}))
    assert done.returncode != 0 and "ResponseError" in done.stderr
    assert redis.Redis.from_url(server.url).keys("asynq:{mail}:*") == []

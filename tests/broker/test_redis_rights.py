"""Which keys, channels and commands the package uses, and that the users of the guide may do exactly that."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.management import call_command

import django_asyncq
from django_asyncq import conf
from django_asyncq.broker import Broker, scripts
from django_asyncq.broker.keys import keys_of
from django_asyncq.fleet.reconciler import Reconciler
from django_asyncq.leadership.coordinator import StartupTaskCoordinator
from django_asyncq.models import Gate, TaskRecord
from django_asyncq.testing import EmbeddedRedis

from .. import acl, tasks
from ..gates.test_waiters import look, wait_at
from ..workers import run_workers

PACKAGE = Path(django_asyncq.__file__).parent
SENT = re.compile(r"\b(?:p?call|send)\('([A-Z]+)'")
# What a web process runs: it enqueues, saves gates, retries and deletes tasks.
OF_PRODUCERS = (
    "enqueue",
    "schedule",
    "add_to_group",
    "park",
    "remove",
    "gate_acquire",
    "gate_build",
    "forget_built",
    "gate_release",
    "gate_settle",
    "gate_wait",
    "check_type",
    "pause_queue",
    "resume_queue",
    "drain",
)


def sent_by_scripts(*names: str) -> set[str]:
    """Return the commands that scripts send, with the functions that they share."""
    return {command.lower() for name in names for command in SENT.findall(scripts.script(name).text)}


def all_scripts() -> list[str]:
    """Return the names of all scripts."""
    names = {path.stem for path in (PACKAGE / "broker" / "lua").glob("*.lua")}
    return sorted(names.difference(scripts.SHARED))


def commands_of(user: str) -> set[str]:
    """Return the commands that the guide's line allows a user."""
    return {word[1:] for word in acl.rules(user) if word.startswith("+")}


@pytest.mark.parametrize("user", ["worker", "producer"])
def test_the_guides_users_have_no_right_by_category(user: str) -> None:
    """And each right that they have is to a command that the broker or the gates name."""
    files = [
        path
        for folder in ("broker", "gates")
        for path in (PACKAGE / folder).rglob("*")
        if path.suffix in (".py", ".lua")
    ]
    sources = "\n".join(path.read_text() for path in files)
    unused = [word for word in commands_of(user) if not re.search(rf"\b{word}", sources, re.IGNORECASE)]
    assert unused == []
    assert [word for word in acl.rules(user) if "@" in word] == ["-@all"]


def test_a_worker_may_send_what_scripts_and_plain_calls_send() -> None:
    """What redis-py sends by itself is seen where the suite runs under that user."""
    assert sent_by_scripts(*all_scripts()) | set(scripts.TYPES) <= commands_of("worker")
    assert commands_of("producer") <= commands_of("worker")


def test_a_producer_may_send_what_its_scripts_send() -> None:
    """So a script that web processes run cannot get a command that only workers may send."""
    assert sent_by_scripts(*OF_PRODUCERS) <= commands_of("producer")


def test_a_command_of_a_script_is_found() -> None:
    """The pattern sees both ways in which scripts send a command, also over the shared functions."""
    assert SENT.findall("redis.pcall('KEYS', k) redis.call('GET', k) call('HSET', k) send('DEL', k)") == [
        "KEYS",
        "GET",
        "HSET",
        "DEL",
    ]
    assert {"rename", "publish"} <= sent_by_scripts("check_type")


# --- keys and channels


@pytest.mark.parametrize(
    ("written", "prefixes"),
    [
        ({}, ("asynch:qgate:", "task_lock:")),
        ({"KEY_PREFIX": "asynq"}, ("asynch:qgate:", "task_lock:")),
        ({"KEY_PREFIX": "shop"}, ("shop:qgate:", "shop:task_lock:")),
        ({"KEY_PREFIX": "shop", "GATE_PREFIX": "g:"}, ("g:", "shop:task_lock:")),
        ({"KEY_PREFIX": "shop", "LOCK_PREFIX": "l:", "GATE_PREFIX": "asynch:qgate:"}, ("asynch:qgate:", "l:")),
    ],
)
def test_the_prefixes_of_gates_and_locks_follow_the_key_prefix(
    settings: Any, written: dict[str, str], prefixes: tuple[str, str]
) -> None:
    """Unless they are set: two projects on one Redis must not share gates and locks by accident."""
    settings.ASYNCQ = written
    assert (conf.current().gate_prefix, conf.current().lock_prefix) == prefixes


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("prefix", ["asynq", "shop"])
def test_every_key_and_channel_is_under_a_prefix(
    own_redis: EmbeddedRedis,
    own_keys: None,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    prefix: str,
) -> None:
    """Under the guide's user, a fleet that does a bit of everything is refused nothing; SCAN finds no other key.

    Redis notes each refusal in its ACL log, also those that a script or redis-py passes over.
    """
    monkeypatch.setenv("ASYNCQ_TEST_PREFIX", prefix)
    settings.ASYNCQ = {**settings.ASYNCQ, "KEY_PREFIX": prefix}
    own = f"~{prefix}:* ~{{{prefix}:* &{prefix}:*".split()
    rules = acl.rules("worker") if prefix == "asynq" else [*(w for w in acl.rules("worker") if w[0] not in "~&"), *own]
    admin = redis.Redis.from_url(own_redis.url, protocol=2, decode_responses=True)
    # And the lists of other programs that tasks of the suite read.
    admin.execute_command("ACL", "SETUSER", "fleet", *rules, "~tests*")
    settings.CACHES = {"default": {**settings.CACHES["default"], "LOCATION": acl.url_as("fleet", own_redis.url)}}
    do_a_bit_of_everything(admin, tmp_path)
    assert [entry for entry in admin.acl_log() if entry["object"] not in acl.IGNORED] == []
    current = conf.current()
    known = tuple(f"{brace}{start}" for brace in ("", "{") for start in (f"{prefix}:", current.gate_prefix))
    keys = list(admin.scan_iter(count=1000))
    assert [key for key in keys if not key.startswith((*known, current.lock_prefix))] == []
    assert {current.gate_prefix, current.lock_prefix} == current_starts(keys, current)
    assert TaskRecord.objects.count() == 5


def current_starts(keys: list[str], current: conf.Settings) -> set[str]:
    """Return which of the prefixes of gates and locks some key has."""
    return {start for start in (current.gate_prefix, current.lock_prefix) if any(k.startswith(start) for k in keys)}


def do_a_bit_of_everything(admin: Any, folder: Path) -> None:
    """Enqueue in every way, run what is due, use a lock, set odd keys aside, repair, look and delete."""
    Gate.objects.create(name="g", limit=1)
    first = tasks.add.enqueue(1)
    tasks.add.using(priority=5).enqueue(2)
    tasks.add.using(queue_name="other").enqueue(3)
    tasks.gated.enqueue("g")
    run_workers()
    admin.set(keys_of("default").pending, "odd")
    admin.set(f"{conf.current().gate_prefix}g", "odd")
    tasks.gated.enqueue("g")  # keeps its slot, so a key of a gate is left
    wait_at("g", limit=1)
    look("g")
    for _ in Reconciler(Broker()).sweep_steps(is_rebuild=True):
        pass
    coordinator = StartupTaskCoordinator(lock_dir=folder / "locks")
    assert coordinator.acquire("a", 30) and coordinator.renew("a")
    coordinator.release("a")
    assert coordinator.acquire("b", 30)  # so a key of a lock is left
    call_command("asyncq", "rebuild")
    TaskRecord.objects.get(id=first.id).delete()
    assert {"default", "other"} <= Broker("producer").queues()

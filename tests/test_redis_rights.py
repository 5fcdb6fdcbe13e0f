"""Which keys, channels and commands the package uses, and that the docs list exactly those."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.management import call_command

import django_asyncq
from django_asyncq import conf
from django_asyncq.broker import Broker, commands, scripts
from django_asyncq.broker.keys import keys_of
from django_asyncq.leadership.coordinator import StartupTaskCoordinator
from django_asyncq.maintenance.reconciler import Reconciler
from django_asyncq.models import Gate, TaskRecord
from django_asyncq.testing import EmbeddedRedis

from . import acl, tasks
from .test_waiters import look, wait_at
from .workers import run_workers

PACKAGE = Path(django_asyncq.__file__).parent
PAGE = PACKAGE.parent / "docs" / "reference" / "redis-commands.md"
ROW = re.compile(r"^\| `([A-Z ]+)` \| (both|worker) \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)
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
    "gate_forget",
    "gate_release",
    "gate_settle",
    "gate_wait",
    "check_type",
    "pause_queue",
    "resume_queue",
    "unique_acquire",
    "unique_release",
    "drain",
)


def rows() -> dict[str, tuple[str, set[str]]]:
    """Return the table: command in small letters → who needs it, and what sends it."""
    return {
        command.lower().replace(" ", "|"): (user, {part.strip(" `") for part in places.split(",")})
        for command, user, places in ROW.findall(PAGE.read_text())
    }


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


def test_the_table_lists_what_the_scripts_send() -> None:
    """Each command of a script has a row, and no other row says that a script sends it."""
    assert {command for command, (_, places) in rows().items() if "scripts" in places} == sent_by_scripts(
        *all_scripts()
    )


def test_the_table_names_the_modules_that_send_a_command() -> None:
    """Each is there, and has the command's name; each plain command of `commands.py` has a row that says so."""
    plain = {command for command, (_, places) in rows().items() if "broker/commands.py" in places}
    assert plain == set(commands.TYPES)
    for command, (_, places) in rows().items():
        for place in places - {"scripts", "broker/commands.py"}:
            # redis-py calls DEL `delete`.
            word = {"del": "delete"}.get(command, command)
            assert re.search(rf"\b{word}(_iter)?\b", (PACKAGE / place).read_text(), re.IGNORECASE), (command, place)


@pytest.mark.parametrize("user", ["worker", "producer"])
def test_the_guides_users_may_send_what_the_table_lists(user: str) -> None:
    """No command more, none less; nothing by category."""
    needed = {command for command, (who, _) in rows().items() if who == "both" or user == "worker"}
    assert commands_of(user) == needed
    assert [word for word in acl.rules(user) if "@" in word] == ["-@all"]


def test_a_producer_may_send_what_its_scripts_send() -> None:
    """So a script that web processes run cannot get a command that only workers may send."""
    assert sent_by_scripts(*OF_PRODUCERS) <= commands_of("producer")


def test_a_command_that_no_row_lists_would_be_found() -> None:
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
    admin.execute_command("ACL", "SETUSER", "fleet", *rules)
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

"""`manage.py asyncq` about what has no row: messages that other programs have enqueued, by the ids that they have."""

from __future__ import annotations

import io
import json
import re
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from django.core.management import CommandError, call_command
from django.utils import timezone

from django_asyncq.broker.keys import (
    cancel_channel,
    keys_of,
    own_queues_key,
    queues_key,
    scheduler_key,
    schedulers_key,
)
from django_asyncq.broker.message import SchedulerEntry
from django_asyncq.interop.asynq_display import SchedulerEntries
from django_asyncq.models import Schedule, TaskRecord, TaskState
from django_asyncq.observe.inspector import EntryDetails, Inspector
from django_asyncq.testing import EmbeddedRedis

from .. import go_client, tasks
from ..interop.test_adopting import claim

pytestmark = pytest.mark.django_db(transaction=True)

QUEUE = "mail"
ODD = [
    "order-7",
    "a b/c:{d}",
    "-x",
    "Bestellung ü🦄",
    "%s'\"\\",
    "01234567",
    "3f2504e0-4f89-41d3-9a0c-0305e82c3301",
    "x" * 9_000,
]


def run(*arguments: str) -> str:
    """Run the command and return what it prints."""
    out = io.StringIO()
    call_command("asyncq", "tasks", *arguments, stdout=out, stderr=io.StringIO())
    return out.getvalue()


def listed(*arguments: str) -> str:
    """List the schedules and return what is printed."""
    out = io.StringIO()
    call_command("asyncq", "schedules", "list", *arguments, stdout=out)
    return out.getvalue()


def found(*arguments: str) -> Any:
    """Run the command with --json and return what it prints."""
    return json.loads(run(arguments[0], "--json", *arguments[1:]))


def refused(*arguments: str) -> str:
    """Run the command, which refuses, and return what it prints and says."""
    out = io.StringIO()
    with pytest.raises(CommandError) as caught:
        call_command("asyncq", "tasks", *arguments, stdout=out, stderr=io.StringIO())
    return f"{out.getvalue()}{caught.value}"


def put(client: redis.Redis, state: str, id: str = "order-7", queue: str = QUEUE) -> None:
    """Have a Go program leave an entry in a state that waits, or with its worker."""
    keys = keys_of(queue)
    go_client.enqueue(client, queue, "email:deliver", b'{"to": "a@b.c", "subject": "x"}', id=id)
    if state == "active":
        assert go_client.take(client, queue) == id
    elif state == "retry":
        assert go_client.take(client, queue) == id
        go_client.fail(client, queue, id, due_at=time.time() + 600)
    elif state != "pending":
        client.lrem(keys.pending, 0, id)
        client.zadd(getattr(keys, state), {id: time.time() + 600})
        client.hset(keys.task(id), "state", state)


def state_of(client: redis.Redis, id: str = "order-7") -> str | None:
    state: Any = client.hget(keys_of(QUEUE).task(id), "state")
    return state and state.decode()


@pytest.mark.parametrize("id", ODD)
def test_an_entry_is_found_by_the_id_that_it_has(redis_client: redis.Redis, id: str) -> None:
    """Whatever another program calls it, in whichever queue it is."""
    put(redis_client, "retry", id)
    for queue in ("go", "other"):
        go_client.enqueue(redis_client, queue, "x:y", id="another")
    shown = found("show", "--", id)
    assert (shown["id"], shown["queue"], shown["state"], shown["type"]) == (id, QUEUE, "retry", "email:deliver")
    assert (shown["row"], shown["retried"], shown["max_retries"], shown["error"]) == (None, 1, 25, "go failed")
    assert shown["at"] > timezone.now().isoformat() > shown["last_failed_at"]
    assert found("run", "--", id)["done"] == 1
    assert found("delete", "--yes", "--", f"{QUEUE}/{id}")["done"] == 1
    assert state_of(redis_client, id) is None
    assert redis_client.sismember(own_queues_key(), QUEUE) == 0


def test_show_masks_secrets_and_says_what_it_is(redis_client: redis.Redis) -> None:
    """As for a row; a terminal obeys nothing of it."""
    go_client.enqueue(redis_client, QUEUE, "x\x1b[2J", b'{"token": "s3cret"}', id="order-7", headers={"password": "pw"})
    for arguments in (("show", "order-7"), ("show", "order-7", "--json")):
        text = run(*arguments)
        assert "token" in text and "s3cret" not in text and '"pw"' not in text and "\x1b" not in text
    assert "s3cret" in run("show", "order-7", "--unmasked")
    assert "It has no row" in run("show", "order-7")


@pytest.mark.parametrize(
    ("verb", "state", "becomes", "why"),
    [
        ("run", "scheduled", "pending", ""),
        ("run", "retry", "pending", ""),
        ("run", "archived", "pending", ""),
        ("run", "pending", "pending", "it is due already"),
        ("run", "active", "active", "it is running"),
        ("run", "completed", "completed", "it has succeeded"),
        ("retry", "retry", "pending", ""),
        ("retry", "archived", "pending", ""),
        ("retry", "scheduled", "scheduled", "it has not failed"),
        ("delete", "pending", None, ""),
        ("delete", "scheduled", None, ""),
        ("delete", "retry", None, ""),
        ("delete", "archived", None, ""),
        ("delete", "completed", None, ""),
        ("delete", "active", "active", "it is running: cancel it first"),
        ("cancel", "active", "active", ""),
        ("cancel", "pending", "pending", "delete it"),
        ("cancel", "archived", "archived", "delete it"),
        ("cancel", "completed", "completed", "it has succeeded"),
    ],
)
def test_a_verb_does_to_an_entry_what_asynqs_tools_do(
    redis_client: redis.Redis, verb: str, state: str, becomes: str | None, why: str
) -> None:
    """What it refuses it leaves byte for byte, and says why."""
    put(redis_client, state)
    before = go_client.contents(redis_client, QUEUE)
    arguments = (verb, "order-7", *(["--yes"] if verb == "delete" else []))
    if why:
        assert why in refused(*arguments)
        assert go_client.contents(redis_client, QUEUE) == before
    else:
        answer = found(*arguments)
        assert answer["asked" if verb == "cancel" else "done"] == 1 and answer["refused"] == {}
        places = [getattr(keys_of(QUEUE), name) for name in ("scheduled", "retry", "archived", "completed")]
        assert not any(redis_client.exists(place) for place in places)
        assert redis_client.llen(keys_of(QUEUE).pending) == (becomes == "pending")
    assert state_of(redis_client) == becomes
    assert not TaskRecord.objects.exists()


def test_cancel_is_sent_on_asynqs_channel(redis_client: redis.Redis) -> None:
    """A server of asynq hears the id."""
    put(redis_client, "active")
    with redis_client.pubsub(ignore_subscribe_messages=True) as listener:
        listener.subscribe(cancel_channel())
        listener.get_message(timeout=5)
        found("cancel", "order-7")
        heard: Any = None
        while heard is None:
            heard = listener.get_message(timeout=5)
    assert heard["data"] == b"order-7"
    assert "--wait is of tasks with a row" in refused("cancel", "order-7", "--wait", "1s")


def test_a_lock_goes_with_its_entry(redis_client: redis.Redis) -> None:
    """Another program can enqueue what is unique again."""
    lock = keys_of(QUEUE).unique("email:deliver", "0" * 32)
    go_client.enqueue(redis_client, QUEUE, "email:deliver", id="order-7", unique_key=lock)
    found("delete", "order-7", "--yes")
    assert not redis_client.exists(lock)


def test_a_row_is_found_by_what_another_program_calls_it(redis_client: redis.Redis) -> None:
    """From its claim on; also when Redis has no entry of it, or cannot be reached."""
    put(redis_client, "pending")
    claim()
    row = TaskRecord.objects.get()
    assert found("show", "order-7")["id"] == found("show", f"{QUEUE}/order-7")["id"] == str(row.id)
    TaskRecord.objects.update(state=TaskState.SUCCEEDED, finished_at=timezone.now())
    redis_client.delete(keys_of(QUEUE).task("order-7"))
    assert found("delete", "order-7", "--yes")["done"] == 1
    assert not TaskRecord.objects.exists()


def test_a_row_is_found_while_redis_is_unreachable(own_redis: EmbeddedRedis) -> None:
    """Only what may be in Redis alone is not."""
    TaskRecord.objects.create(name="a.b", wire_id="order-7")
    own_redis.stop()
    assert found("show", "order-7")["wire_id"] == "order-7"
    assert "Redis" in refused("show", "order-8")


def test_an_id_of_several_is_refused_with_those_that_name_one(redis_client: redis.Redis) -> None:
    """Rows whose id was used again, and entries of the same id in two queues."""
    rows = [TaskRecord.objects.create(name="a.b", wire_id="order-7", queue_name=QUEUE) for _ in range(2)]
    put(redis_client, "scheduled")
    put(redis_client, "pending", queue="go")
    text = refused("delete", "order-7", "--yes")
    for name in (*(str(row.id) for row in rows), f"{QUEUE}/order-7 without a row, scheduled", "go/order-7 without"):
        assert name in text
    assert found("run", f"{QUEUE}/order-7")["done"] == 1
    assert found("show", str(rows[0].id))["wire_id"] == "order-7"
    TaskRecord.objects.bulk_create(TaskRecord(name="a.b", wire_id="order-7") for _ in range(30))
    assert " and 24 more" in refused("show", "order-7")


def test_rows_and_entries_in_one_call(redis_client: redis.Redis) -> None:
    """Each is counted once, whatever it was called."""
    put(redis_client, "scheduled")
    row = tasks.add.using(run_after=timedelta(hours=1)).enqueue(1).id
    gone = "f" * 32
    answer = found("run", "order-7", row, f"{QUEUE}/order-7", gone)
    assert answer == {"chosen": 3, "done": 2, "refused": {"it has no row": 1}}
    answer = found("cancel", "order-7", row, "--yes")
    assert (answer["chosen"], answer["cancelled"], sum(answer["refused"].values())) == (2, 1, 1)


@pytest.mark.parametrize("text", ["nothing", "0123", "01234567", "f" * 32, "‮", "mail/nothing", "/", "mail/", "%"])
def test_what_names_nothing_is_an_error(redis_client: redis.Redis, text: str) -> None:
    """It says what was looked for, and where."""
    put(redis_client, "pending")
    said = refused("show", text)
    assert "No task" in said and "Redis" in said
    assert len(text) == 32 or "1 queue: mail" in said
    assert "has no row yet" in refused("list", "--before", "order-7")


@pytest.mark.parametrize(
    "fields",
    [{"msg": b"\xff\xff"}, {"msg": b""}, {"msg": b"\xff", "state": "\x1b["}, {"state": "pending"}, {"row": "no"}],
)
def test_rubbish_can_be_shown_and_deleted(redis_client: redis.Redis, fields: dict[str, Any]) -> None:
    """As far as there is a message; nothing is made of it."""
    keys = keys_of(QUEUE)
    redis_client.sadd(queues_key(), QUEUE, b"\xff", "a\nb", "")
    redis_client.hset(keys.task("odd"), mapping=fields)
    redis_client.lpush(keys.pending, "odd")
    if "msg" not in fields:
        assert "No task is called 'odd'" in refused("show", "odd")
        return
    shown = found("show", "odd")
    assert (shown["type"] or "", shown["state"], shown["payload"]) == ("", "", "")
    assert "cannot be read" in refused("run", "odd") and "cannot be read" in refused("cancel", "odd")
    assert found("delete", "odd", "--yes")["done"] == 1
    assert not redis_client.exists(keys.task("odd"))


def test_an_entry_that_is_gone_meanwhile_is_refused(redis_client: redis.Redis) -> None:
    """By each verb; and what a worker has taken since is not deleted."""
    put(redis_client, "scheduled")
    (entry,) = Inspector().entries.find("order-7")
    assert isinstance(entry, EntryDetails)
    put(redis_client, "active", "order-8")
    (taken,) = Inspector().entries.find("order-8")
    assert "running" in Inspector().entries.delete(taken)
    entries = Inspector().entries
    # Another program has finished it, and keeps its result.
    redis_client.hset(keys_of(QUEUE).task("order-7"), "state", "completed")
    assert "succeeded" in entries.run(entry) and redis_client.llen(keys_of(QUEUE).pending) == 0
    redis_client.delete(keys_of(QUEUE).task("order-7"))
    for change in (entries.run, entries.retry, entries.cancel, entries.delete):
        assert "no longer" in change(entry)


# --- schedules of other programs


def list_schedules(client: redis.Redis, *entries: bytes, scheduler: str = "go-host:7:5e0c", alive: float = 60) -> None:
    """List entries as asynq's scheduler does."""
    key = scheduler_key(scheduler)
    client.rpush(key, *entries)
    client.zadd(schedulers_key(), {key: time.time() + alive})


ENTRY = SchedulerEntry(
    id="5e0c0d6a", spec="@every 30s", type="email:digest", payload=b'{"token": "s3cret"}', options=('Queue("mail")',),
    next_at=datetime(2026, 11, 24, 18, tzinfo=UTC), previous_at=None,
)  # fmt: skip


def test_schedules_of_other_programs_stand_beside_ours(redis_client: redis.Redis) -> None:
    """Marked; those of ours, which the leader lists there too, stand once."""
    row = Schedule(name="nightly", task="tests.tasks.tally", cron="0 3 * * *", zone="UTC")
    row.plan_next(timezone.now())
    row.save()
    SchedulerEntries().beat()
    list_schedules(redis_client, ENTRY.encode())
    list_schedules(redis_client, replace(ENTRY, id="dead").encode(), scheduler="dead:1:x", alive=-1)
    shown = json.loads(listed("--json"))
    assert [each["name"] for each in shown["schedules"]] == ["nightly"]
    assert shown["foreign"] == [
        {
            "id": "5e0c0d6a", "task": "email:digest", "timing": "@every 30s", "options": ['Queue("mail")'],
            "next_occurrence_at": "2026-11-24T18:00:00+00:00", "latest": None, "scheduler": "go-host:7:5e0c",
            "backend": "default", "is_readable": True,
        }
    ]  # fmt: skip
    _, ours, foreign = listed().splitlines()[:3]
    assert "nightly" in ours and "another program" not in ours
    assert re.search(r"^5e0c0d6a +email:digest +@every 30s +- +- +2026-11-24 18:00:00 +- +of another program$", foreign)
    with pytest.raises(CommandError, match="no schedule is called"):
        call_command("asyncq", "schedules", "run", "5e0c0d6a")


def test_rubbish_among_the_schedules_is_shown_as_such(redis_client: redis.Redis, key_prefix: str) -> None:
    """No key is read that is not that of a scheduler, and none of another type."""
    elsewhere = f"{key_prefix}-elsewhere"
    redis_client.set(elsewhere, "kept")
    list_schedules(redis_client, b"\xff\xff", replace(ENTRY, spec="\x1b[2J").encode(), scheduler="\x1b}{")
    odd = {elsewhere: time.time() + 60, b"\xff": "inf", "": time.time() + 60, schedulers_key(): time.time() + 60}
    redis_client.zadd(schedulers_key(), odd)
    redis_client.set(scheduler_key("no list"), "x")
    redis_client.zadd(schedulers_key(), {scheduler_key("no list"): "inf"})
    shown = json.loads(listed("--json"))["foreign"]
    assert [(each["is_readable"], each["task"]) for each in shown] == [(False, ""), (True, "email:digest")]
    text = listed()
    assert "of another program, cannot be read" in text and "\x1b" not in text
    assert redis_client.getdel(elsewhere) == b"kept"
    redis_client.delete(schedulers_key())
    redis_client.set(schedulers_key(), "x")
    assert json.loads(listed("--json"))["foreign"] == []
    assert listed() == "no schedules\n"


def test_our_schedules_are_listed_while_redis_is_unreachable(own_redis: EmbeddedRedis) -> None:
    """It says that others may be missing."""
    Schedule.objects.create(name="nightly", task="tests.tasks.tally", cron="0 3 * * *")
    own_redis.stop()
    assert json.loads(listed("--json"))["foreign"] is None
    assert "nightly" in listed() and "Redis is unreachable" in listed()

"""The inbox: what any program pushes there becomes a task, or is kept with the reason why it cannot be one."""

from __future__ import annotations

import json
import logging
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import UUID

import pytest
import redis
from django.db import OperationalError
from django.dispatch import receiver
from django.utils import timezone

from django_asyncq import checks, lifecycle
from django_asyncq import task as declare
from django_asyncq.broker import Broker, foreign, keys, scripts
from django_asyncq.broker.foreign import Inbox
from django_asyncq.core import compat
from django_asyncq.core.names import uuid7
from django_asyncq.exceptions import BrokerUnavailable, InvalidOption, LockLost, PrefixTaken
from django_asyncq.interop import inbox as service_module
from django_asyncq.interop.inbox import InboxService
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.signals import task_state_changing
from django_asyncq.storage.routing import transaction_of
from django_asyncq.testing import EmbeddedRedis

from .. import acl, inbox_tasks
from ..inbox_tasks import QUEUE
from ..project.test_docs import blocks_of
from ..workers import ROOT, environment, run_workers, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)

GUIDE = ROOT / "docs" / "guides" / "inbox.md"
NAME = inbox_tasks.letter.module_path
TWO = {
    "default": {"BACKEND": "django_asyncq.backend.AsyncqBackend", "QUEUES": []},
    "reports": {"BACKEND": "django_asyncq.backend.AsyncqBackend", "QUEUES": []},
}


@contextmanager
def leading() -> Iterator[int]:
    """A transaction of a process that leads, without a lock."""
    with transaction_of(TaskRecord):
        yield 1


def service() -> InboxService:
    """What the leader runs."""
    return InboxService(Broker(), leading)


def push(*documents: Any, queue: str = QUEUE, alias: str = "default") -> None:
    """Do what another program does: LPUSH, and nothing else."""
    for document in documents:
        data = document if isinstance(document, bytes) else json.dumps(document).encode()
        Broker().client.lpush(keys.keys_of(queue, alias).inbox, data)


def look(reader: InboxService | None = None, queue: str = QUEUE, alias: str = "default") -> InboxService:
    """Read an inbox once."""
    reader = reader or service()
    reader.read(alias, queue)
    return reader


def kept(queue: str = QUEUE) -> list[foreign.Rejected]:
    """What was rejected, the oldest first."""
    return foreign.read_rejected(Broker(), queue)[::-1]


def taken(queue: str = QUEUE) -> dict[bytes, bytes]:
    """The documents that are taken and not settled."""
    found: dict[bytes, bytes] = Broker().client.hgetall(keys.keys_of(queue).inbox_taken)
    return found


def make_due(queue: str = QUEUE) -> None:
    """Let the time pass after which taken documents are taken again."""
    client, place = Broker().client, keys.keys_of(queue).inbox_due
    for id in client.zrange(place, 0, -1):
        client.zadd(place, {id: 1})


# --- good documents


def test_a_document_becomes_a_task_that_runs() -> None:
    """With all it can say, in the order of pushing, in Redis too; nothing is left of it."""
    push({"task": NAME, "args": [1], "kwargs": {"text": "é"}, "headers": {"trace-id": "t"}}, {"task": NAME})
    look()
    rows = list(TaskRecord.objects.order_by("id"))
    assert [(row.name, row.queue_name, row.args, row.kwargs, row.headers, row.state) for row in rows] == [
        (NAME, QUEUE, [1], {"text": "é"}, {"trace-id": "t"}, TaskState.QUEUED),
        (NAME, QUEUE, [], {}, None, TaskState.QUEUED),
    ]
    assert (taken(), kept(), Broker().client.exists(keys.keys_of(QUEUE).inbox_due)) == ({}, [], 0)
    run_workers()
    assert [row.return_value for row in TaskRecord.objects.order_by("id")] == [
        {"number": 1, "text": "é", "headers": {"trace-id": "t"}},
        {"number": 0, "text": "", "headers": {}},
    ]


def test_a_document_may_name_its_time_and_its_priority() -> None:
    """Seconds from now, or a time in ISO form; a key that is null is as good as none."""
    at = timezone.now() + timedelta(days=1)
    push(
        {"task": NAME, "run_after": 3600, "priority": 7, "id": None, "headers": None, "args": None},
        {"task": NAME, "run_after": at.isoformat()},
    )
    look()
    first, second = TaskRecord.objects.order_by("id")
    assert first.priority == 7
    assert abs((first.run_after - timezone.now()).total_seconds() - 3600) < 60  # type: ignore[operator]
    assert second.run_after == at


def test_a_wire_name_and_any_inbox_of_the_alias_will_do() -> None:
    """A task goes to its own queue, whatever inbox of the alias its document was pushed to."""
    push({"task": "letter:send", "args": [1]}, queue="other")
    look(queue="other")
    (row,) = TaskRecord.objects.all()
    assert (row.name, row.queue_name) == (inbox_tasks.gated_letter.module_path, QUEUE)


def test_other_inboxes_are_looked_at_less_often() -> None:
    """Those of the queues that Redis knows, beside those on which tasks with `inbox=True` are declared."""
    Broker().register_queue("other")
    Broker.forget_registered()
    with mock.patch.object(Broker, "known_queues", return_value=["other"]):
        push({"task": NAME}, queue="other")
        reader = service()
        assert reader.tick(100.0) == service_module.LOOK_SECONDS
        assert TaskRecord.objects.count() == 1
        push({"task": NAME}, queue="other")
        push({"task": NAME})
        reader.tick(101.0)
        assert TaskRecord.objects.count() == 2
        reader.tick(106.0)
        assert TaskRecord.objects.count() == 3


def test_where_no_task_takes_documents_redis_is_not_asked() -> None:
    """A project without inboxes pays nothing for them."""
    with (
        mock.patch.object(service_module, "every_task", return_value=[inbox_tasks.private_letter]),
        mock.patch.object(scripts, "run", side_effect=AssertionError),
    ):
        assert service().tick(0.0) == service_module.LOOK_ELSEWHERE_SECONDS


def test_the_framework_announces_the_task() -> None:
    """`task_enqueued` is sent, as for any other task."""
    found: list[str] = []

    def note(sender: Any, task_result: Any, **kwargs: Any) -> None:
        found.append(task_result.id)

    compat.task_enqueued.connect(note)
    try:
        push({"task": NAME})
        look()
    finally:
        compat.task_enqueued.disconnect(note)
    assert found == [str(TaskRecord.objects.get().id)]


# --- once


def test_an_id_makes_one_task_while_its_row_exists() -> None:
    """In one page, in another one, and after the task has finished; another id makes another task."""
    same = {"task": NAME, "args": [1], "id": "order-7"}
    push(same, {**same, "args": [2]}, {**same, "id": "order-8"})
    look()
    push(same)
    look()
    assert [row.args for row in TaskRecord.objects.order_by("enqueued_at")] == [[1], [1]]
    assert (taken(), kept()) == ({}, [])
    TaskRecord.objects.all().delete()
    push(same)
    look()
    assert TaskRecord.objects.count() == 1


def test_the_id_belongs_to_the_alias(settings: Any) -> None:
    """Two aliases may have documents of one id."""
    settings.TASKS = TWO
    other = inbox_tasks.letter.using(backend="reports")
    push({"task": NAME, "id": "7"})
    look()
    with mock.patch.object(service_module, "find", return_value=other):
        push({"task": NAME, "id": "7"}, alias="reports")
        look(alias="reports")
    assert set(TaskRecord.objects.values_list("backend", flat=True)) == {"default", "reports"}


def test_a_document_read_by_two_becomes_one_task() -> None:
    """The first reader dies after its commit: the second one finds the row, and asks for no slot of its gate."""
    push({"task": "letter:send", "args": [1]})
    with pytest.raises(KeyboardInterrupt), mock.patch.object(Inbox, "settle", side_effect=KeyboardInterrupt):
        look()
    assert len(taken()) == 1
    look()
    assert len(taken()) == 1, "it is taken again after a while only"
    make_due()
    look()
    assert (TaskRecord.objects.count(), taken()) == (1, {})


def test_a_reader_that_no_longer_leads_inserts_nothing() -> None:
    """Its documents are the next leader's."""
    push({"task": NAME})

    @contextmanager
    def lost() -> Iterator[int]:
        raise LockLost("maintenance", 1)
        yield 1

    with pytest.raises(LockLost):
        look(InboxService(Broker(), lost))
    make_due()
    look()
    assert (TaskRecord.objects.count(), taken()) == (1, {})


# --- a full gate


def test_a_full_gate_keeps_its_documents_and_no_others() -> None:
    """They stay taken, and are tasks when there is a slot."""
    push(
        *({"task": "letter:send", "args": [1]} for _ in range(3)), {"task": "letter:send", "args": [2]}, {"task": NAME}
    )
    reader = look()
    assert sorted(TaskRecord.objects.values_list("gate", flat=True)) == ["", "letters-1", "letters-2"]
    assert (len(taken()), kept()) == (2, [])
    make_due()
    look(reader)
    assert len(taken()) == 2
    # Here, not by worker processes: their supervisor would look too, whenever the time of a document has come.
    runs = lifecycle.claim(Broker(), QUEUE, "w", 9, "default").runs
    for run in runs:
        lifecycle.begin(run, "w", timezone.now())
        lifecycle.succeed(run, 1, timezone.now())
    lifecycle.acknowledge(Broker(), "w", runs, lifecycle.record_runs(runs))
    # Which releases the slots.
    lifecycle.announce([run.record for run in runs], TaskState.RUNNING, TaskState.SUCCEEDED)
    make_due()
    look(reader)
    assert (len(taken()), TaskRecord.objects.filter(gate="letters-1").count()) == (1, 2)


def test_documents_that_wait_at_gates_leave_space_for_new_ones() -> None:
    """However many they are, a page has new documents too."""
    inbox_tasks.gated_letter.enqueue(1)
    with mock.patch.object(service_module, "PER_PAGE", 5), mock.patch.object(service_module, "AGAIN_PER_PAGE", 5):
        push(*({"task": "letter:send", "args": [1]} for _ in range(20)))
        look()
        assert len(taken()) == 20
        make_due()
        push({"task": NAME})
        look()
    assert TaskRecord.objects.filter(name=NAME).count() == 1


# --- bad documents

BAD: dict[str, tuple[Any, str]] = {
    "not UTF-8": (b'{"task": "\xff"}', "it is not UTF-8: byte 10 cannot be read"),
    "not JSON": (b'{"task": ', "it is not JSON, or holds what databases do not store"),
    "NaN": (b'{"task": "a", "args": [NaN]}', "it is not JSON, or holds what databases do not store: NaN"),
    "half a character": (b'{"task": "\\ud800"}', "it is not JSON, or holds"),
    "too deep": (b'{"task": "a", "args": ' + b"[" * 99 + b"]" * 99 + b"}", "more than 66 lists and objects"),
    "a list": ([NAME], "it is a list, not an object"),
    "a text": ("a", "it is the text 'a', not an object"),
    "null": (None, "it is null, not an object"),
    "no task": ({}, "it has no 'task': give a text, the name of a task"),
    "an empty task": ({"task": ""}, "its 'task' is the text '': give a text, the name of a task"),
    "a number as task": ({"task": 7}, "its 'task' is the number 7: give a text"),
    "a long task": ({"task": "a" * 201}, "its 'task' has 201 characters, more than 200"),
    "an unknown task": ({"task": "shop.tasks.none"}, "no task is called 'shop.tasks.none': shop.tasks is not imported"),
    "a path": ({"task": "../../etc/passwd"}, "no task is called '../../etc/passwd': the name is not a path such as"),
    "no inbox": ({"task": inbox_tasks.private_letter.module_path, "args": [1]}, "takes no documents: declare it with"),
    "unknown keys": ({"task": NAME, "arg": [1]}, "it has the unknown key 'arg': it may have task, args, kwargs, id"),
    "args": ({"task": NAME, "args": {"number": 1}}, "its 'args' is an object: give a list"),
    "kwargs": ({"task": NAME, "kwargs": [1]}, "its 'kwargs' is a list: give an object"),
    "binding": ({"task": NAME, "kwargs": {"nope": 1}}, "cannot be called with these arguments: got an unexpected"),
    "arguments of no database": ({"task": NAME, "kwargs": {"text": "a\x00"}}, "holds a NUL character"),
    "a huge number": ({"task": NAME, "args": [2**70]}, "is a whole number beyond 64 bits"),
    "headers": ({"task": NAME, "headers": {"a": 1}}, "headers are not valid: 'a': 1 is not a name with a text"),
    "headers as a text": ({"task": NAME, "headers": "a"}, "headers are not valid: give a mapping of texts"),
    "id as a number": ({"task": NAME, "id": 7}, "its 'id' is the number 7: give a text of 1 to 200 characters"),
    "an empty id": ({"task": NAME, "id": ""}, "its 'id' is the text '': give a text of 1 to 200 characters"),
    "a long id": ({"task": NAME, "id": "a" * 201}, "its 'id' is a text of 201 characters: give a text of 1 to 200"),
    "run_after as a word": ({"task": NAME, "run_after": "soon"}, "its 'run_after' is not valid: Invalid isoformat"),
    "run_after without zone": ({"task": NAME, "run_after": "2030-01-01T00:00:00"}, "run_after has no time zone"),
    "run_after as true": ({"task": NAME, "run_after": True}, "its 'run_after' is true: give seconds from now, or"),
    "run_after before now": ({"task": NAME, "run_after": -1}, "its 'run_after' is the number -1: give seconds"),
    "run_after too late": ({"task": NAME, "run_after": 1e12}, "is no time to wait: date value out of"),
    "run_after beyond": ({"task": NAME, "run_after": "9999-12-31T00:00:00Z"}, "run_after is outside the calendar"),
    "priority": ({"task": NAME, "priority": 1.5}, "its 'priority' is the number 1.5: give a whole number"),
    "priority too high": ({"task": NAME, "priority": 101}, "priority"),
    "a gate without a limit": (
        {"task": inbox_tasks.limitless_letter.module_path, "args": [1]},
        "gate 'nobody-has-set-its-limit' has no limit",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_can_be_no_task_is_kept_with_the_reason(kind: str) -> None:
    """Beside good documents of the same page, which become tasks."""
    document, reason = BAD[kind]
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    push({"task": NAME, "args": [1]}, data, {"task": NAME, "args": [2]})
    look()
    (found,) = kept()
    assert reason in found.reason
    assert (found.data, found.source) == (data, "inbox")
    assert UUID(found.id)
    assert [row.args for row in TaskRecord.objects.order_by("id")] == [[1], [2]]
    assert taken() == {}


def test_a_document_that_is_too_large_is_cut(settings: Any) -> None:
    """It may have 1 MiB, or four times the bytes of arguments. The reason names the limit, and 64 KiB are kept."""
    settings.ASYNCQ = {**settings.ASYNCQ, "MAX_ARGUMENTS_BYTES": 300_000}
    push({"task": NAME, "kwargs": {"text": "x" * 1_200_000}}, {"task": NAME})
    look()
    (found,) = kept()
    assert found.reason == "it takes more than 1,200,000 bytes"
    assert (len(found.data), TaskRecord.objects.count()) == (foreign.MOST_BYTES, 1)


def test_a_task_of_another_alias_is_refused(settings: Any) -> None:
    """The reason says where its inbox is."""
    settings.TASKS = TWO
    push({"task": NAME}, alias="reports")
    look(alias="reports")
    found = foreign.read_rejected(Broker("worker", "reports"), QUEUE)
    prefix = keys.prefix()
    assert [each.reason for each in found] == [
        f"task '{NAME}' belongs to the alias 'default': push to {prefix}:{{{QUEUE}}}:inbox"
    ]


def test_a_second_task_of_a_unique_key_is_refused() -> None:
    """As `enqueue` refuses it; the reason names the holder. The same document read twice is no second task."""
    document = {"task": inbox_tasks.unique_letter.module_path, "args": [1]}
    push(document)
    with pytest.raises(KeyboardInterrupt), mock.patch.object(Inbox, "settle", side_effect=KeyboardInterrupt):
        look()
    make_due()
    look()
    assert (taken(), kept()) == ({}, [])
    push(document)
    look()
    (found,) = kept()
    assert f"task {TaskRecord.objects.get().id} holds its unique key" in found.reason


def test_a_veto_of_the_project_rejects_one_document() -> None:
    """Whatever a receiver raises for it; the others of its page are tasks."""

    @receiver(task_state_changing)
    def refuse(records: list[TaskRecord], **kwargs: Any) -> None:
        if any(row.args == [13] for row in records):
            raise ZeroDivisionError("not thirteen")

    push(*({"task": NAME, "args": [number]} for number in (12, 13, 14)))
    try:
        look()
    finally:
        task_state_changing.disconnect(refuse)
    assert [found.reason for found in kept()] == ["ZeroDivisionError: not thirteen"]
    assert [row.args for row in TaskRecord.objects.order_by("id")] == [[12], [14]]


def test_rejected_documents_are_bounded_and_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """The newest thousand, for seven days; one WARNING for each queue."""
    reader = service()
    with mock.patch.object(foreign, "MOST_KEPT", 3):
        push(*(str(number).encode() for number in range(5)))
        look(reader)
        push(b"5")
        look(reader)
    assert [found.data for found in kept()] == [b"3", b"4", b"5"]
    assert 0 < Broker().client.ttl(keys.keys_of(QUEUE).rejected) <= foreign.KEPT_SECONDS
    lines = [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]
    assert lines == [
        f"inbox of queue {QUEUE}: document rejected: it is the number 4, not an object; "
        f"kept in {keys.keys_of(QUEUE).rejected} (next warning in a minute)"
    ]


# --- outages


@pytest.mark.parametrize("error", [OperationalError("no space"), BrokerUnavailable("no"), PrefixTaken])
def test_an_outage_rejects_nothing(error: Any) -> None:
    """Documents stay taken, no more are taken while no row can be inserted, and all of them are tasks afterwards."""
    if error is PrefixTaken:
        error = PrefixTaken(prefix="asynq", owner=uuid7(), database=uuid7())
    push({"task": NAME, "args": [1]})
    reader = service()
    with mock.patch.object(service_module.lifecycle, "enqueue", side_effect=error), pytest.raises(type(error)):
        look(reader)
    push({"task": NAME, "args": [2]})
    with mock.patch.object(reader, "_fenced", side_effect=OperationalError), pytest.raises(OperationalError):
        look(reader)
    assert Broker().client.llen(keys.keys_of(QUEUE).inbox) == 1
    make_due()
    look(reader)
    assert [row.args for row in TaskRecord.objects.order_by("id")] == [[1], [2]]
    assert (taken(), kept()) == ({}, [])


def test_one_inbox_that_fails_keeps_no_other_waiting(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once, with the name of the queue."""
    reader = service()
    with mock.patch.object(reader, "read", side_effect=ValueError("odd")):
        reader.tick(0.0)
        reader.tick(1.0)
    lines = [line.getMessage() for line in caplog.records if line.levelno == logging.ERROR]
    (line,) = [line for line in lines if "reading the list" not in line]
    assert line.startswith(f"reading the inbox of queue {QUEUE} failed and is tried again: odd")
    assert len([line for line in lines if "reading the list tests orders failed" in line]) == 1


# --- what is in Redis is not trusted


def test_odd_keys_stop_nothing() -> None:
    """Keys of another type are set aside; documents without a time are due; times without a document are removed."""
    client, places = Broker().client, keys.keys_of(QUEUE)
    client.set(places.inbox_taken, "odd")
    client.set(places.inbox_due, "odd")
    client.zadd(places.rejected, {"odd": 1})
    push(b"odd", {"task": NAME, "args": [1]})
    look()
    client.hset(places.inbox_taken, b"\xff name of another program", json.dumps({"task": NAME, "args": [2]}))
    client.zadd(places.inbox_due, {"stray": 1})
    client.hset(places.inbox_taken, str(uuid7()), json.dumps({"task": NAME, "args": [3]}))
    look()
    look()
    assert sorted(row.args[0] for row in TaskRecord.objects.all()) == [1, 2, 3]
    assert (taken(), client.zcard(places.inbox_due), len(kept())) == ({}, 0, 1)


def test_settling_twice_rejects_once() -> None:
    """Every word of the script, and no second copy after a lost reply."""
    push(b"a", b"b")
    box, ids = Inbox(), [str(uuid7()), str(uuid7())]
    assert box.take(QUEUE, ids, largest_bytes=100, most_again=10) == ([(ids[0], b"a"), (ids[1], b"b")], 0)
    assert box.take(QUEUE, [str(uuid7())], largest_bytes=100, most_again=10) == ([], 0)
    for words in (["enqueued", "rejected"], ["missing", "missing"]):
        assert box.settle(QUEUE, [ids[0]], [(ids[1], b"b", "odd")]) == words
    assert [found.data for found in kept()] == [b"b"]


def test_a_reply_has_a_bound() -> None:
    """Large documents come in several replies, in their order."""
    push(*(bytes([65 + number]) * 1000 for number in range(5)))
    with mock.patch.object(foreign, "REPLY_BYTES", 1500):
        found = Inbox().take(QUEUE, [str(uuid7()) for _ in range(5)], largest_bytes=1000, most_again=5)
        assert ([data[:1] for _, data in found.documents], found.left) == ([b"A", b"B"], 3)
        make_due()
        again = Inbox().take(QUEUE, [str(uuid7()) for _ in range(5)], largest_bytes=1000, most_again=5)
    assert (again.documents, again.left) == (found.documents, 3)


# --- a plain list of another program


@pytest.fixture
def lists() -> Iterator[redis.Redis]:
    """A client of the Redis of this test, whose lists have no prefix."""
    client: redis.Redis = Broker().client
    yield client
    client.delete(*(task.inbox for task in (inbox_tasks.order, inbox_tasks.line, inbox_tasks.gated_value)))


def values_of(task: Any) -> list[Any]:
    """The arguments of the tasks that were made of a list."""
    return list(TaskRecord.objects.filter(name=task.module_path).order_by("id").values_list("args", "kwargs"))


def test_each_value_of_a_list_is_the_one_argument_of_its_task(lists: redis.Redis) -> None:
    """In the order of the pushes, whatever JSON holds; or as a text. No other queue is looked at for it."""
    values = [{"task": NAME, "args": [1]}, ["a", {"b": None}], "é", 1.5, None, True]
    for value in values:
        lists.lpush(inbox_tasks.order.inbox, json.dumps(value))
    lists.lpush(inbox_tasks.line.inbox, '{"not": "parsed"', "é")
    service().tick(0.0)
    assert values_of(inbox_tasks.order) == [([value], {}) for value in values]
    assert values_of(inbox_tasks.line) == [(['{"not": "parsed"'], {}), (["é"], {})]
    assert TaskRecord.objects.values_list("queue_name", flat=True).distinct().get() == QUEUE
    run_workers("--queues", QUEUE)
    assert TaskRecord.objects.filter(state=TaskState.SUCCEEDED).count() == 8
    assert not lists.exists(inbox_tasks.order.inbox, inbox_tasks.line.inbox)
    assert not list(lists.scan_iter(f"{keys.keys_of(QUEUE).inbox_taken}*"))


@pytest.mark.parametrize(
    ("task", "value", "reason"),
    [
        (inbox_tasks.order, b"{", "it is not JSON, or holds what databases do not store"),
        (inbox_tasks.order, b"\xff", "it is not UTF-8: byte 0 cannot be read"),
        (inbox_tasks.order, b"NaN", "it is not JSON, or holds what databases do not store"),
        (inbox_tasks.line, b"a\xff", "it is not UTF-8: byte 1 cannot be read"),
        (inbox_tasks.line, b"a\x00", "args[0]"),
    ],
)
def test_a_value_that_cannot_be_an_argument_is_kept_with_the_reason(
    task: Any, value: bytes, reason: str, lists: redis.Redis
) -> None:
    """With the name of its list, where `queues show --rejected` looks; the others become tasks."""
    lists.lpush(task.inbox, b"1", value, b"2")
    service().tick(0.0)
    assert len(values_of(task)) == 2
    (found,) = kept()
    assert found.reason.startswith(f"in the list {task.inbox}: ") and reason in found.reason
    assert (found.data, found.source) == (value, "inbox")


def test_a_list_whose_gate_is_full_keeps_what_was_taken(lists: redis.Redis) -> None:
    """Beside what was taken of others; it becomes a task when there is a slot."""
    lists.lpush(inbox_tasks.gated_value.inbox, "7", "7")
    service().tick(0.0)
    assert (len(values_of(inbox_tasks.gated_value)), kept(), taken()) == (1, [], {})
    assert lists.hlen(f"{keys.keys_of(QUEUE).inbox_taken}:{inbox_tasks.gated_value.inbox}") == 1


def test_what_is_no_list_keeps_no_other_waiting(lists: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    """Another program may have put anything there; the log names it."""
    lists.set(inbox_tasks.order.inbox, "a text")
    lists.lpush(inbox_tasks.line.inbox, "a")
    push({"task": NAME})
    service().tick(0.0)
    assert (len(values_of(inbox_tasks.line)), TaskRecord.objects.count()) == (1, 2)
    assert "reading the list tests orders" in caplog.text and "WRONGTYPE" in caplog.text
    assert lists.get(inbox_tasks.order.inbox) == b"a text"


def test_documents_do_not_reach_a_task_that_has_a_list() -> None:
    """Its declaration decides who may reach it."""
    push({"task": inbox_tasks.order.module_path, "args": [1]})
    look()
    assert [each.reason for each in kept()] == [
        f"task '{inbox_tasks.order.module_path}' takes no documents: declare it with inbox=True"
    ]


def noop(value: Any) -> None:
    """A function to declare."""


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"inbox": ""}, "give True, or the name of the Redis list whose values it gets, such as 'orders'"),
        ({"inbox": "a\nb"}, "give True, or the name of the Redis list"),
        ({"inbox": "a", "wire_name": "a"}, "a message may hold several arguments, a value is one"),
        ({"payload": "bytes", "inbox": True}, "it needs wire_name=…, or inbox='a list'"),
        ({"inbox": "tests:lines"}, "tests.inbox_tasks.line has it already"),
    ],
)
def test_options_that_can_never_work_are_refused(options: Any, error: str) -> None:
    """At the declaration."""
    with pytest.raises(InvalidOption) as caught:
        declare(**options)(noop)
    assert error in str(caught.value)


def test_a_list_of_this_package_is_refused(settings: Any) -> None:
    """Its entries would be taken out of it."""
    assert not list(checks.check_inbox_lists())
    settings.ASYNCQ = {**settings.ASYNCQ, "KEY_PREFIX": "tests"}
    found = list(checks.check_inbox_lists())
    assert [each.id for each in found] == ["asyncq.E055"] * 3, "the name of the fourth has no colon there"
    assert any("inbox='tests:lines', which is a key of this package" in each.msg for each in found)


# --- rights, and a real fleet


def test_a_program_that_only_pushes_needs_one_right(own_redis: EmbeddedRedis) -> None:
    """The guide's user may push to the inbox, and neither read it nor touch anything else."""
    admin = redis.Redis.from_url(own_redis.url, protocol=2)
    admin.execute_command("ACL", "SETUSER", "shop", *acl.rules("shop"))
    user = redis.Redis.from_url(acl.url_as("shop", own_redis.url), protocol=2)
    assert user.lpush("asynq:{mails}:inbox", "{}") == 1
    for refused in (("LRANGE", "asynq:{mails}:inbox", 0, -1), ("LPUSH", "asynq:{mails}:pending", "a"), ("GET", "a")):
        with pytest.raises(redis.exceptions.NoPermissionError):
            user.execute_command(*refused)


def adapted(example: str, url: str) -> str:
    """Return an example of the guide, for the keys, the task and the Redis of this test."""
    names = {"asynq:{mails}:": keys.keys_of(QUEUE).base, "shop.tasks.send_mail": NAME, "user_id": "number"}
    for name, instead in {**names, "redis://127.0.0.1:6379/0": url}.items():
        example = example.replace(name, instead)
    return example


def test_a_fleet_runs_what_is_pushed(tmp_path: Path) -> None:
    """By the leader of `runworkers`, from pushing to the row; with the examples of the guide."""
    url = environment()["ASYNCQ_TEST_REDIS_URL"]
    code = adapted(next(block for block in blocks_of(GUIDE, "python") if "lpush(" in block), url)
    (line,) = adapted("".join(block for block in blocks_of(GUIDE, "sh") if ":inbox" in block), url).splitlines()
    command = shlex.split(line)
    assert command.pop(0) == "redis-cli"
    with workers(tmp_path) as fleet:
        wait_until(lambda: "this process leads" in fleet.output(), "a leader")
        assert Broker().client.execute_command(*command) == 1
        wait_until(lambda: TaskRecord.objects.filter(state=TaskState.SUCCEEDED).first(), "a task that ran")
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
        done = TaskRecord.objects.filter(state=TaskState.SUCCEEDED)
        wait_until(lambda: done.count() == 2, "another task")
        assert fleet.stop() == 0
    assert [each.return_value["number"] for each in done] == [7, 7]

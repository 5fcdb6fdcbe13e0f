"""Alerts: what a look finds, that it is said once, and that a server that is bad costs a bounded time.

A receiver on the loopback gets the messages. No test waits for a next look: each looks when it wants to.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core import mail
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connections
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_asyncq import checks, conf, control
from django_asyncq.broker import keys, ownership, redis_clock
from django_asyncq.broker.keys import keys_of
from django_asyncq.core.policies import alert_settings
from django_asyncq.fleet.leader import MaintenanceService
from django_asyncq.models import Alert, PauseKind, Schedule, TaskRecord, TaskState
from django_asyncq.observe import alerts as sending
from django_asyncq.observe.alerts import Alerter
from django_asyncq.observe.problems import Problem
from django_asyncq.signals import fleet_problem
from django_asyncq.storage import identity
from django_asyncq.storage.routing import writing_database
from django_asyncq.testing import EmbeddedRedis, travel

from .. import tasks
from ..admin_cases import make
from ..receiver import Receiver, receiver
from ..workers import wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)

OPS = ["ops@example.com", "Night <night@example.com>"]
Configure = Callable[..., None]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the environment does not reach the receiver."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a look does not find is over."""
    monkeypatch.setattr(sending, "OVER_AFTER", timedelta(0))


@pytest.fixture
def hook() -> Iterator[Receiver]:
    """A receiver of webhooks."""
    with receiver() as server:
        yield server


@pytest.fixture
def configure(settings: Any) -> Configure:
    """Set ASYNCQ["ALERTS"]."""

    def put(**alerts: Any) -> None:
        settings.ASYNCQ = {**settings.ASYNCQ, "ALERTS": alerts}

    return put


@pytest.fixture
def heard() -> Iterator[list[tuple[Problem, bool]]]:
    """What the signal has said."""
    found: list[tuple[Problem, bool]] = []

    def hear(problem: Problem, is_over: bool, **more: Any) -> None:
        found.append((problem, is_over))

    fleet_problem.connect(hear)
    yield found
    fleet_problem.disconnect(hear)


def looked() -> dict[tuple[str, str], Problem]:
    """What one look finds: by kind and subject."""
    return {(each.kind, each.subject): each for each in Alerter().looker.look().problems.values()}


def wait(queue: str = "mail", minutes: float = 11, **values: Any) -> TaskRecord:
    """Make a task that has been due for some minutes."""
    return make(TaskState.QUEUED, queue_name=queue, enqueued_at=timezone.now() - timedelta(minutes=minutes), **values)


def count_attempts(client: Any, queue: str, processed: int, failed: int, *, minutes_ago: int = 1) -> None:
    """Count attempts as the scripts do that acknowledge them."""
    tasks.stamp.using(queue_name=queue).enqueue()
    TaskRecord.objects.filter(queue_name=queue).delete()
    at = redis_clock.seconds() - 60 * minutes_ago
    hour, minute = time.strftime("%Y-%m-%dT%H", time.gmtime(at)), time.gmtime(at).tm_min
    client.hset(keys_of(queue).minutes(hour), mapping={f"p{minute}": processed, f"f{minute}": failed})


def note_supervisor(client: Any, host: str, *, ago: float, started_ago: float = 3600, pid: int = 7) -> None:
    """Note a supervisor that last reported some seconds ago."""
    now = redis_clock.measure()
    token = ownership.token_of(host, pid, now - started_ago)
    client.zadd(keys.supervisors_key(), {token: (now - ago) * 1000 + ownership.ALIVE_MS})


@contextmanager
def database_unreachable() -> Iterator[None]:
    """Make the database of the tasks one that nothing can connect to."""
    connection = connections[writing_database(Alert)]
    connection.close()
    before = dict(connection.settings_dict)
    wrong = {"NAME": "/nowhere/at/all.sqlite3"} if connection.vendor == "sqlite" else {"PORT": "1"}
    connection.settings_dict.update(wrong)
    try:
        yield
    finally:
        connection.settings_dict.update(before)
        connection.close()


# --- what a look finds


def test_a_queue_in_which_tasks_wait(configure: Configure) -> None:
    """From ten minutes on; of each queue the oldest task. None is no limit."""
    for minutes in (14, 12):
        wait("mail", minutes)
    wait("fresh", 9)
    (found,) = looked().values()
    assert (found.title, found.command) == ("queue mail: tasks wait", "manage.py asyncq queues show mail")
    assert re.fullmatch(r"queue mail: the oldest task has been waiting for 84\d s, longer than 600 s", found.text)
    configure(oldest_waiting=None)
    assert looked() == {}


@pytest.mark.parametrize("held", ["queue", "task", "delayed", "follower", "remote"])
def test_what_may_wait_is_no_alert(held: str) -> None:
    """What is paused, not due, waits for another task, or is run by another program."""
    later = timezone.now() + timedelta(hours=1)
    values = {
        "delayed": {"run_after": later},
        "follower": {"after_id": make(TaskState.SUCCEEDED).id},
        "remote": {"is_remote": True},
    }
    row = wait("mail", 20, **values.get(held, {}))
    if held == "queue":
        control.pause(PauseKind.QUEUE, "mail")
    elif held == "task":
        control.pause(PauseKind.TASK, row.name)
    assert looked() == {}


def test_a_queue_whose_attempts_fail(redis_client: Any) -> None:
    """A fifth of at least twenty in the last 15 minutes; of another queue, and earlier ones, do not count."""
    count_attempts(redis_client, "mail", 300, 123, minutes_ago=2)
    count_attempts(redis_client, "few", 19, 19)
    count_attempts(redis_client, "well", 100, 19)
    count_attempts(redis_client, "old", 100, 100, minutes_ago=20)
    (found,) = looked().values()
    assert found.text == "queue mail: 123 of 300 attempts of the last 15 minutes failed"
    assert found.command == "manage.py asyncq tasks failures --queue mail"


def test_a_schedule_that_is_overdue() -> None:
    """By five minutes; one that is disabled, removed or not due is not."""
    late = timezone.now() - timedelta(minutes=7)
    for name, values in {
        "nightly": {"next_occurrence_at": late},
        "soon": {"next_occurrence_at": timezone.now() - timedelta(minutes=3)},
        "off": {"next_occurrence_at": late, "enabled": False},
        "removed": {"next_occurrence_at": late, "retired_at": late},
        "done": {"next_occurrence_at": None},
    }.items():
        Schedule.objects.create(name=name, task="tests.tasks.tidy", cron="0 4 * * *", **values)
    (found,) = looked().values()
    assert found.title == "schedule nightly is overdue" and re.search(r" by 42\d s, more than 300 s$", found.text)


def test_nobody_has_reported(redis_client: Any) -> None:
    """For two minutes: also to a host on which no worker runs, because Redis has the reports."""
    note_supervisor(redis_client, "web-3", ago=30)
    assert looked() == {}
    redis_client.delete(keys.supervisors_key())
    note_supervisor(redis_client, "web-3", ago=185)
    found = looked()
    assert set(found) == {("silent_workers", ""), ("silent_workers", "web-3:7")}
    assert re.fullmatch(r"no worker has reported for 18\d s, longer than 120 s", found["silent_workers", ""].text)


def test_a_supervisor_that_has_vanished_is_named(redis_client: Any) -> None:
    """Beside others that live; not one that a later one on its host has replaced."""
    note_supervisor(redis_client, "web-1", ago=2)
    note_supervisor(redis_client, "web-3", ago=190, pid=4711)
    note_supervisor(redis_client, "web-2", ago=600)
    note_supervisor(redis_client, "web-2", ago=1, started_ago=500)
    redis_client.zadd(keys.supervisors_key(), {"of another version": time.time() * 1000, "0.000:1:x": 1.0})
    (found,) = looked().values()
    assert found.title == "host web-3: runworkers has vanished" and "process 4711 has not reported" in found.text


@pytest.mark.parametrize("lived", [0.0, 0.0004, 0.3])
def test_a_supervisor_that_died_as_it_began_is_named(redis_client: Any, lived: float) -> None:
    """It has not replaced itself, however the moments are rounded; one that began right after it has."""
    note_supervisor(redis_client, "web-1", ago=2)
    for host in ("web-2", "web-3"):
        note_supervisor(redis_client, host, ago=190, started_ago=190 + lived)
    note_supervisor(redis_client, "web-3", ago=1, started_ago=189.9, pid=8)
    assert [each.title for each in looked().values()] == ["host web-2: runworkers has vanished"]


def test_a_supervisor_that_stopped_leaves_no_trace_and_one_that_died_an_hour(redis_client: Any) -> None:
    """The script that each living supervisor calls keeps the dead ones for that long, and counts them no more."""
    database = identity.ensure()
    for ago in (3_500, 3_700):
        note_supervisor(redis_client, f"host-{ago}", ago=ago + 15)
    now = redis_clock.seconds()
    token = ownership.token_of("here", 1, now)
    ownership.note_supervisor(database, token, alive_ms=ownership.ALIVE_MS, may_take=True)
    # It has taken the prefix, and with it nobody else's supervisors.
    assert [each.host for each in ownership.supervisors()] == ["here"]
    for ago in (3_500, 3_700):
        note_supervisor(redis_client, f"host-{ago}", ago=ago + 15)
    found = ownership.note_supervisor(database, token, alive_ms=ownership.ALIVE_MS)
    assert found.supervisors == 1
    known = {each.host: each.is_alive for each in ownership.supervisors()}
    assert known == {"here": True, "host-3500": False}
    ownership.forget_supervisor(token)
    assert [each.host for each in ownership.supervisors()] == ["host-3500"]


def test_a_supervisor_that_stops_takes_those_with_it_that_it_had_replaced(redis_client: Any) -> None:
    """Otherwise they would be missed from then on; of another host, and later ones, are."""
    for host, ago in (("web-1", 100), ("web-1", 20), ("web-2", 100)):
        note_supervisor(redis_client, host, ago=ago, pid=ago)
    token = ownership.token_of("web-1", 9, redis_clock.seconds() - 50)
    ownership.forget_supervisor(token)
    assert {(each.host, each.pid) for each in ownership.supervisors()} == {("web-1", 20), ("web-2", 100)}


def test_redis_that_is_unreachable_is_a_problem(own_redis: EmbeddedRedis) -> None:
    """What the database knows is found too, and nothing is over that Redis knows."""
    wait()
    own_redis.kill()
    look = Alerter().looker.look()
    assert [each.title for each in look.problems.values()] == ["Redis is unreachable", "queue mail: tasks wait"]
    assert look.kinds == {"store", "oldest_waiting", "overdue_schedules"}


def test_what_is_always_a_problem(redis_client: Any) -> None:
    """As for `asyncq health`."""
    redis_client.set(keys.owner_key(), "00000000-0000-0000-0000-000000000007")
    with travel(seconds=30):
        identity.ensure()
        found = looked()
    assert {subject for kind, subject in found if kind == "mismatch"} == {
        "clocks",
        f"prefix {conf.current().key_prefix}",
    }


def test_a_look_reads_no_finished_rows() -> None:
    """Of tasks, those that are QUEUED; a few queries, whatever there is."""
    for queue in ("a", "b", "c"):
        wait(queue)
        make(TaskState.SUCCEEDED, queue_name=queue)
    looker = Alerter().looker
    with CaptureQueriesContext(connections[writing_database(Alert)]) as queries:
        looker.look()
    asked = [each["sql"] for each in queries.captured_queries if "django_asyncq_taskrecord" in each["sql"]]
    assert len(asked) == 1 and re.search(r"state[`\"] = 0", asked[0])
    assert len(queries.captured_queries) <= 6


# --- once when it is new, and once when it is over


def test_a_problem_is_said_once_and_its_end_once(
    configure: Configure, hook: Receiver, heard: list[tuple[Problem, bool]]
) -> None:
    """By mail, to the webhook and by the signal; and again when it comes again."""
    configure(webhook=hook.url("/T000/B000"), mail=OPS)
    row = wait("mail<b>", 14)
    for _ in range(3):
        Alerter().tick()
    (received,) = hook.received
    assert received.path == "/T000/B000" and received.headers["content-type"] == "application/json; charset=utf-8"
    document = received.document
    (alert,) = document["alerts"]
    assert (alert["kind"], alert["backend"], alert["subject"]) == ("oldest_waiting", "default", "mail<b>")
    assert (document["project"], document["host"]) == (conf.current().key_prefix, socket.gethostname())
    assert document["over"] == [] and document["text"].startswith("asyncq: queue mail&lt;b&gt;: tasks wait\n- queue")
    (sent,) = mail.outbox
    assert sent.subject == "[Django] asyncq: queue mail<b>: tasks wait" and sent.from_email == "root@localhost"
    assert sent.to == OPS and f"- {alert['text']}; see: {alert['command']}\n" in sent.body
    row.delete()
    for _ in range(2):
        Alerter().tick()
    assert not Alert.objects.exists()
    assert mail.outbox[1].subject == "[Django] asyncq: over: queue mail<b>: tasks wait"
    assert hook.documents()[1]["alerts"] == [] and hook.documents()[1]["over"][0]["subject"] == "mail<b>"
    assert [(problem.subject, is_over) for problem, is_over in heard] == [("mail<b>", False), ("mail<b>", True)]
    wait("mail<b>")
    Alerter().tick()
    assert [len(each) for each in (hook.received, mail.outbox, heard)] == [3, 3, 3]


def test_what_only_one_host_finds_does_not_come_and_go(
    configure: Configure, hook: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a host with another limit. It is over when no look has found it for a while."""
    after = timedelta(seconds=150)
    monkeypatch.setattr(sending, "OVER_AFTER", after)
    configure(webhook=hook.url())
    wait()
    finds = Alerter()
    configure(webhook=hook.url(), oldest_waiting=None)
    does_not = Alerter()
    for _ in range(3):
        finds.tick()
        Alert.objects.update(seen_at=timezone.now() - after)
        finds.tick()
        does_not.tick()
    assert len(hook.received) == 1
    Alert.objects.update(seen_at=timezone.now() - after)
    does_not.tick()
    assert len(hook.received) == 2 and len(hook.documents()[1]["over"]) == 1


def test_one_message_has_all_that_is_new(configure: Configure, hook: Receiver) -> None:
    """As many as a message may have; the next look says the others."""
    configure(webhook=hook.url())
    for number in range(sending.MOST_IN_MESSAGE + 2):
        wait(f"queue-{number}")
    for _ in range(3):
        Alerter().tick()
    assert [len(each["alerts"]) for each in hook.documents()] == [sending.MOST_IN_MESSAGE, 2]
    assert hook.documents()[0]["text"].splitlines()[0].endswith(f", and {sending.MOST_IN_MESSAGE - 1} more")


def test_of_eight_that_look_at_the_same_moment_one_says_it(configure: Configure, hook: Receiver) -> None:
    """The leader, and what cron starts on other hosts: that it is new, and that it is over."""
    configure(webhook=hook.url())

    def look_together() -> None:
        gate, failed = threading.Barrier(8), []

        def look() -> None:
            try:
                alerter = Alerter()
                found = alerter.looker.look()
                gate.wait()
                alerter.say(found)
            except DatabaseError as error:
                failed.append(error)
            finally:
                connections.close_all()

        threads = [threading.Thread(target=look) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # A deadlock is one of the answers that a database may give; the next look is then the sender's.
        assert len(failed) < 8
        Alerter().tick()

    names = [f"queue-{number}" for number in range(5)]
    for name in names:
        wait(name)
    look_together()
    TaskRecord.objects.all().delete()
    look_together()
    for part in ("alerts", "over"):
        assert sorted(each["subject"] for document in hook.documents() for each in document[part]) == names


def test_what_one_way_could_not_say_is_said_by_the_other_and_not_again(
    configure: Configure, hook: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """What nobody was told is said by the next look. No log line has the address."""
    caplog.set_level(logging.DEBUG)
    configure(webhook=hook.url("/500/SECRET"))
    wait()
    Alerter().tick()
    Alerter().tick()
    assert len(hook.received) == 2 and not Alert.objects.exists()
    configure(webhook=hook.url("/500/SECRET"), mail=OPS)
    Alerter().tick()
    Alerter().tick()
    assert len(hook.received) == 3 and len(mail.outbox) == 1 and Alert.objects.count() == 1
    assert f"could not be sent by webhook of http://127.0.0.1:{hook.server_port}: status 500" in caplog.text
    assert "SECRET" not in caplog.text


def test_a_receiver_alone_is_enough(heard: list[tuple[Problem, bool]]) -> None:
    """Without an address."""
    wait()
    assert Alerter().has_listeners
    Alerter().tick()
    Alerter().tick()
    assert len(heard) == 1


def test_a_receiver_that_raises_was_not_told() -> None:
    """The next look tells it again."""
    calls = []

    def fail(**more: Any) -> None:
        calls.append(more)
        raise ValueError("no")

    wait()
    fleet_problem.connect(fail)
    try:
        Alerter().tick()
        Alerter().tick()
    finally:
        fleet_problem.disconnect(fail)
    assert len(calls) == 2 and not Alert.objects.exists()


def test_a_limit_that_is_none_ends_its_problems(configure: Configure, hook: Receiver) -> None:
    """No row stays for ever."""
    configure(webhook=hook.url())
    wait()
    Alerter().tick()
    configure(webhook=hook.url(), oldest_waiting=None)
    Alerter().tick()
    assert len(hook.documents()[1]["over"]) == 1 and not Alert.objects.exists()


def test_redis_that_is_unreachable_is_said_once(own_redis: EmbeddedRedis, configure: Configure, hook: Receiver) -> None:
    """Of what Redis knows nothing is over meanwhile."""
    configure(webhook=hook.url())
    Alert.objects.create(
        kind="failure_ratio",
        backend="default",
        subject="mail",
        title="queue mail: attempts fail",
        seen_at=timezone.now(),
    )
    own_redis.stop()
    Alerter().tick()
    Alerter().tick()
    assert [each["subject"] for document in hook.documents() for each in document["alerts"]] == ["Redis"]
    assert not hook.documents()[0]["over"]
    own_redis.start()
    Alerter().tick()
    assert {each["subject"] for each in hook.documents()[1]["over"]} == {"Redis", "mail"}


def test_a_database_that_is_unreachable_is_said_once_by_each_process(configure: Configure, hook: Receiver) -> None:
    """The command does not send it, because no row can say that it has: it exits with 1, and cron says so."""
    configure(webhook=hook.url())
    wait()
    alerter = Alerter()
    alerter.tick()
    with database_unreachable():
        alerter.tick()
        alerter.tick()
        with pytest.raises(CommandError, match=r"the database is unreachable from .*, so nothing is sent"):
            run("check", "--send")
    alerter.tick()
    alerter.tick()
    assert [[each["subject"] for each in document["alerts"]] for document in hook.documents()] == [
        ["mail"], ["database"], [],
    ]  # fmt: skip
    assert hook.documents()[2]["over"][0]["title"] == "the database is unreachable"


# --- servers that are bad


@pytest.mark.parametrize("path", ["/hang/SECRET", "/drip/SECRET", "/redirect/SECRET", "/huge"])
def test_a_webhook_costs_a_bounded_time_and_leads_nowhere(
    path: str, configure: Configure, hook: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While an attempt hangs there is no other. An answer is not read without end."""
    hangs = path in ("/hang/SECRET", "/drip/SECRET")
    monkeypatch.setattr(sending, "WEBHOOK_SECONDS", 0.3 if hangs else 30)
    configure(webhook=hook.url(path))
    wait()
    alerter = Alerter()
    (text,) = alerter.say(alerter.looker.look()) or [""]
    assert "SECRET" not in text
    if hangs:
        assert "no answer within 0.3 s" in text or "timed out" in text
    elif path == "/huge":
        assert not text
    else:
        assert text.endswith("status 307, and no redirect is followed")
    assert [each.path for each in hook.received] == [path]


def test_a_way_that_hangs_is_not_called_again() -> None:
    """Until it has finished. Nobody waits for it longer than it may take."""
    may_end, calls = threading.Event(), []

    def hang(message: Any) -> None:
        calls.append(message)
        may_end.wait(30)

    way = sending._Way("mail", 0.05, hang)
    message = sending.compose([Problem("store", "", "x", "t", "x", "c")], [])
    assert way.send(message) == "no answer within 0.05 s"
    assert way.send(message) == "the attempt before has still not finished"
    may_end.set()
    assert way._thread is not None
    way._thread.join(10)
    assert way.send(message) == "" and len(calls) == 2


def test_a_webhook_that_nobody_serves_is_named_by_its_host(configure: Configure) -> None:
    """Without the secret."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    configure(webhook=f"http://127.0.0.1:{port}/SECRET")
    wait()
    alerter = Alerter()
    (text,) = alerter.say(alerter.looker.look())
    assert text.startswith(f"webhook of http://127.0.0.1:{port}: ConnectionRefusedError: ") and "SECRET" not in text


def test_odd_names_break_no_header_and_no_line(configure: Configure) -> None:
    """They are of other programs too."""
    configure(mail=OPS)
    Schedule.objects.create(
        name="a\r\nBcc: x@y\x1b[0m", task="tests.tasks.tidy", cron="* * * * *",
        next_occurrence_at=timezone.now() - timedelta(hours=1),
    )  # fmt: skip
    Alerter().tick()
    (sent,) = mail.outbox
    assert "\n" not in sent.subject and "\x1b" not in sent.body and len(sent.body.splitlines()) == 3


# --- settings, the command, real workers


def test_nothing_looks_without_anybody_to_tell(configure: Configure) -> None:
    """No thread, no query."""
    for alerts, looks in (({}, False), ({"mail": OPS}, True)):
        configure(**alerts)
        assert ("alerts" in [loop.name for loop in MaintenanceService([], single_instance=True)._loops]) is looks


def test_the_defaults_are_those_of_the_docs(configure: Configure) -> None:
    """As the guide has them."""
    assert (alert_settings().failure_ratio, alert_settings().oldest_waiting) == (0.2, 600)
    configure(oldest_waiting=timedelta(hours=1), failure_ratio=None)
    assert (alert_settings().failure_ratio, alert_settings().oldest_waiting) == (None, 3600)


GOOD: list[dict[str, Any]] = [
    {},
    {"mail": []},
    {"mail": OPS, "webhook": ""},
    {"mail": ("a@b",), "webhook": "https://hooks.example/T000/B000?x=1"},
    {"webhook": "http://127.0.0.1:8065/hooks/abc", "failure_ratio": 1},
    {"webhook": "http://[::1]:8065/x", "oldest_waiting": timedelta(minutes=5)},
    {"failure_ratio": None, "oldest_waiting": None},
]
BAD: list[tuple[Any, str, str]] = [
    ([], "E173", "['ALERTS'] is a list, not a dictionary"),
    (None, "E173", "is a NoneType, not a dictionary"),
    ("https://hooks.example/SECRET", "E173", "is a str, not a dictionary"),
    ({"mails": OPS}, "E173", "has the unknown key 'mails'"),
    ({5: OPS}, "E173", "has the unknown key 5"),
    ({"failure_ratio": 0}, "E173", "['failure_ratio'] = 0 is not valid"),
    ({"failure_ratio": 20}, "E173", "['failure_ratio'] = 20 is not valid"),
    ({"failure_ratio": True}, "E173", "['failure_ratio']"),
    ({"failure_ratio": float("nan")}, "E173", "['failure_ratio']"),
    ({"oldest_waiting": 0}, "E173", "['oldest_waiting']"),
    ({"oldest_waiting": "10m"}, "E173", "['oldest_waiting']"),
    ({"mail": "ops@example.com"}, "E174", "['mail'] is a str"),
    ({"mail": None}, "E174", "['mail'] is a NoneType"),
    ({"mail": ["ops"]}, "E174", "['mail'] has 'ops', which is no address"),
    ({"mail": ["a@b.example\nBcc: c@d"]}, "E174", "which is no address"),
    ({"mail": [5]}, "E174", "has 5, which is no address"),
    ({"webhook": None}, "E175", "it is a NoneType, not a text"),
    ({"webhook": "hooks.example/SECRET"}, "E175", "its scheme is neither https nor http"),
    ({"webhook": "file:///etc/SECRET"}, "E175", "its scheme is neither https nor http"),
    ({"webhook": "ftp://hooks.example/SECRET"}, "E175", "its scheme is neither https nor http"),
    ({"webhook": "https:///SECRET"}, "E175", "it names no host"),
    ({"webhook": "https://ann:SECRET@hooks.example/x"}, "E175", "it has a user name or a password in it"),
    ({"webhook": "https://hooks.example:0/SECRET"}, "E175", "its port is 0"),
    ({"webhook": "https://hooks.example:SECRET/x"}, "E175", "it cannot be read"),
    ({"webhook": "https://[::1/SECRET"}, "E175", "it cannot be read"),
    ({"webhook": "https://hooks.example/SECRET x"}, "E175", "has a space"),
    ({"webhook": "https://hooks.example/SECRET\r\nX: y"}, "E175", "has a space"),
    ({"webhook": "https://hooks.example/" + "x" * 2_000}, "E175", "more than 2,000"),
    ({"webhook": "https://hooks.example/#SECRET"}, "E175", "it has a '#'"),
]


def faults_of(written: Any, settings: Any) -> list[Any]:
    """What the checks say of ASYNCQ["ALERTS"]."""
    settings.ASYNCQ = {**settings.ASYNCQ, "ALERTS": written}
    return [*checks.check_settings(), *checks.check_alerts()]


def test_settings_that_are_wrong_are_named_with_the_remedy(settings: Any) -> None:
    """And without the address of the webhook; not only the first one. Good ones are accepted."""
    for good in GOOD:
        assert faults_of(good, settings) == []
        alert_settings()
    for written, id, text in BAD:
        (found,) = faults_of(written, settings)
        assert found.id == f"asyncq.{id}" and text in found.msg and found.hint, written
        assert "SECRET" not in f"{found.msg} {found.hint}"
    found = faults_of({"mail": ["a", "b@c", 7], "webhook": "x", "colour": 1, "oldest_waiting": 0}, settings)
    assert [each.id[-4:] for each in found] == ["E174", "E174", "E175", "E173", "E173"]


def run(*arguments: str) -> str:
    """Run `asyncq alerts`; return what it prints."""
    out = StringIO()
    call_command("asyncq", "alerts", *arguments, stdout=out)
    return out.getvalue()


def test_the_command_says_what_is_wrong_by_its_exit_code(configure: Configure) -> None:
    """And changes nothing. With --send it needs somebody to send to, and right settings."""
    assert run("check") == "no alerts\n"
    with pytest.raises(CommandError, match=r"ASYNCQ\['ALERTS'\] has neither 'mail' nor 'webhook'"):
        run("check", "--send")
    wait()
    with pytest.raises(CommandError, match=r"^1 alert$"):
        run("check")
    out = StringIO()
    with pytest.raises(CommandError):
        call_command("asyncq", "alerts", "check", "--json", stdout=out)
    document = json.loads(out.getvalue())
    assert document["alerts"][0]["subject"] == "mail" and document["not_sent"] == []
    assert not Alert.objects.exists()
    configure(mail=["ops"])
    with pytest.raises(CommandError, match="has 'ops', which is no address"):
        run("check")


def test_the_command_and_the_leader_send_once(configure: Configure, hook: Receiver) -> None:
    """In the same rows. What is sent is no error, and what could not be sent is one."""
    configure(webhook=hook.url("/500/SECRET"))
    wait()
    with pytest.raises(CommandError, match=r"not sent by webhook of http://127.0.0.1:\d+: status 500"):
        run("check", "--send")
    configure(webhook=hook.url())
    for _ in range(2):
        assert "queue mail: the oldest task has been waiting" in run("check", "--send")
    Alerter().tick()
    assert len(hook.received) == 2


def test_the_leader_looks_and_sends(hook: Receiver, tmp_path: Path) -> None:
    """A task of a queue that no worker serves."""
    wait("nobody")
    with workers(tmp_path, "--queues", "default", ASYNCQ_TEST_ALERTS=json.dumps({"webhook": hook.url()})):
        wait_until(lambda: hook.received, "the alert")
    assert [each["subject"] for each in hook.documents()[0]["alerts"]] == ["nobody"]

"""Alerts: what a look finds, who sends it and when, and what a message says. A receiver on the loopback gets them."""

from __future__ import annotations

import json
import logging
import re
import smtplib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.contrib import admin
from django.core import mail
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connections
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_asyncq import checks, conf, pausing
from django_asyncq.alerts import alerter as alerter_module
from django_asyncq.alerts import message, webhook
from django_asyncq.alerts.alerter import Alerter
from django_asyncq.alerts.bounded_call import BoundedCall, NotFinished
from django_asyncq.alerts.findings import Finding, Findings, Key, key_of
from django_asyncq.alerts.local_notes import LocalNotes, file_of_notes
from django_asyncq.alerts.mail import Mail
from django_asyncq.alerts.wording import percent, span
from django_asyncq.broker import keys, prefix_owner, redis_clock
from django_asyncq.broker.keys import keys_of
from django_asyncq.definitions.alert_settings import alert_settings
from django_asyncq.maintenance.service import MaintenanceService
from django_asyncq.models import Alert, AlertKind, PauseKind, Schedule, TaskRecord, TaskState
from django_asyncq.storage import identity
from django_asyncq.storage.routing import writing_database
from django_asyncq.testing import EmbeddedRedis, travel

from . import tasks
from .admin_cases import make
from .receiver import Receiver, receiver
from .workers import ROOT, environment, wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)

OPS = ["ops@example.com", "Night <night@example.com>"]
# A look each second, so that no test waits and no clock is moved so far that the clocks of the stores differ.
QUICK = {"every": 1, "again": 3}
LOOK = timedelta(seconds=1)
Configure = Callable[..., None]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the environment does not reach the receiver."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hook() -> Iterator[Receiver]:
    """A receiver of webhooks."""
    with receiver() as server:
        yield server


@pytest.fixture
def configure(settings: Any) -> Configure:
    """Set ASYNCQ["ALERTS"]; without workers in the test, their silence is no alert unless it is asked for."""

    def put(**alerts: Any) -> None:
        settings.ASYNCQ = {**settings.ASYNCQ, "ALERTS": {**QUICK, "silent_workers": None, **alerts}}

    return put


def looked(**alerts: Any) -> dict[tuple[str, str], Finding]:
    """What one look finds above its limit: by kind and subject."""
    return {(each.key.kind, each.key.subject): each for each in Alerter().looker.look().alerts()}


def looks(alerter: Alerter, count: int = 2, seconds: float = 1.0) -> None:
    """Look several times; the clock of the database is moved on before each look but the first."""
    with travel() as clock:
        for number in range(count):
            if number:
                clock.move(seconds=seconds)
            alerter.tick()


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
    token = prefix_owner.token_of(host, pid, now - started_ago)
    client.zadd(keys.supervisors_key(), {token: (now - ago) * 1000 + prefix_owner.ALIVE_MS})


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
    """From ten minutes on; of each queue the oldest task."""
    configure()
    wait("mail", 14)
    wait("mail", 12)
    wait("fresh", 9)
    (found,) = looked().values()
    assert found.title == "queue mail: tasks wait"
    assert found.text == "queue mail: the oldest task has waited for 14 min (limit 10 min)"
    assert found.command == "manage.py asyncq queues show mail"
    assert found.value == pytest.approx(14 * 60, abs=5) and found.limit == 600
    assert found.since is not None


@pytest.mark.parametrize("held", ["queue", "task", "delayed", "follower", "remote"])
def test_what_may_wait_is_no_alert(held: str, configure: Configure) -> None:
    """What is paused, not due, waits for another task, or is run by another program."""
    configure()
    later = timezone.now() + timedelta(hours=1)
    values = {
        "delayed": {"run_after": later},
        "follower": {"after_id": make(TaskState.SUCCEEDED).id},
        "remote": {"is_remote": True},
    }
    row = wait("mail", 20, **values.get(held, {}))
    if held == "queue":
        pausing.pause(PauseKind.QUEUE, "mail")
    elif held == "task":
        pausing.pause(PauseKind.TASK, row.name)
    assert looked() == {}


def test_a_queue_whose_attempts_fail(configure: Configure, redis_client: Any) -> None:
    """A fifth of at least twenty in the last 15 minutes; of another queue, and of an hour ago, it does not count."""
    configure()
    count_attempts(redis_client, "mail", 300, 123, minutes_ago=2)
    count_attempts(redis_client, "few", 19, 19)
    count_attempts(redis_client, "well", 100, 19)
    count_attempts(redis_client, "old", 100, 100, minutes_ago=20)
    (found,) = looked().values()
    assert found.title == "queue mail: attempts fail"
    assert found.text == "queue mail: 41 % of 300 attempts of the last 15 minutes failed (limit 20 %)"
    assert found.command == "manage.py asyncq tasks failures --queue mail"
    assert (found.value, found.limit, found.since) == (0.41, 0.2, None)


def test_a_schedule_that_is_overdue(configure: Configure) -> None:
    """By five minutes; one that is disabled, removed or not due is not."""
    configure()
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
    assert found.text == "schedule nightly is overdue by 7 min (limit 5 min)"
    assert found.command == "manage.py asyncq schedules history nightly"


def test_nobody_has_reported(configure: Configure, redis_client: Any) -> None:
    """For two minutes: also to a host on which no worker runs, because Redis has the reports."""
    configure(silent_workers=120)
    note_supervisor(redis_client, "web-3", ago=30)
    assert looked() == {}
    redis_client.delete(keys.supervisors_key())
    note_supervisor(redis_client, "web-3", ago=185)
    found = looked()
    assert set(found) == {("silent_workers", ""), ("silent_workers", "web-3:7")}
    nobody = found["silent_workers", ""]
    assert nobody.text == "no worker has reported for 3 min 5 s (limit 2 min)" and nobody.since is not None
    assert nobody.hold_seconds == 0


def test_workers_that_were_stopped_are_missed_after_the_limit(
    configure: Configure, hook: Receiver, redis_client: Any
) -> None:
    """Nothing shows when they were stopped, so the looks count: a deployment is no alert."""
    configure(silent_workers=3, webhook=hook.url())
    alerter = Alerter()
    looks(alerter, 3)
    assert not hook.received
    with travel(seconds=3.2):
        alerter.tick()
    (document,) = hook.documents()
    assert document["alerts"][0]["text"] == "no worker is known (limit 3 s)"


def test_a_supervisor_that_has_vanished_is_named(configure: Configure, redis_client: Any) -> None:
    """Beside others that live; not one that a later one on its host has replaced, nor one that was stopped."""
    configure(silent_workers=120)
    note_supervisor(redis_client, "web-1", ago=2)
    note_supervisor(redis_client, "web-3", ago=190, pid=4711)
    note_supervisor(redis_client, "web-2", ago=600)
    note_supervisor(redis_client, "web-2", ago=1, started_ago=500)
    redis_client.zadd(keys.supervisors_key(), {"of another version": time.time() * 1000, "0.000:1:x": 1.0})
    found = [each for each in looked().values() if each.key.subject]
    assert [each.title for each in found] == ["host web-3: runworkers has vanished"]
    text = "host web-3: runworkers (process 4711) has not reported for 3 min 10 s (limit 2 min), and was not stopped"
    assert found[0].text == text


@pytest.mark.parametrize("lived", [0.0, 0.0004, 0.3])
def test_a_supervisor_that_died_as_it_began_is_named(configure: Configure, redis_client: Any, lived: float) -> None:
    """It has not replaced itself, however the moments are rounded; one that began right after it has."""
    configure(silent_workers=120)
    note_supervisor(redis_client, "web-1", ago=2)
    for host in ("web-2", "web-3"):
        note_supervisor(redis_client, host, ago=190, started_ago=190 + lived)
    note_supervisor(redis_client, "web-3", ago=1, started_ago=189.9, pid=8)
    found = [each for each in looked().values() if each.key.subject]
    assert [each.title for each in found] == ["host web-2: runworkers has vanished"]


def test_a_supervisor_that_stopped_leaves_no_trace_and_one_that_died_an_hour(redis_client: Any) -> None:
    """The script that each living supervisor calls keeps the dead ones for that long, and counts them no more."""
    database = identity.ensure()
    for ago in (3_500, 3_700):
        note_supervisor(redis_client, f"host-{ago}", ago=ago + 15)
    now = redis_clock.seconds()
    token = prefix_owner.token_of("here", 1, now)
    prefix_owner.note_supervisor(database, token, alive_ms=prefix_owner.ALIVE_MS, may_take=True)
    # It has taken the prefix, and with it nobody else's supervisors.
    assert [each.host for each in prefix_owner.supervisors()] == ["here"]
    for ago in (3_500, 3_700):
        note_supervisor(redis_client, f"host-{ago}", ago=ago + 15)
    found = prefix_owner.note_supervisor(database, token, alive_ms=prefix_owner.ALIVE_MS)
    assert found.supervisors == 1
    known = {each.host: each.is_alive for each in prefix_owner.supervisors()}
    assert known == {"here": True, "host-3500": False}
    prefix_owner.forget_supervisor(token)
    assert [each.host for each in prefix_owner.supervisors()] == ["host-3500"]


def test_a_supervisor_that_stops_takes_those_with_it_that_it_had_replaced(redis_client: Any) -> None:
    """Otherwise they would be missed from then on; of another host, and later ones, are."""
    for host, ago in (("web-1", 100), ("web-1", 20), ("web-2", 100)):
        note_supervisor(redis_client, host, ago=ago, pid=ago)
    token = prefix_owner.token_of("web-1", 9, redis_clock.seconds() - 50)
    prefix_owner.forget_supervisor(token)
    assert {(each.host, each.pid) for each in prefix_owner.supervisors()} == {("web-1", 20), ("web-2", 100)}


def test_runworkers_whose_processes_do_not_start_is_an_alert(configure: Configure, redis_client: Any) -> None:
    """It reports, but nothing runs a task."""
    configure(silent_workers=120)
    note_supervisor(redis_client, "web-1", ago=1)
    (found,) = looked().values()
    assert found.text == "runworkers runs, but none of its worker processes does (limit 2 min)"
    assert found.hold_seconds == 120


def test_redis_that_is_unreachable_is_an_alert(own_redis: EmbeddedRedis, configure: Configure) -> None:
    """What the database knows is found too."""
    configure(silent_workers=120)
    wait()
    own_redis.kill()
    findings = Alerter().looker.look()
    texts = [each.text for each in findings.alerts()]
    assert texts[0] == f"Redis is unreachable from {socket.gethostname()}" and texts[1].startswith("queue mail:")
    assert len(texts) == 2
    assert not findings.is_over(key_of(AlertKind.FAILURE_RATIO, "mail", "default"))
    assert findings.is_over(key_of(AlertKind.OVERDUE_SCHEDULES, "nightly"))


def test_a_database_that_is_unreachable_is_an_alert(configure: Configure) -> None:
    """Nothing else of the database is judged."""
    configure()
    with database_unreachable():
        findings = Alerter().looker.look()
    assert [each.text for each in findings.alerts()] == [f"the database is unreachable from {socket.gethostname()}"]
    assert not findings.is_database_reachable
    assert not findings.is_over(key_of(AlertKind.OLDEST_WAITING, "mail", "default"))


def test_what_is_always_a_problem_is_an_alert(configure: Configure, redis_client: Any) -> None:
    """As for `asyncq health`."""
    configure()
    redis_client.set(keys.owner_key(), "00000000-0000-0000-0000-000000000007")
    with travel(seconds=30):
        identity.ensure()
        found = looked()
    assert {subject for kind, subject in found if kind == "mismatch"} == {
        "clocks",
        f"prefix {conf.current().key_prefix}",
    }
    assert not re.search(r"\d", found["mismatch", "clocks"].title)


@pytest.mark.parametrize("kind", ["failure_ratio", "oldest_waiting", "silent_workers", "overdue_schedules"])
def test_none_turns_a_limit_off(kind: str, configure: Configure, redis_client: Any) -> None:
    """The other three are found."""
    configure(silent_workers=120)
    wait()
    count_attempts(redis_client, "fails", 50, 50)
    late = timezone.now() - timedelta(minutes=7)
    Schedule.objects.create(name="late", task="tests.tasks.tidy", cron="0 4 * * *", next_occurrence_at=late)
    four = {"failure_ratio", "oldest_waiting", "silent_workers", "overdue_schedules"}
    assert {kind for kind, _ in looked()} == four
    configure(**{"silent_workers": 120, kind: None})
    assert {kind for kind, _ in looked()} == four - {kind}


def test_a_look_reads_no_finished_rows(configure: Configure) -> None:
    """Of tasks, those that are QUEUED; a few queries, whatever there is."""
    configure(silent_workers=120)
    for queue in ("a", "b", "c"):
        wait(queue)
        make(TaskState.SUCCEEDED, queue_name=queue)
    looker = Alerter().looker
    with CaptureQueriesContext(connections[writing_database(Alert)]) as queries:
        looker.look()
    asked = [each["sql"] for each in queries.captured_queries if "django_asyncq_taskrecord" in each["sql"]]
    assert len(asked) == 1 and re.search(r"state[`\"] = 0", asked[0])
    assert len(queries.captured_queries) <= 6


# --- when it is sent


def test_nothing_looks_without_anybody_to_say_it_to(configure: Configure) -> None:
    """No thread, no query."""
    configure()
    assert Alerter().channels == []
    service = MaintenanceService([], single_instance=True)
    assert "alerts" not in [loop.name for loop in service._loops]
    configure(mail=OPS)
    service = MaintenanceService([], single_instance=True)
    assert "alerts" in [loop.name for loop in service._loops]


def test_the_defaults_are_those_of_the_docs(settings: Any) -> None:
    """As the guide has them."""
    settings.ASYNCQ = {**settings.ASYNCQ, "ALERTS": {"mail": OPS}}
    found = alert_settings()
    assert (found.failure_ratio, found.oldest_waiting, found.silent_workers) == (0.2, 600, 120)
    assert (found.overdue_schedules, found.again, found.every) == (300, 4 * 3600, 60)
    settings.ASYNCQ = {**settings.ASYNCQ, "ALERTS": {"again": timedelta(hours=1), "oldest_waiting": None}}
    assert (alert_settings().again, alert_settings().oldest_waiting) == (3600, None)


def test_an_alert_is_sent_at_the_second_look(configure: Configure, hook: Receiver) -> None:
    """What a single look sees is none; by mail and to the webhook."""
    configure(webhook=hook.url("/T000/B000"), mail=OPS)
    row = wait("mail", 14)
    alerter = Alerter()
    alerter.tick()
    assert not hook.received and not mail.outbox
    with travel(seconds=1):
        alerter.tick()
    (received,) = hook.received
    assert received.path == "/T000/B000" and received.headers["content-type"] == "application/json; charset=utf-8"
    document = received.document
    (alert,) = document["alerts"]
    assert {name: alert[name] for name in ("kind", "backend", "subject", "limit", "is_repeated")} == {
        "kind": "oldest_waiting",
        "backend": "default",
        "subject": "mail",
        "limit": 600,
        "is_repeated": False,
    }
    assert alert["since"] == row.enqueued_at.isoformat() and alert["value"] == pytest.approx(840, abs=10)
    assert (document["project"], document["host"]) == (conf.current().key_prefix, socket.gethostname())
    assert document["over"] == [] and document["text"].startswith("asyncq: queue mail: tasks wait\n- queue mail: the")
    (sent,) = mail.outbox
    assert sent.subject == "[Django] asyncq: queue mail: tasks wait" and sent.from_email == "root@localhost"
    assert sent.to == OPS
    since = f"{row.enqueued_at:%Y-%m-%d %H:%M:%S} UTC"
    first, _, about, _ = sent.body.split("\n")
    assert first == (
        f"- queue mail: the oldest task has waited for 14 min (limit 10 min), since {since}; "
        "see: manage.py asyncq queues show mail"
    )
    assert socket.gethostname() in about and conf.current().key_prefix in about


def test_what_is_over_before_the_second_look_is_never_sent(configure: Configure, hook: Receiver) -> None:
    """And leaves no row."""
    configure(webhook=hook.url())
    wait()
    alerter = Alerter()
    alerter.tick()
    assert Alert.objects.count() == 1
    TaskRecord.objects.all().delete()
    looks(alerter, 3)
    assert not hook.received and not Alert.objects.exists()


def test_an_alert_that_lasts_is_sent_again_after_the_pause(configure: Configure, hook: Receiver) -> None:
    """Three seconds here, four hours by default; it says that it is not new."""
    configure(webhook=hook.url())
    wait()
    alerter = Alerter()
    with travel() as clock:
        for _ in range(9):
            alerter.tick()
            clock.move(seconds=0.5)
    first, second = hook.documents()
    assert not first["alerts"][0]["is_repeated"] and second["alerts"][0]["is_repeated"]
    assert second["text"].startswith("asyncq: still: queue mail: tasks wait\n- still: queue mail: the oldest")


def test_what_is_over_is_said_once(configure: Configure, hook: Receiver) -> None:
    """When it was not found for one and a half times the time between looks; then its row is deleted."""
    configure(webhook=hook.url(), mail=OPS)
    wait()
    alerter = Alerter()
    looks(alerter)
    TaskRecord.objects.all().delete()
    with travel(seconds=2) as clock:
        alerter.tick()
        assert len(hook.received) == 1
        clock.move(seconds=1)
        alerter.tick()
        clock.move(seconds=1)
        alerter.tick()
    _, document = hook.documents()
    (over,) = document["over"]
    assert (over["kind"], over["subject"], over["text"]) == ("oldest_waiting", "mail", "queue mail: tasks wait")
    assert over["lasted_seconds"] == pytest.approx(1, abs=0.3) and document["alerts"] == []
    assert document["text"].splitlines()[0] == "asyncq: over: queue mail: tasks wait"
    assert mail.outbox[1].subject == "[Django] asyncq: over: queue mail: tasks wait"
    assert "- over: queue mail: tasks wait; it was seen for 1 s, since 20" in mail.outbox[1].body
    assert not Alert.objects.exists()


def test_a_value_around_its_limit_does_not_come_and_go(configure: Configure, hook: Receiver, redis_client: Any) -> None:
    """An alert begins at the limit, and is over below three quarters of it."""
    configure(webhook=hook.url(), again=3600)
    alerter = Alerter()
    with travel() as clock:
        for failed in (25, 25, 18, 22, 16, 25, 16):
            count_attempts(redis_client, "mail", 100, failed)
            alerter.tick()
            clock.move(seconds=0.5)
        assert sum(bool(each["over"]) for each in hook.documents()) == 0
        for _ in range(4):
            count_attempts(redis_client, "mail", 100, 14)
            alerter.tick()
            clock.move(seconds=0.5)
    *alerts, over = hook.documents()
    assert [each["is_repeated"] for document in alerts for each in document["alerts"]] == [False]
    assert over["over"][0]["text"] == "queue mail: attempts fail"


def test_one_message_has_all_that_is_new(configure: Configure, hook: Receiver) -> None:
    """200 queues are one mail: the first is named, fifty are listed, the others are counted."""
    configure(webhook=hook.url(), mail=OPS)
    for number in range(200):
        wait(f"queue-{number:03}", 11 + number)
    looks(Alerter())
    (document,), (sent,) = hook.documents(), mail.outbox
    assert len(document["alerts"]) == 50 and document["more"] == 150
    assert sent.subject == "[Django] asyncq: queue queue-199: tasks wait, and 199 more"
    lines = sent.body.split("\n")
    assert lines[50] == "- and 150 more" and len(lines) == 54


def test_a_second_alert_is_a_message_of_its_own(configure: Configure, hook: Receiver) -> None:
    """It does not wait for the pause of the first, and does not repeat it."""
    configure(webhook=hook.url(), again=3600)
    wait("first")
    alerter = Alerter()
    looks(alerter)
    wait("second")
    looks(alerter)
    assert [[each["subject"] for each in document["alerts"]] for document in hook.documents()] == [
        ["first"],
        ["second"],
    ]


def test_of_two_senders_one_sends(configure: Configure, hook: Receiver) -> None:
    """Eight at the same moment: the leader, and what cron starts on other hosts."""
    configure(webhook=hook.url(), again=3600)
    for number in range(5):
        wait(f"queue-{number}")
    Alerter().tick()
    Alert.objects.update(first_seen_at=timezone.now() - LOOK)
    gate, failed = threading.Barrier(8), []

    def look() -> None:
        try:
            alerter = Alerter()
            gate.wait()
            alerter.tick()
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
    sent = [each["subject"] for document in hook.documents() for each in document["alerts"]]
    assert sorted(sent) == [f"queue-{number}" for number in range(5)]


def test_a_reservation_of_a_sender_that_died_expires(configure: Configure, hook: Receiver) -> None:
    """Until then no other sends; then another one does."""
    configure(webhook=hook.url(), again=3600)
    wait()
    alerter = Alerter()
    alerter.tick()
    until = timezone.now() + timedelta(seconds=2.5)
    Alert.objects.update(reserved_by="dead", reserved_until=until)
    with travel(seconds=1) as clock:
        alerter.tick()
        assert not hook.received
        clock.move(seconds=2)
        alerter.tick()
    assert len(hook.received) == 1 and not Alert.objects.get().reserved_by


def test_a_note_that_no_look_has_confirmed_for_a_day_is_dropped(configure: Configure, hook: Receiver) -> None:
    """After a long standstill nobody needs to read that something of last week is over."""
    configure(webhook=hook.url())
    old = timezone.now() - timedelta(days=2)
    Alert.objects.create(
        channel="webhook", kind="oldest_waiting", backend="default", subject="mail", title="x",
        first_seen_at=old, seen_at=old, sent_at=old,
    )  # fmt: skip
    Alerter().tick()
    assert not hook.received and not Alert.objects.exists()


def test_a_vanished_supervisor_is_over_when_its_host_reports_again(
    configure: Configure, hook: Receiver, redis_client: Any
) -> None:
    """That Redis has forgotten it does not mean so."""
    configure(webhook=hook.url(), silent_workers=60)
    note_supervisor(redis_client, "web-1", ago=1)
    note_supervisor(redis_client, "web-3", ago=100)
    alerter = Alerter()
    looks(alerter)
    assert [each["subject"] for each in hook.documents()[0]["alerts"]] == ["web-3:7"]
    redis_client.delete(keys.supervisors_key())
    note_supervisor(redis_client, "web-1", ago=1)
    with travel(seconds=3) as clock:
        alerter.tick()
        assert len(hook.received) == 1 and Alert.objects.filter(subject="web-3:7").exists()
        note_supervisor(redis_client, "web-3", ago=1, started_ago=2, pid=8)
        clock.move(seconds=1)
        alerter.tick()
    assert hook.documents()[1]["over"][0]["text"] == "host web-3: runworkers has vanished"


# --- while a store is unreachable


def test_redis_that_is_unreachable_is_said_and_paused_by_the_database(
    own_redis: EmbeddedRedis, configure: Configure, hook: Receiver
) -> None:
    """Two senders, one message; and one when it is back."""
    configure(webhook=hook.url(), again=3600)
    own_redis.stop()
    looks(Alerter())
    looks(Alerter())
    (document,) = hook.documents()
    assert [each["text"] for each in document["alerts"]] == [f"Redis is unreachable from {socket.gethostname()}"]
    own_redis.start()
    with travel(seconds=3):
        Alerter().tick()
    assert hook.documents()[1]["over"][0]["text"] == "Redis is unreachable"


def test_a_database_that_is_unreachable_is_said_from_memory(configure: Configure, hook: Receiver) -> None:
    """Once, and that it is over; nothing is said twice when it is back."""
    configure(webhook=hook.url(), mail=OPS)
    wait()
    alerter = Alerter()
    looks(alerter)
    with database_unreachable():
        looks(alerter, 3, 0.6)
    assert len(hook.received) == len(mail.outbox) == 2
    document = hook.documents()[1]
    assert [each["subject"] for each in document["alerts"]] == ["database"]
    TaskRecord.objects.all().delete()
    wait("mail")
    with travel(seconds=2.9):
        alerter.tick()
        assert mail.outbox[2].subject == "[Django] asyncq: over: the database is unreachable"
        alerter.tick()
    assert len(hook.received) == 3


def test_a_command_that_runs_again_and_again_says_it_once(configure: Configure, hook: Receiver, tmp_path: Path) -> None:
    """A file keeps what a process forgets, and is deleted afterwards."""
    configure(webhook=hook.url(), again=3600)
    path = tmp_path / "new" / "notes.json"
    with database_unreachable(), travel() as clock:
        for _ in range(4):
            Alerter(local=LocalNotes(path)).tick()
            clock.move(seconds=1)
    assert len(hook.received) == 1 and path.stat().st_mode & 0o077 == 0
    with travel(seconds=6):
        Alerter(local=LocalNotes(path)).tick()
    assert hook.documents()[1]["over"][0]["subject"] == "database"
    assert [each.name for each in path.parent.iterdir() if "notes" in each.name] == []


@pytest.mark.parametrize(
    "written",
    [
        "",
        "[]",
        "{",
        '{"webhook": 5}',
        '{"webhook": {"title": 1, "first_seen_at": 5, "seen_at": "x", "sent_at": []}}',
        "x" * 99_999,
    ],
)
def test_a_file_that_cannot_be_read_is_as_none(
    written: str, configure: Configure, hook: Receiver, tmp_path: Path
) -> None:
    """It is written anew."""
    configure(webhook=hook.url())
    path = tmp_path / "notes.json"
    path.write_text(written)
    with database_unreachable():
        looks(Alerter(local=LocalNotes(path)))
    assert len(hook.received) == 1 and json.loads(path.read_text())["webhook"]["sent_at"]


# --- what cannot be sent


@pytest.mark.parametrize(
    ("path", "text"), [("/500/SECRET", "status 500"), ("/redirect/SECRET", "status 307, and no redirect is followed")]
)
def test_a_webhook_that_refuses_is_tried_again(
    path: str, text: str, configure: Configure, hook: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """At the next look; the log says so without the address, and a redirect leads nowhere."""
    caplog.set_level(logging.DEBUG)
    configure(webhook=hook.url(path), again=3600)
    wait()
    alerter = Alerter()
    looks(alerter, 3)
    assert len(hook.received) == 2 and {each.path for each in hook.received} == {path}
    assert Alert.objects.get().sent_at is None and not Alert.objects.get().reserved_by
    hook.answer = 204
    looks(alerter, 2)
    assert len(hook.received) == 3 and Alert.objects.get().sent_at is not None
    (line,) = [each.message for each in caplog.records if "could not be sent" in each.message]
    assert f"webhook of http://127.0.0.1:{hook.server_port}: {text}" in line
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize("way", ["hang", "drip"])
def test_a_webhook_that_does_not_answer_costs_a_bounded_time(
    way: str, configure: Configure, hook: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Five seconds in all, here one; and no second request while the first one hangs. Mail is sent all the same."""
    monkeypatch.setattr(webhook.Webhook, "seconds", 1.0)
    configure(webhook=hook.url(f"/{way}/SECRET"), mail=OPS)
    wait()
    alerter = Alerter()
    alerter.tick()
    began = time.monotonic()
    with travel(seconds=1) as clock:
        alerter.tick()
        assert 0.9 < time.monotonic() - began < 4
        assert len(mail.outbox) == 1
        if way == "drip":
            clock.move(seconds=1)
            alerter.tick()
            assert len(hook.received) == 1
            assert "still not finished" in alerter.channels[0].send(message.compose_test(timezone.now()))
    assert "no answer within 1 s" in caplog.text or "timed out" in caplog.text
    assert "SECRET" not in caplog.text


def test_a_webhook_that_nobody_serves_is_named_by_its_host(
    configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    """A refused connection, and a host that does not exist."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        configure(webhook=f"http://127.0.0.1:{port}/SECRET?token=SECRET")
        (failed,) = Alerter().send_test()
    assert failed.startswith(f"webhook of http://127.0.0.1:{port}: ConnectionRefusedError: ")
    configure(webhook="http://no-such-host.invalid/SECRET")
    (failed,) = Alerter().send_test()
    assert failed.startswith("webhook of http://no-such-host.invalid: gaierror: ")
    assert "SECRET" not in caplog.text + failed


def test_an_answer_is_not_read_without_end(configure: Configure, hook: Receiver) -> None:
    """Five megabytes of it are no error."""
    configure(webhook=hook.url("/huge"))
    assert Alerter().send_test() == []


def test_a_mail_server_that_refuses_is_tried_again(
    configure: Configure, hook: Receiver, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a second message to the webhook, and with one line a minute in the log."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        settings.EMAIL_PORT = taken.getsockname()[1]
        settings.EMAIL_HOST = "127.0.0.1"
        settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
        configure(webhook=hook.url(), mail=OPS, again=3600)
        wait()
        alerter = Alerter()
        looks(alerter, 4)
    assert len(hook.received) == 1
    lines = [each.message for each in caplog.records if "could not be sent" in each.message]
    assert len(lines) == 1 and "could not be sent by mail: ConnectionRefusedError: " in lines[0]
    settings.EMAIL_BACKEND = "django.core.mail.backends.locmem.EmailBackend"
    looks(alerter)
    assert len(mail.outbox) == 1 and len(hook.received) == 1


def test_a_log_line_comes_once_a_minute(
    configure: Configure, hook: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """For each channel."""
    monkeypatch.setattr(alerter_module, "SECONDS_PER_LOG_LINE", 0.0)
    configure(webhook=hook.url("/500"))
    alerter = Alerter()
    for _ in range(3):
        assert alerter.send_test()
    assert caplog.text.count("could not be sent") == 3


def test_a_mail_server_that_says_nothing_costs_a_bounded_time(
    configure: Configure, hook: Receiver, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Django's EMAIL_TIMEOUT is none by default. The webhook is sent all the same."""
    monkeypatch.setattr(Mail, "seconds", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", silent.getsockname()[1]
        settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
        configure(webhook=hook.url(), mail=OPS)
        alerter = Alerter()
        assert alerter.send_test() == ["mail: no answer within 0.5 s"]
        assert alerter.send_test() == ["mail: the attempt before has still not finished"]
        assert len(hook.received) == 2
        connection, _ = silent.accept()
        connection.close()


@pytest.mark.parametrize("error", [smtplib.SMTPAuthenticationError(535, b"no"), SystemExit(3), KeyError("x")])
def test_whatever_a_mail_backend_raises_is_a_failure(
    error: BaseException, configure: Configure, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the project's code."""
    settings.EMAIL_BACKEND = "tests.test_alerts.Raises"
    monkeypatch.setattr(Raises, "error", error)
    configure(mail=OPS)
    (failed,) = Alerter().send_test()
    assert failed.startswith(f"mail: {type(error).__name__}")


class Raises:
    """A mail backend that only raises."""

    error: BaseException = ValueError()

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def send_messages(self, messages: Any) -> int:
        """Raise."""
        raise self.error


def test_a_process_that_stops_waits_for_no_answer() -> None:
    """Neither for one that it waits for, nor for a later one."""
    call, never = BoundedCall("test", 60), threading.Event()
    threading.Timer(0.2, call.stop).start()
    began = time.monotonic()
    for _ in range(2):
        assert isinstance(call.run(lambda: never.wait(30)), NotFinished)
    assert time.monotonic() - began < 10
    never.set()


# --- what a message says


NASTY = "a\r\nBcc: x@example.com\x1b[31m\u202e<!channel> & more"


def test_odd_names_break_no_header_and_no_line(configure: Configure, hook: Receiver) -> None:
    """They are shown as escapes; in the text of a webhook they are no link and no mention."""
    configure(webhook=hook.url(), mail=OPS)
    late = timezone.now() - timedelta(minutes=7)
    Schedule.objects.create(name=NASTY, task="tests.tasks.tidy", cron="0 4 * * *", next_occurrence_at=late)
    Schedule.objects.create(name="--help", task="tests.tasks.tidy", cron="0 4 * * *", next_occurrence_at=late)
    looks(Alerter())
    (sent,) = mail.outbox
    assert "\n" not in sent.subject and sent.to == OPS and not sent.bcc
    sent.message()
    assert sent.body.count("\n") == 4 and "\x1b" not in sent.body and "\u202e" not in sent.body
    assert r"schedule a\r\nBcc: x@example.com\x1b[31m\u202e<!channel> & more is overdue" in sent.body
    assert "manage.py asyncq schedules history -- --help" in sent.body
    text = hook.documents()[0]["text"]
    assert "&lt;!channel&gt; &amp; more" in text and "<" not in text


def test_a_message_has_no_argument_and_no_error(configure: Configure, hook: Receiver) -> None:
    """Names only."""
    configure(webhook=hook.url(), mail=OPS)
    wait(args=["SECRET"], kwargs={"x": "SECRET"}, errors=[{"message": "SECRET"}], last_exception="a.SECRET")
    looks(Alerter())
    assert "SECRET" not in mail.outbox[0].body + json.dumps(hook.documents())


def test_a_long_title_is_cut_in_the_subject(configure: Configure) -> None:
    """A header has its limits; the line has the whole name."""
    configure(mail=OPS)
    late = timezone.now() - timedelta(minutes=7)
    Schedule.objects.create(name="x" * 200, task="tests.tasks.tidy", cron="0 4 * * *", next_occurrence_at=late)
    looks(Alerter())
    assert len(mail.outbox[0].subject) < 230 and "x" * 200 in mail.outbox[0].body


def test_what_explains_the_others_stands_first() -> None:
    """A store, then workers, then what waits."""
    found = {
        kind: Finding(Key(kind, "", "x"), kind, kind, "")
        for kind in ("failure_ratio", "oldest_waiting", "overdue_schedules", "mismatch", "silent_workers", "store")
    }
    findings = Findings({each.key: each for each in found.values()})
    assert [each.title for each in findings.alerts()] == [
        "store", "silent_workers", "mismatch", "oldest_waiting", "overdue_schedules", "failure_ratio",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (-3, "0 s"), (59.4, "59 s"), (60, "1 min"), (185, "3 min 5 s"), (840, "14 min"), (845, "14 min"),
     (3_600, "1 h"), (11_100, "3 h 5 min"), (90_000, "1 d 1 h"), (8_640_000, "100 d")],
)  # fmt: skip
def test_spans(seconds: float, text: str) -> None:
    """In two units at most."""
    assert span(seconds) == text


@pytest.mark.parametrize(
    ("ratio", "text"), [(0, "0 %"), (0.002, "0.2 %"), (0.2, "20 %"), (0.414, "41 %"), (1, "100 %")]
)
def test_percents(ratio: float, text: str) -> None:
    """Nothing is rounded to zero."""
    assert percent(ratio) == text


# --- settings


GOOD: list[dict[str, Any]] = [
    {},
    {"mail": []},
    {"mail": OPS, "webhook": ""},
    {"mail": ("a@b",), "webhook": "https://hooks.example/T000/B000?x=1"},
    {"webhook": "http://127.0.0.1:8065/hooks/abc", "failure_ratio": 1, "again": 60},
    {"webhook": "http://[::1]:8065/x", "oldest_waiting": timedelta(minutes=5), "silent_workers": 15},
    {"failure_ratio": None, "oldest_waiting": None, "silent_workers": None, "overdue_schedules": None},
    {"every": 1, "again": timedelta(days=1), "overdue_schedules": 0.5},
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
    ({"silent_workers": 14}, "E173", "['silent_workers']"),
    ({"overdue_schedules": timedelta(0)}, "E173", "['overdue_schedules']"),
    ({"again": None}, "E173", "['again'] = None is not valid"),
    ({"again": -1}, "E173", "['again']"),
    ({"every": 0.5}, "E173", "['every']"),
    ({"every": timedelta(hours=2)}, "E173", "['every']"),
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


@pytest.mark.parametrize("written", GOOD)
def test_good_settings_are_accepted(written: dict[str, Any], settings: Any) -> None:
    """And can be read."""
    settings.ASYNCQ = {**settings.ASYNCQ, "ALERTS": written}
    assert [*checks.check_settings(), *checks.check_alerts()] == []
    alert_settings()


@pytest.mark.parametrize(("written", "id", "text"), BAD)
def test_bad_settings_are_named_with_the_remedy(written: Any, id: str, text: str, settings: Any) -> None:
    """And without the address of the webhook."""
    settings.ASYNCQ = {**settings.ASYNCQ, "ALERTS": written}
    (found,) = [*checks.check_settings(), *checks.check_alerts()]
    assert found.id == f"asyncq.{id}" and text in found.msg and found.hint
    assert "SECRET" not in f"{found.msg} {found.hint}"


def test_each_fault_is_named(settings: Any) -> None:
    """Not only the first one."""
    alerts = {"mail": ["a", "b@c", 7], "webhook": "x", "colour": 1, "again": 0}
    settings.ASYNCQ = {**settings.ASYNCQ, "ALERTS": alerts}
    assert [each.id for each in checks.check_alerts()] == [
        "asyncq.E174", "asyncq.E174", "asyncq.E175", "asyncq.E173", "asyncq.E173",
    ]  # fmt: skip


def test_nobody_can_change_an_alert_by_hand() -> None:
    """No page of the admin, no permission."""
    assert not admin.site.is_registered(Alert) and Alert._meta.default_permissions == ()


# --- the command


def run(*arguments: str) -> str:
    """Run `asyncq alerts`; return what it prints."""
    out = StringIO()
    call_command("asyncq", "alerts", *arguments, stdout=out, stderr=StringIO())
    return out.getvalue()


def test_the_command_says_what_is_wrong_by_its_exit_code(configure: Configure) -> None:
    """It changes nothing, and needs nobody to send to."""
    configure()
    assert run("check") == "no alerts\n"
    assert json.loads(run("check", "--json")) == {"alerts": [], "not_sent": []}
    wait("mail", 14)
    with pytest.raises(CommandError, match=r"^1 alert$") as caught:
        run("check")
    assert caught.value.returncode == 1
    assert not Alert.objects.exists()


def test_the_command_prints_json(configure: Configure) -> None:
    """With the same keys as the webhook gets."""
    configure()
    wait("mail", 14)
    out = StringIO()
    with pytest.raises(CommandError):
        call_command("asyncq", "alerts", "check", "--json", stdout=out)
    (found,) = json.loads(out.getvalue())["alerts"]
    assert set(found) == {"kind", "backend", "subject", "value", "limit", "since", "text", "command"}


def test_the_command_needs_somebody_to_send_to(configure: Configure) -> None:
    """With the name of the settings."""
    configure()
    for arguments in (["check", "--send"], ["test"]):
        with pytest.raises(CommandError, match=r"ASYNCQ\['ALERTS'\] has neither 'mail' nor 'webhook'"):
            run(*arguments)


def test_the_command_names_what_is_wrong_in_the_settings(settings: Any) -> None:
    """It runs without Django's checks, some of which need the database."""
    for written, text in (("x", "is a str, not a dictionary"), ({"mail": ["ops"]}, "has 'ops', which is no address")):
        settings.ASYNCQ = {**settings.ASYNCQ, "ALERTS": written}
        with pytest.raises(CommandError, match=text):
            run("check")


@pytest.mark.parametrize("verb", ["check", "test"])
def test_the_command_without_tables_says_to_migrate(verb: str, hook: Receiver, tmp_path: Path) -> None:
    """It does not take that for an outage."""
    empty = f"{tmp_path}/empty.sqlite3"
    alerts = json.dumps({"webhook": hook.url()})
    done = alerts_of(
        {"DATABASE_URL": f"sqlite:///{empty}", "ASYNCQ_TEST_OWN_DATABASE": empty, "ASYNCQ_TEST_ALERTS": alerts}, verb
    )
    assert done.returncode == 1 and "run `manage.py migrate`" in done.stderr
    assert "unreachable" not in done.stdout + done.stderr


def test_a_test_message_shows_that_messages_arrive(configure: Configure, hook: Receiver) -> None:
    """Or why they do not."""
    configure(webhook=hook.url(), mail=OPS)
    assert run("test") == f"Sent by webhook of http://127.0.0.1:{hook.server_port} and by mail.\n"
    assert hook.documents()[0]["text"] == "asyncq: a test of alerts" and "Nothing is wrong" in mail.outbox[0].body
    hook.answer = 403
    with pytest.raises(CommandError, match=r"not sent by webhook of .*: status 403"):
        run("test")


def test_the_command_and_the_leader_send_once(configure: Configure, hook: Receiver) -> None:
    """The command of cron notes in the same rows."""
    configure(webhook=hook.url(), again=3600)
    wait()
    with travel() as clock:
        for _ in range(2):
            assert "queue mail: the oldest task has waited" in run("check", "--send")
            clock.move(seconds=1)
        Alerter().tick()
    assert len(hook.received) == 1


def test_a_message_that_was_not_sent_is_an_error(configure: Configure, hook: Receiver) -> None:
    """One that was sent is none, whatever is wrong: cron would send mail about it each time."""
    configure(webhook=hook.url("/500/SECRET"))
    wait()
    Alerter().tick()
    with travel(seconds=1), pytest.raises(CommandError) as caught:
        run("check", "--send")
    assert str(caught.value) == f"not sent by webhook of http://127.0.0.1:{hook.server_port}: status 500"


def alerts_of(variables: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `asyncq alerts` in a process of its own, as cron does."""
    command = [sys.executable, "-m", "django", "asyncq", "alerts", *arguments]
    env = environment(**variables)
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)


def test_cron_says_once_that_the_database_is_unreachable(configure: Configure, hook: Receiver, tmp_path: Path) -> None:
    """In processes of its own, which end after each look."""
    alerts = {"every": 1, "webhook": hook.url(), "silent_workers": None}
    nowhere = f"{tmp_path}/nowhere/x.sqlite3"
    wrong = {"DATABASE_URL": f"sqlite:///{nowhere}", "ASYNCQ_TEST_OWN_DATABASE": nowhere}
    variables = {"ASYNCQ_TEST_ALERTS": json.dumps(alerts), "ASYNCQ_TEST_LOCK_DIR": str(tmp_path / "locks")}
    for _ in range(3):
        done = alerts_of({**variables, **wrong}, "check", "--send")
        assert done.returncode == 0 and "the database is unreachable from" in done.stdout, done.stderr
        assert "Traceback" not in done.stderr
    assert len(hook.received) == 1
    wait_until(lambda: alerts_of(variables, "check", "--send").returncode == 0 and len(hook.received) == 2, "the end")
    assert hook.documents()[1]["over"][0]["text"] == "the database is unreachable"


# --- real workers


def test_the_leader_looks_and_sends(hook: Receiver, tmp_path: Path) -> None:
    """What waits because no worker serves its queue, by both channels; then that it is over."""
    alerts = {"every": 1, "webhook": hook.url("/T000/SECRET"), "mail": OPS[:1], "oldest_waiting": 0.5}
    variables = {"ASYNCQ_TEST_ALERTS": json.dumps(alerts), "ASYNCQ_TEST_MAIL_FOLDER": str(tmp_path / "mail")}
    tasks.add.using(queue_name="unserved").enqueue(1)
    with workers(tmp_path, "--queues", "default", **variables) as fleet:
        wait_until(lambda: hook.received, "the alert")
        (alert,) = hook.documents()[0]["alerts"]
        assert (alert["kind"], alert["subject"]) == ("oldest_waiting", "unserved")
        wait_until(lambda: [*(tmp_path / "mail").glob("*.log")], "the mail")
        TaskRecord.objects.all().delete()
        wait_until(lambda: len(hook.received) == 2, "the end of it")
        assert hook.documents()[1]["over"][0]["subject"] == "unserved"
        wait_until(lambda: not Alert.objects.exists(), "no rows")
        assert fleet.stop() == 0
    assert "SECRET" not in fleet.output() and "alerts sent by mail: 1 wrong, 0 over" in fleet.output()
    (written,) = {path.read_text().split("\n-----")[0] for path in sorted((tmp_path / "mail").glob("*.log"))[:1]}
    assert "Subject: [Django] asyncq: queue unserved: tasks wait" in written


def test_a_webhook_that_hangs_stalls_nothing(hook: Receiver, tmp_path: Path) -> None:
    """Tasks are forwarded and run meanwhile, and the supervisor stops in time."""
    alerts = {"every": 1, "webhook": hook.url("/drip"), "oldest_waiting": 0.5}
    tasks.add.using(queue_name="unserved").enqueue(1)
    with workers(tmp_path, "--queues", "default", ASYNCQ_TEST_ALERTS=json.dumps(alerts)) as fleet:
        wait_until(lambda: hook.received, "the request that hangs")
        result = tasks.add.using(run_after=timedelta(seconds=1)).enqueue(1)
        wait_until(lambda: TaskRecord.objects.get(pk=result.id).state == TaskState.SUCCEEDED, "a task", 5)
        began = time.monotonic()
        assert fleet.stop() == 0
        assert time.monotonic() - began < 8
    assert len(hook.received) == 1


@pytest.mark.faults
def test_a_fleet_that_is_killed_is_missed_by_cron(hook: Receiver, tmp_path: Path) -> None:
    """And one of two hosts by the leader of the other, which says it once; then that it is back."""
    alerts = {"every": 1, "webhook": hook.url(), "silent_workers": 16}
    variables = {"ASYNCQ_TEST_ALERTS": json.dumps(alerts)}
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with workers(first, "--worker-id", "web-1", **variables) as leader:
        wait_until(
            lambda: "leadership acquired" in leader.output() or "this process leads" in leader.output(), "a leader"
        )
        with workers(second, "--worker-id", "web-2", **variables) as other:
            wait_until(lambda: len(prefix_owner.supervisors()) == 2, "two supervisors")
            other.process.kill()
            for pid in other.children():
                subprocess.run(["kill", "-9", str(pid)], check=False)
            wait_until(lambda: hook.received, "the alert of the leader", 40)
        assert [each["text"].split(" (")[0] for each in hook.documents()[0]["alerts"]] == ["host web-2: runworkers"]
        with workers(second, "--worker-id", "web-2", **variables) as again:
            wait_until(lambda: len(hook.received) == 2, "the end of it")
            assert hook.documents()[1]["over"][0]["text"] == "host web-2: runworkers has vanished"
            again.stop()
        leader.process.kill()
    wait_until(lambda: alerts_of(variables, "check", "--send") and len(hook.received) == 3, "the alert of cron")
    assert hook.documents()[2]["alerts"][0]["text"].startswith("no worker has reported for")


@pytest.mark.faults
def test_the_last_leader_says_that_redis_is_unreachable(
    own_redis: EmbeddedRedis, hook: Receiver, tmp_path: Path
) -> None:
    """Long after its lock has expired; and that it is over."""
    alerts = {"every": 1, "webhook": hook.url(), "oldest_waiting": None}
    with workers(tmp_path, ASYNCQ_TEST_ALERTS=json.dumps(alerts), ASYNCQ_TEST_LOCK_TTL="3") as fleet:
        wait_until(lambda: "leadership acquired" in fleet.output(), "a leader")
        own_redis.stop()
        time.sleep(4)  # the lock expires
        wait_until(lambda: hook.received, "the alert")
        assert hook.documents()[0]["alerts"][0]["text"].startswith("Redis is unreachable from")
        own_redis.start()
        wait_until(lambda: len(hook.received) > 1, "the end of it")
    assert hook.documents()[1]["over"][0]["text"] == "Redis is unreachable"


def test_the_file_of_notes_lies_beside_the_lock_files(settings: Any) -> None:
    """Under a name of the project's own."""
    settings.ASYNCQ = {**settings.ASYNCQ, "KEY_PREFIX": "shop:eu/..", "TASK_LOCK_DIR": "/var/lock/shop"}
    assert file_of_notes() == Path("/var/lock/shop/alerts-shop_eu_...json")

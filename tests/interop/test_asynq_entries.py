"""Schedules as asynq's own tools show them: the bytes, the keys, and that they are only a copy of the rows."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from django_asyncq.broker import Broker
from django_asyncq.broker.keys import prefix
from django_asyncq.broker.message import (
    SchedulerEnqueueEvent,
    SchedulerEntry,
    UndecodableMessage,
    decode_scheduler_entry,
)
from django_asyncq.exceptions import BrokerUnavailable
from django_asyncq.interop import asynq_display
from django_asyncq.interop.asynq_display import SchedulerEntries, entry_of, go_duration
from django_asyncq.models import Occurrence, Schedule
from django_asyncq.scheduling.scheduler import Fired, Scheduler
from django_asyncq.testing import EmbeddedRedis

from .. import tasks  # noqa: F401 - registers them

FIXTURES = Path(__file__).parent.parent / "fixtures" / "asynq"
NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def captured(fixture: str, message: str) -> tuple[bytes, dict[str, Any], list[str]]:
    """Return the captured bytes of a message, its fields, and its repeated options."""
    for key in json.loads((FIXTURES / f"{fixture}.json").read_text())["keys"]:
        for position, decoded in enumerate(key.get("decoded", [])):
            if decoded["message"] == message:
                items = key.get("items_left_to_right") or [member["member"] for member in key["members"]]
                fields = decoded["fields_in_wire_order"]
                values = {field["name"]: field["value"] for field in fields}
                options = [field["value"] for field in fields if field["name"] == "enqueue_options"]
                return bytes.fromhex(items[position]["hex"]), values, options
    raise AssertionError(f"{fixture} has no {message}")


def moment(value: dict[str, int]) -> datetime:
    """A captured timestamp, cut from Go's nanoseconds to Python's microseconds."""
    return datetime.fromtimestamp(value["seconds"], UTC) + timedelta(microseconds=value.get("nanos", 0) // 1000)


@pytest.mark.parametrize("fixture", ["scheduler-entry", "scheduler-entry-never-fired"])
def test_entries_are_written_as_go_writes_them(fixture: str) -> None:
    """Byte for byte. A schedule that never fired has Go's zero time."""
    data, values, options = captured(fixture, "SchedulerEntry")
    previous = values["prev_enqueue_time"]
    entry = SchedulerEntry(
        id=values["id"],
        spec=values["spec"],
        type=values["task_type"],
        payload=bytes.fromhex(values["task_payload"]["hex"]),
        options=tuple(options),
        next_at=moment(values["next_enqueue_time"]),
        previous_at=moment(previous) if previous["seconds"] > 0 else None,
    )
    assert entry.encode() == data
    assert decode_scheduler_entry(data) == entry


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x01\xff", b"\x2a\x01\xff", b"\x32\x02\x08", b"\x0a\x05ab"])
def test_an_entry_that_nobody_can_have_written_is_refused(data: bytes) -> None:
    """Cut, or no UTF-8, also within a time."""
    with pytest.raises(UndecodableMessage):
        decode_scheduler_entry(data)


def test_a_time_that_no_datetime_holds_is_none() -> None:
    """As of servers; a field of another type is as if it were not there."""
    assert decode_scheduler_entry(b"\x32\x07\x08" + b"\xff" * 5 + b"\x7f").next_at is None
    assert decode_scheduler_entry(b"\x08\x05\x28\x01").id == ""


def test_events_are_written_as_go_writes_them() -> None:
    """Except for the nanoseconds below a microsecond, which Python does not have."""
    data, values, _ = captured("scheduler-entry", "SchedulerEnqueueEvent")
    nanos = values["enqueue_time"]["nanos"]
    event = SchedulerEnqueueEvent(task_id=values["task_id"], enqueued_at=moment(values["enqueue_time"]))
    assert event.encode()[:-4] == data[:-4]
    assert nanos // 1000 == moment(values["enqueue_time"]).microsecond


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (30, "30s"), (90, "1m30s"), (3600, "1h0m0s"), (86_405, "24h0m5s")]
)
def test_durations_are_written_as_go_writes_them(seconds: int, text: str) -> None:
    """In the form of `time.Duration.String`."""
    assert go_duration(seconds) == text


def make(**values: Any) -> Schedule:
    """A schedule of `tests.tasks.tally`."""
    row = Schedule(
        **{
            "name": "tally",
            "task": "tests.tasks.tally",
            "args": ["north"],
            "cron": "*/5 * * * *",
            "zone": "UTC",
            **values,
        }
    )
    row.plan_next(NOON)
    row.save()
    return row


@pytest.mark.django_db
def test_an_entry_describes_the_task() -> None:
    """Each option has a parenthesis, because asynq's inspector panics at one without."""
    row = make(cron="30 2 * * *", zone="Europe/Berlin")
    entry = entry_of(row)
    assert entry.id == str(row.pk)
    assert entry.spec == "CRON_TZ=Europe/Berlin 30 2 * * *"
    assert json.loads(entry.payload) == {"args": ["north"], "kwargs": {}}
    assert entry.options == ('Queue("default")', "MaxRetry(0)")
    assert entry_of(make(name="gone", task="tests.tasks.gone", cron="", interval_seconds=90)).spec == "@every 1m30s"
    assert entry_of(Schedule.objects.get(name="gone")).options == ()


@pytest.mark.django_db(transaction=True)
def test_a_beat_shows_every_firing_schedule_until_the_next_beat_is_overdue() -> None:
    """The newest list replaces others. An invalid schedule is skipped. A clean stop removes all but the events."""
    client = Broker().client
    row = make()
    Schedule.objects.filter(pk=make(name="bad").pk).update(zone="Mars/Olympus")
    make(name="off", enabled=False)
    fired = Scheduler(clock=lambda: NOON + timedelta(minutes=5)).fire_due().fired
    entries = SchedulerEntries()
    for _ in range(2):
        entries.beat()
        entries.add_events(fired)
    key = f"{prefix()}:schedulers:{{{entries.entry_list.id}}}"
    assert [member.decode() for member in client.zrange(f"{prefix()}:schedulers", 0, -1)] == [key]
    assert 15 < client.ttl(key) <= 20
    shown = Schedule.objects.get(pk=row.pk)
    shown.previous = NOON + timedelta(minutes=5)  # type: ignore[attr-defined]
    assert client.lrange(key, 0, -1) == [entry_of(shown).encode()]
    history = f"{prefix()}:scheduler_history:{row.pk}"
    assert client.zcard(history) == 2  # two events of one task
    assert str(Occurrence.objects.get(outcome="queued").task_id).encode() in client.zrange(history, 0, -1)[0]
    entries.clear()
    assert not client.exists(key, f"{prefix()}:schedulers")
    assert client.exists(history)
    row.delete()
    assert not client.exists(history)


@pytest.mark.django_db(transaction=True)
def test_only_the_latest_events_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand; here three."""
    monkeypatch.setattr("django_asyncq.broker.servers.EVENTS_KEPT", 3)
    entries = SchedulerEntries()
    for number in range(6):
        entries.entry_list.note("default", "e", b"event %d" % number, number)
    assert Broker().client.zrange(f"{prefix()}:scheduler_history:e", 0, -1) == [b"event 3", b"event 4", b"event 5"]


@pytest.mark.django_db(transaction=True)
def test_an_outage_of_redis_is_raised_to_the_caller(own_redis: EmbeddedRedis) -> None:
    """The next beat shows the schedule again."""
    row = make()
    entries = SchedulerEntries()
    own_redis.kill()
    for verb in (entries.beat, entries.clear, lambda: entries.add_events([Fired(row, NOON, row.pk)])):
        with pytest.raises(BrokerUnavailable):
            verb()
    own_redis.start()
    entries.beat()
    assert Broker().client.zcard(f"{prefix()}:schedulers") == 1


@pytest.mark.django_db(transaction=True)
def test_a_schedule_that_cannot_be_shown_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its error is logged once, not at every beat."""
    make(name="a")
    make(name="b")
    real = asynq_display.entry_of

    def shown(row: Schedule) -> SchedulerEntry:
        if row.name == "a":
            raise RuntimeError("odd")
        return real(row)

    monkeypatch.setattr(asynq_display, "entry_of", shown)
    entries = SchedulerEntries()
    entries.beat()
    entries.beat()
    key = f"{prefix()}:schedulers:{{{entries.entry_list.id}}}"
    assert Broker().client.llen(key) == 1
    assert caplog.text.count("the entry of schedule a failed") == 1

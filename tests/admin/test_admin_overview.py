"""The overview: the six questions, the chart with its table, and who may see it."""

from __future__ import annotations

import re
from bisect import bisect_left
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.utils import timezone

from django_asyncq import control
from django_asyncq.admin import history
from django_asyncq.admin.overview import SPANS, Chart, as_rate, buckets_of, nice_maximum
from django_asyncq.broker import Broker, redis_clock
from django_asyncq.broker.inspection import History
from django_asyncq.broker.reading import Reader
from django_asyncq.broker.run_counts import BOUNDS, RunCounting, RunCounts
from django_asyncq.control import start_bulk
from django_asyncq.models import Gate, PauseKind, TaskRecord, TaskState
from django_asyncq.observe.inspector import MinuteInfo
from django_asyncq.testing import EmbeddedRedis

from .. import tasks
from ..admin_cases import LIST, client_with, make

pytestmark = pytest.mark.django_db(transaction=True)

INDEX = "/admin/django_asyncq/"
NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def facts(response: Any, id: str) -> list[str]:
    """What a panel says."""
    (panel,) = [panel for panel in response.context["panels"] if panel.id == id]
    return [str(fact.text) for fact in panel.facts]


def test_the_six_questions_are_answered() -> None:
    """Each with a link to where it is looked at further."""
    now = timezone.now()
    make(last_exception="shop.CardDeclined")
    make(last_exception="shop.CardDeclined", finished_at=now - timedelta(days=3))
    make(TaskState.RUNNING, timeout_seconds=5, last_attempted_at=now - timedelta(hours=1))
    tasks.stamp.using(queue_name="mail").enqueue()
    control.pause(PauseKind.QUEUE, "mail")
    Gate.objects.create(name="narrow", limit=1)
    tasks.gated.using(gate="narrow").enqueue("narrow")
    start_bulk("retry", {"state": "failed"}, by="bob")
    client = client_with("view_taskrecord", "pause_queue")
    client.post(f"{LIST}pause/", {"kind": "task", "name": "tests.tasks.add", "confirmed": "yes", "reason": "why"})
    response = client.get(INDEX)
    assert facts(response, "failing") == ["1 time CardDeclined in add"]
    assert "The oldest task has waited for" in facts(response, "moving")[2]
    assert facts(response, "working")[0] == "0 workers are alive." and "1 task is stuck." in facts(response, "working")
    assert "Queue mail is paused." in facts(response, "bleeding") and "Gate narrow is full." in facts(
        response, "bleeding"
    )
    assert facts(response, "mending") == ["2 tasks have failed for good.", "Retry of many tasks: 0 of 2 done"]
    (entry,) = response.context["entries"]
    assert (entry.who, entry.what, entry.text) == ("ann", "task tests.tasks.add", "Paused: why")
    text = response.content.decode()
    assert "<h1>Overview</h1>" in text and "state=stuck" in text and f"{LIST}failures/" in text


def test_others_see_djangos_own_list_of_models() -> None:
    """Without a number of ours."""
    response = client_with("view_gate").get(INDEX)
    assert response.status_code == 200 and "Is it moving?" not in response.content.decode()
    assert "/admin/django_asyncq/gate/" in response.content.decode()


def test_the_overview_is_there_while_redis_is_unreachable(own_redis: EmbeddedRedis) -> None:
    """It says what is not known."""
    make()
    own_redis.kill()
    response = client_with("view_taskrecord").get(INDEX)
    text = response.content.decode()
    assert "Redis is unreachable" in text and "The chart cannot be shown" in text
    assert facts(response, "working") == ["It is not known."] and facts(response, "failing") == ["1 time Glitch in add"]


def test_a_large_history_is_cut() -> None:
    """The newest ten, of our models only; secrets are masked."""
    client = client_with("view_taskrecord")
    request: Any = type("Request", (), {"user": LogEntry._meta.get_field("user").related_model.objects.get()})()
    for number in range(12):
        history.note(request, TaskRecord, f"thing {number}", history.Did.CANCELLED_BECAUSE, reason="password=hunter22")
    entries = client.get(INDEX).context["entries"]
    assert len(entries) == 10 and entries[0].what == "thing 11" and "hunter22" not in entries[0].text


@pytest.mark.parametrize("span", ["1h", "24h", "7d", "x", ""])
def test_each_span_has_a_chart(span: str) -> None:
    """An unknown one is an hour."""
    tasks.add.enqueue(1)
    response = client_with("view_taskrecord").get(INDEX, {"span": span})
    chart = response.context["chart"]
    expected = SPANS.get(span, SPANS["1h"])
    assert chart.span is expected
    assert abs(len(chart.buckets) - expected.minutes / expected.per_bar) <= 1
    assert len(chart.rows) == len(chart.buckets) and "<svg" in response.content.decode()


def test_the_counters_of_redis_are_in_the_chart() -> None:
    """As means per minute; those of all queues together."""
    key = History("worker").keys("default").minutes(f"{datetime.now(UTC):%Y-%m-%dT%H}")
    client = History("worker").client
    minute = datetime.now(UTC).minute
    tasks.add.enqueue(1)
    client.hset(key, mapping={f"p{minute}": 40, f"f{minute}": 10})
    chart = client_with("view_taskrecord").get(INDEX).context["chart"]
    assert (chart.buckets[-1].processed, chart.buckets[-1].failed) == (40, 10)
    assert chart.maximum == 50 and chart.bars[-1].title.endswith("40 per minute, 10 of them failed")


# --- the chart


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata"])
@pytest.mark.parametrize("span", ["1h", "24h", "7d"])
def test_the_axis_of_times_has_labels_in_each_zone(zone: str, span: str) -> None:
    """Whose days begin at other times than those of UTC."""
    found = SPANS[span]
    with timezone.override(zone):
        labels = Chart(found, buckets_of(minutes([1] * found.minutes), found.per_bar)).x_labels
    assert 5 <= len(labels) <= 8, labels


def minutes(counts: list[int | None]) -> list[MinuteInfo]:
    """Minutes from noon on."""
    moments = [NOON + timedelta(minutes=number) for number in range(len(counts))]
    return [MinuteInfo(at, count, None if count is None else 0) for at, count in zip(moments, counts, strict=True)]


def test_bars_are_means_and_unknown_times_are_gaps() -> None:
    """Of several queues the sums."""
    found = buckets_of([*minutes([1, 2, 3, None, None, None]), *minutes([2, 0, 4, None, None, None])], 3)
    assert [(each.processed, each.failed) for each in found] == [(4.0, 0.0), (None, None)]
    chart = Chart(SPANS["1h"], found)
    assert len(chart.bars) == 1 and len(chart.gaps) == 1
    assert chart.rows[0][1:3] == ("–", "–") and chart.rows[1][1] == "4"


def test_a_bar_leads_to_the_tasks_of_its_time() -> None:
    """And not to newer ones; the failed part of it to the failed ones."""
    now = timezone.now().replace(second=0, microsecond=0)
    old, new = (make(enqueued_at=now - timedelta(minutes=ago)) for ago in (10, 2))
    key = History("worker").keys("default").minutes(f"{now - timedelta(minutes=10):%Y-%m-%dT%H}")
    minute = (now - timedelta(minutes=10)).minute
    Broker().register_queue("default")
    History("worker").client.hset(key, mapping={f"p{minute}": 1, f"f{minute}": 1})
    client = client_with("view_taskrecord")
    page = client.get(INDEX).content.decode()
    links = {unescape(each) for each in re.findall(rf'<a href="({LIST}[^"]*before=[^"]*)" tabindex="-1"', page)}
    assert len(links) == 2 and any("state=failed" in link for link in links)
    for link in links:
        listed = client.get(link).content.decode()
        assert str(old.pk) in listed and str(new.pk) not in listed


def test_a_chart_of_nothing_has_axes() -> None:
    """And no bar."""
    for counts in ([], [0, 0]):
        chart = Chart(SPANS["1h"], buckets_of(minutes(list(counts)), 1))
        assert chart.bars == [] and chart.y_labels == ["1", "0.5", "0"]


@pytest.mark.parametrize(("value", "top"), [(0, 1), (1, 1), (1.1, 2), (3, 5), (7, 10), (11, 20), (4_321, 5_000)])
def test_the_axis_ends_at_a_round_number(value: float, top: float) -> None:
    """Not below the highest bar."""
    assert nice_maximum(value) == top


def test_rates_are_short() -> None:
    """No false precision."""
    assert [as_rate(value) for value in (None, 0, 0.26, 3, 12.6, 4321.0)] == ["–", "0", "0.3", "3", "13", "4,321"]


def later(at: float) -> Reader[float]:
    """Three hours after a time."""
    yield from ()
    return at + 3 * 3600


def test_runs_by_task_of_the_last_hour_and_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """How they ended and how long half of them and 95 of 100 took, of all queues; a name is text, whatever it is."""
    client = client_with("view_taskrecord")
    assert "Runs by task" not in client.get(INDEX).content.decode()
    for queue, name, took, count in (
        ("mail", "shop.charge", 0.2, 19),
        ("late", "shop.charge", 20, 1),
        ("mail", "<b>", 2, 1),
    ):
        Broker().register_queue(queue)
        counts = RunCounts()
        counts.outcomes |= {"succeeded": count, "failed": 1, "timeout": 1, "retried": 2}
        counts.took.buckets[bisect_left(BOUNDS, took)] = count
        RunCounting().add(queue, {name: counts})
    at = redis_clock.seconds()
    monkeypatch.setattr("django_asyncq.broker.redis_clock.reading_seconds", lambda *_: later(at))
    assert "Runs by task" not in client.get(INDEX).content.decode()
    page = unescape(re.sub(r"<[^>]+>", " ", client.get(f"{INDEX}?span=7d").content.decode()))
    assert "In this hour and the 24 hours before." in page
    assert re.findall(r"shop.charge +28 +4 +14.3 % +4 +(\d+ ms) +(\d+ ms) +– +–", page) == [("179 ms", "250 ms")]
    assert re.search(r"<b> +5 +2 +40.0 % +2 ", page)

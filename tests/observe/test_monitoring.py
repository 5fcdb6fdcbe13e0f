"""Health and metrics: what they say, to whom, and that the alerts, the dashboard and the guide name what exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from prometheus_client.core import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from django_asyncq import checks, conf, control, lifecycle
from django_asyncq.broker import Broker, keys, ownership, redis_clock
from django_asyncq.broker.run_counts import RunCounting, RunCounts
from django_asyncq.contrib.prometheus import AsyncqCollector
from django_asyncq.models import (
    FailureReason,
    Gate,
    Occurrence,
    OccurrenceOutcome,
    PauseKind,
    Rate,
    Schedule,
    TaskRecord,
    TaskState,
)
from django_asyncq.observe import health, numbers, scale
from django_asyncq.observe.inspector import Inspector, MinuteInfo
from django_asyncq.testing import EmbeddedRedis

from .. import tasks
from ..admin_cases import client_with, make
from ..project.test_docs import blocks_of
from ..workers import wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)

DOCS = Path(__file__).parent.parent.parent / "docs"
TOKEN = "0123456789abcdef"
NAME = re.compile(r"\basyncq_[a-z_]+\b")
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """What one test has seen of the health is not shown to the next."""
    health._kept.clear()
    yield
    health._kept.clear()


@pytest.fixture
def token(settings: Any) -> dict[str, str]:
    """The header of a program that may read."""
    settings.ASYNCQ = {**settings.ASYNCQ, "MONITOR_TOKEN": TOKEN}
    return {"Authorization": f"Bearer {TOKEN}"}


def scraped(headers: dict[str, str]) -> Samples:
    """The samples of a scrape, by name and labels."""
    answer = Client().get("/metrics", headers=headers)
    assert answer.status_code == 200 and answer["Content-Type"].startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.content.decode())
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"asyncq_{name}", frozenset(labels.items())]


# --- health


def test_the_health_is_open_and_says_no_more_than_that() -> None:
    """To anybody; a HEAD too."""
    answer = Client().get("/health")
    assert (answer.status_code, answer.json()) == (200, {"healthy": True})
    assert answer["Cache-Control"] == "no-store" and Client().head("/health").status_code == 200
    assert Client().post("/health").status_code == 405


@pytest.mark.parametrize("query", ["max_silence=60", "max_age=0", "max_waiting=0"])
def test_a_limit_that_is_passed_is_503(query: str, token: dict[str, str]) -> None:
    """The problem is named to those who may read it."""
    tasks.add.enqueue(1)
    time.sleep(0.01)
    answer = Client().get(f"/health?{query}")
    assert (answer.status_code, answer.json()) == (503, {"healthy": False})
    found = Client().get(f"/health?{query}", headers=token).json()
    assert len(found["problems"]) == 1 and found["waiting"] == 1


@pytest.mark.parametrize("query", ["max_age=x", "max_age=-1", "max_waiting=nan", "max_silence=1e99", "max_age=%00"])
def test_a_limit_that_is_none_is_named(query: str) -> None:
    """Before either store is asked."""
    answer = Client().get(f"/health?{query}")
    assert answer.status_code == 400 and query.partition("=")[0] in answer.json()["error"]


@pytest.mark.parametrize("name", ["max_silense", "max_", "max_Age"])
def test_a_limit_that_there_is_not_is_refused(name: str) -> None:
    """A monitor with a typing error would never warn. Other parameters may be there, such as against caches."""
    answer = Client().get(f"/health?{name}=5")
    assert answer.status_code == 400
    assert answer.json()["error"] == f"no limit is called {name!r}: the limits are max_age, max_waiting, max_silence"
    assert Client().get("/health?t=5").status_code == 200


def test_an_unreachable_redis_is_503(own_redis: EmbeddedRedis, token: dict[str, str]) -> None:
    """No error page."""
    own_redis.kill()
    answer = Client().get("/health", headers=token)
    assert answer.status_code == 503 and "a store is unreachable" in answer.json()["problems"][0]


def test_many_requests_cost_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a second, for each set of limits; what is kept is bounded."""
    clock = [100.0]
    monkeypatch.setattr(health.time, "monotonic", lambda: clock[0])
    with CaptureQueriesContext(connection) as queries:
        Client().get("/health")
    assert queries.captured_queries
    with CaptureQueriesContext(connection) as queries:
        Client().get("/health")
    assert not queries.captured_queries
    clock[0] += 1.5
    with CaptureQueriesContext(connection) as queries:
        Client().get("/health")
    assert queries.captured_queries
    for number in range(2 * health.MOST_KEPT):
        Client().get(f"/health?max_age={number}")
    assert len(health._kept) <= health.MOST_KEPT


# --- who may read


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Bearer x", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x"])
def test_others_do_not_learn_that_there_are_metrics(header: str, token: dict[str, str]) -> None:
    """404, as for any address that is not there."""
    headers = {"Authorization": header} if header else {}
    assert Client().get("/metrics", headers=headers).status_code == 404
    assert set(Client().get("/health", headers=headers).json()) == {"healthy"}


def test_an_empty_token_opens_nothing() -> None:
    """The default."""
    assert conf.current().monitor_token == ""
    assert Client().get("/metrics", headers={"Authorization": "Bearer "}).status_code == 404


def test_staff_may_look() -> None:
    """Without a token."""
    assert client_with().get("/metrics").status_code == 200
    assert "problems" in client_with(name="bob").get("/health").json()
    assert client_with(name="eve").post("/metrics").status_code == 405


@pytest.mark.parametrize("bad", ["short", "x" * 15, "with space in it ok", 5, None, "ünïcödé" * 4])
def test_a_token_that_could_be_guessed_is_refused(bad: Any, settings: Any) -> None:
    """At the check, with the remedy."""
    settings.ASYNCQ = {**settings.ASYNCQ, "MONITOR_TOKEN": bad}
    (found,) = [each for each in checks.check_settings(None) if each.id == "asyncq.E171"]
    assert "16" in (found.hint or "")


# --- metrics


def test_the_numbers_are_those_of_both_stores(token: dict[str, str]) -> None:
    """Queues, tasks, gates and schedules."""
    now = timezone.now()
    for _ in range(3):
        tasks.stamp.using(queue_name="mail").enqueue()
    tasks.stamp.using(queue_name="mail", run_after=timedelta(hours=1)).enqueue()
    make(TaskState.RUNNING, queue_name="mail", last_attempted_at=now)
    make(retry_at=now + timedelta(minutes=1))
    make()
    make(TaskState.SUCCEEDED)
    control.pause(PauseKind.QUEUE, "mail")
    Gate.objects.create(name="narrow", limit=2)
    tasks.gated.using(gate="narrow").enqueue("narrow")
    make(reason=FailureReason.GATE_FULL, gate="narrow", retry_at=now, errors=[], last_exception="")
    late = now - timedelta(seconds=90)
    Schedule.objects.create(name="late", task="tests.tasks.tidy", cron="0 4 * * *", next_occurrence_at=late)
    samples = scraped(token)
    mail = {"backend": "default", "queue": "mail"}
    assert value(samples, "up") == 1
    assert value(samples, "queue_rows", **mail, state="queued") == 4
    assert value(samples, "queue_rows", **mail, state="running") == 1
    assert value(samples, "queue_entries", **mail, state="pending") == 3
    assert value(samples, "queue_entries", **mail, state="scheduled") == 1
    assert 0 <= value(samples, "queue_oldest_waiting_seconds", **mail) < 60
    assert value(samples, "queue_paused", **mail) == 1
    assert value(samples, "task_rows", task="tests.tasks.stamp", state="queued") == 4
    assert value(samples, "task_rows", task="tests.tasks.add", state="retrying") == 2
    assert not any("succeeded" in str(labels) or "failed" in str(labels) for _, labels in samples)
    assert value(samples, "gate_limit", gate="narrow") == 2
    assert value(samples, "gate_slots", gate="narrow") == value(samples, "gate_waiting", gate="narrow") == 1
    assert value(samples, "schedules") == value(samples, "schedules_overdue") == 1
    assert 89 < value(samples, "schedules_overdue_seconds") < 150
    assert value(samples, "supervisors") == 0


def test_workers_and_what_they_have_done_are_counted(token: dict[str, str], tmp_path: Path) -> None:
    """Slots, memory, and processed and failed attempts."""
    with workers(tmp_path, "--processes", "2", "--concurrency", "3"):
        wait_until(lambda: len(numbers.read_numbers().workers) == 2, "the heartbeats")
        tasks.add.enqueue(1)
        failed = tasks.fail_until.enqueue(9, True)
        wait_until(lambda: TaskRecord.objects.get(pk=failed.id).state == TaskState.FAILED, "the failure")
        here = {"backend": "default", "queue": "default"}
        wait_until(lambda: value(scraped(token), "queue_processed_total", **here) == 2, "both")
        samples = scraped(token)
    assert value(samples, "queue_failed_total", **here) == 1
    # The processes have ended, and have written what they had counted.
    after = scraped(token)
    add, fails = ({**here, "task": f"tests.tasks.{name}"} for name in ("add", "fail_until"))
    assert value(after, "task_runs_total", **add, outcome="succeeded") == 1
    assert value(after, "task_runs_total", **add, outcome="failed") == 0
    assert value(after, "task_runs_total", **fails, outcome="failed") == 1
    for name in ("duration", "wait"):
        assert value(after, f"task_{name}_seconds_bucket", **add, le="0.005") <= 1
        assert value(after, f"task_{name}_seconds_bucket", **add, le="1800.0") == 1
        assert value(after, f"task_{name}_seconds_count", **add) == 1
        assert 0 <= value(after, f"task_{name}_seconds_sum", **add) < 60
    assert value(samples, "workers", backend="default", state="active") == 2
    assert value(samples, "worker_slots", backend="default") == 6
    assert value(samples, "worker_memory_bytes", backend="default") > 20_000_000
    assert value(samples, "supervisors") == 1 and value(samples, "last_report_age_seconds") < 30


def test_supervisors_that_vanished_are_counted(redis_client: Any, token: dict[str, str]) -> None:
    """Those that have stopped reporting; not one that a later one on its host has replaced."""
    now = redis_clock.measure()
    reports = {("web-1", 900): 2, ("web-2", 900): 20, ("web-3", 900): 600, ("web-3", 500): 2, ("web-4", 900): 3_000}
    for (host, began), ago in reports.items():
        noted = {ownership.token_of(host, 7, now - began): (now - ago) * 1000 + ownership.ALIVE_MS}
        redis_client.zadd(keys.supervisors_key(), noted)
    samples = scraped(token)
    assert value(samples, "supervisors") == value(samples, "supervisors_vanished") == 2


def test_an_unreachable_store_is_a_metric(own_redis: EmbeddedRedis, token: dict[str, str], caplog: Any) -> None:
    """And one line in the log, not an error page."""
    own_redis.kill()
    assert scraped(token) == {("asyncq_up", frozenset()): 0.0}
    assert "a scrape of metrics found a store unreachable" in caplog.text


def test_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with the most tasks are named; the others are one."""
    monkeypatch.setattr(numbers, "MOST_TASKS", 2)
    monkeypatch.setattr(numbers, "MOST_GATES", 1)
    monkeypatch.setattr(numbers, "MOST_SCHEDULES", 3)
    for number, name in enumerate(["a.one", "b.two", "c.three", "d.four"]):
        for _ in range(number + 1):
            make(TaskState.QUEUED, name=name)
        Gate.objects.create(name=f"gate-{number}", limit=number + 1)
        fired(name, make())
    make(reason=FailureReason.GATE_FULL, gate="gate-3", retry_at=timezone.now(), errors=[], last_exception="")
    found = numbers.read_numbers()
    assert found.tasks[("other", "queued")] == 3 and found.tasks[("d.four", "queued")] == 4
    assert {name for name, _ in found.tasks} == {"other", "c.three", "d.four"}
    assert [(gate.name, gate.limit, gate.waiting) for gate in found.gates] == [("gate-0", 1, 0), ("other", 9, 1)]
    assert found.failed_schedules == ["a.one", "b.two", "c.three", "other"]


def fired(name: str, *runs: TaskRecord | OccurrenceOutcome, **values: Any) -> None:
    """Make a schedule that has fired each minute, the first run first: a task, or what happened instead."""
    now = timezone.now().replace(microsecond=0)
    row = Schedule.objects.create(
        **{"name": name, "task": "tests.tasks.add", "interval_seconds": 60, "next_occurrence_at": now, **values}
    )
    for number, run in enumerate(runs):
        of_run = {"task": run} if isinstance(run, TaskRecord) else {"outcome": run}
        Occurrence.objects.create(schedule=row, occurs_at=now + timedelta(minutes=number), **of_run)


def test_a_schedule_whose_latest_run_failed_is_a_metric(token: dict[str, str]) -> None:
    """By its latest occurrence that is over: also one that could not be queued, and none that a person cancelled."""
    success, now = TaskState.SUCCEEDED, timezone.now()
    fired("failed", make(success), make(), OccurrenceOutcome.SKIPPED, OccurrenceOutcome.MISSED)
    fired("runs-again", make(), make(TaskState.QUEUED), make(retry_at=now), make(TaskState.RUNNING))
    fired("crashed", make(reason=FailureReason.WORKER_LOST))
    fired("refused", make(success), OccurrenceOutcome.REFUSED)
    fired("is-well", make(), OccurrenceOutcome.REFUSED, make(success))
    fired("was-well", make(success), make(retry_at=now))
    fired("cancelled", make(), make(reason=FailureReason.CANCELLED))
    fired("discarded", make(), make(reason=FailureReason.DISCARDED))
    fired("new")
    fired("off", make(), enabled=False)
    fired("removed", make(), retired_at=now)
    fired("over", make(), next_occurrence_at=None)
    pruned = make(success)
    fired("pruned", make(), pruned)
    TaskRecord.objects.filter(pk=pruned.pk).delete()
    found = {labels for name, labels in scraped(token) if name == "asyncq_schedule_last_failed"}
    assert found == {frozenset({("schedule", each)}) for each in ("failed", "runs-again", "crashed", "refused")}


@pytest.mark.parametrize("name", ['a"} 1\nasyncq_up 5', "b\\", "ü" * 50])
def test_odd_names_do_not_break_the_answer(name: str, token: dict[str, str]) -> None:
    """The library escapes them."""
    make(TaskState.QUEUED, name=name)
    samples = scraped(token)
    assert value(samples, "up") == 1 and value(samples, "task_rows", task=name, state="queued") == 1


def test_no_query_reads_finished_rows() -> None:
    """Each asks for states that are not final, for another table, or for the ids of the latest occurrences."""
    fired("nightly", make(TaskState.SUCCEEDED))
    with CaptureQueriesContext(connection) as queries:
        numbers.read_numbers()
    table = TaskRecord._meta.db_table
    asked = [sql for each in queries.captured_queries if re.search(f'[`"]{table}[`"]', sql := each["sql"])]
    (of_schedules,) = (sql for sql in asked if Occurrence._meta.db_table in sql)
    assert re.search(r"LIMIT 1\)", of_schedules)
    asked.remove(of_schedules)
    assert asked and not [sql for sql in asked if not re.search(r"state[`\"] (=|IN)", sql)]
    assert not [sql for sql in asked if re.search(r"state[`\"] = 2|IN \([^)]*2", sql)]


# --- what names the metrics


def exported() -> set[str]:
    """The names of all metrics, as a scrape of a site with one thing of each kind has them."""
    tasks.add.enqueue(1)
    runs = lifecycle.claim(Broker(), "default", "w", 1, "default").runs
    lifecycle.postpone(Broker(), "w", runs, 60, is_unknown=True)
    counts = RunCounts()
    counts.took.buckets[0] = counts.waited.buckets[0] = 1
    RunCounting().add("default", {"tests.tasks.add": counts})
    Rate.objects.create(name="api", starts=2)
    Gate.objects.create(name="narrow", limit=2)
    fired("nightly", make())
    registry = CollectorRegistry(auto_describe=False)
    registry.register(AsyncqCollector())
    # A histogram is named as a whole.
    names = {
        family.name if family.type == "histogram" else sample.name
        for family in registry.collect()
        for sample in family.samples
    }
    # There while workers run.
    return names | {f"asyncq_{name}" for name in ("workers", "last_report_age_seconds", *WORKER_METRICS)}


WORKER_METRICS = ("worker_slots", "worker_slots_in_use", "worker_memory_bytes")


def test_the_guide_names_every_metric_and_no_other() -> None:
    """In its table."""
    table = (DOCS / "guides" / "monitoring.md").read_text().partition("| metric |")[2].partition("\n\n")[0]
    assert set(NAME.findall(table)) == exported()


@pytest.mark.parametrize("file", ["alerts.yml", "grafana.json"])
def test_the_alerts_and_the_dashboard_name_metrics_that_exist(file: str) -> None:
    """A renamed metric would never fire."""
    text = (DOCS / "monitoring" / file).read_text()
    # There once a task has run.
    assert set(NAME.findall(text)) <= exported()
    assert len(set(NAME.findall(text))) >= 9


def test_the_dashboard_is_whole() -> None:
    """Panels with their own numbers and places, each with a query."""
    board = json.loads((DOCS / "monitoring" / "grafana.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 10
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
    assert all(target["expr"] and target["refId"] for panel in panels for target in panel["targets"])


def expressions() -> list[str]:
    """Return the queries for Prometheus that the guides show: blocks of text that begin with a metric."""
    blocks = [block for page in sorted((DOCS / "guides").rglob("*.md")) for block in blocks_of(page, "text")]
    return [block.strip() for block in blocks if NAME.match(block)]


def test_queries_in_the_guides_name_metrics_that_exist() -> None:
    """Those of blocks; a query that names another metric would be empty for ever."""
    assert expressions()
    assert {name for query in expressions() for name in NAME.findall(query)} <= exported()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("is_right", [True, False])
def test_promtool_accepts_the_queries_of_the_guides(is_right: bool, tmp_path: Path) -> None:
    """As rules; and it refuses them when a parenthesis is missing."""
    queries = expressions() if is_right else [query.replace(")", "") for query in expressions()]
    rules = [{"record": f"docs:query{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "docs", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is is_right, done.stderr


# --- scale


def minutes(*processed: int | None) -> list[MinuteInfo]:
    """Minutes with so many attempts, the newest first."""
    return [MinuteInfo(timezone.now(), count, 0) for count in processed]


@pytest.mark.parametrize(
    ("counts", "elapsed", "rate"),
    [
        ((100, 0), 20, 5.0),
        ((0, 120), 5, 120 / 65),
        ((10, 120), 0, 130 / 60),
        ((0, 600), 30, 0.0),
        ((None, None), 30, 0.0),
        ((), 30, 0.0),
    ],
)
def test_what_is_served_is_measured_in_this_minute(counts: Any, elapsed: float, rate: float) -> None:
    """In its first ten seconds together with the minute before."""
    assert scale.served_per_second(minutes(*counts), elapsed) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("waiting", "arrival", "service", "is_paused", "seconds"),
    [(0, 5, 0, True, 0.0), (100, 1, 6, False, 20.0), (100, 6, 6, False, None), (100, 0, 9, True, None)],
)
def test_a_queue_that_does_not_get_shorter_has_no_end(
    waiting: int, arrival: float, service: float, is_paused: bool, seconds: float | None
) -> None:
    """And an empty one is empty now."""
    assert scale.seconds_to_empty(waiting, arrival, service, is_paused=is_paused) == seconds


@pytest.mark.parametrize(
    ("waiting", "arrival", "service", "running", "wanted"),
    [
        (0, 0, 0, 0, 0),
        (5, 0, 0, 0, 1),
        (5, 1, 0, 3, 4),
        (0, 2.0, 4.0, 8, 4),
        (120, 2.0, 4.0, 8, 8),
        (1, 0.0, 4.0, 0, 1),
    ],
)
def test_wanted_slots_follow_from_how_long_a_run_takes(
    waiting: int, arrival: float, service: float, running: int, wanted: int
) -> None:
    """Eight at once for four a second are two seconds each."""
    assert scale.wanted_slots(waiting, arrival, service, running, 60) == wanted


def test_what_holds_a_queue_back_is_named(token: dict[str, str]) -> None:
    """A pause before a gate, a gate before the slots."""

    def asked(**more: str) -> dict[str, Any]:
        answer = Client().get("/scale", {"queue": "mail", **more}, headers=token)
        assert answer.status_code == 200
        return answer.json()

    assert asked() == {
        "backend": "default", "queue": "mail", "waiting": 0, "arrival_per_s": 0.0, "service_per_s": 0.0,
        "seconds_to_empty": 0.0, "busy_slots": 0, "slots": 0, "wanted_slots": 0, "limited_by": "none",
    }  # fmt: skip
    for _ in range(3):
        tasks.stamp.using(queue_name="mail").enqueue()
    tasks.stamp.using(queue_name="mail", run_after=timedelta(hours=1)).enqueue()
    tasks.stamp.using(queue_name="other").enqueue()
    found = asked()
    assert (found["waiting"], found["seconds_to_empty"], found["limited_by"]) == (3, None, "slots")
    assert found["arrival_per_s"] == pytest.approx(4 / 30, abs=0.001) and found["wanted_slots"] == 1
    for _ in range(4):
        make(
            queue_name="mail", reason=FailureReason.GATE_FULL, gate="narrow", retry_at=timezone.now(), errors=[],
            last_exception="",
        )  # fmt: skip
    found = asked()
    assert (found["waiting"], found["limited_by"]) == (7, "gate:narrow")
    control.pause(PauseKind.QUEUE, "mail")
    assert asked()["limited_by"] == "paused"


@pytest.mark.parametrize(
    ("query", "status"),
    [("", 400), ("queue=a b", 400), ("queue=q&target=0", 400), ("queue=q&target=x", 400), ("queue=q&backend=no", 400)],
)
def test_a_scale_of_nothing_is_refused(query: str, status: int, token: dict[str, str]) -> None:
    """With the reason; others get 404."""
    answer = Client().get(f"/scale?{query}", headers=token)
    assert answer.status_code == status and answer.json()["error"]
    assert Client().get(f"/scale?{query}").status_code == 404
    assert Client().post("/scale", headers=token).status_code == 405


def test_a_scale_without_redis_is_503(own_redis: EmbeddedRedis, token: dict[str, str]) -> None:
    """No error page."""
    own_redis.kill()
    assert Client().get("/scale?queue=q", headers=token).status_code == 503


def test_the_command_exits_with_1_when_it_takes_too_long() -> None:
    """And names what holds the queue back."""
    out = StringIO()
    call_command("asyncq", "queues", "scale", "mail", "--max-seconds", "5m", "--json", stdout=out)
    assert json.loads(out.getvalue())["seconds_to_empty"] == 0
    tasks.stamp.using(queue_name="mail").enqueue()
    with pytest.raises(CommandError, match="does not get shorter; limited by: slots"):
        call_command("asyncq", "queues", "scale", "mail", "--max-seconds", "5m", stdout=StringIO())
    call_command("asyncq", "queues", "scale", "mail", stdout=out)
    assert "limited_by" in out.getvalue()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["steady", "ramp", "gate", "paused"])
def test_seconds_to_empty_come_true(kind: str, tmp_path: Path) -> None:
    """Between a fifth and four fifths of a drain of minutes; prints each estimate beside what was left. By hand."""
    Gate.objects.create(name="drained", limit=4)
    slow = tasks.gated.using(gate="drained") if kind == "gate" else tasks.nap
    arguments = ("drained", 0.4) if kind == "gate" else (0.4,)
    for _ in range(4 if kind == "gate" else 3_000):
        slow.enqueue(*arguments)
    if kind == "gate":
        # They fail at the full gate, and are retried as it has room.
        rows = [
            TaskRecord(
                name="tests.tasks.gated", args=list(arguments), gate="drained", queue_limit=4, state=TaskState.FAILED,
                reason=FailureReason.GATE_FULL, retry_at=timezone.now(), errors=[],
            )
            for _ in range(1_200)
        ]  # fmt: skip
        TaskRecord.objects.bulk_create(rows)
    began = time.monotonic()
    looks = []
    with workers(tmp_path, "--processes", "1", "--concurrency", "8"):
        while True:
            found = scale.read_scale("default")
            looks.append((time.monotonic(), found))
            if not found.waiting and not TaskRecord.objects.filter(state__lte=TaskState.RUNNING).exists():
                break
            if kind == "paused" and 60 <= time.monotonic() - began < 80:
                # It says so as long as that lasts, and afterwards how long it takes from then on.
                if found.limited_by != "paused":
                    Inspector().queues.pause("default")
                    found = scale.read_scale("default")
                assert (found.seconds_to_empty, found.limited_by) == (None, "paused")
                looks.pop()
            elif found.limited_by == "paused":
                Inspector().queues.resume("default")
                looks.pop()
                # The rate of this minute has the pause in it.
                time.sleep(60)
            if kind == "ramp":
                for _ in range(5):
                    slow.enqueue(*arguments) if time.monotonic() - began < 60 else None
            time.sleep(1)
    end = looks[-1][0]
    errors = []
    for at, found in looks:
        share = (at - began) / (end - began)
        if 0.2 < share < 0.8:
            left = end - at
            errors.append(abs((found.seconds_to_empty or 0) - left) / left)
            print(f"{kind} {share:.2f}: {found.seconds_to_empty} s estimated, {left:.1f} s left, by {found.limited_by}")
    print(f"{kind}: {end - began:.0f} s; error: median {sorted(errors)[len(errors) // 2]:.0%}, most {max(errors):.0%}")
    assert sorted(errors)[len(errors) // 2] < 0.25


@pytest.mark.long
@pytest.mark.parametrize("count", [2_000, 20_000])
def test_a_scrape_of_many_queues_and_names(count: int, settings: Any) -> None:
    """Of 200 queues and 1,000 names of tasks, with so many live rows; prints how long each of 21 took. By hand."""
    settings.ASYNCQ = {**settings.ASYNCQ, "MONITOR_TOKEN": TOKEN}
    rows = [
        TaskRecord(name=f"shop.tasks.t{number % 1_000}", queue_name=f"q{number % 200}", errors=[], backend="default")
        for number in range(count)
    ]
    TaskRecord.objects.bulk_create(rows, batch_size=2_000)
    for number in range(200):
        tasks.stamp.using(queue_name=f"q{number}").enqueue()
    took = []
    for _ in range(21):
        began = time.perf_counter()
        answer = Client().get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
        took.append((time.perf_counter() - began) * 1_000)
        assert answer.status_code == 200
    text = answer.content.decode()
    assert text.count("\nasyncq_queue_paused{") == 200 and text.count("\nasyncq_task_rows{") >= 1_000
    took.sort()
    size = f"{len(text):,} bytes"
    print(f"scrape of {count:,} rows: median {took[10]:.0f} ms, least {took[0]:.0f}, most {took[-1]:.0f}; {size}")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("count", "every"), [(20_000, 1.0), (40_000, 5.0)])
def test_a_drain_beside_scrapes(count: int, every: float, settings: Any, tmp_path: Path) -> None:
    """Nine pairs of drains, one of each pair with a scrape each second or each five; prints the ratios. By hand."""
    settings.ASYNCQ = {**settings.ASYNCQ, "MONITOR_TOKEN": TOKEN}
    inspector = Inspector()

    def drain(*, scraped: bool) -> float:
        """Return how many tasks a second were run."""
        inspector.queues.pause("default")
        tasks.stamp.enqueue_many([tasks.stamp.arguments() for _ in range(count)])
        wait_until(lambda: inspector.queues.get("default").pending == count, "the backlog")
        done = threading.Event()

        def scrape() -> None:
            while not done.wait(every):
                assert Client().get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
            connections.close_all()

        scraper = threading.Thread(target=scrape)
        if scraped:
            scraper.start()
        began = time.monotonic()
        inspector.queues.resume("default")
        wait_until(lambda: not inspector.queues.get("default").active + inspector.queues.get("default").pending, "end")
        seconds = time.monotonic() - began
        done.set()
        if scraped:
            scraper.join()
        wait_until(lambda: not TaskRecord.objects.filter(state__lte=TaskState.RUNNING).exists(), "the outcomes")
        return count / seconds

    with workers(tmp_path, "--processes", "2"):
        drain(scraped=False)
        ratios = []
        for number in range(9):
            found = {scraped: drain(scraped=scraped) for scraped in ((True, False) if number % 2 else (False, True))}
            ratios.append(found[True] / found[False])
            print(f"with {found[True]:,.0f} a second, without {found[False]:,.0f}: {ratios[-1]:.3f}")
    ratios.sort()
    print(f"with scrapes against without: median {ratios[4]:.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}")

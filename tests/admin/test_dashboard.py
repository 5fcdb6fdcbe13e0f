"""The dashboard and the alert rules in a real Prometheus, beside real workers. By hand: it takes some minutes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from django_asyncq.models import FailureReason, Gate, Schedule, TaskRecord, TaskState

from .. import tasks
from ..browsing import Person
from ..dashboard import Series, page, panels
from ..workers import ROOT, wait_until, workers

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]

TOKEN = "0123456789abcdef"
# How long there is load: long enough for rates over five minutes to be curves.
LOAD_SECONDS = 240
SCRAPE_SECONDS = 2


@pytest.fixture
def ask(live_server: Any, settings: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A Prometheus that scrapes this project; called with a path of its API, it returns the data."""
    settings.ASYNCQ = {**settings.ASYNCQ, "MONITOR_TOKEN": TOKEN}
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    project = urllib.parse.urlsplit(live_server.url).netloc
    configuration = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": f"{SCRAPE_SECONDS}s"},
        "rule_files": [str(ROOT / "docs" / "monitoring" / "alerts.yml")],
        "scrape_configs": [
            {
                "job_name": "asyncq",
                "authorization": {"credentials": TOKEN},
                "static_configs": [{"targets": [project]}],
            }
        ],
    }
    # JSON is YAML.
    (tmp_path / "prometheus.yml").write_text(json.dumps(configuration))
    command = ["prometheus", f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with (tmp_path / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)

    def call(path: str, **query: Any) -> Any:
        url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    try:
        wait_until(lambda: _is_up(call), "Prometheus")
        yield call
    finally:
        process.terminate()
        process.wait()


def _is_up(call: Callable[..., Any]) -> bool:
    try:
        return bool(call("query", query="asyncq_up == 1")["result"])
    except OSError:
        return False


def test_each_panel_shows_something(ask: Callable[..., Any], person: Person, tmp_path: Path) -> None:
    """Beside a fleet with load, failures, a full gate and a schedule; each rule can be evaluated."""
    Gate.objects.create(name="provider", limit=2)
    due = timezone.now().replace(microsecond=0)
    Schedule.objects.create(
        name="nightly", task="tests.tasks.tally", args=["north"], cron="* * * * *", zone="UTC", next_occurrence_at=due
    )
    # They were refused at the gate before; two at a time take 3 s.
    waiting = [
        TaskRecord(
            name="tests.tasks.gated", args=["provider", 3.0], gate="provider", queue_limit=2, queue_name="reports",
            state=TaskState.FAILED, reason=FailureReason.GATE_FULL, retry_at=due, errors=[],
        )
        for _ in range(100)
    ]  # fmt: skip
    TaskRecord.objects.bulk_create(waiting)
    began = time.time()
    with workers(tmp_path, "--processes", "2", "--concurrency", "8"):
        _load()
    data = {panel["title"]: _series(ask, panel, began) for panel in panels()}
    assert [title for title, series in data.items() if not series] == []
    rules = [rule for group in ask("rules")["groups"] for rule in group["rules"]]
    assert len(rules) >= 8 and {rule["health"] for rule in rules} == {"ok"}
    if folder := os.environ.get("ASYNCQ_TEST_PICTURES"):
        file = tmp_path / "dashboard.html"
        file.write_text(page([(panel, data[panel["title"]]) for panel in panels()]))
        person.width(1216)
        person.browser.get(file.as_uri())
        person.picture("dashboard")
        assert (Path(folder) / "dashboard.png").exists()


def _load() -> None:
    """Enqueue, in waves, what some hundreds of customers might."""
    began = time.monotonic()
    round_of_load = 0
    while (elapsed := time.monotonic() - began) < LOAD_SECONDS:
        # More than the slots can do in the second quarter.
        count = 24 if 0.25 < elapsed / LOAD_SECONDS < 0.5 else 8
        for _ in range(count):
            tasks.nap.using(queue_name="mail").enqueue(0.6)
        tasks.stamp.using(queue_name="reports").enqueue_many([tasks.stamp.arguments() for _ in range(20)])
        if round_of_load % 3 == 0:
            tasks.exits.using(queue_name="reports").enqueue()
        round_of_load += 1
        time.sleep(1.0)


def _series(ask: Callable[..., Any], panel: dict[str, Any], began: float) -> list[Series]:
    found = []
    for target in panel["targets"]:
        # Grafana writes four times the interval of the scrapes here.
        query = target["expr"].replace("$__rate_interval", f"{4 * SCRAPE_SECONDS}s")
        answer = ask("query_range", query=query, start=began, end=time.time(), step=SCRAPE_SECONDS)
        for each in answer["result"]:
            name = target["legendFormat"]
            for label, value in each["metric"].items():
                name = name.replace(f"{{{{{label}}}}}", value)
            points = [(float(at), float(value)) for at, value in each["values"] if value != "NaN"]
            if points:
                found.append(Series(name, points))
    return found

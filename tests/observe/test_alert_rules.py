"""The alert rules for Prometheus: each fires on what it is for, and stays silent otherwise, at three loads."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

FILE = Path(__file__).parent.parent.parent / "docs" / "monitoring" / "alerts.yml"
LOADS = ("low", "middle", "high")
# What a scrape has, by minute: a series, and its values in promtool's notation.
Scrapes = dict[str, str]


class Rule(NamedTuple):
    """What is expected of a rule. fires, silent: scrapes by load, after `minutes` of which it does so.

    labels: of the alert, severity aside. summary: its text.
    """

    severity: str
    labels: dict[str, str]
    summary: str
    fires: tuple[Scrapes, Scrapes, Scrapes]
    silent: tuple[Scrapes, Scrapes, Scrapes]
    minutes: int = 50


def level(*values: float | str, minutes: int = 60) -> str:
    """Values that are repeated, one a minute; "_" is none, and "stale" that the scrape did not have the series."""
    return " ".join(map(str, values * (minutes // len(values) + 1)))


def rises(per_minute: float) -> str:
    """A counter; below one a minute it is not there before it is 1."""
    if per_minute >= 1:
        return f"0+{per_minute}x600"
    pause = round(1 / per_minute)
    return f"_x{pause // 2} " + " ".join(f"{count}x{pause - 1}" for count in range(1, 600 // pause + 2))


def queue_attempts(processed: float, failed: float) -> Scrapes:
    """The counters of a queue, which is beside one where all is well."""
    return {
        'asyncq_queue_processed_total{backend="default",queue="mail"}': rises(processed),
        'asyncq_queue_failed_total{backend="default",queue="mail"}': rises(failed) if failed else level(0),
        'asyncq_queue_processed_total{backend="default",queue="other"}': rises(1000),
        'asyncq_queue_failed_total{backend="default",queue="other"}': level(0),
    }


def task_runs(**per_minute: float) -> Scrapes:
    """The counters of a task, by outcome, beside a busy one of the same queue."""
    found = {
        f'asyncq_task_runs_total{{task="shop.tasks.send",queue="mail",outcome="{outcome}"}}': rises(rate)
        for outcome, rate in per_minute.items()
    }
    return found | {'asyncq_task_runs_total{task="shop.tasks.log",queue="mail",outcome="succeeded"}': rises(9000)}


def gate(limit: int, slots: str, waiting: str) -> Scrapes:
    """A gate with a limit that does not change."""
    found = {"limit": level(limit), "slots": slots, "waiting": waiting}
    return {f'asyncq_gate_{name}{{gate="narrow"}}': values for name, values in found.items()}


def waits(seconds: str, paused: int = 0) -> Scrapes:
    """A queue whose oldest task waits."""
    labels = '{backend="default",queue="mail"}'
    return {f"asyncq_queue_oldest_waiting_seconds{labels}": seconds, f"asyncq_queue_paused{labels}": level(paused)}


def one(name: str, *values: str) -> tuple[Scrapes, Scrapes, Scrapes]:
    """One series, with values for each load."""
    first, second, third = ({f"asyncq_{name}": each} for each in values)
    return first, second, third


QUEUE = {"backend": "default", "queue": "mail"}
TASK = {"task": "shop.tasks.send", "queue": "mail"}
PAUSED = 'queue_paused{backend="default",queue="mail"}'
REJECTED = 'queue_entries{backend="default",queue="mail",state="%s"}'
RULES = {
    "AsyncqNotScraped": Rule(
        "page",
        {},
        "No metrics arrive. No web process answers, or Prometheus may not read them.",
        # No target any more; never one; one that is up, whose answer is no metrics.
        (*one("up", "1x9 stale", "_x50", "1x9 stale _x50")[:2], {'up{job="asyncq"}': level(1)}),
        one("up", level(1), level(0), level(1, 1, "stale")),
    ),
    "AsyncqStoresUnreachable": Rule(
        "page",
        {},
        "The database or Redis cannot be read from the web processes.",
        one("up", level(0), "1x46 0x60", "0x60"),
        one("up", level(1), level(0, 1), "1x48 0x60"),
    ),
    "AsyncqNoWorker": Rule(
        "page",
        {},
        "No worker has reported for a minute. Start some with manage.py runworkers.",
        one("supervisors", level(0), "2x45 0x60", "200x45 0x60"),
        one("supervisors", level(1), level(20), "200x49 0x60"),
    ),
    "AsyncqSupervisorVanished": Rule(
        "ticket",
        {},
        "Vanished without being stopped, and not replaced on their hosts: 1 runworkers.",
        (
            {"asyncq_supervisors": "2x40 1x60", "asyncq_supervisors_vanished": "0x40 1x60"},
            {"asyncq_supervisors": "20x40 19x60", "asyncq_supervisors_vanished": "0x40 1x60"},
            {"asyncq_supervisors": "200x40 199x60", "asyncq_supervisors_vanished": "0x40 3x2 1x60"},
        ),
        # Another one has begun on its host; some were stopped.
        (
            {"asyncq_supervisors": "2x49 1x60", "asyncq_supervisors_vanished": "0x48 1x60"},
            {"asyncq_supervisors": "20x40 4x60", "asyncq_supervisors_vanished": level(0)},
            {"asyncq_supervisors": level(200), "asyncq_supervisors_vanished": level(1, 0)},
        ),
    ),
    "AsyncqTasksWait": Rule(
        "page",
        QUEUE,
        "The oldest task of queue mail has waited for 6m 40s.",
        # One task that no worker takes; a backlog that stays; one whose oldest changes.
        (waits("40+60x5 400x60"), waits(level(400)), waits(level(900, 700, 400))),
        (waits(level(0)), waits(level(400), paused=1), waits(level(290, 310))),
    ),
    "AsyncqAttemptsFail": Rule(
        "ticket",
        QUEUE,
        "More than a fifth of the attempts in queue mail fail.",
        (queue_attempts(2, 2), queue_attempts(100, 30), queue_attempts(60_000, 20_000)),
        (queue_attempts(2, 0.2), queue_attempts(100, 10), queue_attempts(60_000, 6_000)),
    ),
    "AsyncqTasksFail": Rule(
        "ticket",
        TASK,
        "More than a fifth of shop.tasks.send in queue mail fail finally.",
        (
            task_runs(failed=2),
            # Those that are retried count neither way, nor those that were cancelled.
            task_runs(succeeded=70, failed=10, timeout=10, crashed=10, retried=900, cancelled=900),
            task_runs(succeeded=4_000, failed=2_000),
        ),
        (
            task_runs(succeeded=2, failed=0.2),
            task_runs(succeeded=80, discarded=10, failed=10, retried=90),
            task_runs(succeeded=5_000, failed=500, cancelled=5_000),
        ),
    ),
    "AsyncqTaskNeverSucceeds": Rule(
        "ticket",
        TASK,
        "Each attempt of shop.tasks.send in queue mail has failed for six hours.",
        (task_runs(failed=1 / 60), task_runs(retried=10, succeeded=0.001), task_runs(crashed=5_000, cancelled=100)),
        (task_runs(failed=1 / 60, succeeded=1 / 120), task_runs(retried=10, discarded=10), task_runs(cancelled=5_000)),
        minutes=540,
    ),
    "AsyncqGateFull": Rule(
        "ticket",
        {"gate": "narrow"},
        "Gate narrow has been full for half an hour, and tasks wait for it.",
        (
            gate(1, level(1), level(1)),
            gate(20, level(20, 19, 20, 18), level(50, 3, 0, 8)),
            gate(1000, level(1000, 990, 996, 970), level(5_000, 4_000)),
        ),
        (
            gate(1, level(1), level(0)),
            gate(20, level(10, 20), level(0, 1, 0)),
            gate(1000, level(1000, 400), level(5_000)),
        ),
    ),
    "AsyncqScheduleOverdue": Rule(
        "ticket",
        {},
        "A schedule has not fired. Is a worker running that may lead?",
        one("schedules_overdue_seconds", "0x40 30+60x20", level(130), "0x40 500x60"),
        one("schedules_overdue_seconds", level(0), level(90, 119), level(0, 130)),
    ),
    "AsyncqScheduleFails": Rule(
        "ticket",
        {"schedule": "nightly"},
        "The latest run of schedule nightly failed, or each one of the last quarter of an hour.",
        # A run each night, each minute, and beside others that fail now and then.
        (
            {'asyncq_schedule_last_failed{schedule="nightly"}': "_x20 1x60"},
            {'asyncq_schedule_last_failed{schedule="nightly"}': level(1)},
            {
                'asyncq_schedule_last_failed{schedule="nightly"}': level(1),
                'asyncq_schedule_last_failed{schedule="often"}': level(1, 1, "stale"),
            },
        ),
        (
            {'asyncq_schedule_last_failed{schedule="nightly"}': "1x40 stale _x60"},
            {'asyncq_schedule_last_failed{schedule="nightly"}': level(1, 1, 1, "stale")},
            {
                f'asyncq_schedule_last_failed{{schedule="s{number}"}}': level(*[1] * 12, "stale", "_", "_")
                for number in range(200)
            },
        ),
    ),
    "AsyncqQueuePaused": Rule(
        "ticket",
        QUEUE,
        "Queue mail has been paused for half a day.",
        one(PAUSED, "1x800", "0x60 1x740", "0x79 1x720"),
        one(PAUSED, "0x800", "0x300 1x500", level(*[1] * 700, *[0] * 10, minutes=800)),
        minutes=800,
    ),
    "AsyncqMessagesRejected": Rule(
        "ticket",
        {**QUEUE, "state": "rejected"},
        "Other programs send to queue mail what can be no task.",
        one(REJECTED % "rejected", level(1), "0+5x100", level(90_000)),
        (
            *one(REJECTED % "rejected", level(0), "0x47 3x60", level(0))[:2],
            {f"asyncq_{REJECTED % 'archived'}": level(90_000)},
        ),
    ),
    "AsyncqClocksDiffer": Rule(
        "ticket",
        {},
        "The clocks of the database and of Redis differ. Synchronize both servers.",
        one("clock_difference_seconds", level(5.5), level(-60), "0+0.5x100"),
        one("clock_difference_seconds", level(0), level(-4.9, 4.9), level(-60, 1)),
    ),
}


def promtool(*arguments: Any) -> str:
    """What it says, after success."""
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_rule_has_its_cases() -> None:
    """And none is left of a rule that is gone."""
    (group,) = yaml.safe_load(FILE.read_text())["groups"]
    assert [rule["alert"] for rule in group["rules"]] == list(RULES)
    assert all(len(rule.fires) == len(rule.silent) == len(LOADS) for rule in RULES.values())


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_rules() -> None:
    """All of them."""
    assert f"{len(RULES)} rules found" in promtool("check", "rules", FILE)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("name", RULES)
def test_a_rule_fires_on_what_it_is_for(name: str, tmp_path: Path) -> None:
    """And on nothing else, at a low, a middle and a high load."""
    rule = RULES[name]
    alert = {"exp_labels": {"severity": rule.severity, **rule.labels}, "exp_annotations": {"summary": rule.summary}}
    cases = [
        {
            "name": f"{load} load: {'fires' if expected else 'silent'}",
            "interval": "1m",
            "input_series": [{"series": series, "values": values} for series, values in scrapes.items()],
            "alert_rule_test": [{"eval_time": f"{rule.minutes}m", "alertname": name, "exp_alerts": expected}],
        }
        for by_load, expected in ((rule.fires, [alert]), (rule.silent, []))
        for load, scrapes in zip(LOADS, by_load, strict=True)
    ]
    # Evaluated each minute, those of many hours take half a minute.
    every = "1m" if rule.minutes < 100 else "10m"
    file = tmp_path / "cases.yml"
    # JSON is YAML.
    file.write_text(json.dumps({"rule_files": [str(FILE)], "evaluation_interval": every, "tests": cases}))
    promtool("test", "rules", file)

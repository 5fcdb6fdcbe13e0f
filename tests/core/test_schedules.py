"""Declarations of schedules and start-up tasks: a wrong one is refused at once, and the error names the remedy."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from django_asyncq import cron, every, startup_task, task
from django_asyncq.core import schedules
from django_asyncq.core.calls import check_call
from django_asyncq.exceptions import InvalidOption

from .. import tasks

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: cron(""), "five fields"),
        (lambda: cron(None), "five fields"),  # type: ignore[arg-type]
        (lambda: cron("61 * * * *"), "minute"),
        (lambda: cron("* * * * * *"), "five"),
        (lambda: cron("0 0 31 2 *"), "never"),
        (lambda: cron("* * * * *", timezone="Mars/Olympus"), "Mars/Olympus"),
        (lambda: cron("* * * * *", overlap="perhaps"), "overlap='perhaps'"),  # type: ignore[arg-type]
        (lambda: cron("* * * * *", missed="some"), "missed='some'"),  # type: ignore[arg-type]
        (lambda: cron("* * * * *", missed_cap=0), "missed_cap=0"),
        (lambda: cron("* * * * *", jitter_seconds=-1), "jitter_seconds=-1"),
        (lambda: cron("* * * * *", name="x" * 201), "at most 200"),
        (lambda: cron("* * * * *", starts_at=NOON.replace(tzinfo=None)), "starts_at"),
        (lambda: cron("* * * * *", starts_at=NOON, ends_at=NOON.replace(hour=11)), "ends_at"),
        (lambda: every(), "at least 1 s"),
        (lambda: every(seconds=-1), "seconds=-1"),
        (lambda: every(seconds=0.5), "seconds=0.5"),  # type: ignore[arg-type]
        (lambda: every(days=10**9), "seconds"),
        (lambda: startup_task(""), "1 to 200"),
        (lambda: startup_task("x", ttl=2), "at least 3"),
        (lambda: startup_task("x", ttl=float("inf")), "at least 3"),
        (lambda: startup_task("x", ttl=True), "at least 3"),
    ],
)
def test_declaration_that_can_never_work_is_refused(make: Callable[[], Any], words: str) -> None:
    """When the module is imported, not at the first occurrence."""
    with pytest.raises(InvalidOption, match=words.replace("(", r"\(")):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: cron("* * * * *", zone="UTC"),  # type: ignore[call-arg]
        lambda: cron("* * * * *", interval_seconds=3),  # type: ignore[call-arg]
        lambda: every(seconds=3, timezone="UTC"),  # type: ignore[call-arg]
        lambda: every(seconds=3, cron="* * * * *"),  # type: ignore[call-arg]
        lambda: task(attempts=3),  # type: ignore[call-overload]
        lambda: task(run_after=None),  # type: ignore[call-overload]
    ],
)
def test_options_that_do_not_exist_are_refused(make: Callable[[], Any]) -> None:
    """As for any function that lists its parameters."""
    with pytest.raises(TypeError, match=r"unknown options|no option"):
        make()


def test_units_of_an_interval_add_up() -> None:
    """The interval is their sum in whole seconds."""
    assert every(days=1, hours=2, minutes=3, seconds=4).interval_seconds == 93_784


def test_time_zone_defaults_to_the_projects(settings: Any) -> None:
    """The setting is read when it is needed, not at the declaration."""
    declared = cron("* * * * *")
    settings.TIME_ZONE = "Asia/Tokyo"
    assert declared.zone == "Asia/Tokyo"
    assert cron("* * * * *", timezone="Europe/Berlin").zone == "Europe/Berlin"


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("* * * * *", "cron"),
        ((every(seconds=1, args=("a",)), every(seconds=2, args=("a",))), "name="),
        ((every(seconds=1, name="a", args=("a",)), every(seconds=2, name="a", args=("a",))), "name="),
        (every(seconds=1), "region"),
        (every(seconds=1, args=("a", 1, 2)), "too many"),
        (every(seconds=1, kwargs={"region": {1}}), "region"),
    ],
)
def test_task_refuses_a_schedule_it_cannot_run(schedule: Any, words: str) -> None:
    """No schedule, two of one name, or arguments that the function does not take or JSON cannot represent."""
    with pytest.raises(InvalidOption, match=words):
        task(schedule=schedule)(tasks.tally.func)


def test_task_refuses_a_switch_that_is_no_boolean() -> None:
    """It must be True or False."""
    with pytest.raises(InvalidOption, match="schedulable='yes'"):
        task(schedulable="yes")(tasks.tally.func)  # type: ignore[call-overload]


def test_task_refuses_a_number_as_retention() -> None:
    """A number alone would not say which outcome it is for."""
    with pytest.raises(InvalidOption, match="retention=7"):
        task(retention=7)(tasks.tally.func)  # type: ignore[call-overload]


def test_calls_are_checked_against_the_signature() -> None:
    """The context is not among the arguments of a call."""
    check_call(tasks.stamp, (), {})
    check_call(tasks.tally, ["north"], {"pages": 2})
    with pytest.raises(InvalidOption, match=r"takes \(region"):
        check_call(tasks.tally, [], {})
    with pytest.raises(InvalidOption, match="too many"):
        check_call(tasks.stamp, ["context"], {})


def test_startup_tasks_keep_their_order_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is imported twice declares them once; another function cannot use the name."""
    monkeypatch.setattr(schedules, "_startup_tasks", {})

    def first() -> None: ...
    def second() -> None: ...

    assert startup_task("b", ttl=5)(first) is first
    startup_task("a")(second)
    startup_task("b", ttl=6, every_start=True)(first)
    found = schedules.startup_tasks()
    assert [(each.name, each.ttl_seconds, each.every_start) for each in found] == [("b", 6, True), ("a", 60, False)]
    with pytest.raises(InvalidOption, match="second"):
        startup_task("b")(second)

"""How long what is kept: values, which rule holds, and what is wrong with the setting."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.core import checks

from django_asyncq.definitions.retention_policy import INHERIT, KEEP_HINT, Retention, Rule, current_rules, faults
from django_asyncq.exceptions import InvalidOption

DAY = timedelta(days=1)


@pytest.mark.parametrize("value", [0, 1.5, 7 * 86_400, timedelta(0), 30 * DAY, 36_525 * DAY, None, INHERIT])
def test_a_retention_takes_seconds_a_timedelta_none_or_nothing(value: Any) -> None:
    """And keeps it as it was written."""
    assert Retention(failed=value) == Retention(INHERIT, value)


@pytest.mark.parametrize("value", [-1, -DAY, True, "7d", float("nan"), float("inf"), 36_526 * DAY, [1], object()])
def test_a_retention_refuses_what_is_no_time(value: Any) -> None:
    """The error names the outcome, the value and the remedy."""
    with pytest.raises(InvalidOption, match="succeeded=") as raised:
        Retention(succeeded=value)
    assert KEEP_HINT in str(raised.value)


def test_what_is_not_said_comes_from_the_next() -> None:
    """None is said: for ever."""
    assert Retention(succeeded=None).or_else(Retention(5, 6)) == Retention(None, 6)
    assert Retention().or_else(Retention(failed=DAY)) == Retention(INHERIT, DAY)
    assert repr(Retention()) == "Retention(succeeded=INHERIT, failed=INHERIT)"


def test_defaults_are_a_week_and_a_month() -> None:
    """With nothing set, each outcome has one rule."""
    rules = current_rules({})
    assert list(rules.of("succeeded")) == [Rule("", (), 7 * DAY)]
    assert list(rules.of("failed")) == [Rule("", (), 30 * DAY)]
    assert rules.shortest() == 7 * DAY


def test_the_most_specific_rule_comes_first(settings: Any) -> None:
    """Tasks before queues before the default; settings before code, each outcome by itself; equal times in one rule."""
    settings.ASYNCQ = {
        "SUCCEEDED_RETENTION_SECONDS": None,
        "RETENTION": {
            "tasks": {"a.both": {"succeeded": 10}, "a.other": {"succeeded": timedelta(seconds=10), "failed": None}},
            "queues": {"mail": {"failed": 99}},
        },
    }
    rules = current_rules({"a.both": Retention(20, 30), "a.code": Retention(failed=30)})
    assert list(rules.of("succeeded")) == [
        Rule("name", ("a.both", "a.other"), timedelta(seconds=10)),
        Rule("", (), None),
    ]
    assert list(rules.of("failed")) == [
        Rule("name", ("a.both", "a.code"), timedelta(seconds=30)),
        Rule("name", ("a.other",), None),
        Rule("queue_name", ("mail",), timedelta(seconds=99)),
        Rule("", (), 30 * DAY),
    ]
    assert rules.shortest() == timedelta(seconds=10)


def test_all_may_be_kept_for_ever(settings: Any) -> None:
    """Then there is no shortest time."""
    settings.ASYNCQ = {"SUCCEEDED_RETENTION_SECONDS": None, "FAILED_RETENTION_SECONDS": None}
    assert current_rules({}).shortest() is None
    assert current_rules({"a.b": Retention(failed=3)}).shortest() == timedelta(seconds=3)


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ([], "[] is no dictionary"),
        ({"queue": {}}, "['queue']: unknown key, known are 'queues' and 'tasks'"),
        ({"queues": 3600}, "['queues'] = 3600 is no dictionary of names"),
        ({"queues": {5: {}}}, "['queues'][5]: the name is no text"),
        ({"queues": {"mail": 3600}}, "['queues']['mail'] = 3600 is no dictionary"),
        (
            {"tasks": {"a.b": {"sucess": 1}}},
            "['tasks']['a.b']['sucess']: unknown key, known are 'succeeded' and 'failed'",
        ),
        ({"tasks": {"a.b": {"failed": "1 day"}}}, "['tasks']['a.b']['failed'] = '1 day' is not valid"),
        ({"tasks": {"a.b": {"failed": INHERIT}}}, "['tasks']['a.b']['failed'] = INHERIT is not valid"),
    ],
)
@pytest.mark.django_db
def test_each_fault_of_the_setting_is_told_with_its_place(written: Any, says: str, settings: Any) -> None:
    """The check passes it on with the shape as hint."""
    assert [says in fault for fault in faults(written)] == [True]
    settings.ASYNCQ = {"RETENTION": written}
    (found,) = [message for message in checks.run_checks() if message.id == "asyncq.E129"]
    assert says in found.msg
    assert "'queues'" in str(found.hint)


def test_every_fault_is_told() -> None:
    """Not the first alone; and a right one has none."""
    assert len(list(faults({"queues": {"a": {"failed": -1, "x": 1}, "b": 3}, "y": {}}))) == 4
    assert list(faults({"queues": {"mail": {"succeeded": 3600, "failed": None}}, "tasks": {"a.b": {}}})) == []


@pytest.mark.parametrize("value", [-1, "7 days", True, timedelta(days=7)])
@pytest.mark.django_db
def test_default_times_are_seconds(value: Any, settings: Any) -> None:
    """Their names say so; the check has a hint for each."""
    settings.ASYNCQ = {"SUCCEEDED_RETENTION_SECONDS": value, "FAILED_RETENTION_SECONDS": value}
    found = {message.id for message in checks.run_checks() if message.hint}
    assert {"asyncq.E127", "asyncq.E128"} <= found

"""Retention: valid values, the rule that applies, and errors of the setting."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.core import checks

from django_asyncq.core.policies import INHERIT, RETENTION_TIME_HINT, Retention, Rule, current_rules, setting_errors
from django_asyncq.exceptions import InvalidOption

DAY = timedelta(days=1)


@pytest.mark.parametrize("value", [0, 1.5, 7 * 86_400, timedelta(0), 30 * DAY, 36_525 * DAY, None, INHERIT])
def test_a_retention_takes_seconds_a_timedelta_none_or_nothing(value: Any) -> None:
    """And keeps the value unchanged."""
    assert Retention(failed=value) == Retention(INHERIT, value)


@pytest.mark.parametrize("value", [-1, -DAY, True, "7d", float("nan"), float("inf"), 36_526 * DAY, [1], object()])
def test_a_retention_refuses_other_values(value: Any) -> None:
    """The error names the outcome, the value and the remedy."""
    with pytest.raises(InvalidOption, match="succeeded=") as raised:
        Retention(succeeded=value)
    assert RETENTION_TIME_HINT in str(raised.value)


def test_a_value_that_is_not_set_comes_from_the_next_retention() -> None:
    """None is a value: it keeps for ever."""
    assert Retention(succeeded=None).or_else(Retention(5, 6)) == Retention(None, 6)
    assert Retention().or_else(Retention(failed=DAY)) == Retention(INHERIT, DAY)
    assert repr(Retention()) == "Retention(succeeded=INHERIT, failed=INHERIT)"


def test_defaults_are_a_week_and_a_month() -> None:
    """Without settings, each outcome has one rule."""
    rules = current_rules({})
    assert list(rules.rules_for("succeeded")) == [Rule("", (), 7 * DAY)]
    assert list(rules.rules_for("failed")) == [Rule("", (), 30 * DAY)]
    assert rules.shortest() == 7 * DAY


def test_the_most_specific_rule_comes_first(settings: Any) -> None:
    """Tasks precede queues and the default, settings precede code, for each outcome. Equal times share one rule."""
    settings.ASYNCQ = {
        "SUCCEEDED_RETENTION_SECONDS": None,
        "RETENTION": {
            "tasks": {"a.both": {"succeeded": 10}, "a.other": {"succeeded": timedelta(seconds=10), "failed": None}},
            "queues": {"mail": {"failed": 99}},
        },
    }
    rules = current_rules({"a.both": Retention(20, 30), "a.code": Retention(failed=30)})
    assert list(rules.rules_for("succeeded")) == [
        Rule("name", ("a.both", "a.other"), timedelta(seconds=10)),
        Rule("", (), None),
    ]
    assert list(rules.rules_for("failed")) == [
        Rule("name", ("a.both", "a.code"), timedelta(seconds=30)),
        Rule("name", ("a.other",), None),
        Rule("queue_name", ("mail",), timedelta(seconds=99)),
        Rule("", (), 30 * DAY),
    ]
    assert rules.shortest() == timedelta(seconds=10)


def test_all_tasks_may_be_kept_for_ever(settings: Any) -> None:
    """Then there is no shortest time."""
    settings.ASYNCQ = {"SUCCEEDED_RETENTION_SECONDS": None, "FAILED_RETENTION_SECONDS": None}
    assert current_rules({}).shortest() is None
    assert current_rules({"a.b": Retention(failed=3)}).shortest() == timedelta(seconds=3)


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ([], "[] is not a dictionary"),
        ({"queue": {}}, "['queue']: unknown key; the known keys are 'queues' and 'tasks'"),
        ({"queues": 3600}, "['queues'] = 3600 is not a dictionary of names"),
        ({"queues": {5: {}}}, "['queues'][5]: the name is not text"),
        ({"queues": {"mail": 3600}}, "['queues']['mail'] = 3600 is not a dictionary"),
        (
            {"tasks": {"a.b": {"sucess": 1}}},
            "['tasks']['a.b']['sucess']: unknown key; the known keys are 'succeeded' and 'failed'",
        ),
        ({"tasks": {"a.b": {"failed": "1 day"}}}, "['tasks']['a.b']['failed'] = '1 day' is not valid"),
        ({"tasks": {"a.b": {"failed": INHERIT}}}, "['tasks']['a.b']['failed'] = INHERIT is not valid"),
    ],
)
@pytest.mark.django_db
def test_each_error_of_the_setting_names_its_path(written: Any, says: str, settings: Any) -> None:
    """The check reports it, with the valid shape as a hint."""
    assert [says in error for error in setting_errors(written)] == [True]
    settings.ASYNCQ = {"RETENTION": written}
    (found,) = [message for message in checks.run_checks() if message.id == "asyncq.E129"]
    assert says in found.msg
    assert "'queues'" in str(found.hint)


def test_every_error_is_reported() -> None:
    """Not only the first. A valid setting has none."""
    assert len(list(setting_errors({"queues": {"a": {"failed": -1, "x": 1}, "b": 3}, "y": {}}))) == 4
    assert list(setting_errors({"queues": {"mail": {"succeeded": 3600, "failed": None}}, "tasks": {"a.b": {}}})) == []


@pytest.mark.parametrize("value", [-1, "7 days", True, timedelta(days=-7)])
@pytest.mark.django_db
def test_default_times_are_seconds(value: Any, settings: Any) -> None:
    """Or a timedelta. The check has a hint for each."""
    settings.ASYNCQ = {"SUCCEEDED_RETENTION_SECONDS": value, "FAILED_RETENTION_SECONDS": value}
    found = {message.id for message in checks.run_checks() if message.hint}
    assert {"asyncq.E127", "asyncq.E128"} <= found

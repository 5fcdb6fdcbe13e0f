"""Bad settings are told by a check with its own id and a hint, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
from django.core import checks
from django.core.management import call_command
from django.core.management.base import CommandError

from django_asyncq import conf
from django_asyncq.checks import RULES

# Django's own checks of JSON fields ask the database.
pytestmark = pytest.mark.django_db

BACKEND = "django_asyncq.backend.AsyncqBackend"


def ids() -> list[str]:
    """Ids of all messages, each of which must have a hint."""
    found = [message for message in checks.run_checks() if str(message.id).startswith("asyncq.")]
    assert all(message.hint for message in found)
    return [str(message.id) for message in found]


def test_good_settings_say_nothing() -> None:
    """The suite's own settings and the defaults are right."""
    assert ids() == []


def test_every_setting_has_a_rule_with_an_id_of_its_own() -> None:
    """None was forgotten, none shares an id, and every default passes."""
    assert set(RULES) == set(conf.FIELD_NAMES)
    assert len({rule.id for rule in RULES.values()}) == len(RULES)
    defaults = conf.Settings()
    for key, rule in RULES.items():
        assert rule.holds(getattr(defaults, conf.FIELD_NAMES[key])), key


@pytest.mark.parametrize("key", sorted(RULES))
def test_each_bad_value_is_told_by_its_id(key: str, settings: Any) -> None:
    """An object is right for no setting."""
    settings.ASYNCQ = {key: object()}
    assert RULES[key].id in ids()


@pytest.mark.parametrize(
    ("setting", "value", "id"),
    [
        ("ASYNCQ", [], "asyncq.E001"),
        ("ASYNCQ", {"LEASE": 1}, "asyncq.E002"),
        ("ASYNCQ", {"LEASE_SECONDS": 10, "BEAT_SECONDS": 5}, "asyncq.E003"),
        ("ASYNCQ", {"PROVISIONAL_SECONDS": 10}, "asyncq.E004"),
        ("ASYNCQ", {"REDIS": "nowhere"}, "asyncq.E010"),
        ("CACHES", {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}, "asyncq.E011"),
        ("TASKS", {}, "asyncq.W013"),
        ("TASKS", {"a": {"BACKEND": BACKEND}, "b": {"BACKEND": BACKEND}}, "asyncq.E014"),
        ("USE_TZ", False, "asyncq.W015"),
        ("TASKS", {"default": {"BACKEND": BACKEND, "QUEUES": ["bad queue"]}}, "asyncq.E020"),
        ("TASKS", {"default": {"BACKEND": BACKEND, "OPTIONS": {"retries": 3}}}, "asyncq.E021"),
        ("TASKS", {"default": {"BACKEND": BACKEND, "OPTIONS": {"max_attempts": 0}}}, "asyncq.E022"),
    ],
)
def test_wrong_shapes_are_told(setting: str, value: Any, id: str, settings: Any) -> None:
    """Each with its own id."""
    setattr(settings, setting, value)
    assert id in ids()


def test_environment_overrides_what_the_issue_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """SINGLE_INSTANCE_MODE and TASK_LOCK_DIR of the environment win."""
    monkeypatch.setenv("SINGLE_INSTANCE_MODE", "false")
    monkeypatch.setenv("TASK_LOCK_DIR", "/tmp/locks")
    conf.current.cache_clear()
    assert (conf.current().single_instance_mode, conf.current().task_lock_dir) == (False, "/tmp/locks")
    monkeypatch.undo()
    conf.current.cache_clear()


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (["--queues", "a b=1"], "not valid"),
        (["--queues", "a=0"], "weight"),
        (["--queues", "a=x"], "a=x"),
        (["--processes", "0"], "at least 1"),
        (["--concurrency", "many"], "at least 1"),
        (["--backend", "nowhere"], "nowhere"),
        (["--worker-id", "a b"], "a b"),
        (["--single-instance", "--multi-instance"], "not allowed"),
    ],
)
def test_runworkers_refuses_bad_options(option: list[str], says: str) -> None:
    """The error names the option's trouble."""
    with pytest.raises(CommandError, match=says):
        call_command("runworkers", *option)

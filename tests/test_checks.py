"""A bad setting is reported by a check with an id of its own and a hint, before anything runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from django.core import checks
from django.core.management import call_command
from django.core.management.base import CommandError

from django_asyncq import conf, cron, every, registry, task
from django_asyncq.checks import RULES

from . import tasks

# Django's own checks of JSON fields query the database.
pytestmark = pytest.mark.django_db

BACKEND = "django_asyncq.backend.AsyncqBackend"
ROOT = Path(__file__).parent.parent


def ids() -> list[str]:
    """Return the ids of all messages of this package; each must have a hint."""
    found = [message for message in checks.run_checks() if str(message.id).startswith("asyncq.")]
    assert all(message.hint for message in found)
    return [str(message.id) for message in found]


def test_good_settings_give_no_message() -> None:
    """The settings of the test suite are valid."""
    assert ids() == []


def test_every_setting_has_a_rule_with_an_id_of_its_own() -> None:
    """No setting lacks a rule, no two rules share an id, and every default is valid."""
    assert set(RULES) == set(conf.FIELD_NAMES)
    assert len({rule.id for rule in RULES.values()}) == len(RULES)
    defaults = conf.Settings()
    for key, rule in RULES.items():
        assert rule.holds(getattr(defaults, conf.FIELD_NAMES[key])), key


def test_documented_checks_are_those_of_the_code() -> None:
    """The page lists each id, and no other."""
    page = (ROOT / "docs" / "reference" / "checks.md").read_text()
    sources = "".join((ROOT / "django_asyncq" / name).read_text() for name in ("checks.py", "backend.py"))
    assert re.findall(r"^\| (asyncq\.[EW]\d+) \|", page, re.MULTILINE) == sorted(
        set(re.findall(r"asyncq\.[EW]\d+", sources)), key=lambda id: id[-3:]
    )


@pytest.mark.parametrize("key", sorted(RULES))
def test_each_bad_value_is_reported_with_its_id(key: str, settings: Any) -> None:
    """A plain object is not valid for any setting."""
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
        ("SECRET_KEY", "", "asyncq.E017"),
        ("TASKS", {"default": {"BACKEND": BACKEND, "QUEUES": ["bad queue"]}}, "asyncq.E020"),
        ("TASKS", {"default": {"BACKEND": BACKEND, "OPTIONS": {"retries": 3}}}, "asyncq.E021"),
        ("TASKS", {"default": {"BACKEND": BACKEND, "OPTIONS": {"max_attempts": 0}}}, "asyncq.E022"),
        ("TASKS", {"default": {"BACKEND": BACKEND, "OPTIONS": {"timeout": "3"}}}, "asyncq.E022"),
        ("TASKS", {"default": {"BACKEND": BACKEND, "OPTIONS": {"timeout": False}}}, "asyncq.E022"),
    ],
)
def test_wrong_settings_are_reported(setting: str, value: Any, id: str, settings: Any) -> None:
    """Each with an id of its own."""
    setattr(settings, setting, value)
    assert id in ids()


def test_environment_overrides_two_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """SINGLE_INSTANCE_MODE and TASK_LOCK_DIR."""
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
    """The error message names the problem."""
    with pytest.raises(CommandError, match=says):
        call_command("runworkers", *option)


def test_a_declared_schedule_with_two_fields_for_days_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The information says in words when it fires. Any other schedule gives none."""
    monkeypatch.setattr(registry, "_registry", {})
    schedules = (cron("0 0 13 * 5", name="either"), cron("0 0 */2 * 5", name="both"), every(hours=1, name="hourly"))
    task(schedule=schedules)(tasks.tidy.func)
    (found,) = [message for message in checks.run_checks() if message.id == "asyncq.I018"]
    assert found.level == checks.INFO
    assert "'either', cron('0 0 13 * 5')" in found.msg
    assert "on the 13th day of month or on Friday" in found.msg
    assert ids() == ["asyncq.I018"]


def test_a_module_of_tasks_that_cannot_be_imported_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a warning: a web process may do without its tasks, a worker may not."""

    def fails() -> None:
        raise ImportError("No module named 'renderer'")

    monkeypatch.setattr(registry, "load_task_modules", fails)
    (found,) = [message for message in checks.run_checks() if message.id == "asyncq.W019"]
    assert "ImportError: No module named 'renderer'" in found.msg

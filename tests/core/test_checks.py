"""A bad setting is reported by a check with an id of its own and a hint, before anything runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.core import checks
from django.core.management import call_command
from django.core.management.base import CommandError

from django_asyncq import conf, cron, every, task
from django_asyncq.backend import AsyncqBackend
from django_asyncq.checks import RULES, check_pools, check_tenants
from django_asyncq.core import registry
from django_asyncq.core.compat import HAS_DJANGO_TASKS

from .. import context_tasks, rate_tasks, tasks

# Django's own checks of JSON fields query the database.
pytestmark = pytest.mark.django_db

BACKEND = "django_asyncq.backend.AsyncqBackend"
DUMMY = "django.tasks.backends.dummy.DummyBackend" if HAS_DJANGO_TASKS else "django_tasks.backends.dummy.DummyBackend"
OF_P = {"BACKEND": BACKEND, "OPTIONS": {"prefix": "p"}}
ROOT = Path(__file__).parent.parent.parent


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
    """The page lists each id, and no other, except those of single settings, which stand with their settings."""
    page = (ROOT / "docs" / "reference" / "checks.md").read_text()
    sources = "".join((ROOT / "django_asyncq" / name).read_text() for name in ("checks.py", "backend.py"))
    ids = set(re.findall(r"asyncq\.[EW]\d+", sources)) - {rule.id for rule in RULES.values()}
    assert re.findall(r"^\| (asyncq\.[EW]\d+) \|", page, re.MULTILINE) == sorted(ids, key=lambda id: id[-3:])


def set_pool(pool: Any, monkeypatch: pytest.MonkeyPatch, alias: str = "default") -> None:
    """Let DATABASES have a pool that nothing connects to. The fixture `settings` warns of changes to DATABASES."""
    database = {"ENGINE": "django.db.backends.postgresql", "OPTIONS": {"pool": pool}}
    monkeypatch.setattr(django_settings, "DATABASES", {**django_settings.DATABASES, alias: database})


@pytest.mark.parametrize("pool", [{"max_size": 10}, {"min_size": 10}, {"max_size": "ten"}, None])
def test_pool_that_is_large_enough_gives_no_message(pool: Any, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight slots and two threads; what is no number is Django's to report."""
    settings.ASYNCQ = {"CONCURRENCY": 8}
    set_pool(pool, monkeypatch)
    assert list(check_pools()) == []


def test_small_pool_is_reported_with_what_to_set(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per process, with the number of connections that the server needs."""
    settings.ASYNCQ = {"CONCURRENCY": 6, "PROCESSES": 3}
    set_pool(True, monkeypatch)
    (message,) = check_pools()
    assert "a pool of 4 connections" in message.msg
    assert "6 slots and 2 threads of its own" in message.msg
    assert "{'max_size': 8} or more, or lower the concurrency to 2" in str(message.hint)
    assert "needs 32 connections" in str(message.hint)


def test_pool_of_another_database_needs_one_connection_for_each_slot(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads of the package use the database of its rows only."""
    settings.ASYNCQ = {"CONCURRENCY": 5}
    set_pool(True, monkeypatch, alias="other")
    assert ["DATABASES['other'] has a pool of 4" in message.msg for message in check_pools()] == [True]
    settings.ASYNCQ = {"CONCURRENCY": 4}
    assert list(check_pools()) == []


def install_tenants(settings: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a stand-in of django-tenants: the check looks for its name only."""
    (folder / "django_tenants").mkdir()
    (folder / "django_tenants" / "__init__.py").touch()
    monkeypatch.syspath_prepend(folder)
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, "django_tenants"]


def test_shared_app_of_tenants_gives_no_message(settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With django-tenants the tables stand in the shared schema; a list of tenants' apps without it says nothing."""
    settings.TENANT_APPS = ["django_asyncq"]
    assert list(check_tenants()) == []
    install_tenants(settings, tmp_path, monkeypatch)
    settings.TENANT_APPS = ["shop", "django_asyncq_reports"]
    assert list(check_tenants()) == []


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
        ("ASYNCQ", {"REDIS": "nowhere"}, "asyncq.E010"),
        ("CACHES", {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}, "asyncq.E011"),
        ("TASKS", {}, "asyncq.W013"),
        ("TASKS", {"a": OF_P, "b": OF_P}, "asyncq.E014"),
        ("TASKS", {"a": {**OF_P, "QUEUES": []}, "b": {**OF_P, "QUEUES": ["x"]}}, "asyncq.E014"),
        ("TASKS", {"two words": {"BACKEND": BACKEND}}, "asyncq.E023"),
        ("TASKS", {"qgate": {"BACKEND": BACKEND}}, "asyncq.E023"),
        ("USE_TZ", False, "asyncq.W015"),
        ("SECRET_KEY", "", "asyncq.E017"),
        ("TENANT_APPS", ["django.contrib.auth", "django_asyncq"], "asyncq.E018"),
        ("TENANT_APPS", ("django_asyncq.apps.AsyncqConfig",), "asyncq.E018"),
        ("POOL", True, "asyncq.W019"),
        ("POOL", {"max_size": 9}, "asyncq.W019"),
        ("POOL", {"min_size": 9}, "asyncq.W019"),
        ("POOL", {"min_size": 20, "max_size": 9}, "asyncq.W019"),
        ("TASKS", {"default": {"BACKEND": BACKEND, "QUEUES": ["bad queue"]}}, "asyncq.E020"),
        ("TASKS", {"default": {"BACKEND": BACKEND, "OPTIONS": {"retries": 3}}}, "asyncq.E021"),
        ("TASKS", {"default": {"BACKEND": BACKEND, "OPTIONS": {"max_attempts": 0}}}, "asyncq.E022"),
        ("TASKS", {"default": {"BACKEND": BACKEND, "OPTIONS": {"timeout": "3"}}}, "asyncq.E022"),
        ("TASKS", {"default": {"BACKEND": BACKEND, "OPTIONS": {"timeout": False}}}, "asyncq.E022"),
    ],
)
def test_wrong_settings_are_reported(
    setting: str, value: Any, id: str, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with an id of its own."""
    if setting == "TENANT_APPS":
        install_tenants(settings, tmp_path, monkeypatch)
    if setting == "POOL":
        set_pool(value, monkeypatch)
    else:
        setattr(settings, setting, value)
    assert id in ids()


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("QUEUE", "Did you mean 'QUEUES'? "),
        ("OPTION", "Did you mean 'OPTIONS'? "),
        ("options", "Did you mean "),
        ("X", ""),
    ],
)
def test_a_misspelt_key_of_an_alias_is_reported(key: str, hint: str, settings: Any) -> None:
    """The framework ignores it, so the default would stay in force; another package's alias is not looked at."""
    other = {"BACKEND": "django_asyncq.testing.TestBackend", key: []}
    settings.TASKS = {"default": {"BACKEND": BACKEND, key: ["mail"]}, "test": other, "none": {"BACKEND": DUMMY, key: 1}}
    found = [each for each in checks.run_checks() if each.id == "asyncq.E024"]
    assert [each.msg for each in found] == [
        f"TASKS[{name!r}] has the unknown key {key!r}." for name in ("default", "test")
    ]
    assert {str(each.hint).startswith(hint) for each in found} == {True}
    assert {str(each.hint).endswith("Known keys: BACKEND, QUEUES, OPTIONS.") for each in found} == {True}


def test_a_class_of_the_project_may_read_more_keys(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so by the attribute `known_keys`."""
    settings.TASKS = {"default": {"BACKEND": BACKEND, "REGION": "eu"}}
    assert ids() == ["asyncq.E024"]
    monkeypatch.setattr(AsyncqBackend, "known_keys", (*AsyncqBackend.known_keys, "REGION"))
    assert ids() == []


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
        (["--queues", "reports:0,default"], "pause it with"),
        (["--queues", "reports:-1"], "at least 1 slot"),
        (["--queues", "reports:x"], "such as reports:2"),
        (["--queues", "reports:"], "such as reports:2"),
        (["--queues", "reports:2=3"], "or reports=3:2"),
        (["--queues", "reports:9,default", "--concurrency", "8"], "Write reports:8 or less, or give --concurrency 9"),
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
    (found,) = [message for message in checks.run_checks() if message.id == "asyncq.I030"]
    assert found.level == checks.INFO
    assert "'either', cron('0 0 13 * 5')" in found.msg
    assert "on the 13th day of month or on Friday" in found.msg
    assert ids() == ["asyncq.I030"]


def test_options_of_retries_need_a_second_attempt(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    """The task, its alias or the settings may give it. A time to wait counts for `context.retry(counted=False)` too."""
    monkeypatch.setattr(registry, "_registry", {})
    task(retry_on=OSError, give_up_on=KeyError, backoff=3)(tasks.tidy.func)
    task(takes_context=True, backoff=3)(context_tasks.looks.func)
    found = [message for message in checks.run_checks() if message.id == "asyncq.W032"]
    named = [message.msg.partition(" has ")[2].partition("=")[0] for message in found]
    assert named == ["retry_on", "give_up_on", "backoff"]
    assert ids() == ["asyncq.W032"] * 3
    settings.TASKS = {"default": {"BACKEND": BACKEND, "OPTIONS": {"max_attempts": 2}}}
    assert ids() == []
    settings.TASKS = {"default": {"BACKEND": BACKEND}}
    settings.ASYNCQ = {**settings.ASYNCQ, "MAX_ATTEMPTS": 2}
    assert ids() == []
    settings.ASYNCQ = {**settings.ASYNCQ, "MAX_ATTEMPTS": "2"}
    assert "asyncq.W032" not in ids()
    settings.TASKS = {"default": {"BACKEND": DUMMY}}
    assert "asyncq.W032" not in ids()


def test_tasks_that_share_a_rate_declare_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """However they write them; each pair of a name, a format or a callable has a message that names both tasks."""
    monkeypatch.setattr(registry, "_registry", {})
    functions = iter([rate_tasks.fast.func, rate_tasks.slow.func, rate_tasks.call_api.func, rate_tasks.hourly.func])

    def declare(rate: str, rate_per: Any = None, burst: int = 1) -> None:
        task(rate=rate, rate_per=rate_per, burst=burst)(next(functions))

    def messages() -> list[str]:
        return [message.msg for message in checks.run_checks() if message.id == "asyncq.W056"]

    declare("60/m", "mail")
    declare("1/s", "mail")
    assert ids() == []
    declare("1/s", "mail", burst=2)
    (found,) = messages()
    assert "share the rate 'mail'" in found
    assert ": tests.rate_tasks.call_api (1/s, burst 2), tests.rate_tasks.fast (60/m, burst 1)." in found
    declare("2/s")
    assert messages() == [found]
    assert ids() == ["asyncq.W056"]


@pytest.mark.parametrize("rate_per", ["{number}", lambda number: f"of-{number}"])
def test_tasks_that_name_their_rate_in_one_way_share_it(monkeypatch: pytest.MonkeyPatch, rate_per: Any) -> None:
    """The same arguments give the same name."""
    monkeypatch.setattr(registry, "_registry", {})
    task(rate="1/s", rate_per=rate_per)(rate_tasks.fast.func)
    assert ids() == []
    task(rate="2/s", rate_per=rate_per)(rate_tasks.slow.func)
    assert ids() == ["asyncq.W056"]


def test_a_module_of_tasks_that_cannot_be_imported_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a warning: a web process may do without its tasks, a worker may not."""

    def fails() -> None:
        raise ImportError("No module named 'renderer'")

    monkeypatch.setattr(registry, "load_task_modules", fails)
    (found,) = [message for message in checks.run_checks() if message.id == "asyncq.W031"]
    assert "ImportError: No module named 'renderer'" in found.msg

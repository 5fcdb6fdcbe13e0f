"""System checks of the settings. Each bad value has an id of its own and a hint. A check must not open a connection."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import combinations
from types import SimpleNamespace
from typing import Any, NamedTuple

from django.conf import settings as django_settings
from django.core import checks
from django.utils.module_loading import import_string

from . import conf
from .core import aliases, compat, policies, registry
from .core.aliases import PREFIX_HINT, is_prefix, prefix_of
from .core.guard import attempt
from .core.late import Late
from .core.needs import NEEDS_OF_RETRIES, lacking
from .core.options import MOST_ATTEMPTS, MOST_LOG_LINES, MOST_PER_SECOND, is_attempt_count
from .core.rates import StartRate, rate_of
from .core.schedules import declared_schedules
from .core.time import AT_LEAST_ZERO, MORE_THAN_ZERO, is_duration
from .core.timing import Cron, describe, fires_on_either_day
from .models import TaskRecord
from .storage.routing import SQLITE_OPTIONS, late_write_lock, small_pools, writing_database
from .tasks import default_of

Message = checks.CheckMessage
Check = Callable[..., Iterator[Message]]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    """Add a check; the app registers `check_project`, which makes all of them."""
    CHECKS.append(function)
    return function


def check_project(app_configs: Any = None, **kwargs: Any) -> list[Message]:
    """Make all checks of this module, in their order."""
    return [message for each in CHECKS for message in each(app_configs, **kwargs)]


# It imports redis-py and builds a client, which takes several times as long as all other checks.
SETTING_FAULTS = Late("broker.clients.setting_faults")
# Nothing can be wrong with such an address, without options, that would show without a connection.
WRITTEN = r"(?:[\w.~!$*+-]|%[0-9A-Fa-f]{2})*"
PLAIN_ADDRESS = re.compile(
    rf"rediss?://(?:{WRITTEN}(?::{WRITTEN})?@)?[A-Za-z0-9._-]+(?::[1-9]\d{{0,3}}|:[1-5]\d{{4}})?(?:/\d{{0,4}})?",
    re.ASCII,
)
# The backends whose addresses are asked for alone, and what of their OPTIONS concerns no connection.
PLAIN_BACKENDS = {
    "django_redis.cache.RedisCache": {"CLIENT_CLASS"},
    "django.core.cache.backends.redis.RedisCache": set[str](),
}


class Rule(NamedTuple):
    """What a value in ASYNCQ must be. id: of the check. hint: how to correct the value.

    fault: returns what is wrong with a value, to follow the name of the setting.
    """

    id: str
    holds: Callable[[Any], bool]
    hint: str
    fault: Callable[[Any], str] = " = {!r} is not valid".format


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_whole(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_keep_seconds(value: Any) -> bool:
    return policies.is_retention_time(value)


def _is_pattern(value: Any) -> bool:
    try:
        re.compile(value)
    except (re.error, TypeError):
        return False
    return True


def _are_callables(value: Any) -> bool:
    if not isinstance(value, list | tuple) or not all(isinstance(path, str) for path in value):
        return False
    try:
        return all(callable(import_string(path)) for path in value)
    except ImportError:
        return False


def _is_monitor_token(value: Any) -> bool:
    """A short one could be guessed. The characters are those that a header `Bearer` allows."""
    return value == "" or (isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9._~+/=-]{16,}", value) is not None)


# The kinds of `configuration.Fault`.
REDIS_IDS = {
    "alias": "asyncq.E010",
    "cache": "asyncq.E011",
    "LOCATION": "asyncq.E050",
    "OPTIONS": "asyncq.E051",
    "CLIENT_FACTORY": "asyncq.E052",
}
# The kinds of `alert_settings.Fault`.
ALERT_IDS = {"ALERTS": "asyncq.E173", "mail": "asyncq.E174", "webhook": "asyncq.E175"}
FRAMEWORK_BACKENDS = {
    f"{package}.backends.{name}"
    for package in ("django.tasks", "django_tasks")
    for name in ("dummy.DummyBackend", "immediate.ImmediateBackend")
}
LEAST_STALL_SECONDS = 10
TRUE_OR_FALSE = "Give True or False."
POSITIVE_SECONDS = "Give seconds or a timedelta, more than 0."
KEEP_SECONDS = f"Give {AT_LEAST_ZERO}, or None to keep forever."
RULES: dict[str, Rule] = {
    "REDIS": Rule(
        "asyncq.E101",
        lambda value: isinstance(value, str | list | tuple),
        "Give an address such as redis://host:6379/1, a list of addresses, or the name of an alias in CACHES.",
        # Anything else may have a password in it.
        lambda value: f" is a {type(value).__qualname__}",
    ),
    "CLIENT_FACTORY": Rule(
        "asyncq.E102",
        lambda value: isinstance(value, str),
        "Give the dotted path of a callable, or '' for what REDIS names.",
    ),
    "REDIS_IS_FOR_TESTS": Rule("asyncq.E149", _is_bool, TRUE_OR_FALSE),
    "KEY_PREFIX": Rule("asyncq.E103", is_prefix, f"{PREFIX_HINT}; asynq's tools need 'asynq'."),
    "GATE_PREFIX": Rule("asyncq.E104", is_prefix, f"{PREFIX_HINT}."),
    "LOCK_PREFIX": Rule("asyncq.E148", is_prefix, f"{PREFIX_HINT}."),
    "LEASE_SECONDS": Rule(
        "asyncq.E105", _is_whole(1), "Give whole seconds or a timedelta of whole seconds, at least 1."
    ),
    "BEAT_SECONDS": Rule("asyncq.E106", _is_positive, POSITIVE_SECONDS),
    "MAX_ATTEMPTS": Rule(
        "asyncq.E107", is_attempt_count, f"Give a whole number from 1 to {MOST_ATTEMPTS:,}; 1 means no retry."
    ),
    "TIMEOUT_SECONDS": Rule(
        "asyncq.E108",
        lambda value: value is None or _is_positive(value),
        "Give seconds or a timedelta, more than 0, or None.",
    ),
    "TIMEOUT_GRACE_SECONDS": Rule("asyncq.E109", _is_positive, POSITIVE_SECONDS),
    "SHUTDOWN_GRACE_SECONDS": Rule(
        "asyncq.E110", lambda value: _is_number(value) and value >= 0, "Give seconds or a timedelta, at least 0."
    ),
    "MAX_CRASHES": Rule("asyncq.E111", _is_whole(1), "Give a whole number of at least 1."),
    "UNREGISTERED_PATIENCE_SECONDS": Rule(
        "asyncq.E112", _is_whole(0), "Give whole seconds or a timedelta of whole seconds, at least 0."
    ),
    "EXPECTED_SECONDS": Rule("asyncq.E114", _is_positive, POSITIVE_SECONDS),
    "MAX_ARGUMENTS_BYTES": Rule("asyncq.E115", _is_whole(64), "Give bytes, at least 64."),
    "MAX_RESULT_BYTES": Rule("asyncq.E116", _is_whole(64), "Give bytes, at least 64."),
    "TYPED_ARGUMENTS": Rule("asyncq.E180", _is_bool, TRUE_OR_FALSE),
    "KEEP_LOGS": Rule(
        "asyncq.E150",
        lambda value: _is_whole(0)(value) and value <= MOST_LOG_LINES,
        f"Give a whole number from 0 to {MOST_LOG_LINES}; 0 keeps none.",
    ),
    "PROCESSES": Rule("asyncq.E118", _is_whole(1), "Give a whole number of at least 1."),
    "CONCURRENCY": Rule("asyncq.E119", _is_whole(1), "Give a whole number of at least 1."),
    "START_METHOD": Rule(
        "asyncq.E176",
        lambda value: value in (conf.AUTO, conf.SPAWN, conf.FORKSERVER),
        "Give 'auto', 'spawn' or 'forkserver'.",
    ),
    "SINGLE_INSTANCE_MODE": Rule("asyncq.E123", _is_bool, TRUE_OR_FALSE),
    "TASK_LOCK_DIR": Rule("asyncq.E124", lambda value: isinstance(value, str) and bool(value), "Give a folder's path."),
    "LOCK_TTL_SECONDS": Rule(
        "asyncq.E125", _is_whole(3), "Give whole seconds or a timedelta of whole seconds, at least 3."
    ),
    "SENSITIVE_KEYS": Rule("asyncq.E126", _is_pattern, "Give a regular expression."),
    "HEADER_SOURCES": Rule("asyncq.E172", _are_callables, "Give a list of dotted paths of functions that take a task."),
    "AROUND": Rule(
        "asyncq.E178",
        _are_callables,
        "Give a list of dotted paths of functions that take the context of a run and return a context manager.",
    ),
    "APP_VERSION": Rule(
        "asyncq.E179",
        lambda value: isinstance(value, str) and len(value) <= 100 and value.isprintable(),
        "Give a text of at most 100 printable characters, such as a tag or a commit.",
    ),
    "MONITOR_TOKEN": Rule("asyncq.E171", _is_monitor_token, "Give at least 16 letters, digits or '-._~+/=', or ''."),
    # `check_alerts` looks at it.
    "ALERTS": Rule("asyncq.E173", lambda value: True, ""),
    "SUCCEEDED_RETENTION_SECONDS": Rule("asyncq.E127", _is_keep_seconds, KEEP_SECONDS),
    "FAILED_RETENTION_SECONDS": Rule("asyncq.E128", _is_keep_seconds, KEEP_SECONDS),
    "RETENTION": Rule(
        "asyncq.E129",
        lambda value: not any(policies.setting_errors(value)),
        "Give {'queues': {name: {'succeeded': keep, 'failed': keep}}, 'tasks': {name: {…}}}; each part is optional; "
        f"keep: {policies.RETENTION_TIME_HINT}.",
    ),
    "ACCEPT_OUTCOMES": Rule("asyncq.E177", _is_bool, TRUE_OR_FALSE),
    "BULK_ROWS_PER_SECOND": Rule(
        "asyncq.E170",
        lambda value: _is_whole(1)(value) and value <= MOST_PER_SECOND,
        f"Give a whole number from 1 to {MOST_PER_SECOND:,}.",
    ),
    "STALL_SECONDS": Rule(
        "asyncq.E140",
        lambda value: _is_number(value) and value >= LEAST_STALL_SECONDS,
        f"Give seconds or a timedelta, at least {LEAST_STALL_SECONDS}: an idle worker asks its queues every 5 s.",
    ),
    "STATUS_LINK_SECONDS": Rule("asyncq.E154", is_duration, f"Give {MORE_THAN_ZERO}."),
    "PUSH_BATCH_SECONDS": Rule(
        "asyncq.E131",
        lambda value: _is_number(value) and 0 <= value <= 1,
        "Give seconds or a timedelta from 0 to 1 s; 0 means no batching.",
    ),
}


@check
def check_settings(app_configs: Any = None, **kwargs: Any) -> Iterator[Message]:
    """Check the ASYNCQ dictionary, key by key."""
    written = getattr(django_settings, conf.NAME, {})
    if not isinstance(written, dict):
        yield checks.Error(
            f"{conf.NAME} must be a dictionary, not {type(written).__qualname__}.",
            hint="Write ASYNCQ = {...} with keys in capitals, or remove it.",
            id="asyncq.E001",
        )
        return
    for key, value in written.items():
        if key not in RULES:
            yield checks.Error(
                f"{conf.NAME} has the unknown key {key!r}.",
                hint=f"Known keys: {', '.join(sorted(RULES))}.",
                id="asyncq.E002",
            )
        elif not RULES[key].holds(conf.in_seconds(key, value)):
            faults = policies.setting_errors(value) if key == "RETENTION" else [RULES[key].fault(value)]
            for fault in faults:
                yield checks.Error(f"{conf.NAME}[{key!r}]{fault}.", hint=RULES[key].hint, id=RULES[key].id)
    yield from _check_times(written)


def _check_times(written: dict[str, Any]) -> Iterator[Message]:
    """Check the two times that depend on each other: with few renewals in a lease, one late renewal loses it."""
    defaults = conf.Settings()
    lease, beat = (
        conf.in_seconds(name, written.get(name, getattr(defaults, name.lower())))
        for name in ("LEASE_SECONDS", "BEAT_SECONDS")
    )
    if _is_positive(lease) and _is_positive(beat) and beat * 3 > lease:
        yield checks.Error(
            f"{conf.NAME}['LEASE_SECONDS'] = {lease!r} is less than three times BEAT_SECONDS = {beat!r}.",
            hint="Make the lease at least three times as long, so that one late renewal loses no task.",
            id="asyncq.E003",
        )


@check
def check_alerts(app_configs: Any = None, **kwargs: Any) -> Iterator[Message]:
    """Check ALERTS. No address of a webhook is repeated: it has a secret in it."""
    for fault in policies.setting_faults(conf.raw().get("ALERTS", {})):
        yield checks.Error(f"{conf.NAME}['ALERTS']{fault.text}.", hint=fault.hint, id=ALERT_IDS[fault.kind])


@check
def check_redis_alias(app_configs: Any = None, **kwargs: Any) -> Iterator[Message]:
    """Check the cache alias, its addresses and options, and the client factory. Opens no connection."""
    written = conf.raw()
    if not aliases.is_redis_used():
        return
    if not all(RULES[key].holds(written.get(key, "")) for key in ("REDIS", "CLIENT_FACTORY")):
        return  # `check_settings` has reported it.
    if _is_plain():
        return
    for fault in SETTING_FAULTS():
        yield checks.Error(fault.text, hint=fault.hint, id=REDIS_IDS[fault.kind])


def _is_plain() -> bool:
    """Return whether the settings name one address in the plainest form, by themselves or in CACHES."""
    settings = conf.current()
    found: Any = settings.redis
    cache = django_settings.CACHES.get(found) if isinstance(found, str) else None
    if cache is not None:
        unasked = PLAIN_BACKENDS.get(str(cache.get("BACKEND")))
        options = set(cache.get("OPTIONS") or {})
        if unasked is None or options - unasked or hasattr(django_settings, "DJANGO_REDIS_CONNECTION_FACTORY"):
            return False
        found = cache.get("LOCATION")
    return not settings.client_factory and isinstance(found, str) and PLAIN_ADDRESS.fullmatch(found) is not None


@check
def check_aliases(app_configs: Any = None, **kwargs: Any) -> Iterator[Message]:
    """Check that TASKS names this backend, and that each alias has a usable prefix and queues of its own under it."""
    if not compat.HAS_DJANGO_TASKS and "django_tasks" not in django_settings.INSTALLED_APPS:
        yield checks.Error(
            "django_tasks is not in INSTALLED_APPS.",
            hint="On Django 5.2 the tasks framework comes from the django-tasks package: add 'django_tasks'.",
            id="asyncq.E012",
        )
    tasks = getattr(django_settings, "TASKS", None)
    named = tasks if isinstance(tasks, dict) else {}
    # A backend of the project may be a subclass of ours.
    ours = {name: params for name, params in named.items() if hasattr(aliases.backend_class(name), "client_factory")}
    # In test settings Django's own backends are a choice. A project that forgot TASKS has the immediate one by default.
    is_chosen = django_settings.is_overridden("TASKS")  # type: ignore[misc]
    chosen = {str(params.get("BACKEND", "")) for params in named.values()} if is_chosen else set()
    if not ours and not (chosen and chosen <= FRAMEWORK_BACKENDS):
        yield checks.Warning(
            "No alias in TASKS uses django_asyncq.",
            hint='TASKS = {"default": {"BACKEND": "django_asyncq.backend.AsyncqBackend"}}',
            id="asyncq.W013",
        )
    yield from _check_prefixes(ours)


def _check_prefixes(ours: dict[str, Any]) -> Iterator[Message]:
    settings = conf.current()
    for name in ours:
        prefix = prefix_of(name)
        taken = tuple(filter(is_prefix, (settings.gate_prefix, settings.lock_prefix)))
        # KEY_PREFIX and the option are checked where they stand; an alias may be longer than they are.
        is_usable = prefix == settings.key_prefix or re.fullmatch(r"[A-Za-z0-9_.:-]+", prefix)
        if not is_usable or f"{prefix}:".startswith(taken):
            yield checks.Error(
                f"TASKS[{name!r}] would have the Redis prefix {prefix!r}, which cannot be one.",
                hint=f"Name the alias differently, or give it OPTIONS = {{'prefix': …}}. {PREFIX_HINT}.",
                id="asyncq.E023",
            )
    for (first, params), (second, others) in combinations(ours.items(), 2):
        if prefix_of(first) == prefix_of(second) and (shared := _shared_queues(params, others)):
            yield checks.Error(
                f"TASKS[{first!r}] and TASKS[{second!r}] share the Redis prefix {prefix_of(first)!r} and {shared}.",
                hint="Give each its own QUEUES, or remove 'prefix' from OPTIONS: a worker runs the tasks of one alias "
                "only.",
                id="asyncq.E014",
            )


def _shared_queues(params: Any, others: Any) -> str:
    """Return which queues two aliases share; "" for none. An empty list of QUEUES stands for every name."""
    first, second = (set(each.get("QUEUES", ["default"])) for each in (params, others))
    shared = sorted(map(repr, first & second if first and second else first | second))
    if not (first and second):
        return f"the queues {', '.join(shared)}" if shared else "every queue"
    return f"the queues {', '.join(shared)}" if shared else ""


@check
def check_secret_key(app_configs: Any = None, **kwargs: Any) -> Iterator[Message]:
    """Check that there is a SECRET_KEY, which signs the outcomes that workers leave in Redis."""
    if not conf.has_secret_key():
        yield checks.Error(
            "SECRET_KEY is empty, so no worker can leave an outcome in Redis while the database is unreachable.",
            hint="Set SECRET_KEY to the same long random text on every host.",
            id="asyncq.E017",
        )


@check
def check_pools(app_configs: Any = None, **kwargs: Any) -> Iterator[Message]:
    """Check that a pool of database connections has one for each slot and thread of a worker process."""
    defaults = conf.Settings()
    concurrency, processes = (
        value if _is_whole(1)(value := conf.raw().get(name, default)) else default
        for name, default in (("CONCURRENCY", defaults.concurrency), ("PROCESSES", defaults.processes))
    )
    for pool in small_pools(concurrency, processes):
        yield checks.Warning(f"{pool.text}.", hint=pool.remedy, id="asyncq.W019")


@check
def check_sqlite(app_configs: Any = None, **kwargs: Any) -> Iterator[Message]:
    """Check that SQLite takes the write lock when a transaction begins; a lock that is raised later is refused."""
    alias = writing_database(TaskRecord)
    if aliases.is_redis_used() and late_write_lock(alias):
        yield checks.Warning(
            f"DATABASES[{alias!r}] is SQLite without immediate transactions: while workers write, web requests fail "
            'with "database is locked".',
            hint=f"Set DATABASES[{alias!r}]['OPTIONS'] = {SQLITE_OPTIONS!r}.",
            id="asyncq.W054",
        )


@check
def check_tenants(app_configs: Any = None, **kwargs: Any) -> Iterator[Message]:
    """Check that with django-tenants the tables of tasks are shared: workers know no tenant when they claim a task."""
    if "django_tenants" not in django_settings.INSTALLED_APPS:
        return
    apps = getattr(django_settings, "TENANT_APPS", ())
    if any(str(app).partition(".")[0] == "django_asyncq" for app in apps):
        yield checks.Error(
            "django_asyncq is in TENANT_APPS, so each tenant has tables of its own, which no worker reads.",
            hint="Move 'django_asyncq' from TENANT_APPS to SHARED_APPS, run migrate_schemas, and give each task the "
            "schema name of its tenant as an argument.",
            id="asyncq.E018",
        )


@check
def check_time_zones(app_configs: Any = None, **kwargs: Any) -> Iterator[Message]:
    """Check USE_TZ: without time zones, a schedule cannot tell apart the repeated hours of a clock change."""
    if not django_settings.USE_TZ:
        yield checks.Warning(
            "USE_TZ is False, so schedules do not run.",
            hint="Set USE_TZ = True, Django's default. Tasks without a schedule work either way.",
            id="asyncq.W015",
        )


@check
def check_declared_schedules(app_configs: Any = None, **kwargs: Any) -> Iterator[Message]:
    """Say which declared schedules fire on either of two days, since many read their expression as both."""
    _, error = attempt(registry.load_task_modules)
    if error is not None:
        yield checks.Warning(
            f"The tasks of the installed apps cannot be imported: {type(error).__name__}: {error}",
            hint="Correct the module; no worker starts before.",
            id="asyncq.W031",
        )
    for name, (_, declaration) in declared_schedules():
        timing = Cron(declaration.cron, declaration.zone) if declaration.cron else None
        if timing is not None and fires_on_either_day(timing):
            yield checks.Info(
                f"The schedule {name!r}, cron({declaration.cron!r}), fires on each day that matches the day of month "
                f"or the day of week; one is enough: {describe(timing)}.",
                hint="To silence this, add 'asyncq.I030' to SILENCED_SYSTEM_CHECKS. For days that match both, give the "
                "schedule one of the two, and look for the other in the task.",
                id="asyncq.I030",
            )


@check
def check_retries(app_configs: Any = None, **kwargs: Any) -> Iterator[Message]:
    """Check that a task which says how it is retried has more than one attempt; the settings may decide how many."""
    for task in registry.every_task():
        attempts = default_of(task, "max_attempts", aliases.options_of(task.backend))
        # Django's own backends retry nothing. A number that is none is reported where it stands.
        if not hasattr(aliases.backend_class(task.backend), "client_factory") or not is_attempt_count(attempts):
            continue
        retries = {name: getattr(task, name) for name in (*NEEDS_OF_RETRIES, "takes_context")}
        for option, remedy in lacking(SimpleNamespace(attempts=attempts, **retries), NEEDS_OF_RETRIES):
            yield checks.Warning(
                f"Task {task.module_path} has {option}={retries[option]!r} and is never retried: it has one attempt.",
                hint=remedy,
                id="asyncq.W032",
            )


@check
def check_inbox_lists(app_configs: Any = None, **kwargs: Any) -> Iterator[Message]:
    """Check that no task gets the values of a list of this package: they would be taken out of it."""
    settings = conf.current()
    own = tuple(f"{prefix_of(alias)}:" for alias in aliases.redis_aliases())
    own += tuple(filter(is_prefix, (settings.gate_prefix, settings.lock_prefix)))
    for task in registry.every_task():
        if isinstance(task.inbox, str) and task.inbox.removeprefix("{").startswith(own):
            yield checks.Error(
                f"Task {task.module_path} has inbox={task.inbox!r}, which is a key of this package.",
                hint="Give the list of another program; documents in the queue's own inbox need inbox=True.",
                id="asyncq.E055",
            )


@check
def check_shared_rates(app_configs: Any = None, **kwargs: Any) -> Iterator[Message]:
    """Check that tasks which share a rate declare the same numbers: what is promised of it would be true of neither."""
    sharing: dict[Any, dict[StartRate, Any]] = {}
    for task in registry.every_task():
        if task.rate is not None:
            # A format that several tasks have gives the same name for the same values.
            sharing.setdefault(task.rate_per or task.module_path, {}).setdefault(rate_of(task), task)
    for name, found in sharing.items():
        if len(found) > 1:
            listed = ", ".join(f"{task.module_path} ({task.rate}, burst {task.burst})" for task in found.values())
            text = repr(name) if isinstance(name, str) else f"of {name.__module__}.{name.__qualname__}"
            yield checks.Warning(
                f"Tasks share the rate {text} and declare different numbers: {listed}.",
                hint="Give them the same rate and burst, or each a rate_per of its own. A Rate row overrides them all.",
                id="asyncq.W056",
            )

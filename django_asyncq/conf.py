"""The settings of the `ASYNCQ` dictionary, each with its default and unit. A duration may be written as a timedelta.

`current()` reads them when they are needed, never at import, so that `override_settings` works. It does not validate
them: `checks` does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from .core.time import seconds_of

NAME = "ASYNCQ"
# Between two passes of the reconciler: what a crash left is repaired about as soon as a dead worker is noticed, and a
# pass over a healthy system costs a few commands.
RECONCILE_SECONDS = 5.0
# Between two sweeps of the reconciler over all unfinished rows and all gates. They find what only an eviction, a lost
# memory or another program can leave, and read every unfinished row, so not more often.
SWEEP_SECONDS = 60.0
# While Redis is reachable, the gate slot of a committed row is confirmed within RECONCILE_SECONDS and this time.
CONFIRM_SECONDS = 5
# How long what a transaction has taken, such as the slot of a gate, waits for its commit. A rollback gives it back at
# once, so it counts for producers that die: short enough not to block a gate for long, far longer than a request.
PROVISIONAL_SECONDS = 60
# How worker processes are started, as multiprocessing names it; AUTO is the second where nothing speaks against it.
SPAWN, FORKSERVER, AUTO = "spawn", "forkserver", "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings in force. A key of `ASYNCQ` is the field's name in capitals."""

    redis: str | Sequence[str] = "default"
    """Where the queues are: an address such as `redis://host:6379/1`, or the alias in CACHES of a Redis cache."""
    redis_is_for_tests: bool = False
    """Whether tests may use this Redis, which they do not start themselves; see `RedisNotForTests`."""
    client_factory: str = ""
    """Dotted path of a callable `(role) -> redis client`; for a Cluster: `django_asyncq.broker.cluster.client`."""
    key_prefix: str = "asynq"
    """First part of every key; of the queues of an alias other than `default`: `<KEY_PREFIX>:<alias>`."""
    gate_prefix: str = "asynch:qgate:"
    """First part of the key of every gate (admission limit); `<KEY_PREFIX>:qgate:` when only KEY_PREFIX is set."""
    lock_prefix: str = "task_lock:"
    """First part of the key of every lock of the coordinator; `<KEY_PREFIX>:task_lock:` when only KEY_PREFIX is set."""
    lease_seconds: int = 30
    """How long a worker may be silent before its tasks are recovered and run elsewhere."""
    beat_seconds: float = 5
    """How often a supervisor renews the leases of its workers."""
    max_attempts: int = 1
    """Attempts of a task that sets no `max_attempts`; 1 means no retry."""
    timeout_seconds: float | None = None
    """Timeout of a task that sets no `timeout`; None means no timeout."""
    timeout_grace_seconds: float = 5
    """How long a `def` task may continue after its timeout before its worker process is replaced."""
    shutdown_grace_seconds: float = 20
    """How long running tasks may continue after SIGTERM before they are requeued."""
    stall_seconds: float = 60
    """How long a worker process may take nothing while a task is due and a slot is free, before it is replaced."""
    max_crashes: int = 3
    """A task fails when it was lost alone with its worker process this many times."""
    unregistered_patience_seconds: int = 600
    """How long tasks may wait for a worker whose code has them before an alert says so."""
    expected_seconds: float = 60
    """Expected run time of a task with a gate that sets no `expected_seconds`."""
    push_batch_seconds: float = 0.01
    """How long a task may wait to be pushed together with others; 0 pushes in every `enqueue`."""
    max_arguments_bytes: int = 262_144
    """Largest size of a task's arguments as JSON."""
    max_result_bytes: int = 1_048_576
    """Largest size of a return value as JSON; a note replaces a larger one."""
    app_version: str = ""
    """Version of the project's code, such as a tag or a commit; each failure is kept with that which ran."""
    keep_logs: int = 0
    """Lines of its log that a run of a task without `keep_logs` keeps, at most 2,000."""
    typed_arguments: bool = False
    """Whether arguments of a task without `typed_arguments` may be dates, decimals, UUIDs and instances of models."""
    status_link_seconds: float = 86_400
    """How long a signed link to a task's status is valid."""
    processes: int = 1
    """Worker processes of one `runworkers`."""
    concurrency: int = 8
    """Tasks that one worker process runs at the same time."""
    start_method: str = AUTO
    """How worker processes are started: `spawn`, or `forkserver` from a process that has loaded the project once;
    `auto` forks them where the system can, if the project has no thread and no connection when it is loaded."""
    succeeded_retention_seconds: float | None = 604_800
    """How long a task that succeeded is kept; None means forever."""
    failed_retention_seconds: float | None = 2_592_000
    """How long a task that failed without a retry is kept; None means forever. So are occurrences and start-up runs."""
    accept_outcomes: bool = True
    """Whether a row takes the outcome that another program reports for a task which Django enqueued for our workers."""
    retention: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Exceptions from the two, by name: `{"queues": {name: {"succeeded": …, "failed": …}}, "tasks": {…}}`."""
    bulk_rows_per_second: int = 200
    """How many tasks a second an action on many tasks changes that sets no rate of its own."""
    single_instance_mode: bool = True
    """Whether all workers share one host and one TASK_LOCK_DIR; the lock of a holder that died is then free at once."""
    task_lock_dir: str = "./.locks"
    """Folder of the lock files, used beside Redis in single-instance mode and instead of Redis when it is
    unreachable at start."""
    lock_ttl_seconds: int = 30
    """How long the coordinator's lock outlives a holder that died."""
    sensitive_keys: str = (
        r"passw(or)?d|secret|token(?!s)|(?<![a-z])card|credit_?card|authorization|api[_-]?key|credential"
    )
    """Regular expression; arguments whose key matches it are masked wherever they are shown."""
    header_sources: tuple[str, ...] = ()
    """Dotted paths of functions that are called with a task as it is enqueued, and return headers for it."""
    around: tuple[str, ...] = ()
    """Dotted paths of functions that take the context of a run, and return a context manager for its body."""
    monitor_token: str = ""
    """What a monitor sends as `Authorization: Bearer …` to read metrics and the rest; empty: staff only."""
    alerts: dict[str, Any] = field(default_factory=dict)
    """Where to write when tasks fail, wait or are run by nobody, and from which limits on; see the guide to alerts.
    Empty: nothing looks."""

    @property
    def beat_retry_seconds(self) -> float:
        """How soon a supervisor that could not renew its leases repeats the attempt."""
        return min(self.beat_seconds, 1)

    @property
    def outage_seconds(self) -> float:
        """The shortest outage of Redis that can make leases expire."""
        return self.lease_seconds - self.beat_seconds

    @property
    def quiet_seconds(self) -> float:
        """How long after such an outage expired leases stay with the supervisors that could not renew them."""
        return 2 * self.beat_retry_seconds + 1


FIELD_NAMES = {each.name.upper(): each.name for each in fields(Settings)}
TRUE_WORDS = {"1", "true", "yes", "on"}


def unasked_seconds() -> int:
    """Return how long a gate that no enqueue has asked keeps a trustworthy count.

    Until then, the slot of every committed row is either confirmed or still in its provisional time.
    """
    return max(int(PROVISIONAL_SECONDS - RECONCILE_SECONDS - CONFIRM_SECONDS), 1)


def raw() -> dict[str, Any]:
    """Return the project's `ASYNCQ` dictionary as it is written; an empty one when there is none."""
    value = getattr(django_settings, NAME, {})
    return value if isinstance(value, dict) else {}


def environment() -> dict[str, Any]:
    """Return the settings that come from the environment: SINGLE_INSTANCE_MODE and TASK_LOCK_DIR."""
    found: dict[str, Any] = {}
    if mode := os.environ.get("SINGLE_INSTANCE_MODE"):
        found["single_instance_mode"] = mode.strip().lower() in TRUE_WORDS
    if folder := os.environ.get("TASK_LOCK_DIR"):
        found["task_lock_dir"] = folder
    return found


@lru_cache(maxsize=1)
def current() -> Settings:
    """Return the settings in force. The environment overrides the project's settings, which override the defaults."""
    written = {FIELD_NAMES[key]: in_seconds(key, value) for key, value in raw().items() if key in FIELD_NAMES}
    return Settings(**{**_derived_prefixes(written), **written, **environment()})


def in_seconds(key: str, value: Any) -> Any:
    """Return a timedelta in a setting that is a duration as seconds; any other value unchanged."""
    return seconds_of(value) if key.endswith("_SECONDS") else value


def _derived_prefixes(written: dict[str, Any]) -> dict[str, Any]:
    """Return the prefixes of gates and locks for a KEY_PREFIX of the project's own.

    With the default ones, two projects on one Redis would empty each other's gates and take each other's locks.
    """
    default = Settings().key_prefix
    own = written.get("key_prefix", default)
    if own == default:
        return {}
    return {"gate_prefix": f"{own}:qgate:", "lock_prefix": f"{own}:task_lock:"}


def has_secret_key() -> bool:
    """Return whether the project has a SECRET_KEY; Django raises when it is empty."""
    try:
        return bool(django_settings.SECRET_KEY)
    except ImproperlyConfigured:
        return False


def forget_settings(*, setting: str, **kwargs: Any) -> None:
    """Forget the settings after a test changed them."""
    if setting in (NAME, "CACHES"):
        current.cache_clear()


setting_changed.connect(forget_settings, dispatch_uid="django_asyncq.conf")

"""The settings of the `ASYNCQ` dictionary, each with its default and unit.

Read late (`conf.current()`), so that tests and `override_settings` work; checked early, in `checks.py`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from django.conf import settings as django_settings
from django.core.signals import setting_changed

NAME = "ASYNCQ"
# Beyond RECONCILE_SECONDS: how long a committed row may wait for its gate slot to be confirmed while Redis is there.
CONFIRM_SECONDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One value per key of `ASYNCQ`; the key is the field's name in capitals."""

    redis: str = "default"
    """Alias in CACHES of a django-redis cache whose server holds the queues."""
    client_factory: str = ""
    """Dotted path of a callable `(role) -> redis client`; `django_asyncq.broker.cluster.client` is for a Cluster."""
    key_prefix: str = "asynq"
    """First part of every queue key. asynq's own tools see only `asynq`."""
    gate_prefix: str = "asynch:qgate:"
    """First part of every gate key."""
    lease_seconds: int = 30
    """How long a worker may be silent before its tasks are given to another."""
    beat_seconds: float = 5
    """How often the supervisor renews leases."""
    max_attempts: int = 1
    """Attempts of a task that does not say; 1 means no retry."""
    timeout_seconds: float | None = None
    """Timeout of a task that does not say; None means none."""
    timeout_grace_seconds: float = 5
    """How long a `def` task may go on after its timeout before its process is replaced."""
    shutdown_grace_seconds: float = 20
    """How long running tasks may go on after SIGTERM before they are handed back."""
    max_crashes: int = 3
    """Lost workers a task may have before it is set to failed."""
    unregistered_patience_seconds: int = 600
    """How long a task whose name no worker knows is put off before it is set to failed."""
    provisional_seconds: int = 60
    """How long a gate slot waits for the commit of the transaction it was taken in."""
    expected_seconds: float = 60
    """Expected seconds of a task at a gate that does not say."""
    push_batch_seconds: float = 0.01
    """How long what is enqueued right after a push waits to be pushed with more; 0: each `enqueue` pushes at once."""
    handoff: bool = True
    """Whether an idle worker is handed a pushed task at once; if not, all idle workers are only woken."""
    max_arguments_bytes: int = 262_144
    """Largest size of a task's arguments as JSON."""
    max_result_bytes: int = 1_048_576
    """Largest size of a return value as JSON; a larger one is replaced by a note."""
    max_depth: int = 64
    """Deepest nesting of arguments and results."""
    processes: int = 1
    """Worker processes of `runworkers`."""
    concurrency: int = 8
    """Tasks one worker process runs at once."""
    forward_seconds: float = 5
    """Longest time between two looks at what has become due."""
    reconcile_seconds: float = 5
    """Time between two passes of the reconciler."""
    sweep_seconds: float = 60
    """Time between two sweeps of the reconciler over all waiting rows and gates."""
    succeeded_retention_seconds: float | None = 604_800
    """How long a task that succeeded is kept; None means for ever."""
    failed_retention_seconds: float | None = 2_592_000
    """How long a task that failed for good is kept; None means for ever. Ticks and start-up runs are kept as long."""
    retention: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Exceptions from the two, by name: `{"queues": {name: {"succeeded": …, "failed": …}}, "tasks": {…}}`."""
    prune_seconds: float = 60
    """Time between two passes of the pruner; after a long one it rests longer."""
    single_instance_mode: bool = True
    """Whether all workers share one host and one TASK_LOCK_DIR; a holder that died is then succeeded at once."""
    task_lock_dir: str = "./.locks"
    """Folder of the lock files: beside Redis in single-instance mode, in place of it when it is away at start."""
    lock_ttl_seconds: int = 30
    """How long the coordinator's lock outlives a holder that has died."""
    sensitive_keys: str = r"passw(or)?d|secret|token(?!s)|(?<![a-z])card|credit_?card|authorization|api_?key|credential"
    """Regular expression; arguments whose key it matches are masked wherever they are shown."""

    @property
    def beat_retry_seconds(self) -> float:
        """How soon a supervisor that could not renew its leases tries again."""
        return min(self.beat_seconds, 1)

    @property
    def outage_seconds(self) -> float:
        """How long nobody must have reached Redis for leases to have run out by that."""
        return self.lease_seconds - self.beat_seconds

    @property
    def quiet_seconds(self) -> float:
        """How long after such an outage lapsed leases are left to supervisors that could not renew them."""
        return 2 * self.beat_retry_seconds + 1

    @property
    def unasked_seconds(self) -> int:
        """How long a gate may go unasked and still be believed.

        Who asks sooner finds the slot of every committed row either confirmed or in its provisional time still.
        """
        return max(int(self.provisional_seconds - self.reconcile_seconds - CONFIRM_SECONDS), 1)


FIELD_NAMES = {each.name.upper(): each.name for each in fields(Settings)}
TRUE_WORDS = {"1", "true", "yes", "on"}


def raw() -> dict[str, Any]:
    """Return the project's `ASYNCQ` dictionary as it was written, or an empty one."""
    value = getattr(django_settings, NAME, {})
    return value if isinstance(value, dict) else {}


def environment() -> dict[str, Any]:
    """Return the settings that the environment overrides: SINGLE_INSTANCE_MODE and TASK_LOCK_DIR."""
    found: dict[str, Any] = {}
    if mode := os.environ.get("SINGLE_INSTANCE_MODE"):
        found["single_instance_mode"] = mode.strip().lower() in TRUE_WORDS
    if folder := os.environ.get("TASK_LOCK_DIR"):
        found["task_lock_dir"] = folder
    return found


@lru_cache(maxsize=1)
def current() -> Settings:
    """Return the settings in force: defaults, then the project's, then the environment's."""
    written = {FIELD_NAMES[key]: value for key, value in raw().items() if key in FIELD_NAMES}
    return Settings(**{**written, **environment()})


def forget_settings(*, setting: str, **kwargs: Any) -> None:
    """Drop what was read, after a test changed the settings."""
    if setting in (NAME, "CACHES"):
        current.cache_clear()


setting_changed.connect(forget_settings, dispatch_uid="django_asyncq.conf")

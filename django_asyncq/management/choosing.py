"""Choose the alias in TASKS, and its queues, that `runworkers` runs; say which there are when the choice is wrong."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.conf import settings
from django.core.management.base import CommandError

from .. import compat
from ..aliases import uses_redis, written_aliases

EXAMPLE = 'TASKS = {"default": {"BACKEND": "django_asyncq.backend.AsyncqBackend"}}'


def chosen_backend(alias: str) -> Any:
    """Return the backend of an alias. Raises: CommandError with the aliases that can be run."""
    if alias not in _written():
        raise CommandError(f"TASKS has no alias {alias!r}. {_remedy()}")
    try:
        backend: Any = compat.task_backends[alias]
    except Exception as error:
        raise CommandError(f"TASKS[{alias!r}] cannot be used: {error}") from error
    kind = type(backend).__qualname__
    if not hasattr(backend, "enqueue_many"):
        raise CommandError(f"TASKS[{alias!r}] has the backend {kind}, whose tasks runworkers does not run. {_remedy()}")
    if not uses_redis(alias):
        raise CommandError(
            f"TASKS[{alias!r}] is a {kind}, whose tasks are not in Redis: run them with "
            f"django_asyncq.testing.run_tasks(backend={alias!r}), or write "
            f"'BACKEND': 'django_asyncq.backend.AsyncqBackend' to have workers run them"
        )
    return backend


def check_queues(backend: Any, names: Collection[str]) -> None:
    """Refuse queues that the alias does not have. Raises: CommandError with the queues there are."""
    unknown = sorted(set(names) - set(backend.queues)) if backend.queues else []
    if unknown:
        raise CommandError(
            f"--queues names {', '.join(map(repr, unknown))}, and TASKS[{backend.alias!r}]['QUEUES'] has only "
            f"{', '.join(map(repr, sorted(backend.queues)))}. Correct the name, or add it to QUEUES."
        )


def _remedy() -> str:
    usable = [alias for alias in sorted(_written()) if _can_be_run(alias)]
    if not usable:
        return f"No alias there has the backend of django_asyncq. Write {EXAMPLE}."
    return f"Give one that runworkers can run: {', '.join(f'--backend {alias}' for alias in usable)}."


def _can_be_run(alias: str) -> bool:
    try:
        backend: Any = compat.task_backends[alias]
    except Exception:  # noqa: BLE001 - a backend of the project may raise anything
        return False
    return hasattr(backend, "enqueue_many") and uses_redis(alias)


def _written() -> dict[str, Any]:
    # Without the setting, Django has one alias with its immediate backend.
    return written_aliases() if hasattr(settings, "TASKS") else {compat.DEFAULT_TASK_BACKEND_ALIAS: {}}

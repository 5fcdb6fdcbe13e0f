"""Django's tasks framework, from Django 6 or from the `django-tasks` backport on 5.2, and Python 3.12's `batched`.

The two frameworks must never be mixed, because each has its own signals, Task class and handler. All modules of the
project import the framework from here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import django
from django.core.exceptions import ImproperlyConfigured

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from itertools import batched
else:
    T = TypeVar("T")

    def batched(iterable: Iterable[T], n: int) -> Iterator[tuple[T, ...]]:
        """Yield the items in tuples of n, the last of which may be shorter."""
        items = iter(iterable)
        while part := tuple(islice(items, n)):
            yield part


HAS_DJANGO_TASKS = django.VERSION >= (6, 0)

if TYPE_CHECKING or HAS_DJANGO_TASKS:
    from django.tasks import DEFAULT_TASK_BACKEND_ALIAS, DEFAULT_TASK_QUEUE_NAME, task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import (
        TASK_REFRESH_ATTRS,
        Task,
        TaskContext,
        TaskError,
        TaskResult,
        TaskResultStatus,
    )
    from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
else:
    try:
        import django_tasks  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "django_tasks":
            raise
        raise ImproperlyConfigured(
            f"Django {django.get_version()} has no tasks framework, and its backport is not installed: run "
            'pip install "django_asyncq[backport]", and put "django_tasks" before "django_asyncq" in INSTALLED_APPS'
        ) from error
    from django_tasks import DEFAULT_TASK_BACKEND_ALIAS, DEFAULT_TASK_QUEUE_NAME, task_backends
    from django_tasks import exceptions as django_tasks_exceptions
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import (
        TASK_REFRESH_ATTRS,
        Task,
        TaskContext,
        TaskError,
        TaskResult,
        TaskResultStatus,
    )
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued, task_finished, task_started

    # django-tasks 0.12 calls it InvalidTaskError; its main branch has Django's name.
    InvalidTask = getattr(django_tasks_exceptions, "InvalidTask", None) or django_tasks_exceptions.InvalidTaskError

__all__ = [
    "DEFAULT_TASK_BACKEND_ALIAS",
    "DEFAULT_TASK_QUEUE_NAME",
    "HAS_DJANGO_TASKS",
    "TASK_REFRESH_ATTRS",
    "BaseTaskBackend",
    "InvalidTask",
    "Task",
    "TaskContext",
    "TaskError",
    "TaskResult",
    "TaskResultDoesNotExist",
    "TaskResultStatus",
    "batched",
    "task_backends",
    "task_enqueued",
    "task_finished",
    "task_started",
]


def set_return_value(result: TaskResult[Any, Any], value: Any) -> None:
    """Store the return value in a result.

    The constructor of `TaskResult` takes no return value; Django's own backends set this private attribute as well.
    """
    object.__setattr__(result, "_return_value", value)

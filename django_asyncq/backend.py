"""The backend of Django's tasks framework: `TASKS = {"default": {"BACKEND": "django_asyncq.backend.AsyncqBackend"}}`.

Django creates it while user modules are being imported. It must not import models or `lifecycle` at the top, and must
open no connection before the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from uuid import UUID

from django.apps import apps
from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from . import compat
from .definitions import payload
from .definitions.calls import check_binding, gate_name
from .definitions.moments import checked_moment
from .definitions.names import QUEUE_NAME, uuid7
from .definitions.task_options import is_attempt_count
from .durations import MORE_THAN_ZERO, is_duration
from .prefixes import PREFIX_HINT, is_prefix
from .results import result_of
from .storage import database_clock
from .tasks import Arguments, Task, default_of

if TYPE_CHECKING:
    from .models import TaskRecord

__all__ = ["AsyncqBackend"]


class Option(NamedTuple):
    """An option of an alias in TASKS. holds: whether a value is valid. hint: how to correct it."""

    holds: Callable[[Any], bool]
    hint: str


class AsyncqBackend(compat.BaseTaskBackend):
    """Stores tasks as rows of the project's database and dispatches them through Redis.

    QUEUES: the allowed names; an empty list allows every valid name. OPTIONS: `max_attempts` and `timeout` of
    tasks that set none. The `a…` methods are the framework's: they call the plain ones in the thread that holds
    the caller's database connection.
    """

    task_class = Task
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True
    # Whether its tasks are dispatched through Redis; asked by `aliases`.
    uses_redis: ClassVar[bool] = True
    known_options: ClassVar[Mapping[str, Option]] = {
        "max_attempts": Option(is_attempt_count, "Give a whole number of at least 1."),
        "timeout": Option(
            lambda value: value is None or is_duration(value), f"Give {MORE_THAN_ZERO}, or None for no timeout."
        ),
        "prefix": Option(is_prefix, f"{PREFIX_HINT}."),
    }

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        # While apps are still being imported it is not known; then the first use says it.
        if apps.apps_ready:
            _require_app()

    def enqueue(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Enqueue one call.

        Raises: InvalidTask, InvalidOption, EnqueueRefused; nothing is written then.
        """
        (result,) = self.enqueue_many(task, [Arguments(tuple(args), dict(kwargs))])
        return result

    def enqueue_many(self, task: Any, calls: Sequence[Arguments], *, partial: bool = False) -> list[Any]:
        """Enqueue many calls, all or none. With `partial`, the result of a refused call is None.

        Raises: as `enqueue`.
        """
        _require_app()
        from . import lifecycle

        records = self._records(task, calls)
        own_task = task if task.backend == self.alias else None
        results = {record.id: result_of(record, own_task) for record in records}

        def announce_enqueued(committed: list[TaskRecord]) -> None:
            for record in committed:
                compat.task_enqueued.send_robust(type(self), task_result=results[record.id])

        admitted = {record.id for record in lifecycle.enqueue(records, partial=partial, on_committed=announce_enqueued)}
        return [result if id in admitted else None for id, result in results.items()]

    def _records(self, task: Any, calls: Sequence[Arguments]) -> list[TaskRecord]:
        """Return an unsaved row for each call. Raises: InvalidTask, InvalidOption."""
        from .models import TaskRecord

        self.validate_task(task)
        common: dict[str, Any] = {
            **_column_defaults(),
            "name": task.module_path,
            "backend": self.alias,
            "queue_name": task.queue_name,
            "priority": int(task.priority),
            "run_after": checked_moment("run_after", task.run_after) if task.run_after is not None else None,
            "max_attempts": default_of(task, "max_attempts", self.options),
            "timeout_seconds": default_of(task, "timeout", self.options),
            "queue_limit": task.queue_limit,
            "expected_seconds": task.expected_seconds,
            "enqueued_at": database_clock.of_host(),
        }
        records = []
        for call in calls:
            check_binding(task, call.args, call.kwargs)
            given = payload.of_call(call.args, call.kwargs)
            gate = gate_name(task, call.args, call.kwargs)
            own = {
                "id": uuid7(),
                "args": given.args,
                "kwargs": given.kwargs,
                "gate": gate,
                "errors": [],
                "worker_ids": [],
            }
            values: Any = {**common, **own}
            # In the order of the columns: with keywords the constructor takes 14 µs, not 4.
            records.append(TaskRecord(*values.values()))
        return records

    def get_result(self, result_id: str) -> Any:
        """Return the result of this id, also when the code no longer has its task. Raises: TaskResultDoesNotExist."""
        _require_app()
        from .models import TaskRecord
        from .storage.routing import rows_of

        try:
            return result_of(rows_of(TaskRecord).get(id__in=_uuids(result_id), backend=self.alias))
        except TaskRecord.DoesNotExist as error:
            raise compat.TaskResultDoesNotExist(result_id) from error

    def validate_task(self, task: Any) -> None:
        """Refuse a task that can never run here. Raises: InvalidTask."""
        if self.queues and task.queue_name not in self.queues:
            raise compat.InvalidTask(
                f"queue {task.queue_name!r} is not one of TASKS[{self.alias!r}]['QUEUES'], which are "
                f"{', '.join(sorted(map(repr, self.queues)))}: use one of these, or add it there."
            )
        if isinstance(task.priority, bool) or not isinstance(task.priority, int | float):
            raise compat.InvalidTask(f"priority must be a whole number, not {task.priority!r}.")
        super().validate_task(task)

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        """Check the alias's QUEUES and OPTIONS."""
        return list(self._problems())

    def _problems(self) -> Iterator[checks.CheckMessage]:
        name = f"TASKS[{self.alias!r}]"
        for queue in self.queues:
            if not isinstance(queue, str) or not QUEUE_NAME.fullmatch(queue):
                yield checks.Error(
                    f"{name}['QUEUES'] holds {queue!r}, which is not a valid queue name.",
                    hint="Use 1 to 64 letters, digits, '_', '.' and '-'.",
                    id="asyncq.E020",
                )
        for option, value in self.options.items():
            if option not in self.known_options:
                yield checks.Error(
                    f"{name}['OPTIONS'] has the unknown option {option!r}.",
                    hint=f"Known options: {', '.join(self.known_options)}.",
                    id="asyncq.E021",
                )
            elif not self.known_options[option].holds(value):
                yield checks.Error(
                    f"{name}['OPTIONS'][{option!r}] = {value!r} is not valid.",
                    hint=self.known_options[option].hint,
                    id="asyncq.E022",
                )


@cache
def _require_app() -> None:
    """Raise ImproperlyConfigured where the app is not installed: its models and commands are missing then."""
    if not apps.is_installed("django_asyncq"):
        lines = '"django_asyncq"' if compat.HAS_DJANGO_TASKS else '"django_tasks" and "django_asyncq", in this order,'
        raise ImproperlyConfigured(
            f"TASKS names a backend of django_asyncq, which is not in INSTALLED_APPS: add {lines} to INSTALLED_APPS, "
            "and run `manage.py migrate`"
        )


@cache
def _column_defaults() -> dict[str, Any]:
    """Return the default of each column of a row, in the order of the columns."""
    from .models import TaskRecord

    row = TaskRecord()
    return {field.attname: getattr(row, field.attname) for field in TaskRecord._meta.concrete_fields}


def _uuids(text: Any) -> list[UUID]:
    """Return the id in a list; an empty list for any other text, so that no row is found."""
    try:
        return [UUID(text)] if len(text) <= 36 else []
    except (ValueError, TypeError, AttributeError):
        return []

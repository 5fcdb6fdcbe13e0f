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

from . import aliases, compat
from .asyncq_result import AsyncqResult, LogLine
from .definitions import payload
from .definitions.batches import group_of
from .definitions.calls import check_binding, gate_name
from .definitions.close_names import did_you_mean
from .definitions.headers import checked_headers, with_inherited
from .definitions.moments import checked_moment, moment_after
from .definitions.names import QUEUE_NAME, uuid7
from .definitions.task_options import MOST_ATTEMPTS, is_attempt_count
from .definitions.time_limits import limits_of
from .definitions.unique_keys import unique_digest
from .durations import MORE_THAN_ZERO, Duration, is_duration
from .header_sources import sourced_headers
from .logs import inherited_headers
from .prefixes import PREFIX_HINT, is_prefix
from .registry import find
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
    # Of an alias in TASKS; a class of the project's that reads more adds them.
    known_keys: ClassVar[tuple[str, ...]] = aliases.KEYS
    known_options: ClassVar[Mapping[str, Option]] = {
        "max_attempts": Option(is_attempt_count, f"Give a whole number from 1 to {MOST_ATTEMPTS:,}."),
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

        records = self.new_rows(task, calls)
        results = self._results_of(records, [task] * len(records))
        on_committed = self._announcer_of(results)
        if task.unique:
            found = lifecycle.enqueue_unique(
                records,
                on_duplicate=task.on_duplicate,
                by_arguments=task.unique is True,
                partial=partial,
                on_committed=on_committed,
            )
            return [row and (results.get(row.id) or result_of(row, is_new=False)) for row in found]
        admitted = {record.id for record in lifecycle.enqueue(records, partial=partial, on_committed=on_committed)}
        return [result if id in admitted else None for id, result in results.items()]

    # The next two are called by the scheduler.

    @property
    def enqueues_rows(self) -> bool:
        """Whether `enqueue_rows` does what `enqueue` does: a class of the project's may do more there."""
        kind = type(self)
        return kind.enqueue is AsyncqBackend.enqueue and kind.enqueue_many is AsyncqBackend.enqueue_many

    def enqueue_rows(self, records: list[TaskRecord], tasks: Sequence[Any]) -> set[UUID]:
        """Enqueue rows of `new_rows`, as many as the gates admit; return the ids of those.

        tasks: of each row its own; none of them unique. Raises: as `enqueue`, for the first that cannot be enqueued.
        """
        from . import lifecycle

        on_committed = self._announcer_of(self._results_of(records, tasks))
        return {record.id for record in lifecycle.enqueue(records, partial=True, on_committed=on_committed)}

    def _results_of(self, records: Sequence[TaskRecord], tasks: Sequence[Any]) -> dict[UUID, Any]:
        """Return the result of each new row, by its id."""
        return {
            record.id: result_of(record, task if task.backend == self.alias else None, is_new=True)
            for record, task in zip(records, tasks, strict=True)
        }

    def _announcer_of(self, results: Mapping[UUID, Any]) -> Callable[[list[TaskRecord]], None]:
        """Return what sends the framework's signal for committed rows."""

        def announce_enqueued(committed: list[TaskRecord]) -> None:
            for record in committed:
                compat.task_enqueued.send_robust(type(self), task_result=results[record.id])

        return announce_enqueued

    def new_rows(self, task: Any, calls: Sequence[Arguments], ids: Sequence[UUID] = ()) -> list[TaskRecord]:
        """Return an unsaved row for each call. ids: of the rows; new ones by default.

        Raises: InvalidTask, InvalidOption.
        """
        from . import lifecycle
        from .models import TaskRecord

        self.validate_task(task)
        common = self._columns_of(task)
        records = []
        for index, call in enumerate(calls):
            check_binding(task, call.args, call.kwargs)
            sent, given = _payload_of(task, call)
            own: Any = {
                "id": ids[index] if ids else uuid7(),
                "args": given.args,
                "kwargs": given.kwargs,
                "gate": gate_name(task, call.args, call.kwargs),
                "group": "" if task.batch is None and task.group is None else group_of(task, given.args, given.kwargs),
                "errors": [],
                "worker_ids": [],
            }
            if task.unique:
                own["unique_key"] = own["unique_slot"] = unique_digest(task, self.alias, given.args, given.kwargs)
            # In the order of the columns: with keywords the constructor takes 14 µs, not 4.
            records.append(TaskRecord(*(common | own).values()))
            if sent is not None:
                records[-1].is_remote = True
                records[-1].wire_message = lifecycle.remote_message_of(records[-1], sent)
        return records

    def _columns_of(self, task: Any) -> dict[str, Any]:
        """Return the columns that all calls of a task share, in the order of the columns. Raises: InvalidOption."""
        limits = limits_of(task, database_clock.now)
        return {
            **_column_defaults(),
            "name": task.module_path,
            "backend": self.alias,
            "queue_name": task.queue_name,
            "priority": int(task.priority),
            "run_after": checked_moment("run_after", task.run_after) if task.run_after is not None else None,
            "expires_at": limits.expires_at,
            "deadline": limits.deadline,
            "max_attempts": default_of(task, "max_attempts", self.options),
            "timeout_seconds": default_of(task, "timeout", self.options),
            "queue_limit": task.queue_limit,
            "expected_seconds": task.expected_seconds,
            "soft_timeout_seconds": task.soft_timeout,
            "keep_logs": task.keep_logs,
            "headers": with_inherited(
                checked_headers(task.headers) if task.headers else None, inherited_headers(), sourced_headers(task)
            ),
            "enqueued_at": database_clock.of_host(),
            **_unique_until(task),
        }

    def get_result(self, result_id: str) -> Any:
        """Return the result of this id, also when the code no longer has its task. Raises: TaskResultDoesNotExist."""
        _require_app()
        from . import lifecycle
        from .models import TaskRecord
        from .storage.routing import rows_of

        try:
            record = rows_of(TaskRecord).get(id__in=_uuids(result_id), backend=self.alias)
        except TaskRecord.DoesNotExist as error:
            raise compat.TaskResultDoesNotExist(result_id) from error
        declared: Any = find(record.name)
        is_transaction = declared is not None and declared.takes_context and getattr(declared, "atomic", False)
        return result_of(record, progress=lifecycle.newest_progress(record, may_be_unwritten=is_transaction))

    def logs(self, result: AsyncqResult[Any, Any]) -> list[LogLine]:
        """Return the log lines that are kept with a task, oldest first."""
        _require_app()
        from .models import TaskLogLine
        from .storage.routing import rows_of

        lines = rows_of(TaskLogLine).filter(task_id__in=_uuids(result.id)).order_by("fence", "number")
        return [LogLine(each.attempt, each.logged_at, each.level, each.logger, each.text) for each in lines]

    # The next two are called by `AsyncqResult` and `wait_all`.

    def wait(self, results: Sequence[Any], timeout: Duration | None, *, allow_in_task: bool = False) -> list[Any]:
        """Sleep until the tasks of some results have succeeded; return their values.

        Raises: as `AsyncqResult.wait`.
        """
        _require_app()
        from . import awaiting

        return awaiting.wait(results, awaiting.checked_seconds(timeout), allow_in_task=allow_in_task)

    async def wait_async(
        self, results: Sequence[Any], timeout: Duration | None, *, allow_in_task: bool = False
    ) -> list[Any]:
        """Do the same without holding a thread."""
        _require_app()
        from . import awaiting

        seconds = awaiting.checked_seconds(timeout)
        return await awaiting.wait_async(results, seconds, allow_in_task=allow_in_task)

    def cancel(self, result: Any, reason: str = "") -> str:
        """Cancel the task of a result; `AsyncqResult.cancel` says what it returns. Raises: TaskResultDoesNotExist."""
        _require_app()
        from . import lifecycle

        done = lifecycle.cancel(_uuids(result.id), reason=reason, backend=self.alias)
        for word in done._fields:
            if getattr(done, word):
                return word
        raise compat.TaskResultDoesNotExist(result.id)

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
        """Check the alias's keys, QUEUES and OPTIONS."""
        return list(self._problems())

    def _problems(self) -> Iterator[checks.CheckMessage]:
        name = f"TASKS[{self.alias!r}]"
        # The framework ignores a misspelt one, and its default stays in force.
        for key in aliases.written_aliases().get(self.alias, {}):
            if key not in self.known_keys:
                yield checks.Error(
                    f"{name} has the unknown key {key!r}.",
                    hint=f"{did_you_mean(str(key), self.known_keys)}Known keys: {', '.join(self.known_keys)}.",
                    id="asyncq.E024",
                )
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


def _payload_of(task: Any, call: Arguments) -> tuple[bytes | None, payload.Payload]:
    """Return what is sent to another program, None for a task of ours, and the arguments as the row shows them.

    Raises: InvalidArguments.
    """
    if task.is_remote:
        return task.wire_payload(call.args, call.kwargs)  # type: ignore[no-any-return]
    return None, payload.of_call(call.args, call.kwargs)


def _unique_until(task: Any) -> dict[str, Any]:
    """Return the columns that say until when a call of a unique task holds its slot."""
    if not task.unique or task.unique_until == "end":
        return {}
    if task.unique_until == "start":
        return {"unique_until_start": True}
    return {"unique_until": moment_after("unique_until", database_clock.now(), task.unique_until)}


def _uuids(text: Any) -> list[UUID]:
    """Return the id in a list; an empty list for any other text, so that no row is found."""
    try:
        return [UUID(text)] if len(text) <= 36 else []
    except (ValueError, TypeError, AttributeError):
        return []

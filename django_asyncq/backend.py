"""The backend of Django's tasks framework: `TASKS = {"default": {"BACKEND": "django_asyncq.backend.AsyncqBackend"}}`.

Django creates it while user modules are being imported. It must not import models or `lifecycle` at the top, and must
open no connection before the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from uuid import UUID

from django.apps import apps
from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from . import conf
from .core import aliases, compat, header_sources, logs, payload
from .core.after import After, check_after, edges_of, placeholders
from .core.aliases import PREFIX_HINT, is_prefix
from .core.batches import group_of
from .core.calls import (
    Shape,
    called,
    check_binding,
    gate_columns,
    passes_context,
    rate_name,
    shape_of,
    takes,
    unique_digest,
)
from .core.fairness import share_of_call
from .core.headers import checked_headers, trace_headers_of, with_inherited
from .core.names import QUEUE_NAME, did_you_mean, uuid7
from .core.options import MOST_ATTEMPTS, is_attempt_count
from .core.registry import find
from .core.time import MORE_THAN_ZERO, PLAIN, Duration, has_times, is_duration, times_of
from .core.typed import carry_of, occurs_in, readable_call
from .exceptions import InvalidArguments
from .results import AsyncqResult, LogLine, StoredTask, result_of
from .storage import database_clock
from .tasks import Arguments, Task, default_of

if TYPE_CHECKING:
    from .models import TaskRecord

__all__ = ["AsyncqBackend"]


class Option(NamedTuple):
    """An option of an alias in TASKS. holds: whether a value is valid. hint: how to correct it."""

    holds: Callable[[Any], bool]
    hint: str


class Node(NamedTuple):
    """A call that is enqueued with others. id: of its row. after: what it waits for, also of these others."""

    id: UUID
    task: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    after: Sequence[After]


class Plan(NamedTuple):
    """What all calls of a task share: decided at the first one.

    settings: those in force then. is_plain: it has no gate, no fair key, no unique key, no group, no `rate_per`, no
    typed arguments, and is not remote.
    has_times: a time of its rows depends on when the call is made. shape: what its function takes. carry: of typed
    arguments. columns: of its rows.
    """

    task: Any
    settings: conf.Settings
    is_plain: bool
    has_times: bool
    shape: Shape | None
    carry: payload.Carry | None
    columns: dict[str, Any]


# Of one backend in one thread.
MOST_PLANS = 256


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
    # Makes the Redis clients of its aliases, by their role; None: the settings name its Redis. Asked by `aliases`.
    client_factory: ClassVar[Callable[[str], Any] | None] = None
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
        # By the task's id in memory, which the plan keeps from being another's.
        self._plans: dict[int, Plan] = {}
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
        if header_sources.tracers:
            return header_sources.traced(self._enqueue, task, calls, partial)
        return self._enqueue(task, calls, partial)

    def _enqueue(self, task: Any, calls: Sequence[Arguments], partial: bool) -> list[Any]:
        lifecycle = _ready().lifecycle
        records = self.new_rows(task, calls)
        results, on_committed = self._results_of(records, [task] * len(records))
        if task.unique:
            found = lifecycle.enqueue_unique(
                records, on_duplicate=task.on_duplicate, partial=partial, on_committed=on_committed
            )
            return [row and (results.get(row.id) or result_of(row, is_new=False)) for row in found]
        admitted = {record.id for record in lifecycle.enqueue(records, partial=partial, on_committed=on_committed)}
        return [result if id in admitted else None for id, result in results.items()]

    def enqueue_steps(self, nodes: Sequence[Node]) -> list[Any]:
        """Enqueue calls that wait for each other, all or none; return their results. nodes: parents first.

        Raises: as `enqueue`.
        """
        if header_sources.tracers:
            # One trace for all of them. An error in it must show no secret of any of them.
            calls = [Arguments(node.args, node.kwargs) for node in nodes]
            task = next((node.task for node in nodes if node.task.sensitive), nodes[0].task)
            return header_sources.traced(lambda *_: self._enqueue_steps(nodes), task, calls, False)
        return self._enqueue_steps(nodes)

    def _enqueue_steps(self, nodes: Sequence[Node]) -> list[Any]:
        lifecycle = _ready().lifecycle
        groups: dict[int, list[Node]] = {}
        for node in nodes:
            groups.setdefault(id(node.task), []).append(node)
        rows: dict[UUID, TaskRecord] = {}
        for group in groups.values():
            calls = [Arguments(node.args, node.kwargs) for node in group]
            ids, afters = [node.id for node in group], [node.after for node in group]
            rows.update(zip(ids, self.new_rows(group[0].task, calls, ids, afters), strict=True))
        records = [rows[node.id] for node in nodes]
        results, on_committed = self._results_of(records, [node.task for node in nodes])
        lifecycle.enqueue_together(records, on_committed=on_committed)
        return list(results.values())

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
        on_committed = self._results_of(records, tasks)[1]
        admitted = _ready().lifecycle.enqueue(records, partial=True, on_committed=on_committed)
        return {record.id for record in admitted}

    def _results_of(
        self, records: Sequence[TaskRecord], tasks: Sequence[Any]
    ) -> tuple[dict[UUID, Any], Callable[[list[TaskRecord]], None]]:
        """Return the result of each new row, by its id, and what sends the framework's signal for committed rows."""
        results = {}
        for record, task in zip(records, tasks, strict=True):
            if isinstance(task.run_after, timedelta):
                # As the framework knows tasks, and as far as the moment is known here.
                task = replace(task, run_after=record.run_after)
            results[record.id] = result_of(record, task if task.backend == self.alias else None, is_new=True)

        def announce_enqueued(committed: list[TaskRecord]) -> None:
            for record in committed:
                compat.task_enqueued.send_robust(type(self), task_result=results[record.id])

        return results, announce_enqueued

    def new_rows(
        self,
        task: Any,
        calls: Sequence[Arguments],
        ids: Sequence[UUID] = (),
        afters: Sequence[Sequence[After]] | None = None,
    ) -> list[TaskRecord]:
        """Return an unsaved row for each call. ids: of the rows; new ones by default. afters: what each of the calls
        waits for; by default what the task says.

        Raises: InvalidTask, InvalidOption.
        """
        plan = self._plan_of(task)
        if task.after or task.after_failure != "fail":
            afters = [task.after] * len(calls) if afters is None else afters
        if afters is not None:
            calls = _with_placeholders(task, self.alias, calls, afters)
        times = times_of(task, database_clock.now) if plan.has_times else PLAIN
        shared = {**plan.columns, **times.columns}
        if task.headers or logs.running.get() or header_sources.registered or plan.settings.header_sources:
            shared["headers"] = self._headers_of(task)
        shared["enqueued_at"] = database_clock.of_host()
        names = None if plan.shape is None else plan.shape.names
        rows = []
        for index, call in enumerate(calls):
            args, kwargs = call
            if not takes(plan.shape, args, kwargs):
                check_binding(task, args, kwargs)
            columns = {**shared, "id": ids[index] if ids else uuid7()}
            if plan.is_plain:
                columns["args"], columns["kwargs"] = payload.of_call(args, kwargs, names)
            else:
                self._add_own(columns, task, call, plan.carry)
            rows.append(columns)
        records = _ready().record.of_columns(rows)
        if times.delays:
            for record in records:
                record.delays = times.delays
        if afters is not None:
            for record, after in zip(records, afters, strict=True):
                record.edges = edges_of(task, after)
                if record.edges and isinstance(task.run_after, timedelta):
                    record.delay_seconds = task.run_after.total_seconds()
        return records

    def _plan_of(self, task: Any) -> Plan:
        """Return what all calls of a task share. Raises: InvalidTask."""
        plan = self._plans.get(id(task))
        if plan is None or plan.settings is not conf.current():
            if len(self._plans) >= MOST_PLANS:
                # Most are of `using`, which makes another task each time.
                self._plans.clear()
            self.validate_task(task)
            plan = self._plans[id(task)] = self._new_plan(task)
        elif type(self).validate_task is not AsyncqBackend.validate_task:
            # That of the project's may look at more than the task.
            self.validate_task(task)
        return plan

    def _new_plan(self, task: Any) -> Plan:
        others = (task.gate, task.fair, task.batch, task.group, task.rate_per)
        carry = carry_of(task)
        has_more = task.unique or task.is_remote or carry or [x for x in others if x is not None]
        shape = shape_of(called(task), has_context=passes_context(task))
        columns = {
            "name": task.module_path,
            "backend": self.alias,
            "queue_name": task.queue_name,
            "priority": int(task.priority),
            "max_attempts": default_of(task, "max_attempts", self.options),
            "timeout_seconds": default_of(task, "timeout", self.options),
            "expected_seconds": task.expected_seconds,
            "soft_timeout_seconds": task.soft_timeout,
            "keep_logs": task.keep_logs,
        }
        if task.version != 1:
            columns["version"] = task.version
        if task.on_full == "wait":
            columns |= {"max_waiting": task.max_waiting, "is_ordered": task.ordered}
        return Plan(task, conf.current(), not has_more, has_times(task), shape, carry, columns)

    def _headers_of(self, task: Any) -> dict[str, str] | None:
        """Return the headers of a call that is made here. Raises: InvalidOption."""
        own = checked_headers(task.headers) if task.headers else None
        running = logs.running.get()
        inherited = {} if running is None else trace_headers_of(running.headers)
        return with_inherited(own, inherited, header_sources.sourced_headers(task))

    def _add_own(self, columns: dict[str, Any], task: Any, call: Arguments, carry: payload.Carry | None) -> None:
        """Add the columns of one call of a task that is not plain. Raises: InvalidArguments, InvalidOption."""
        sent, given = _payload_of(task, call, carry)
        seen = given
        if carry is not None and occurs_in(given):
            columns["has_typed_arguments"] = True
            # As the options will see them again, from the row, whether this call gives values or their forms.
            seen = readable_call(*given)
            call = Arguments(tuple(seen.args), seen.kwargs)
        # Found again where it starts. Here, so that the caller learns of a name that is none.
        rate_name(task, *seen)
        columns |= {
            "args": given.args,
            "kwargs": given.kwargs,
            **gate_columns(task, call.args, call.kwargs),
            "group": "" if task.batch is None and task.group is None else group_of(task, *seen),
        }
        if task.fair is not None:
            # Computed anew at each push; here a caller can be told that it is wrong.
            share_of_call(task, *seen)
        if task.unique:
            columns["unique_key"] = unique_digest(task, self.alias, *(given if task.unique is True else seen))
            columns["unique_slot"] = columns["unique_key"]
        if sent is not None:
            columns["is_remote"] = True
            (record,) = _ready().record.of_columns([columns])
            columns["wire_message"] = _ready().lifecycle.remote_message_of(record, sent)

    def get_result(self, result_id: str) -> Any:
        """Return the result of this id, also when the code no longer has its task. Raises: TaskResultDoesNotExist."""
        lifecycle, record_class = _ready()
        from .storage.routing import rows_of

        try:
            record = rows_of(record_class).get(id__in=_uuids(result_id), backend=self.alias)
        except record_class.DoesNotExist as error:
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
        from .observe import waits

        return waits.wait(results, waits.checked_seconds(timeout), allow_in_task=allow_in_task)

    async def wait_async(
        self, results: Sequence[Any], timeout: Duration | None, *, allow_in_task: bool = False
    ) -> list[Any]:
        """Do the same without holding a thread."""
        _require_app()
        from .observe import waits

        seconds = waits.checked_seconds(timeout)
        return await waits.wait_async(results, seconds, allow_in_task=allow_in_task)

    def cancel(self, result: Any, reason: str = "", *, wait: Duration | None = None) -> str:
        """Cancel the task of a result; `AsyncqResult.cancel` says what it returns. Raises: TaskResultDoesNotExist."""
        done = _ready().lifecycle.cancel_pages([_uuids(result.id)], reason=reason, backend=self.alias, wait=wait)
        return self._word_of(done, result)

    def how_stopped(self, result: Any) -> str:
        """Return "asked" while the task of a result may still run after its cancel, else what `cancel` would return."""
        return self._word_of(_ready().lifecycle.how_stopped(_uuids(result.id)), result)

    def _word_of(self, done: Any, result: Any) -> str:
        for word in done._fields:
            if getattr(done, word):
                return str(word)
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
        if isinstance(task.run_after, timedelta):
            # The framework knows moments only.
            task = StoredTask(**{field.name: getattr(task, field.name) for field in fields(task)} | {"run_after": None})
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


class _Ready(NamedTuple):
    """What can be imported when the models are ready."""

    lifecycle: Any
    record: type[TaskRecord]


@cache
def _ready() -> _Ready:
    """Return it. Raises: ImproperlyConfigured, where the app is not installed."""
    _require_app()
    from . import lifecycle
    from .models import TaskRecord

    return _Ready(lifecycle, TaskRecord)


def _with_placeholders(
    task: Any, alias: str, calls: Sequence[Arguments], afters: Sequence[Sequence[After]]
) -> list[Arguments]:
    """Return calls with what stands for the values of the tasks that they wait for, which come at the claim.

    Raises: InvalidOption, InvalidArguments for a value that the call gives too.
    """
    found = []
    for (args, kwargs), after in zip(calls, afters, strict=True):
        check_after(task, alias, after)
        values = placeholders(after)
        if both := sorted(values.keys() & kwargs.keys()):
            raise InvalidArguments(
                f"task {task.module_path}: {both[0]!r} is given in the call and in after=…: give it once", path=both[0]
            )
        found.append(Arguments(args, {**kwargs, **values}) if values else Arguments(args, kwargs))
    return found


def _payload_of(task: Any, call: Arguments, carry: payload.Carry | None) -> tuple[bytes | None, payload.Payload]:
    """Return what is sent to another program, None for a task of ours, and the arguments as the row shows them.

    Raises: InvalidArguments.
    """
    if task.is_remote:
        return task.wire_payload(call.args, call.kwargs)  # type: ignore[no-any-return]
    return None, payload.of_call(call.args, call.kwargs, carry=carry)


def _uuids(text: Any) -> list[UUID]:
    """Return the id in a list; an empty list for any other text, so that no row is found."""
    try:
        return [UUID(text)] if len(text) <= 36 else []
    except (ValueError, TypeError, AttributeError):
        return []

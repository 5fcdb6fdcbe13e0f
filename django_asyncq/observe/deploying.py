"""Before a deploy: can this code run what waits, and can the running workers run what this code will enqueue?

Live rows are grouped by task, version, queue and the form of their arguments; of each group the oldest and the
newest call is tried, `upgrade` included. So a million rows cost one statement and a few calls. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from uuid import UUID

from django.conf import settings
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import (
    BooleanField,
    CharField,
    Count,
    Exists,
    ExpressionWrapper,
    F,
    Func,
    Max,
    Min,
    OuterRef,
    Q,
    TextField,
)
from django.db.models.functions import Cast
from django.db.models.sql.compiler import SQLCompiler

from .. import lifecycle
from ..broker import servers
from ..core import compat, registry
from ..core.aliases import aliases_beside, is_redis_used, one_alias_per_prefix
from ..core.calls import check_call
from ..core.schedules import declared_schedules
from ..core.several_gates import read_others
from ..core.versions import upgraded
from ..exceptions import InvalidOption, TaskNotRegistered, UpgradeFailed
from ..models import Gate, Schedule, TaskRecord, TaskState
from ..scheduling.occurrences import arguments_of
from ..storage.routing import rows_of, writing_database

LIVE = Q(state__in=(TaskState.QUEUED, TaskState.RUNNING)) | Q(state=TaskState.FAILED, retry_at__isnull=False)
GROUPED = ("backend", "name", "version", "queue_name")
ENDS = ("oldest", "newest")
# A project may have a gate for each of its customers.
MOST_GATES = 100


class Mistake(NamedTuple):
    """Something that will not run after the deploy. kind: a word; subject: the task, schedule or worker.

    total: of tasks, 0 where it is about none. example: the id of one. text: a sentence with the remedy.
    """

    kind: str
    subject: str
    total: int
    example: str
    text: str


class DeployCheck(NamedTuple):
    """What was looked at, and what was found. tasks: live ones of our workers. workers: None: they were not asked."""

    tasks: int
    names: int
    schedules: int
    workers: int | None
    mistakes: list[Mistake]


def check_deploy(*, against_running: bool = False) -> DeployCheck:
    """Look for what this code cannot run. against_running: look, too, for what the running workers cannot run of it.

    Needs no worker, and without `against_running` no Redis. Raises: django.db.Error; with it BrokerUnavailable.
    """
    registry.load_task_modules()
    groups, schedules = _groups(), list(rows_of(Schedule).planned().order_by("name"))
    examples = [str(UUID(group[each])) for group in groups for each in ENDS if not group["is_wired"]]
    rows = lifecycle.load_rows(examples)
    mistakes = [mistake for group in groups if (mistake := _of_group(group, rows)) is not None]
    mistakes += _of_gates()
    mistakes += [mistake for row in schedules if (mistake := _of_schedule(row)) is not None]
    workers = _workers() if against_running else None
    if workers is not None:
        mistakes += _of_running(workers)
    return DeployCheck(
        tasks=sum(each["total"] for each in groups),
        names=len({each["name"] for each in groups}),
        schedules=len(schedules),
        workers=None if workers is None else sum(map(len, workers.values())),
        mistakes=mistakes,
    )


# --- The tasks that wait, run, or are retried by themselves.


class _Form(Func):
    """What of the arguments decides whether they can be passed: how many there are, or their names."""

    output_field = TextField()
    TEMPLATES: Mapping[str, Mapping[str, str]] = {
        "args": {
            "postgresql": "CASE WHEN jsonb_typeof({0}) = 'array' THEN jsonb_array_length({0})::text ELSE '?' END",
            "sqlite": "CASE WHEN json_valid({0}) THEN json_type({0}) || json_array_length({0}) ELSE '?' END",
            "mysql": "CONCAT(JSON_TYPE({0}), JSON_LENGTH({0}))",
        },
        "kwargs": {
            "postgresql": "CASE WHEN {0} = '{{}}'::jsonb THEN '' WHEN jsonb_typeof({0}) = 'object' THEN "
            "(SELECT string_agg(k, ' ' ORDER BY k) FROM jsonb_object_keys({0}) AS k) ELSE '?' END",
            "sqlite": "CASE WHEN json_valid({0}) THEN COALESCE((SELECT group_concat(k, ' ') FROM "
            "(SELECT key AS k FROM json_each({0}) ORDER BY k)), '') ELSE '?' END",
            "mysql": "COALESCE(JSON_KEYS({0}), '?')",
        },
    }

    def __init__(self, column: str) -> None:
        super().__init__(F(column))
        self.column = column

    def as_vendor(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **extra: Any) -> Any:
        """Use the functions for JSON of the database."""
        template = self.TEMPLATES[self.column][connection.vendor].format("%(expressions)s")
        return super().as_sql(compiler, connection, template=template, **extra)

    as_postgresql = as_sqlite = as_mysql = as_vendor


def _groups() -> list[dict[str, Any]]:
    """Return the groups of live rows, each with its total, and its oldest and newest id."""
    forms: dict[str, Any] = {}
    if connections[writing_database(TaskRecord)].vendor in _Form.TEMPLATES["args"]:
        forms = {"of_args": _Form("args"), "of_kwargs": _Form("kwargs")}
    # The arguments of a message of another program are those of the message.
    is_wired = ExpressionWrapper(Q(wire_id__isnull=False), output_field=BooleanField())
    rows = rows_of(TaskRecord).filter(LIVE, is_remote=False, batch_size=None).annotate(is_wired=is_wired, **forms)
    text = Cast("id", CharField())
    found = rows.order_by().values(*GROUPED, "is_wired", *forms)
    return list(found.annotate(total=Count("id"), oldest=Min(text), newest=Max(text)).order_by("name", "version"))


def _of_gates() -> Iterator[Mistake]:
    """Find gates that nothing gives a limit: neither a row of theirs, nor the tasks; the first 100."""
    has_row = Exists(rows_of(Gate).filter(name=OuterRef("gate")))
    rows = rows_of(TaskRecord).filter(LIVE).exclude(gate="").order_by()
    lacking: Any = rows.filter(~has_row, queue_limit=None).values("name", "gate")
    count = {"total": Count("id"), "oldest": Min(Cast("id", CharField()))}
    found = [(each["gate"], each) for each in lacking.annotate(**count).order_by("name", "gate")[:MOST_GATES]]
    # The other gates of a task of several.
    several: Any = rows.exclude(other_gates="").values("name", "other_gates").annotate(**count)
    unlimited = [
        (gate.name, each)
        for each in several.order_by("name", "other_gates")
        for gate in read_others(each["other_gates"])
        if gate.limit is None
    ]
    if unlimited:
        known = set(rows_of(Gate).filter(name__in={name for name, _ in unlimited}).values_list("name", flat=True))
        found += [(name, each) for name, each in unlimited if name not in known]
    for gate, each in found[:MOST_GATES]:
        text = f"the gate {gate!r} has no limit: declare queue_limit=…, or make the gate in the admin"
        yield Mistake("gate", each["name"], each["total"], str(UUID(each["oldest"])), text)


def _of_group(group: Mapping[str, Any], rows: Mapping[str, TaskRecord]) -> Mistake | None:
    """Return the first mistake of a group. rows: its oldest and newest by their ids, where they can be read."""
    name, alias, queue = (group[each] for each in ("name", "backend", "queue_name"))

    def mistake(kind: str, text: str) -> Mistake:
        return Mistake(kind, name, group["total"], str(UUID(group["oldest"])), text)

    if alias not in getattr(settings, "TASKS", {}):
        return mistake("backend", f"TASKS has no alias {alias!r}: keep it until these tasks have run")
    queues = compat.task_backends[alias].queues
    if queues and queue not in queues:
        return mistake("queue", f"QUEUES of {alias!r} has no {queue!r}: keep it until these tasks have run")
    try:
        task = registry.runnable(name, group["version"])
    except TaskNotRegistered as error:
        if registry.find(name):
            return mistake("version", str(error))
        return mistake("name", f"{error}; if it was renamed, declare aliases={name!r}")
    for row in (rows.get(str(UUID(group[each]))) for each in ENDS):
        if row is None:
            continue
        try:
            given = upgraded(task, row.args, row.kwargs, row.version, has_typed=row.has_typed_arguments)
            check_call(task, given.args, given.kwargs)
        except UpgradeFailed as error:
            return mistake("upgrade", str(error))
        except InvalidOption as error:
            return mistake("arguments", f"{error}; raise version=… and give upgrade=…")
    return None


def _of_schedule(row: Schedule) -> Mistake | None:
    def mistake(text: object) -> Mistake:
        return Mistake("schedule", row.name, 0, str(row.pk), f"it will not fire: {text}")

    try:
        task = registry.registered(row.task)
        if not row.is_declared and not task.schedulable:
            return mistake(f"task {row.task} is not declared with schedulable=True")
        arguments_of(row, task)
    except (TaskNotRegistered, InvalidOption) as error:
        # A declared one that the code has no more is retired by the workers.
        is_retired = row.is_declared and row.name not in {name for name, _ in declared_schedules()}
        return None if is_retired else mistake(error)
    return None


# --- The workers that run now, beside web processes with this code.


def _workers() -> dict[str, list[servers.WorkerInfo]]:
    """Return the living processes of ours that take tasks, by alias: a drained one will not meet what is enqueued.

    Raises: BrokerUnavailable.
    """
    aliases = one_alias_per_prefix() if is_redis_used() else []
    return {alias: [each for each in servers.workers(alias) if each.takes_tasks] for alias in aliases}


def _of_running(workers: Mapping[str, list[servers.WorkerInfo]]) -> Iterator[Mistake]:
    """Find the tasks of this code that no worker of their queue can run, and those that some cannot."""
    for alias, living in workers.items():
        aliases = aliases_beside(alias)
        for task in [each for each in registry.every_task() if each.backend in aliases]:
            name, version = task.module_path, task.version
            serving = [each for each in living if task.queue_name in each.queues]
            unable = [each for each in serving if not each.knows(task.backend, task.queue_name, name, version)]
            if not unable:
                continue
            their = sorted({each.details.app_version or each.host for each in unable if each.details is not None})
            who = f"{len(unable)} of {len(serving)} running workers of queue {task.queue_name!r} ({', '.join(their)})"
            what = f"version {version} of its arguments" if version > 1 else "it"
            text = f"{who} cannot run {what}: calls wait for a worker that has this code"
            yield Mistake("running", name, 0, "", text)

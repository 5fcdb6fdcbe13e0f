"""Write the rows of pauses, and have Redis follow after the commit."""

from __future__ import annotations

from functools import partial

from django.db import transaction
from django.db.models import Exists, OuterRef, Q

from ..aliases import is_redis_used, uses_redis, written_aliases
from ..broker import Broker
from ..broker import pauses as in_redis
from ..broker.server_of_tests import require_server_of_tests
from ..definitions import wire_names
from ..definitions.names import TASK_NAME, check_gate_name, check_queue_name
from ..exceptions import BrokerUnavailable, InvalidOption
from ..guard import get_logger
from ..models import Pause, PauseKind
from ..prefixes import DEFAULT_ALIAS
from ..registry import find, find_remote
from ..storage import database_clock
from ..storage.routing import rows_of, writing_database
from ..test_run import is_test_run

logger = get_logger("django_asyncq.pausing")


def pause(kind: str, name: str, *, backend: str = DEFAULT_ALIAS, by: str = "", note: str = "") -> bool:
    """Pause a queue, a task or a gate; return whether it was running until now.

    kind: of `PauseKind`. backend: the alias in TASKS of a queue; a task or a gate has none. by: who pauses it, cut at
    150 characters. note: why, cut at 500.
    The row is written in the caller's transaction. After the commit Redis follows; if it is unreachable then, the
    leader repeats it. Raises: InvalidOption, also for the name of a task that nothing would hold back; django.db.Error.
    """
    kind, backend = checked(kind, name, backend)
    if kind == PauseKind.TASK:
        _check_runs_here(name)
    defaults = {"paused_at": database_clock.now(), "paused_by": by[:150], "note": note[:500]}
    row, is_new = rows_of(Pause).get_or_create(kind=kind, backend=backend, name=name, defaults=defaults)
    if is_new:
        _after_commit(partial(_begin, row))
    return is_new


def resume(kind: str, name: str, *, backend: str = DEFAULT_ALIAS) -> bool:
    """Resume a queue, a task or a gate; return whether it was paused.

    Workers are notified after the commit. A queue goes on at once; calls of a task that were postponed begin within 15
    seconds; a gate admits at once. Raises: InvalidOption, django.db.Error.
    """
    kind, backend = checked(kind, name, backend)
    rows = rows_of(Pause).filter(kind=kind, backend=backend, name=name)
    row = rows.first()
    if row is None or not rows.filter(pk=row.pk).delete()[0]:
        return False
    _after_commit(partial(_finish, row, mark_of(row)))
    return True


def pauses(kind: str | None = None) -> list[Pause]:
    """Return what is paused now, by kind, alias and name. kind: only of this kind."""
    rows = rows_of(Pause).order_by("kind", "backend", "name")
    return list(rows if kind is None else rows.filter(kind=kind))


def is_paused() -> Q:
    """Return the condition on tasks that their queue is paused, or that they are paused by their name."""
    rows = rows_of(Pause)
    queues = rows.filter(kind=PauseKind.QUEUE, backend=OuterRef("backend"), name=OuterRef("queue_name"))
    return Q(Exists(queues)) | Q(name__in=rows.filter(kind=PauseKind.TASK).values("name"))


def mark_of(row: Pause) -> str:
    """Return the text that names a row beside the key of its queue in Redis."""
    return f"{row.pk}.{int(row.paused_at.timestamp() * 1_000_000)}"


def put(row: Pause) -> None:
    """Have Redis say what the row of a queue says. Raises: BrokerUnavailable."""
    broker = Broker("producer", row.backend)
    # So that the leader looks at it, and asynq's tools list it, though nothing was enqueued yet.
    broker.register_queue(row.name)
    in_redis.pause_queue(broker, row.name, since=int(row.paused_at.timestamp()), mark=mark_of(row))


def checked(kind: str, name: str, backend: str) -> tuple[PauseKind, str]:
    """Return the kind, and the alias that the row has. Raises: InvalidOption."""
    if kind not in PauseKind.values:
        raise InvalidOption(f"kind={kind!r} is not valid: give one of {', '.join(PauseKind.values)}")
    found = PauseKind(kind)
    if found is PauseKind.QUEUE:
        check_queue_name(name)
        if backend not in written_aliases():
            raise InvalidOption(f"backend={backend!r} is not valid: TASKS has {', '.join(written_aliases())}")
        return found, backend
    if found is PauseKind.TASK and not TASK_NAME.fullmatch(name):
        raise InvalidOption(f"task name {name!r} is not valid: give the dotted path of its function")
    if found is PauseKind.GATE:
        check_gate_name(name)
    return found, ""


def _check_runs_here(name: str) -> None:
    """Refuse the type of a message, and a task of another program. A name that is unknown here may be one elsewhere."""
    if find(name) is not None:
        return
    for alias in written_aliases():
        if (remote := find_remote(name, alias)) is not None:
            raise InvalidOption(
                f"task {name!r} is run by another program, which knows no paused tasks: pause its queue "
                f"{remote.queue_name!r}"
            )
        for task in wire_names.tasks_of(alias):
            if task.wire_name == name:
                raise InvalidOption(f"{name!r} is what other programs call task {task.module_path}: give this name")


def _after_commit(follow: partial[None]) -> None:
    # robust: a Redis that is unreachable must not turn a committed request into an error.
    transaction.on_commit(follow, using=writing_database(Pause), robust=not is_test_run())


def _is_in_redis(row: Pause) -> bool:
    """Whether Redis is to follow a row from here. A gate follows by the signals of its row."""
    if row.kind == PauseKind.QUEUE:
        return uses_redis(row.backend)
    return row.kind == PauseKind.TASK and is_redis_used()


def _begin(row: Pause) -> None:
    """Have Redis follow a new row."""
    if not _is_in_redis(row):
        return
    require_server_of_tests()
    try:
        if row.kind == PauseKind.QUEUE:
            put(row)
        else:
            in_redis.pause_task("producer", row.name)
    except BrokerUnavailable as error:
        logger.warning("pause of the %s %s: Redis follows when it is reachable again: %s", row.kind, row.name, error)


def _finish(row: Pause, mark: str) -> None:
    """Have Redis follow the deletion of a row. mark: of the row, whose deletion has taken its key away."""
    if not _is_in_redis(row):
        return
    require_server_of_tests()
    try:
        if row.kind == PauseKind.QUEUE:
            in_redis.resume_queue(Broker("producer", row.backend), row.name, mark)
        else:
            in_redis.resume_task("producer", row.name)
    except BrokerUnavailable as error:
        logger.warning("resume of the %s %s: Redis follows when it is reachable again: %s", row.kind, row.name, error)

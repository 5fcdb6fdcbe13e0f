"""Do the actions on many tasks that people have started: the leader changes one page of each at a time.

A page and the position behind it are one transaction, which commits only in the leader's term. So a kill at any moment
leaves a page changed and counted, or neither, and two leaders never change one page twice. What the change means for
Redis follows the commit, as for every change by a person; the reconciler repairs what a kill prevents.

A gate without a free slot is set aside with the position of its first refused task. When all other tasks have been
looked at, its tasks are tried again as slots become free, until none was admitted for an hour.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple
from uuid import UUID

from django.db import Error as DatabaseError
from django.db import IntegrityError

from .. import lifecycle
from ..core import registry
from ..core.guard import attempt, get_logger, is_a
from ..core.payload import storable_text
from ..exceptions import BrokerUnavailable, GateUnavailable, InvalidOption, LockLost
from ..models import BulkAction, BulkKind, BulkState, TaskRecord, TaskRecordQuerySet
from ..models.tasks import of_gates
from ..storage import database_clock
from ..storage.errors import ErrorKind, kind_of, one_line
from ..storage.isolation import MOST_AT_ONCE, page_of
from ..storage.matching import rows_matching
from ..storage.routing import rows_of, transaction_of, writing_database

logger = get_logger("django_asyncq.fleet.bulk")

# A page is one transaction: about 0.1 s for 200 retries, during which nobody else writes on SQLite.
ROWS_PER_PAGE = 200
# The longest time, while an action is running, until the leader looks for another one.
POLL_SECONDS = 2.0
# More than one person starts by hand; the others wait until one of these is over.
MOST_ACTIONS = 20
# How soon each gate that was full is asked again, and for how many tasks; one page asks one gate.
GATE_SECONDS = 2.0
GATES_PER_SECOND = 10
ROWS_PER_GATE = 50
# The names of gates that are set aside are kept in the row. The tasks of further full gates count as refused.
MOST_GATES = 1000
PATIENCE = timedelta(hours=1)
ERRORS_KEPT = 5
ERROR_CHARACTERS = 340

Fenced = Callable[[], AbstractContextManager[object]]


class BulkRunner:
    """Change a page of each running action that is due. fenced: opens a transaction of this leader."""

    def __init__(self, fenced: Fenced) -> None:
        self._fenced = fenced
        # Action → monotonic seconds of its next page.
        self._due_at: dict[UUID, float] = {}

    @property
    def has_actions(self) -> bool:
        """Whether the last call of `tick` has found an action that is running."""
        return bool(self._due_at)

    def tick(self, now: float) -> float:
        """Change what is due; return the seconds until something is due again. now: monotonic seconds.

        An action that fails stops no other one. Raises: the first of their errors.
        """
        running = rows_of(BulkAction).filter(state=BulkState.RUNNING).order_by("id")
        ids = running.values_list("id", flat=True)[:MOST_ACTIONS]
        self._due_at = {id: self._due_at.get(id, now) for id in ids}
        errors = []
        for id in [id for id, due_at in self._due_at.items() if due_at <= now]:
            try:
                self._due_at[id] = now + self._change_page(id)
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
        if errors:
            raise errors[0]
        return min([POLL_SECONDS, *(max(at - time.monotonic(), 0.0) for at in self._due_at.values())])

    def _change_page(self, id: UUID) -> float:
        """Change the next page of an action; return the seconds until the one behind it."""
        with (
            self._fenced(),
            transaction_of(BulkAction, savepoint=False),
            transaction_of(TaskRecord, savepoint=False),
        ):
            # A person who stops it waits for this page.
            action = rows_of(BulkAction).select_for_update().filter(pk=id, state=BulkState.RUNNING).first()
            if action is None:
                return 0.0
            try:
                pause = _go_on(action)
            except InvalidOption as error:
                logger.error("action %s is not valid and is stopped: %s", action.pk, error)
                pause = _end(action, BulkState.STOPPED, [str(error)])
            action.save(update_fields=PROGRESS)
        if action.state != BulkState.RUNNING:
            text = "action %s is %s: changed %d, refused %d"
            logger.info(text, action.pk, action.state, action.done, action.refused)
        return pause


# --- One page of an action, whose row is locked. What it sets there, the caller saves.
#
# A position is a pair: the name of a gate, and the last of its tasks that was looked at. The first one is that of all
# tasks, with "" for a gate: it stays the first until they have been looked at. Then the gates take turns.

PROGRESS = ("state", "done", "refused", "positions", "progressed_at", "key", "finished_at", "error")


def _go_on(action: BulkAction) -> float:
    """Change the tasks behind the first position; return the seconds until the next page."""
    gate, behind = action.positions.pop(0)
    size = min(action.rows_per_second, ROWS_PER_GATE if gate else ROWS_PER_PAGE)
    found = page_of(_rows_behind(action, gate, behind).order_by("id"), "name", "gate", size=max(size, MOST_AT_ONCE + 1))
    targets = [Target(*each) for each in found[:size]]
    changed = Changed()
    _change(action, targets, changed)
    first: dict[str, UUID] = {}
    for target in changed.full:
        if target.gate not in first and (target.gate in action.full_gates or len(action.positions) < MOST_GATES):
            first[target.gate] = target.id
            _set_aside(action, target)
        elif target.gate not in first:
            changed.refused.append((target, f"gate {target.gate} is full"))
    if targets and gate not in first:
        action.positions.insert(len(action.positions) if gate else 0, (gate, str(targets[-1].id)))
    # What was refused behind the first task of a full gate is looked at again, and counted then.
    refused = [each for each in changed.refused if each[0].gate not in first or each[0].id < first[each[0].gate]]
    action.done += changed.done
    action.refused += len(refused)
    # A reason may be the text of the project's exception.
    _note_errors(action, (storable_text(f"{target.id}: {why}", ERROR_CHARACTERS) for target, why in refused))
    now = database_clock.now()
    if changed.done or not gate:
        action.progressed_at = now
    if not action.positions:
        return _end(action, BulkState.FINISHED)
    if now - (action.progressed_at or now) >= PATIENCE:
        # One of several full gates is behind several positions.
        waiting = sum(_rows_behind(action, *position).count() for position in action.positions)
        action.refused += min(waiting, action.left)
        return _end(action, BulkState.FINISHED, (f"gate {gate} stayed full" for gate in action.full_gates))
    admitted = len(targets) - len(changed.full)
    return admitted / action.rows_per_second or max(GATE_SECONDS / len(action.positions), 1 / GATES_PER_SECOND)


def _set_aside(action: BulkAction, target: Target) -> None:
    """Have the tasks of a full gate wait from this one on; those of several gates may be refused in another's turn."""
    behind = str(UUID(int=target.id.int - 1))
    for number, (gate, known) in enumerate(action.positions):
        if gate == target.gate:
            action.positions[number] = (gate, min(behind, known) if known else known)
            return
    action.positions.append((target.gate, behind))


def _rows_behind(action: BulkAction, gate: str, behind: str) -> TaskRecordQuerySet:
    """Return the tasks behind a position that match now. Raises: InvalidOption when the action's filter is damaged.

    A task that has finished since the action was made is not among them, so one that fails again is retried once.
    """
    if action.newest_id is None:
        return rows_of(TaskRecord).none()
    rows = rows_matching(action.matching).filter(id__lte=action.newest_id)
    rows = rows.at_gate(gate) if gate else rows.exclude(of_gates(action.full_gates))
    if action.kind != BulkKind.CANCEL:
        rows = rows.filter(finished_at__lte=action.created_at)
    return rows.filter(id__gt=UUID(behind)) if behind else rows


def _end(action: BulkAction, state: BulkState, errors: Iterable[str] = ()) -> float:
    _note_errors(action, errors)
    action.state, action.key, action.finished_at = state, None, database_clock.now(writing_database(BulkAction))
    return 0.0


def _note_errors(action: BulkAction, errors: Iterable[str]) -> None:
    """Keep the first errors in the row, a line each."""
    lines = (" ".join(error.split()) for error in errors)
    action.error = "\n".join([*action.error.splitlines(), *lines][:ERRORS_KEPT])


# --- Retry, cancel or delete the tasks of one page, so that one that cannot be changed stops no other.
#
# All are changed at once. When that fails for a reason of some task, they are halved again and again until those at
# fault are alone; these are refused. An error that concerns all tasks is raised, and the page is done again later.


class Target(NamedTuple):
    """A task to change."""

    id: UUID
    name: str
    gate: str


@dataclass
class Changed:
    """What became of the tasks: how many are `done`, which are refused and why, and for which the gate was full.

    full: in the order of their ids.
    """

    done: int = 0
    refused: list[tuple[Target, str]] = field(default_factory=list)
    full: list[Target] = field(default_factory=list)


def _change(action: BulkAction, targets: Sequence[Target], changed: Changed) -> None:
    """Change tasks as the action says. targets: at most 200, in the order of their ids.

    Raises: what concerns all of them: BrokerUnavailable, GateUnavailable, LockLost, django.db.Error.
    """
    if not targets:
        return
    _, error = attempt(ACTS[action.kind], action, targets, changed)
    if error is None:
        return
    # Django raises some IntegrityErrors itself, such as ProtectedError, without the code of a server.
    is_of_server = is_a(error, DatabaseError) and not is_a(error, IntegrityError)
    if is_a(error, (BrokerUnavailable, GateUnavailable, LockLost)) or (
        is_of_server and kind_of(error) is not ErrorKind.ROW
    ):
        raise error
    if len(targets) == 1:
        changed.refused.append((targets[0], one_line(error)))
        return
    middle = len(targets) // 2
    _change(action, targets[:middle], changed)
    _change(action, targets[middle:], changed)


def _retry(action: BulkAction, targets: Sequence[Target], changed: Changed) -> None:
    wanted = {target.id: target for target in targets if registry.find(target.name) is not None}
    done = lifecycle.retry(list(wanted), by_person=True)
    changed.done += len(done.retried)
    # It stands at the gate that refused it.
    changed.full += [wanted[record.id]._replace(gate=record.gate) for record in done.full]
    why = "a task that it waits for has failed; it comes back with that one"
    changed.refused += [(wanted[record.id], why) for record in done.blocked]
    for target in targets:
        if target.id not in wanted:
            why = f"the leader's code has no task {target.name}; deploy it, then retry the task"
            changed.refused.append((target, why))
    for taken in done.taken:
        holder = taken.holder or "which has finished meanwhile"
        changed.refused.append((wanted[taken.record.id], f"another task has its unique key: {holder}"))


def _cancel(action: BulkAction, targets: Sequence[Target], changed: Changed) -> None:
    done = lifecycle.cancel([target.id for target in targets], by=action.created_by or str(action))
    changed.done += done.cancelled + done.asked


def _delete(action: BulkAction, targets: Sequence[Target], changed: Changed) -> None:
    deleted = set(lifecycle.delete([target.id for target in targets]))
    changed.done += len(deleted)
    why = "rows of the project refer to it, or it was retried meanwhile"
    changed.refused += [(target, why) for target in targets if target.id not in deleted]


ACTS: dict[str, Callable[[BulkAction, Sequence[Target], Changed], None]] = {
    BulkKind.RETRY: _retry,
    BulkKind.CANCEL: _cancel,
    BulkKind.DELETE: _delete,
}

"""Retry, cancel or delete the tasks of one page, so that one that cannot be changed stops no other.

All are changed at once. When that fails for a reason of some task, they are halved again and again until those at fault
are alone; these are refused. An error that concerns all tasks is raised, and the page is done again later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from django.db import Error as DatabaseError
from django.db import IntegrityError

from .. import lifecycle, registry
from ..definitions.payload import storable_text
from ..exceptions import BrokerUnavailable, GateUnavailable, LockLost, UnknownGate
from ..faults import one_line
from ..guard import attempt, is_a
from ..models import BulkAction, BulkKind
from ..storage.errors import ErrorKind, kind_of

REASON_CHARACTERS = 300


class Target(NamedTuple):
    """A task to change."""

    id: UUID
    name: str
    gate: str


@dataclass
class Changed:
    """What became of the tasks. done: how many were changed. refused: with the reason of each.

    full: those whose gate had no free slot, in the order of their ids.
    """

    done: int = 0
    refused: list[tuple[Target, str]] = field(default_factory=list)
    full: list[Target] = field(default_factory=list)

    def refuse(self, targets: Iterable[Target], reason: str) -> None:
        """Note that these tasks could not be changed."""
        text = storable_text(" ".join(reason.split()), REASON_CHARACTERS)
        self.refused += [(target, text) for target in targets]


Act = Callable[[Sequence[Target], Changed], None]


def change(action: BulkAction, targets: Sequence[Target]) -> Changed:
    """Change tasks as the action says, in the caller's transaction. targets: at most 500, in the order of their ids.

    Raises: what concerns all of them: BrokerUnavailable, GateUnavailable, LockLost, django.db.Error.
    """
    changed = Changed()
    acts: dict[str, Act] = {BulkKind.RETRY: _retry, BulkKind.DELETE: _delete}
    act = acts.get(action.kind) or _cancel(action.created_by or str(action))
    _each(targets, act, changed)
    return changed


def _each(targets: Sequence[Target], act: Act, changed: Changed) -> None:
    """Do it for all targets; after an error that is not of all of them, for each half."""
    if not targets:
        return
    _, error = attempt(act, targets, changed)
    if error is None:
        return
    if is_a(error, UnknownGate) and any(target.gate == error.gate for target in targets):
        changed.refuse([target for target in targets if target.gate == error.gate], str(error))
        _each([target for target in targets if target.gate != error.gate], act, changed)
        return
    if concerns_all(error):
        raise error
    if len(targets) == 1:
        changed.refuse(targets, one_line(error))
        return
    middle = len(targets) // 2
    _each(targets[:middle], act, changed)
    _each(targets[middle:], act, changed)


def concerns_all(error: BaseException) -> bool:
    """Return whether an error has nothing to do with the tasks of a page."""
    if is_a(error, (BrokerUnavailable, GateUnavailable, LockLost)):
        return True
    if is_a(error, IntegrityError):
        # Django raises some of them itself, such as ProtectedError, without the code of a server.
        return False
    return is_a(error, DatabaseError) and kind_of(error) is not ErrorKind.ROW


def _retry(targets: Sequence[Target], changed: Changed) -> None:
    known = {name for name in {target.name for target in targets} if registry.find(name) is not None}
    wanted = {target.id: target for target in targets if target.name in known}
    done = lifecycle.retry(list(wanted), by_person=True) if wanted else None
    for target in targets:
        if target.name not in known:
            changed.refuse([target], f"the leader's code has no task {target.name}; deploy it, then retry the task")
    if done is None:
        return
    changed.done += len(done.retried)
    changed.full += [wanted[record.id] for record in done.full]
    for taken in done.taken:
        holder = taken.holder or "which has finished meanwhile"
        changed.refuse([wanted[taken.record.id]], f"another task has its unique key: {holder}")


def _cancel(by: str) -> Act:
    def cancel(targets: Sequence[Target], changed: Changed) -> None:
        done = lifecycle.cancel([target.id for target in targets], by=by)
        changed.done += done.cancelled + done.asked

    return cancel


def _delete(targets: Sequence[Target], changed: Changed) -> None:
    deleted = set(lifecycle.delete([target.id for target in targets]))
    changed.done += len(deleted)
    kept = [target for target in targets if target.id not in deleted]
    changed.refuse(kept, "rows of the project refer to it, or it was retried meanwhile")

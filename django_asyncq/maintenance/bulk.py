"""Do the actions on many tasks that people have started: the leader changes one page of each at a time.

A page and the position behind it are one transaction, which commits only in the leader's term. So a kill at any moment
leaves a page changed and counted, or neither, and two leaders never change one page twice. What the change means for
Redis follows the commit, as for every change by a person; the reconciler repairs what a kill prevents.

A gate without a free slot is set aside with the position of its first refused task. When all other tasks have been
looked at, its tasks are tried again as slots become free, until none was admitted for an hour.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from uuid import UUID

from .. import failpoints
from ..bulk_actions import rows_of_action
from ..exceptions import InvalidOption, LockLost
from ..guard import get_logger
from ..models import BulkAction, BulkState, TaskRecord, TaskRecordQuerySet
from ..storage import database_clock
from ..storage.isolation import MOST_AT_ONCE, page_of
from ..storage.routing import rows_of, transaction_of, writing_database
from .bulk_changes import Changed, Target, change

logger = get_logger("django_asyncq.maintenance.bulk")

# A page is one transaction: about 0.1 s for 200 retries, during which nobody else writes on SQLite.
ROWS_PER_PAGE = 200
# The longest time until the leader notices an action that was started or resumed.
POLL_SECONDS = 2.0
# More than one person starts by hand; the others wait until one of these is over.
MOST_ACTIONS = 20
# How soon a gate that was full is asked again, for how many tasks at once, and how many gates in one page.
GATE_SECONDS = 2.0
ROWS_PER_GATE = 50
GATES_PER_PAGE = 20
# The names of gates that are set aside are kept in the row. The tasks of further full gates count as refused.
MOST_GATES = 1000
PATIENCE = timedelta(hours=1)
ERRORS_KEPT = 5

Fenced = Callable[[], AbstractContextManager[object]]


class BulkRunner:
    """Change a page of each running action that is due. fenced: opens a transaction of this leader."""

    def __init__(self, fenced: Fenced) -> None:
        self._fenced = fenced
        # Action → monotonic seconds of its next page.
        self._due_at: dict[UUID, float] = {}
        # Action and gate → monotonic seconds at which the gate is asked again.
        self._gate_due_at: dict[tuple[UUID, str], float] = {}

    def tick(self, now: float) -> float:
        """Change what is due; return the seconds until something is due again. now: monotonic seconds.

        An action that fails stops no other one. Raises: the first of their errors, and LockLost at once.
        """
        running = rows_of(BulkAction).filter(state=BulkState.RUNNING).order_by("id")
        ids = list(running.values_list("id", flat=True)[:MOST_ACTIONS])
        self._due_at = {id: self._due_at.get(id, now) for id in ids}
        self._gate_due_at = {key: at for key, at in self._gate_due_at.items() if key[0] in self._due_at}
        failed: Exception | None = None
        for id in ids:
            if self._due_at[id] > now:
                continue
            try:
                self._due_at[id] = now + self._change_page(id, now)
            except LockLost:
                raise
            except Exception as error:  # noqa: BLE001 - raised below
                failed = failed or error
        if failed is not None:
            raise failed
        return min([POLL_SECONDS, *(max(at - time.monotonic(), 0.0) for at in self._due_at.values())])

    def _change_page(self, id: UUID, now: float) -> float:
        """Change the next page of an action; return how long to pause."""
        with (
            self._fenced(),
            transaction_of(BulkAction, savepoint=False),
            transaction_of(TaskRecord, savepoint=False),
        ):
            # A person who pauses or stops it waits for this page.
            action = rows_of(BulkAction).select_for_update().filter(pk=id, state=BulkState.RUNNING).first()
            if action is None:
                return 0.0
            try:
                pause = _Page(action, self._gate_due_at, now).change()
            except InvalidOption as error:
                logger.error("action %s is not valid and is stopped: %s", action.pk, error)
                _note_errors(action, [str(error)])
                _finish(action, BulkState.STOPPED)
                pause = 0.0
            action.save(update_fields=POSITION)
            failpoints.reach("bulk.page_changed")
        failpoints.reach("bulk.page_committed")
        if action.state != BulkState.RUNNING:
            logger.info(
                "action %s is %s: changed %d, refused %d",
                action.pk,
                action.state,
                action.done,
                action.refused,
            )
        return pause


# What a page changes in the row of its action.
POSITION = ("state", "done", "refused", "left", "last_id", "waiting_at", "waiting_since", "key", "finished_at", "error")


class _Page:
    """One page of an action, whose row is locked. `change` sets what the row becomes; the caller saves it.

    gate_due_at: see `BulkRunner`; it is changed. now: monotonic seconds.
    """

    def __init__(self, action: BulkAction, gate_due_at: dict[tuple[UUID, str], float], now: float) -> None:
        self._action = action
        self._rows = rows_of_action(action)
        self._gate_due_at = gate_due_at
        self._now = now

    def change(self) -> float:
        """Change the tasks of the page; return how long to pause behind it."""
        return self._go_on() if self._action.waiting_since is None else self._ask_gates()

    def _go_on(self) -> float:
        """Change the tasks behind the last one, except those of gates that are set aside."""
        action = self._action
        size = min(action.rows_per_second, ROWS_PER_PAGE)
        rows = self._rows if action.last_id is None else self._rows.filter(id__gt=action.last_id)
        targets = _targets(rows.exclude(gate__in=list(action.waiting_at)), size)
        if targets:
            self._set_gates_aside(changed := change(action, targets))
            _count(action, changed)
            action.last_id = targets[-1].id
            return size / action.rows_per_second if len(targets) == size else 0.0
        if action.waiting_at:
            action.waiting_since = database_clock.now()
        else:
            _finish(action, BulkState.FINISHED)
        return 0.0

    def _set_gates_aside(self, changed: Changed) -> None:
        """Remember behind which task those of each gate without a free slot wait, and how many they are."""
        for target in changed.full:
            if target.gate in self._action.waiting_at:
                continue
            if len(self._action.waiting_at) < MOST_GATES:
                self._wait_at(target, changed)
            else:
                changed.refuse([target], f"gate {target.gate} is full")

    def _wait_at(self, first: Target, changed: Changed) -> None:
        """Have the tasks of a gate wait from the first one on that it refused."""
        behind = UUID(int=first.id.int - 1)
        self._action.waiting_at[first.gate] = [str(behind), self._count_waiting(first.gate, behind)]
        self._gate_due_at[self._action.pk, first.gate] = self._now + GATE_SECONDS
        # What was refused behind it is looked at again, and counted then.
        changed.refused = [
            each for each in changed.refused if each[0].gate != first.gate or each[0].id.int < first.id.int
        ]

    def _count_waiting(self, gate: str, behind: UUID) -> int:
        return self._rows.at_gate(gate).filter(id__gt=behind).count()

    def _ask_gates(self) -> float:
        """Change tasks of the gates that are set aside, as many as these admit now."""
        action = self._action
        due = [gate for gate in sorted(action.waiting_at) if self._due_at(gate) <= self._now]
        found = sum(self._ask_gate(gate) for gate in due[:GATES_PER_PAGE])
        if not action.waiting_at:
            _finish(action, BulkState.FINISHED)
        elif action.waiting_since and database_clock.now() - action.waiting_since >= PATIENCE:
            _note_errors(action, [f"gate {gate} stayed full" for gate in sorted(action.waiting_at)])
            _finish(action, BulkState.FINISHED)
        action.left = sum(count for _, count in action.waiting_at.values())
        next_at = min(map(self._due_at, action.waiting_at), default=self._now)
        return max(next_at - self._now, found / action.rows_per_second)

    def _due_at(self, gate: str) -> float:
        return self._gate_due_at.get((self._action.pk, gate), self._now)

    def _ask_gate(self, gate: str) -> int:
        """Change the next tasks of a gate; return how many it admitted."""
        action = self._action
        behind = UUID(action.waiting_at.pop(gate)[0])
        size = min(action.rows_per_second, ROWS_PER_GATE)
        targets = _targets(self._rows.at_gate(gate).filter(id__gt=behind), size)
        if not targets:
            return 0
        changed = change(action, targets)
        behind = targets[-1].id
        action.waiting_at[gate] = [str(behind), self._count_waiting(gate, behind)]
        if changed.full:
            self._wait_at(changed.full[0], changed)
        if changed.done:
            action.waiting_since = database_clock.now()
        _count(action, changed)
        return len(targets) - len(changed.full)


def _targets(rows: TaskRecordQuerySet, size: int) -> list[Target]:
    """Return the first of these tasks, in the order of their ids."""
    found = page_of(rows.order_by("id"), "name", "gate", size=max(size, MOST_AT_ONCE + 1))
    return [Target(*each) for each in found[:size]]


def _count(action: BulkAction, changed: Changed) -> None:
    action.done += changed.done
    action.refused += len(changed.refused)
    action.left = sum(count for _, count in action.waiting_at.values())
    _note_errors(action, (f"{target.id}: {reason}" for target, reason in changed.refused))


def _note_errors(action: BulkAction, lines: Iterable[str]) -> None:
    """Keep the first errors in the row."""
    kept = action.error.splitlines()
    for line in lines:
        if len(kept) >= ERRORS_KEPT:
            break
        kept.append(line)
    action.error = "\n".join(kept)


def _finish(action: BulkAction, state: BulkState) -> None:
    """Close an action; tasks that still wait at a full gate count as refused."""
    action.refused += sum(count for _, count in action.waiting_at.values())
    action.left, action.waiting_at = 0, {}
    action.state, action.key = state, None
    action.finished_at = database_clock.now(writing_database(BulkAction))

"""Why a task does not run: one answer for the list, the page of a task, and the command line.

The rows and the pauses decide; who is alive comes from Redis. While that is unreachable, nothing is said of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from enum import Enum
from typing import NamedTuple
from uuid import UUID

from ..broker.unknown_tasks import label_of
from ..core.aliases import uses_redis
from ..core.fairness import share_of
from ..core.masking import masker_of
from ..exceptions import BrokerUnavailable
from ..models import FailureReason, Pause, TaskRecord, TaskState
from .fleet import Fleet
from .places import places_in_line, waits_of


class Keeper(Enum):
    """What keeps a task from running; the texts are those of the command line."""

    DELAYED = "it is delayed: due in {seconds:,} s"
    FOLLOWS = "it waits for the task {subject}"
    PARENTS = "it waits for tasks that must finish before it: {subject}"
    BATCHED = "it runs with others, in the batch {subject}"
    REMOTE = "another program runs it"
    UNKNOWN = "no running worker has the code of {subject}"
    QUEUE_PAUSED = "the queue {subject} is paused"
    TASK_PAUSED = "the task {subject} is paused"
    GATE_PAUSED = "the gate {subject} is paused"
    UNSERVED = "no worker takes the queue {subject}"
    RATE = "it waits for the rate {subject}: looked at in about {seconds:,} s"
    GATE_FULL = "it waits for a slot of the gate {subject}"
    RETRY = "it is retried in {seconds:,} s"
    DUE = "it waits for a free worker"
    TIMEOUT = "it is stuck: it has run longer than its timeout"
    WORKER_LOST = "it is stuck: its worker is not alive"


class Why(NamedTuple):
    """Why a task does not run. at: when that is over, if it is known. pause: of what is paused. place: in line.

    subject: of DUE, the fair key under which it waits, if it has one.
    """

    keeper: Keeper
    subject: str = ""
    at: datetime | None = None
    pause: Pause | None = None
    place: int | None = None

    @property
    def limited_by(self) -> str:
        """What limits it, in the words of `Scale.limited_by`."""
        if self.pause is not None:
            return "paused"
        kinds = {Keeper.GATE_FULL: f"gate:{self.subject}", Keeper.RATE: f"rate:{self.subject}", Keeper.DUE: "slots"}
        return kinds.get(self.keeper, "none")

    def text(self, now: datetime) -> str:
        """Return a sentence without a full stop, in English."""
        seconds = 0 if self.at is None else max(0, round((self.at - now).total_seconds()))
        sentence = self.keeper.value.format(subject=self.subject, seconds=seconds)
        if self.keeper is Keeper.DUE and self.subject:
            sentence += f", under the fair key {self.subject}"
        if self.place is not None:
            sentence += f", place {self.place:,} in line"
        if self.pause is not None and self.pause.paused_by:
            sentence += f", by {self.pause.paused_by}"
        return sentence


def why_not_running(row: TaskRecord, fleet: Fleet, *, with_place: bool = False) -> Why | None:
    """Return what keeps a task from running, the first cause first; None for one that runs, and for a finished one.

    with_place: ask Redis for its place at its gate, or under its fair key, too.
    """
    why = whys_not_running([row], fleet)[row.id]
    if why is None or not with_place:
        return why
    if why.keeper is Keeper.DUE:
        return _with_fair_key(why, row, fleet)
    is_asked = why.keeper is Keeper.GATE_FULL and fleet.is_known
    return why._replace(place=_place_in_line(row)) if is_asked else why


def whys_not_running(rows: Sequence[TaskRecord], fleet: Fleet) -> dict[UUID, Why | None]:
    """Return the same for several tasks, by their ids, with one round trip for all that may wait for a rate."""
    found = {row.id: _why(row, fleet) for row in rows}
    may_wait = [
        row
        for row in rows
        if fleet.is_known and uses_redis(row.backend) and (why := found[row.id]) and why.keeper is Keeper.DUE
    ]
    # When Redis cannot say so, none waits for a rate.
    with suppress(BrokerUnavailable):
        found |= {id: Why(Keeper.RATE, name, at=at) for id, (name, at) in waits_of(may_wait).items()}
    return found


def _why(row: TaskRecord, fleet: Fleet) -> Why | None:
    if row.state == TaskState.RUNNING:
        stuck = fleet.why_stuck(row)
        return Why(Keeper.TIMEOUT if stuck == "timeout" else Keeper.WORKER_LOST) if stuck else None
    if row.state == TaskState.FAILED and row.retry_at is not None:
        return _of_retry(row, fleet)
    return _of_queued(row, fleet) if row.state == TaskState.QUEUED else None


def _place_in_line(row: TaskRecord) -> int | None:
    """Return the place of a task; None when Redis does not know it, or cannot say."""
    try:
        return places_in_line([row]).get(row.id)
    except BrokerUnavailable:
        return None


def _with_fair_key(why: Why, row: TaskRecord, fleet: Fleet) -> Why:
    """Add the fair key of a task that is due, and its place in line as far as Redis knows it."""
    share = share_of(row)
    if share is None:
        return why
    place = _place_in_line(row) if fleet.is_known else None
    return why._replace(subject=masker_of(row).text(share.key), place=place)


def _of_retry(row: TaskRecord, fleet: Fleet) -> Why:
    if row.reason != FailureReason.GATE_FULL:
        return Why(Keeper.RETRY, at=row.retry_at)
    return _of_waiting(row, fleet)


def _of_waiting(row: TaskRecord, fleet: Fleet) -> Why:
    if pause := fleet.gate_pause(row.gate):
        return Why(Keeper.GATE_PAUSED, row.gate, pause=pause)
    return Why(Keeper.GATE_FULL, row.gate)


def _of_queued(row: TaskRecord, fleet: Fleet) -> Why:
    if row.waits_for:
        return Why(Keeper.PARENTS, f"{row.waits_for:,}")
    if row.after_id is not None:
        return Why(Keeper.FOLLOWS, str(row.after_id))
    if row.batch_id is not None:
        return Why(Keeper.BATCHED, str(row.batch_id))
    if row.run_after is not None and row.run_after > fleet.now:
        return Why(Keeper.DELAYED, at=row.run_after)
    if row.waits_for_slot:
        return _of_waiting(row, fleet)
    if row.is_remote:
        return Why(Keeper.REMOTE)
    for keeper, subject, pause in (
        (Keeper.QUEUE_PAUSED, row.queue_name, fleet.queue_pause(row.backend, row.queue_name)),
        (Keeper.TASK_PAUSED, row.name, fleet.task_pause(row.name)),
    ):
        if pause is not None:
            return Why(keeper, subject, pause=pause)
    if fleet.is_known and uses_redis(row.backend):
        serving = fleet.serving(row.backend, row.queue_name)
        if not serving:
            return Why(Keeper.UNSERVED, row.queue_name)
        if not any(each.knows(row.name, row.version) for each in serving):
            return Why(Keeper.UNKNOWN, label_of(row.name, row.version))
    return Why(Keeper.DUE)

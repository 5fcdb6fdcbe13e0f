"""Retry every failed task that a list shows, newest first, in rounds of bounded time.

A round goes on behind the last task that the round before has looked at, so tasks that fail again, or that cannot be
queued, never keep the others waiting. A gate that was full once is set aside until the last round is over. Two rounds
at the same time queue each task once, because a task that is queued has no longer failed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.core import signing
from django.db import Error as DatabaseError
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from .. import lifecycle
from ..exceptions import BrokerUnavailable, GateUnavailable, UnknownGate
from ..faults import one_line
from ..guard import attempt, is_a
from ..models import Gate, TaskRecord, TaskState
from ..storage.routing import rows_of
from .code import known_task
from .retry_action import IDS_PER_RETRY, NAMES_IN_MESSAGE, log_retried

# Half of the shortest time after which a usual web server or proxy gives a request up (30 s), and a chunk more.
ROUND_SECONDS = 10.0
# Counting is for the texts only; PostgreSQL counts this many in some ten milliseconds.
MOST_COUNTED = 100_000

FULL, NO_LIMIT = "full", "no limit"
SALT = "django_asyncq.admin.retry_all"


@dataclass
class Progress:
    """What the rounds so far have done.

    after: the last task that was looked at; None at the start. queued: how many tasks were queued.
    set_aside: gate → why its tasks are skipped from now on: FULL, NO_LIMIT or the reason of a GateUnavailable.
    removed: names of tasks that the code no longer has.
    refused, reason: how many tasks a receiver of `task_state_changing` has refused, and what it said first.
    """

    after: str | None = None
    queued: int = 0
    set_aside: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    refused: int = 0
    reason: str = ""

    def text(self, request: HttpRequest) -> str:
        """Return it as signed text, which a form carries from one round to the next."""
        return signing.dumps(vars(self), salt=_salt(request), compress=True)

    @classmethod
    def read(cls, request: HttpRequest) -> Progress | None:
        """Read what the form carries, a new one when it carries none.

        None for the progress of another person or of a list with other filters: it would skip tasks of this list.
        """
        text = request.POST.get("progress", "")
        if not text:
            return cls()
        try:
            return cls(**signing.loads(text, salt=_salt(request)))
        except (signing.BadSignature, TypeError):
            return None


def _salt(request: HttpRequest) -> str:
    """Return what a signature is bound to besides the text: the person, and the filters of the list."""
    return f"{SALT} {request.user.pk} {request.GET.urlencode()}"


def failed_of(rows: QuerySet[TaskRecord], progress: Progress) -> QuerySet[TaskRecord]:
    """Return the failed tasks that the next round takes."""
    failed = rows.filter(state=TaskState.FAILED).order_by("-id")
    if progress.after is not None:
        failed = failed.filter(id__lt=UUID(progress.after))
    if progress.set_aside:
        failed = failed.exclude(gate__in=sorted(progress.set_aside))
    if progress.removed:
        failed = failed.exclude(name__in=progress.removed)
    return failed


def count_up_to_limit(rows: QuerySet[TaskRecord]) -> int:
    """Count rows, at most MOST_COUNTED + 1."""
    return rows.order_by().values("pk")[: MOST_COUNTED + 1].count()


def as_count(count: int) -> str:
    """Return a count as text; a number above MOST_COUNTED is not exact."""
    if count > MOST_COUNTED:
        return _("more than %(count)s") % {"count": number_format(MOST_COUNTED, force_grouping=True)}
    return number_format(count, force_grouping=True)


def do_round(request: HttpRequest, rows: QuerySet[TaskRecord], progress: Progress) -> bool:
    """Queue failed tasks again for about ROUND_SECONDS, one chunk at least; return whether all were looked at.

    rows: the tasks to choose from. progress: is changed.
    """
    deadline = time.monotonic() + ROUND_SECONDS
    while True:
        found = list(failed_of(rows, progress).values_list("pk", "name", "gate")[:IDS_PER_RETRY])
        if not found:
            return True
        removed = {name for name in {name for _id, name, _gate in found} if known_task(name) is None}
        if removed:
            progress.removed += sorted(removed)
            continue
        _retry_chunk(request, {id: gate for id, _name, gate in found}, progress)
        progress.after = str(found[-1][0])
        if time.monotonic() >= deadline:
            return not failed_of(rows, progress).exists()


def _retry_chunk(request: HttpRequest, gate_of: dict[UUID, str], progress: Progress) -> None:
    """Queue tasks as their gates admit. gate_of: the gate of each task, by id."""
    while gate_of:
        done, error = attempt(lifecycle.retry, list(gate_of), by_person=True)
        if error is None:
            log_retried(request, done.retried)
            progress.queued += len(done.retried)
            progress.set_aside.update(dict.fromkeys({record.gate for record in done.full}, FULL))
            return
        if is_a(error, DatabaseError):
            raise error
        if is_a(error, UnknownGate) and error.gate in gate_of.values():
            progress.set_aside[error.gate] = NO_LIMIT
        elif is_a(error, GateUnavailable) and error.gate in gate_of.values():
            # All of them: asking each would take the time-out of a connection each.
            progress.set_aside.update(dict.fromkeys(filter(None, gate_of.values()), error.reason))
        elif is_a(error, (GateUnavailable, BrokerUnavailable)):
            # Of a receiver that uses Redis itself. Each of its tasks would take a time-out too.
            _note_refused(len(gate_of), progress, error)
            return
        else:
            _retry_parts(request, gate_of, progress, error)
            return
        gate_of = {id: gate for id, gate in gate_of.items() if gate not in progress.set_aside}


def _retry_parts(request: HttpRequest, gate_of: dict[UUID, str], progress: Progress, error: BaseException) -> None:
    """Find the tasks that a receiver refuses, so that the others are queued all the same. error: the refusal."""
    if len(gate_of) == 1:
        _note_refused(1, progress, error)
        return
    pairs, middle = list(gate_of.items()), len(gate_of) // 2
    for part in (pairs[:middle], pairs[middle:]):
        _retry_chunk(request, {id: gate for id, gate in part if gate not in progress.set_aside}, progress)


def _note_refused(count: int, progress: Progress, error: BaseException) -> None:
    progress.refused += count
    progress.reason = progress.reason or one_line(error).rstrip(".")


def add_messages(request: HttpRequest, rows: QuerySet[TaskRecord], progress: Progress) -> None:
    """Show the person what all rounds together have done, and which tasks stay failed for which reason."""
    for level, text in _sentences(rows, progress):
        messages.add_message(request, level, text)


def _sentences(rows: QuerySet[TaskRecord], progress: Progress) -> Iterator[tuple[int, str]]:
    if progress.queued:
        yield messages.SUCCESS, queued_text(progress)
    yield from gate_sentences(rows, progress)
    failed = rows.filter(state=TaskState.FAILED)
    for name in progress.removed[:NAMES_IN_MESSAGE]:
        count = count_up_to_limit(failed.filter(name=name))
        text = ngettext(
            "The code has no task %(name)s, so its %(count)s failed task was not retried. Is the code deployed?",
            "The code has no task %(name)s, so its %(count)s failed tasks were not retried. Is the code deployed?",
            count,
        )
        yield messages.ERROR, text % {"name": name, "count": as_count(count)}
    if (more := len(progress.removed) - NAMES_IN_MESSAGE) > 0:
        text = ngettext("The same is true of %(count)d more name.", "The same is true of %(count)d more names.", more)
        yield messages.ERROR, text % {"count": more}
    if progress.refused:
        text = ngettext(
            "The retry of %(count)s task was refused: %(reason)s.",
            "The retry of %(count)s tasks was refused; the first reason: %(reason)s.",
            progress.refused,
        )
        yield messages.ERROR, text % {"count": as_count(progress.refused), "reason": progress.reason}
    if not (progress.queued or progress.set_aside or progress.removed or progress.refused):
        yield messages.WARNING, _("None of the selected tasks is failed any more, so nothing was retried.")


def queued_text(progress: Progress) -> str:
    """Return how many tasks were queued."""
    text = ngettext("%(count)s task queued again.", "%(count)s tasks queued again.", progress.queued)
    return text % {"count": number_format(progress.queued, force_grouping=True)}


def gate_sentences(rows: QuerySet[TaskRecord], progress: Progress) -> Iterator[tuple[int, str]]:
    """Yield how many tasks stay failed at each gate that was set aside, and the remedy; only the first few by name."""
    names = sorted(progress.set_aside)
    limits = dict(rows_of(Gate).filter(name__in=names[:NAMES_IN_MESSAGE]).values_list("name", "limit"))
    failed = rows.filter(state=TaskState.FAILED)
    for gate in names[:NAMES_IN_MESSAGE]:
        waiting = failed.filter(gate=gate)
        count = count_up_to_limit(waiting)
        if not count:
            continue
        own = waiting.values_list("queue_limit", flat=True).first()
        values: dict[str, Any] = {
            "gate": gate,
            "count": as_count(count),
            "limit": limits.get(gate, "?" if own is None else own),
        }
        yield _gate_sentence(progress.set_aside[gate], count, values)
    if (more := len(names) - NAMES_IN_MESSAGE) > 0:
        count = count_up_to_limit(failed.filter(gate__in=names[NAMES_IN_MESSAGE:]))
        text = ngettext(
            "%(more)d more gate was set aside for such a reason, with %(count)s failed tasks.",
            "%(more)d more gates were set aside for such reasons, with %(count)s failed tasks.",
            more,
        )
        yield messages.WARNING, text % {"more": more, "count": as_count(count)}


def _gate_sentence(reason: str, count: int, values: dict[str, Any]) -> tuple[int, str]:
    if reason == FULL:
        text = ngettext(
            "Gate %(gate)s is full (limit %(limit)s): %(count)s task stays failed. "
            "Retry it when the gate has a free slot.",
            "Gate %(gate)s is full (limit %(limit)s): %(count)s tasks stay failed. "
            "Retry them when the gate has free slots.",
            count,
        )
        return messages.WARNING, text % values
    if reason == NO_LIMIT:
        text = ngettext(
            "Gate %(gate)s has no limit: %(count)s task stays failed. Add a gate of this name, then retry it.",
            "Gate %(gate)s has no limit: %(count)s tasks stay failed. Add a gate of this name, then retry them.",
            count,
        )
    else:
        values["reason"] = reason
        text = ngettext(
            "Gate %(gate)s cannot be checked, so %(count)s task stays failed: %(reason)s.",
            "Gate %(gate)s cannot be checked, so %(count)s tasks stay failed: %(reason)s.",
            count,
        )
    return messages.ERROR, text % values

"""Retry tasks for a person in the admin, and report which tasks were queued again and why the others were not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.db import Error as DatabaseError
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from .. import lifecycle
from ..exceptions import GateUnavailable
from ..faults import one_line
from ..guard import attempt, is_a
from ..models import Gate, TaskRecord, TaskState
from ..storage.routing import rows_of
from .code import known_task

# One chunk is one transaction, and one script call per queue and gate. SQLite accepts at least 999 parameters.
IDS_PER_RETRY = 500
NAMES_IN_MESSAGE = 5


@dataclass
class Outcome:
    """The result of a retry.

    taken: tasks whose unique slot another task holds, each with that one, or None when it has finished meanwhile.
    removed: tasks whose function was removed from the code. deleted: number of tasks that no longer exist.
    error: why the retry stopped early. Tasks that are in no list were then not changed.
    """

    retried: list[TaskRecord] = field(default_factory=list)
    full: list[TaskRecord] = field(default_factory=list)
    not_failed: list[TaskRecord] = field(default_factory=list)
    taken: list[tuple[TaskRecord, TaskRecord | None]] = field(default_factory=list)
    removed: list[TaskRecord] = field(default_factory=list)
    deleted: int = 0
    error: BaseException | None = None


def retry(rows: QuerySet[TaskRecord], ids: Collection[UUID]) -> Outcome:
    """Queue failed tasks again, as many as their gates admit.

    rows: the tasks the user may see. An id that is not among them counts as deleted.
    """
    outcome = Outcome()
    remaining = iter(ids)
    while outcome.error is None and (some := list(islice(remaining, IDS_PER_RETRY))):
        _retry_some(rows, some, outcome)
    return outcome


def _retry_some(rows: QuerySet[TaskRecord], ids: Sequence[UUID], outcome: Outcome) -> None:
    found = {record.id: record for record in _light(rows.filter(pk__in=ids))}
    outcome.deleted += len(ids) - len(found)
    registered = {name: known_task(name) is not None for name in {record.name for record in found.values()}}
    removed = [r for r in found.values() if r.state == TaskState.FAILED and not registered[r.name]]
    outcome.removed += removed
    wanted = [id for id in found if found[id] not in removed]
    # A receiver may refuse with any error.
    done, error = attempt(lifecycle.retry, wanted, by_person=True)
    if error is not None:
        if is_a(error, DatabaseError):
            raise error
        outcome.error = error
        return
    outcome.retried += done.retried
    outcome.full += done.full
    # Read the rows again, because another person or a second click may have retried them first.
    now = {record.id: record for record in _light(rows.filter(pk__in=done.not_failed))}
    outcome.not_failed += [now.get(id, found[id]) for id in done.not_failed]
    if done.taken:
        holders = {
            row.id: row for row in _light(rows_of(TaskRecord).filter(pk__in=[each.holder for each in done.taken]))
        }
        outcome.taken += [(each.record, holders.get(each.holder)) for each in done.taken]


def _light(rows: QuerySet[TaskRecord]) -> QuerySet[TaskRecord]:
    return rows.only("id", "name", "state", "gate", "queue_limit").order_by("-id")


def add_messages(request: HttpRequest, outcome: Outcome, url_of: Any) -> None:
    """Show the person the result of each task.

    url_of: function that returns the URL of a task's page.
    """
    for level, text in _sentences(outcome, url_of):
        messages.add_message(request, level, text)


def _sentences(outcome: Outcome, url_of: Any) -> Iterator[tuple[int, SafeString | str]]:
    if outcome.retried:
        text = ngettext("Queued again: {}.", "{} tasks queued again: {}.", len(outcome.retried))
        yield messages.SUCCESS, counted(text, outcome.retried, url_of)
    for gate, limit, records in _by_gate(outcome.full):
        text = _("Gate {} is full (limit {}), so this failed task was not queued: {}.")
        if len(records) > 1:
            text = _("Gate {} is full (limit {}), so these failed tasks were not queued: {}.")
        yield messages.WARNING, format_html(text, gate, limit, _names(records, url_of))
    for text in unchanged(outcome.not_failed, url_of):
        yield messages.WARNING, text
    yield from _taken_sentences(outcome.taken, url_of)
    if outcome.deleted:
        count = outcome.deleted
        text = ngettext("%(count)d task no longer exists.", "%(count)d tasks no longer exist.", count)
        yield messages.WARNING, text % {"count": count}
    for path in sorted({record.name for record in outcome.removed}):
        records = [record for record in outcome.removed if record.name == path]
        text = _("The code has no task {}, so it was not retried: {}. Is the code deployed?")
        if len(records) > 1:
            text = _("The code has no task {}, so they were not retried: {}. Is the code deployed?")
        yield messages.ERROR, format_html(text, path, _names(records, url_of))
    if outcome.error is not None:
        yield messages.ERROR, _error_sentence(outcome.error, bool(outcome.retried))


def counted(text: str, records: Sequence[TaskRecord], url_of: Any) -> SafeString:
    """Return a sentence with the names of tasks, and with their number where there are several. text: of `ngettext`."""
    names = _names(records, url_of)
    return format_html(text, names) if len(records) == 1 else format_html(text, len(records), names)


def unchanged(records: Sequence[TaskRecord], url_of: Any) -> Iterator[SafeString]:
    """Yield a sentence for each state whose tasks were not changed."""
    for state, of_state in _by_state(records):
        yield format_html(_("Not changed, because the state is {}: {}."), state, _names(of_state, url_of))


def _taken_sentences(
    taken: Sequence[tuple[TaskRecord, TaskRecord | None]], url_of: Any
) -> Iterator[tuple[int, SafeString | str]]:
    """Yield for each task why it was not retried, and the task that holds its slot; only for the first few."""
    for record, holder in taken[:NAMES_IN_MESSAGE]:
        if holder is None:
            text = _("{} was not retried, because another task held its unique key at this moment. Retry it again.")
            yield messages.WARNING, format_html(text, _names([record], url_of))
        else:
            text = _("{} was not retried, because {} has the same unique key and has not finished.")
            yield messages.WARNING, format_html(text, _names([record], url_of), _names([holder], url_of))
    if (more := len(taken) - NAMES_IN_MESSAGE) > 0:
        text = ngettext("The same is true of %(count)d more task.", "The same is true of %(count)d more tasks.", more)
        yield messages.WARNING, text % {"count": more}


def _error_sentence(error: BaseException, some_retried: bool) -> str:
    changed = _("The other tasks were not changed.") if some_retried else _("Nothing was changed.")
    if is_a(error, GateUnavailable):
        reason = _("Gate %(gate)s cannot be checked: %(reason)s.") % {"gate": error.gate, "reason": error.reason}
    else:
        reason = _("The retry was refused: %(reason)s.") % {"reason": one_line(error).rstrip(".")}
    return f"{reason} {changed}"


def _names(records: Sequence[TaskRecord], url_of: Any) -> SafeString | str:
    """Return links to the tasks; only to the first few when there are many."""
    shown = records[:NAMES_IN_MESSAGE]
    links = format_html_join(", ", '<a href="{}">{}</a>', ((url_of(record), str(record)) for record in shown))
    if len(records) == len(shown):
        return links
    return format_html(_("{} and {} more"), links, len(records) - len(shown))


def _by_gate(records: Iterable[TaskRecord]) -> Iterator[tuple[str, int | str, list[TaskRecord]]]:
    """Group the tasks by gate. The limit is that of the gate's row, or else the one set by the task."""
    groups: dict[str, list[TaskRecord]] = {}
    for record in records:
        groups.setdefault(record.gate, []).append(record)
    limits = dict(rows_of(Gate).filter(name__in=groups).values_list("name", "limit")) if groups else {}
    for gate, group in groups.items():
        own = group[0].queue_limit
        yield gate, limits.get(gate, "?" if own is None else own), group


def _by_state(records: Iterable[TaskRecord]) -> Iterator[tuple[str, list[TaskRecord]]]:
    groups: dict[int, list[TaskRecord]] = {}
    for record in records:
        groups.setdefault(record.state, []).append(record)
    for state, group in groups.items():
        yield str(TaskState(state).label), group

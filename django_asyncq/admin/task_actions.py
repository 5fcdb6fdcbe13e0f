"""What a person can do to tasks: one on its page, or those that are ticked in the list. One table for all of it.

Every change goes through `lifecycle`. Each action has its permission, and says afterwards what became of each task.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.contrib.admin import ModelAdmin, helpers
from django.contrib.admin.utils import quote
from django.db import Error as DatabaseError
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, pgettext_lazy

from .. import lifecycle
from ..core.guard import attempt, is_a
from ..exceptions import GateUnavailable
from ..models import Gate, TaskRecord, TaskState
from ..storage.errors import one_line
from ..storage.routing import rows_of
from . import history
from .base import Asking, Question, Text, ask, check_rights, reason_of, url_of
from .code import known_task
from .history import Did

# --- Retry tasks for a person in the admin, and report which tasks were queued again and why the others were not.

# One chunk is one transaction, and one script call per queue and gate. SQLite accepts at least 999 parameters.
IDS_PER_RETRY = 500
NAMES_IN_MESSAGE = 5


@dataclass
class Outcome:
    """The result of a retry.

    taken: tasks whose unique slot another task holds, each with that one, or None when it has finished meanwhile.
    blocked: tasks that wait for one that has failed.
    removed: tasks whose function was removed from the code. deleted: number of tasks that no longer exist.
    error: why the retry stopped early. Tasks that are in no list were then not changed.
    """

    retried: list[TaskRecord] = field(default_factory=list)
    full: list[TaskRecord] = field(default_factory=list)
    not_failed: list[TaskRecord] = field(default_factory=list)
    taken: list[tuple[TaskRecord, TaskRecord | None]] = field(default_factory=list)
    blocked: list[TaskRecord] = field(default_factory=list)
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
    outcome.blocked += done.blocked
    # Read the rows again, because another person or a second click may have retried them first.
    now = {record.id: record for record in _light(rows.filter(pk__in=done.not_failed))}
    outcome.not_failed += [now.get(id, found[id]) for id in done.not_failed]
    if done.taken:
        holders = {
            row.id: row for row in _light(rows_of(TaskRecord).filter(pk__in=[each.holder for each in done.taken]))
        }
        outcome.taken += [(each.record, holders.get(each.holder)) for each in done.taken]


def _light(rows: QuerySet[TaskRecord]) -> QuerySet[TaskRecord]:
    return rows.only("id", "name", "state", "gate", "queue_limit", "other_gates").order_by("-id")


def _sentences(outcome: Outcome, url_of: Any) -> Iterator[tuple[int, SafeString | str]]:
    if outcome.retried:
        text = ngettext("Queued again: {}.", "{} tasks queued again: {}.", len(outcome.retried))
        yield messages.SUCCESS, counted(text, outcome.retried, url_of)
    full = _grouped(outcome.full, "gate")
    limits = dict(rows_of(Gate).filter(name__in=full).values_list("name", "limit")) if full else {}
    for gate, records in full.items():
        # That of the gate's row, or else the one set by the task.
        own = records[0].queue_limit
        limit = limits.get(gate, "?" if own is None else own)
        text = _("Gate {} is full (limit {}), so this failed task was not queued: {}.")
        if len(records) > 1:
            text = _("Gate {} is full (limit {}), so these failed tasks were not queued: {}.")
        yield messages.WARNING, format_html(text, gate, limit, _names(records, url_of))
    for text in unchanged(outcome.not_failed, url_of):
        yield messages.WARNING, text
    yield from _taken_sentences(outcome.taken, url_of)
    if outcome.blocked:
        text = _(
            "Not retried, because a task that comes before has failed: {}. Retry that one: these come back with it."
        )
        yield messages.WARNING, format_html(text, _names(outcome.blocked, url_of))
    if outcome.deleted:
        count = outcome.deleted
        text = ngettext("%(count)d task no longer exists.", "%(count)d tasks no longer exist.", count)
        yield messages.WARNING, text % {"count": count}
    for path, records in sorted(_grouped(outcome.removed, "name").items()):
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
    for state, of_state in _grouped(records, "state").items():
        text = _("Not changed, because the state is {}: {}.")
        yield format_html(text, str(TaskState(state).label), _names(of_state, url_of))


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


def _grouped(records: Iterable[TaskRecord], column: str) -> dict[Any, list[TaskRecord]]:
    groups: dict[Any, list[TaskRecord]] = {}
    for record in records:
        groups.setdefault(getattr(record, column), []).append(record)
    return groups


LISTED = 100
IDS_PER_CALL = 500

Do = Callable[[Any, HttpRequest, Collection[UUID]], None]


@dataclass(frozen=True)
class Act:
    """An action on tasks.

    permission: of the app. button: on a task's page. of_marked: in the list. suits: whether it can do anything for a
    task. do: does it, and says so. none: said when it suits no ticked task. asks: ask also for one task; otherwise one
    press is enough.
    """

    name: str
    permission: str
    button: Text
    of_marked: Text
    suits: Callable[[TaskRecord], bool]
    do: Do
    none: Text
    asks: bool = False


# --- what is done


def retry_and_say(model_admin: ModelAdmin[Any], request: HttpRequest, ids: Collection[UUID]) -> Outcome:
    """Retry tasks, say what became of them, and return that."""
    outcome = retry(model_admin.get_queryset(request), ids)
    history.note_tasks(request, outcome.retried, Did.RETRIED)
    for level, text in _sentences(outcome, _url_of_task(model_admin)):
        messages.add_message(request, level, text)
    return outcome


def _retry(model_admin: ModelAdmin[Any], request: HttpRequest, ids: Collection[UUID]) -> None:
    retry_and_say(model_admin, request, ids)


def _run_now(model_admin: ModelAdmin[Any], request: HttpRequest, ids: Collection[UUID]) -> None:
    """Let delayed tasks run now, and retry those that have failed or wait for a retry."""
    rows = {row.id: row for row in model_admin.get_queryset(request).filter(pk__in=ids).only("id", "name", "state")}
    hurried = set(lifecycle.hurry([id for id, row in rows.items() if row.state == TaskState.QUEUED]))
    done = [row for id, row in rows.items() if id in hurried]
    history.note_tasks(request, done, Did.RUN_NOW)
    if done:
        text = ngettext("Due now: {}.", "{} tasks are due now: {}.", len(done))
        messages.success(request, counted(text, done, _url_of_task(model_admin)))
    failed = [id for id, row in rows.items() if row.state == TaskState.FAILED]
    if failed:
        _retry(model_admin, request, failed)
    rest = [row for id, row in rows.items() if row.state != TaskState.FAILED and id not in hurried]
    for text in unchanged(rest, _url_of_task(model_admin)):
        messages.warning(request, text)


def _cancel(model_admin: ModelAdmin[Any], request: HttpRequest, ids: Collection[UUID]) -> None:
    wanted = model_admin.get_queryset(request).filter(pk__in=ids).order_by("id")
    cancel_and_say(model_admin, request, list(wanted.values_list("pk", flat=True)))


def cancel_and_say(model_admin: ModelAdmin[Any], request: HttpRequest, wanted: Sequence[UUID]) -> None:
    """Cancel tasks that wait, and ask those that a worker has to stop; page by page in this order. Say how many."""
    pages = [wanted[start : start + IDS_PER_CALL] for start in range(0, len(wanted), IDS_PER_CALL)]
    total = lifecycle.cancel_pages(pages, by=request.user.get_username(), reason=reason_of(request))
    asked_for = model_admin.get_queryset(request).filter(cancel_requested_at__isnull=False).only("id", "name")
    rows = [row for page in pages for row in asked_for.filter(pk__in=page)]
    if total.cancelled or total.asked:
        reason = reason_of(request)
        history.note_tasks(request, rows, Did.CANCELLED_BECAUSE if reason else Did.CANCELLED, reason=reason)
    cancelled = ngettext("%(count)d task was cancelled.", "%(count)d tasks were cancelled.", total.cancelled)
    asked = ngettext(
        "%(count)d task may be running, and was asked to stop.",
        "%(count)d tasks may be running, and were asked to stop.",
        total.asked,
    )
    over = ngettext("%(count)d task had finished already.", "%(count)d tasks had finished already.", total.over)
    for say, text, count in (
        (messages.success, cancelled, total.cancelled),
        (messages.success, asked, total.asked),
        (messages.warning, over, total.over),
    ):
        if count:
            say(request, text % {"count": count})


# --- the table


ACTS = {
    act.name: act
    for act in (
        Act(
            "retry",
            "retry_task",
            gettext_lazy("Retry"),
            gettext_lazy("Retry selected tasks"),
            lambda record: record.state == TaskState.FAILED,
            _retry,
            gettext_lazy("None of the selected tasks has failed, so nothing was retried."),
        ),
        Act(
            "run",
            "retry_task",
            gettext_lazy("Run now"),
            gettext_lazy("Run selected tasks now"),
            lambda record: (
                record.state == TaskState.FAILED or (record.state == TaskState.QUEUED and record.run_after is not None)
            ),
            _run_now,
            gettext_lazy("None of the selected tasks is delayed or has failed, so nothing was changed."),
        ),
        Act(
            "cancel",
            "cancel_task",
            pgettext_lazy("a task", "Cancel task"),
            gettext_lazy("Cancel selected tasks"),
            lambda record: not record.is_final,
            _cancel,
            gettext_lazy("All selected tasks have finished, so none was cancelled."),
            asks=True,
        ),
    )
}


# --- one task


def _one(name: str) -> Callable[..., Asking]:
    """Return what the button on a task's page does."""

    def press(model_admin: ModelAdmin[Any], request: HttpRequest, record: TaskRecord) -> Asking:
        act = ACTS[name]
        if act.asks:
            yield _question(act, [record])
        act.do(model_admin, request, [record.pk])
        return None

    return press


retry_one, run_one, cancel_one = _one("retry"), _one("run"), _one("cancel")


def _question(act: Act, wanted: Sequence[TaskRecord], *, others: int = 0) -> Question:
    """Return what a page asks. wanted: the tasks; others: how many ticked ones will not be changed."""
    count = len(wanted)
    titles = {
        "retry": ngettext("Retry %(count)d failed task?", "Retry %(count)d failed tasks?", count),
        "run": ngettext("Run %(count)d task now?", "Run %(count)d tasks now?", count),
        "cancel": ngettext("Cancel %(count)d task?", "Cancel %(count)d tasks?", count),
    }
    lines = {
        "retry": _("They are queued again. A task whose gate (admission limit) is full stays failed."),
        "run": _("Delayed tasks are due now, and failed ones are queued again."),
        "cancel": _("A task that waits fails as cancelled. A task that a worker has is asked to stop."),
    }
    said = [lines[act.name]]
    if others:
        text = ngettext(
            "%(count)d selected task will not be changed.", "%(count)d selected tasks will not be changed.", others
        )
        said.append(text % {"count": others})
    title = titles[act.name] % {"count": count}
    return Question(
        title=title,
        lines=said,
        examples=[f"{record} – {record.get_state_display()}" for record in wanted[:LISTED]],
        button=title.rstrip("?؟"),
        asks_reason=act.asks,
        is_destructive=act.asks,
    )


# --- those that are ticked in the list


def act_on_marked(
    model_admin: ModelAdmin[Any], request: HttpRequest, queryset: QuerySet[TaskRecord], name: str
) -> HttpResponse | None:
    """Ask, then do it to the ticked tasks. queryset: what the list shows."""
    act = ACTS[name]
    check_rights(model_admin, request, [act.permission])
    if request.path != url_of(model_admin, "changelist"):
        # Django 6.1 shows the actions on the page of a task too.
        act.do(model_admin, request, list(queryset.values_list("pk", flat=True)))
        return None
    # Not from `queryset`: a task that no longer matches the list's filter must appear in the messages too.
    ids = [UUID(id) for id in request.POST.getlist(helpers.ACTION_CHECKBOX_NAME)]
    columns = ("id", "name", "state", "run_after", "retry_at")
    wanted = []
    if request.POST.get("confirmed") != "yes":
        rows = model_admin.get_queryset(request).filter(pk__in=ids).only(*columns).order_by("-id")
        wanted = [row for row in rows if act.suits(row)]
        if not wanted:
            messages.warning(request, str(act.none))
            return None
    page = ask(model_admin, request, _question(act, wanted, others=len(ids) - len(wanted)), request.get_full_path())
    if page is None:
        act.do(model_admin, request, ids)
    return page


def _url_of_task(model_admin: ModelAdmin[Any]) -> Callable[[TaskRecord], str]:
    return lambda record: url_of(model_admin, "change", quote(record.pk))

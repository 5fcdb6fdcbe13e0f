"""What a person can do to tasks: one on its page, or those that are ticked in the list. One table for all of it.

Every change goes through `lifecycle`. Each action has its permission, and says afterwards what became of each task.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.contrib.admin import ModelAdmin, helpers
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.urls import URLPattern
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, pgettext_lazy

from .. import lifecycle
from ..models import TaskRecord, TaskState
from . import history, retry_action
from .display import Text
from .pages import Question, ask, is_confirmed, paths, reason_of, url_of
from .permissions import has_right

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


def _retry(model_admin: ModelAdmin[Any], request: HttpRequest, ids: Collection[UUID]) -> None:
    outcome = retry_action.retry(model_admin.get_queryset(request), ids)
    history.note_tasks(request, outcome.retried, "Retried.")
    retry_action.add_messages(request, outcome, _url_of_task(model_admin))


def _run_now(model_admin: ModelAdmin[Any], request: HttpRequest, ids: Collection[UUID]) -> None:
    """Let delayed tasks run now, and retry those that have failed or wait for a retry."""
    rows = {row.id: row for row in model_admin.get_queryset(request).filter(pk__in=ids).only("id", "name", "state")}
    hurried = set(lifecycle.hurry([id for id, row in rows.items() if row.state == TaskState.QUEUED]))
    done = [row for id, row in rows.items() if id in hurried]
    history.note_tasks(request, done, "Run now.")
    if done:
        text = ngettext("Due now: {}.", "{} tasks are due now: {}.", len(done))
        messages.success(request, retry_action.counted(text, done, _url_of_task(model_admin)))
    failed = [id for id, row in rows.items() if row.state == TaskState.FAILED]
    if failed:
        _retry(model_admin, request, failed)
    rest = [row for id, row in rows.items() if row.state != TaskState.FAILED and id not in hurried]
    for text in retry_action.unchanged(rest, _url_of_task(model_admin)):
        messages.warning(request, text)


def _cancel(model_admin: ModelAdmin[Any], request: HttpRequest, ids: Collection[UUID]) -> None:
    """Cancel tasks that wait, and ask those that run to stop."""
    wanted = [*model_admin.get_queryset(request).filter(pk__in=ids).order_by("id").values_list("pk", flat=True)]
    total = lifecycle.Cancelled()
    for start in range(0, len(wanted), IDS_PER_CALL):
        page = wanted[start : start + IDS_PER_CALL]
        found = lifecycle.cancel(page, by=request.user.get_username(), reason=reason_of(request))
        total = lifecycle.Cancelled(*map(sum, zip(total, found, strict=True)))
    rows = model_admin.get_queryset(request).filter(pk__in=wanted, cancel_requested_at__isnull=False).only("id", "name")
    if total.cancelled or total.asked:
        reason = reason_of(request)
        history.note_tasks(request, list(rows), f"Cancelled: {reason}" if reason else "Cancelled.")
    for level, text in _cancel_sentences(total):
        messages.add_message(request, level, text)


def _cancel_sentences(total: Any) -> Sequence[tuple[int, str]]:
    cancelled = ngettext("%(count)d task was cancelled.", "%(count)d tasks were cancelled.", total.cancelled)
    asked = ngettext(
        "%(count)d running task was asked to stop.", "%(count)d running tasks were asked to stop.", total.asked
    )
    over = ngettext("%(count)d task had finished already.", "%(count)d tasks had finished already.", total.over)
    found = [
        (messages.SUCCESS, cancelled, total.cancelled),
        (messages.SUCCESS, asked, total.asked),
        (messages.WARNING, over, total.over),
    ]
    return [(level, text % {"count": count}) for level, text, count in found if count]


# --- the table


def _has_failed(record: TaskRecord) -> bool:
    return record.state == TaskState.FAILED


def _can_be_hurried(record: TaskRecord) -> bool:
    return record.state == TaskState.FAILED or (record.state == TaskState.QUEUED and record.run_after is not None)


def _can_be_cancelled(record: TaskRecord) -> bool:
    return not record.is_final


ACTS = {
    act.name: act
    for act in (
        Act(
            "retry",
            "retry_task",
            gettext_lazy("Retry"),
            gettext_lazy("Retry selected tasks"),
            _has_failed,
            _retry,
            gettext_lazy("None of the selected tasks has failed, so nothing was retried."),
        ),
        Act(
            "run",
            "retry_task",
            gettext_lazy("Run now"),
            gettext_lazy("Run selected tasks now"),
            _can_be_hurried,
            _run_now,
            gettext_lazy("None of the selected tasks is delayed or has failed, so nothing was changed."),
        ),
        Act(
            "cancel",
            "cancel_task",
            pgettext_lazy("a task", "Cancel task"),
            gettext_lazy("Cancel selected tasks"),
            _can_be_cancelled,
            _cancel,
            gettext_lazy("All selected tasks have finished, so none was cancelled."),
            asks=True,
        ),
    )
}


# --- one task


def urls(model_admin: ModelAdmin[Any]) -> list[URLPattern]:
    """Return the addresses that the buttons on a task's page post to."""
    return paths(model_admin, {name: _view_of(act) for name, act in ACTS.items()}, of_object=True)


def _view_of(act: Act) -> Callable[..., HttpResponse]:
    def view(model_admin: ModelAdmin[Any], request: HttpRequest, object_id: str) -> HttpResponse:
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        if not (has_right(request, "view_taskrecord") and has_right(request, act.permission)):
            raise PermissionDenied
        record = model_admin.get_object(request, unquote(object_id))
        if record is None:
            messages.warning(request, _("This task no longer exists."))
            return HttpResponseRedirect(url_of(model_admin, "changelist"))
        back = url_of(model_admin, "change", quote(record.pk))
        if act.asks:
            question = _question(act, [record], back)
            if not is_confirmed(request, question):
                return ask(model_admin, request, question)
        act.do(model_admin, request, [record.pk])
        return HttpResponseRedirect(back)

    return view


def _question(act: Act, wanted: Sequence[TaskRecord], back: str, *, others: int = 0) -> Question:
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
        "cancel": _("A task that waits fails as cancelled. A task that runs is asked to stop."),
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
        back=back,
        asks_reason=act.asks,
        is_destructive=act.asks,
    )


# --- those that are ticked in the list


def act_on_marked(
    model_admin: ModelAdmin[Any], request: HttpRequest, queryset: QuerySet[TaskRecord], name: str
) -> HttpResponse | None:
    """Ask, then do it to the ticked tasks. queryset: what the list shows."""
    act = ACTS[name]
    if not (has_right(request, "view_taskrecord") and has_right(request, act.permission)):
        raise PermissionDenied
    back = request.get_full_path()
    if request.path != url_of(model_admin, "changelist"):
        # Django 6.1 shows the actions on the page of a task too.
        act.do(model_admin, request, list(queryset.values_list("pk", flat=True)))
        return None
    # Not from `queryset`: a task that no longer matches the list's filter must appear in the messages too.
    ids = [UUID(id) for id in request.POST.getlist(helpers.ACTION_CHECKBOX_NAME)]
    if request.POST.get("confirmed") == "yes":
        act.do(model_admin, request, ids)
        return None
    columns = ("id", "name", "state", "run_after", "retry_at")
    rows = list(model_admin.get_queryset(request).filter(pk__in=ids).only(*columns).order_by("-id"))
    wanted = [row for row in rows if act.suits(row)]
    if not wanted:
        messages.warning(request, str(act.none))
        return None
    return ask(model_admin, request, _question(act, wanted, back, others=len(ids) - len(wanted)))


def _url_of_task(model_admin: ModelAdmin[Any]) -> Callable[[TaskRecord], str]:
    return lambda record: url_of(model_admin, "change", quote(record.pk))

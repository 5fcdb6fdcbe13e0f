"""The table of our pages and buttons: their addresses, who may use them, and where their code is.

An admin site asks for the addresses long before a page is shown. The pages and what they ask are half of this package,
and most processes of a project show none of them: so the code is named here, and imported when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from django.contrib.admin import AdminSite, ModelAdmin
from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils.functional import LazyObject, Promise, empty
from django.utils.translation import gettext_lazy as _

from ..core.late import Late


class Page(NamedTuple):
    """A page besides Django's. code: `module.function`, which returns the context of its template, or an answer.

    rights: permissions of the app, such as "pause_queue", or words that the ModelAdmin has a `has_…_permission` for;
    all are needed, besides that the ModelAdmin lets the user view the model.
    of_object: it is of one row, which the function is called with too.
    """

    name: str
    code: str
    rights: tuple[str, ...] = ()
    title: str | Promise = ""
    template: str = ""
    of_object: bool = False


class Button(NamedTuple):
    """A button: it answers POST only. code: a function that does it, and that may first `yield` a `base.Question`.

    It returns where to go next: an address, an answer, or None for the page of the row, or else for the page `back`.
    """

    name: str
    code: str
    rights: tuple[str, ...] = ()
    back: str = "changelist"
    of_object: bool = False


# By the name of the model.
TABLE: dict[str | None, tuple[Page | Button, ...]] = {
    "taskrecord": (
        Page("queues", "queues.queues", title=_("Queues"), template="queues.html"),
        Button("pause", "queues.pause_target", ("pause_queue",), back="queues"),
        Button("resume", "queues.resume_target", ("pause_queue",), back="queues"),
        Page("queue", "details.queue", template="details.html"),
        Page("worker", "details.worker", template="details.html"),
        Page("task", "details.task", template="details.html"),
        Page("rejected", "queues.rejected", template="rejected.html"),
        Button("forget", "queues.forget", ("delete_taskrecord",), back="queues"),
        Page("workers", "workers.workers", title=_("Workers"), template="workers.html"),
        Button("drain", "workers.drain", ("drain_worker",), back="workers"),
        Button("undrain", "workers.undrain", ("drain_worker",), back="workers"),
        Page("failures", "failures.failures", title=_("Failures"), template="failures.html"),
        Page("workflows", "workflows.workflows", title=_("Workflows"), template="workflows.html"),
        Page("workflow", "workflows.workflow", template="workflow.html"),
        Button("workflow_retry", "workflows.retry_failed", ("retry_task",), back="workflows"),
        Button("workflow_cancel", "workflows.cancel_open", ("cancel_task",), back="workflows"),
        Page("bulk", "bulk.start"),
        Page("enqueue", "forms.enqueue", ("enqueue_task",), title=_("Enqueue a task"), template="call_form.html"),
        Page("again", "forms.again", ("retry_task", "view_payload"), template="call_form.html", of_object=True),
        Page("reschedule", "forms.reschedule", ("retry_task",), template="call_form.html", of_object=True),
        Button("secrets", "code.secrets", ("view_payload",), of_object=True),
        Button("retry", "task_actions.retry_one", ("retry_task",), of_object=True),
        Button("run", "task_actions.run_one", ("retry_task",), of_object=True),
        Button("cancel", "task_actions.cancel_one", ("cancel_task",), of_object=True),
    ),
    "gate": (
        Button("release", "gates.release", ("view_gate", "release_slot"), of_object=True),
        Button("repair", "gates.repair", ("view_gate", "change_gate"), of_object=True),
    ),
    "schedule": (
        Button("resume", "schedules.resume", ("change",)),
        Button("run", "schedules.run", ("run",), of_object=True),
        Button("switch", "schedules.switch_one", ("change",), of_object=True),
    ),
    "bulkaction": (Button("stop", "bulk.stop", ("view_bulkaction",), of_object=True),),
}


def code_of(name: str) -> Any:
    """Return a function of a module of this folder. name: such as "queues.pause_target"."""
    module, _dot, function = name.partition(".")
    return getattr(import_module(f".{module}", __package__), function)


def own_urls(model_admin: Any) -> list[URLPattern]:
    """Return the patterns of the pages and buttons that a ModelAdmin of ours has besides Django's."""
    opts, protect = model_admin.opts, model_admin.admin_site.admin_view
    return [
        path(
            f"<path:object_id>/{entry.name}/" if entry.of_object else f"{entry.name}/",
            protect(_view(model_admin, entry)),
            name=f"{opts.app_label}_{opts.model_name}_{entry.name}",
        )
        for entry in TABLE.get(opts.model_name, ())
    ]


def _view(model_admin: Any, entry: Page | Button) -> Callable[..., HttpResponse]:
    def view(request: HttpRequest, object_id: str = "") -> HttpResponse:
        answer: HttpResponse = code_of("base.answer")(model_admin, request, entry, object_id)
        return answer

    return view


def _late_view(name: str) -> Callable[..., HttpResponse]:
    def view(self: LateAdmin, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        answer: HttpResponse = getattr(self.made, name)(request, *args, **kwargs)
        return answer

    return view


if TYPE_CHECKING:
    AnyLazyObject = LazyObject[Any]
else:
    AnyLazyObject = LazyObject


class LateAdmin(AnyLazyObject):
    """Stands for a ModelAdmin of ours in the registry of a site; whatever is asked but its addresses makes it."""

    def __init__(self, late: Late, model: type[Model], admin_site: AdminSite) -> None:
        self.__dict__.update(late=late, model=model, admin_site=admin_site, opts=model._meta)
        super().__init__()

    @property
    def made(self) -> Any:
        """The ModelAdmin."""
        if self._wrapped is empty:
            self._setup()
        return self._wrapped

    def _setup(self) -> None:
        self._wrapped = self.late(self.model, self.admin_site)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """That of the ModelAdmin once it is made; before, Django's, whose options `check` need not look at."""
        return ModelAdmin if self._wrapped is empty else self._wrapped.__class__

    @property
    def urls(self) -> list[URLPattern]:
        """The patterns, ours first: Django's last one takes any path."""
        return [*own_urls(self), *ModelAdmin.get_urls(self)]  # type: ignore[arg-type]

    # Those that Django's `get_urls` asks for.
    changelist_view = _late_view("changelist_view")
    add_view = _late_view("add_view")
    history_view = _late_view("history_view")
    delete_view = _late_view("delete_view")
    change_view = _late_view("change_view")

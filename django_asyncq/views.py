"""Views for a project's URLs: the status of one task for the page that enqueued it, and those that monitors read.

The status is JSON at a signed address, without arguments and errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.core.handlers.asgi import ASGIRequest
from django.core.signing import BadSignature, SignatureExpired, TimestampSigner
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import NoReverseMatch, reverse
from django.views.generic import View

from . import conf, lifecycle
from .core import compat
from .core.aliases import uses_redis
from .models import FailureReason, TaskRecord
from .observe import reader
from .observe.health import health_view
from .observe.reader import call_in, release_connections
from .observe.scale import Scale, read_scale, scale_view
from .observe.waits import Waiting, sleep_until, waker_of
from .results import result_of
from .storage.routing import rows_of

__all__ = ["Scale", "TaskStatusView", "health_view", "read_scale", "scale_view", "task_status_url"]

SALT = "django_asyncq.task_status"
# Servers and proxies commonly cut a request after 30 s.
LONGEST_POLL_SECONDS = 25
# How soon a long poll answers a change that is not announced, such as progress.
CHANGE_SECONDS = 2.0


class Shown(NamedTuple):
    """What the page sees of a task.

    status: of Django's framework. reason: of a failure, such as "timeout"; "" for none. progress: as
    `AsyncqResult.progress`. finished: whether nothing will change, unless a person retries it.
    """

    status: str
    reason: str
    progress: dict[str, Any] | None
    finished: bool


def task_status_url(result: Any) -> str:
    """Return the signed address of a task's status, valid for ASYNCQ["STATUS_LINK_SECONDS"]; 24 h by default.

    result: what `enqueue` returned, a row, or an id. Anyone who has the address may read the status.
    Raises: ImproperlyConfigured when the project's URLs do not include those of this app.
    """
    token = TimestampSigner(salt=SALT).sign(str(getattr(result, "id", result)))
    try:
        return reverse("django_asyncq:task_status", args=[token])
    except NoReverseMatch as error:
        raise ImproperlyConfigured(
            'the address of a task\'s status is not in the URLs of this project: add path("tasks/", '
            'include("django_asyncq.urls")) to the urlpatterns'
        ) from error


class TaskStatusView(View):
    """Answers `{"status", "reason", "progress", "finished"}`; 404 for a bad address, 410 for one that has expired.

    `?wait=25`: under ASGI the answer comes as soon as the task has finished, soon after another change, or after that
    many seconds, at most 25. WSGI answers at once, because each waiting request would hold a thread of the server.
    """

    http_method_names = ["get", "head", "options"]

    @classmethod
    def as_view(cls, **initkwargs: Any) -> Callable[..., Any]:
        """Return the view, outside ATOMIC_REQUESTS: a transaction could not see the task finish."""
        view = super().as_view(**initkwargs)
        for alias in connections:
            view = transaction.non_atomic_requests(using=alias)(view)
        return view

    async def get(self, request: HttpRequest, token: str) -> HttpResponse:
        """Answer with the status of the task that the token names."""
        valid_for = timedelta(seconds=conf.current().status_link_seconds)
        try:
            id = UUID(TimestampSigner(salt=SALT).unsign(token, max_age=valid_for))
        except SignatureExpired:
            return _answer({"error": "this link has expired"}, 410)
        except (BadSignature, ValueError):
            return _answer({"error": "there is no such task"}, 404)
        try:
            shown = await self._shown(id, _seconds_to_wait(request))
        except compat.TaskResultDoesNotExist:
            return _answer({"error": "there is no such task"}, 404)
        return _answer(shown._asdict(), 200)

    async def _shown(self, id: UUID, seconds: float) -> Shown:
        """Return what is to be shown, after a change or some seconds. Raises: TaskResultDoesNotExist."""
        record, first = await sync_to_async(_read)(id)
        if seconds <= 0 or first.finished or not uses_redis(record.backend):
            return first
        await sync_to_async(release_connections)()
        timer = asyncio.timeout(seconds)
        try:
            async with timer:
                return await _changed(record, first)
        except TimeoutError:
            if not timer.expired():
                raise
            return first


async def _changed(record: TaskRecord, first: Shown) -> Shown:
    """Return what is to be shown of a task, as soon as that has changed. Raises: TaskResultDoesNotExist."""
    event = asyncio.Event()
    with reader.of_process().used() as thread, Waiting([result_of(record)], waker_of(event)) as waiting:
        await call_in(thread, waiting.begin)
        while True:
            _, shown = await call_in(thread, _read, record.id)
            if shown != first:
                return shown
            await sleep_until(event, min(waiting.pause_seconds(), CHANGE_SECONDS))
            event.clear()
            if waiting.must_look():
                await call_in(thread, waiting.look)


def _seconds_to_wait(request: HttpRequest) -> int:
    """Return how long the answer may take; 0 when the page does not ask for that, or the server must not."""
    asked = request.GET.get("wait", "")
    if not isinstance(request, ASGIRequest) or not (asked.isascii() and asked.isdigit()):
        return 0
    return min(int(asked[:9]), LONGEST_POLL_SECONDS)


def _read(id: UUID) -> tuple[TaskRecord, Shown]:
    """Return the row of a task, and what is to be shown of it. Raises: TaskResultDoesNotExist."""
    record = rows_of(TaskRecord).filter(id=id).first()
    if record is None:
        raise compat.TaskResultDoesNotExist(str(id))
    reason = FailureReason(record.reason).name.lower() if record.is_final and record.reason else ""
    progress = lifecycle.newest_progress(record, may_be_unwritten=True)
    return record, Shown(str(result_of(record).status.value), reason, progress, record.is_final)


def _answer(content: dict[str, Any], status: int) -> JsonResponse:
    return JsonResponse(content, status=status, headers={"Cache-Control": "no-store"})

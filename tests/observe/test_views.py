"""`TaskStatusView`: what a page sees of its task, under WSGI and ASGI, and who may see it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.core.signing import TimestampSigner
from django.db import connection, connections
from django.template import Context, Template
from django.test import AsyncClient, Client
from django.utils import timezone

from django_asyncq import lifecycle, views
from django_asyncq.models import TaskRecord
from django_asyncq.observe import reader, waiters
from django_asyncq.views import TaskStatusView, task_status_url

from .. import tasks
from ..runs import taken_by
from .test_waiting import finish, in_loop, marked

pytestmark = pytest.mark.django_db(transaction=True)

QUEUED = {"status": "READY", "reason": "", "progress": None, "finished": False}
SUCCEEDED = {"status": "SUCCESSFUL", "reason": "", "progress": None, "finished": True}


@pytest.fixture(autouse=True)
def _listener(own_keys: None) -> Iterator[None]:
    yield
    waiters.of_process().stop()


def address_in_template(result: Any) -> str:
    return Template("{% load asyncq %}{% task_status_url result %}").render(Context({"result": result}))


def test_a_page_sees_the_status_and_nothing_else(client: Client) -> None:
    """Through the whole life of a task; nothing is cached."""
    result = tasks.add.using(max_attempts=2).enqueue(1)
    url = address_in_template(result)
    answer = client.get(url)
    assert (answer.status_code, answer.json()) == (200, QUEUED)
    assert answer["Cache-Control"] == "no-store" and answer["Content-Type"] == "application/json"
    finish(error=ValueError("secret"), retries=True)
    assert client.get(url).json() == QUEUED, "an attempt follows"
    lifecycle.retry([TaskRecord.objects.get().id], by_person=True)
    run = taken_by("w")
    assert client.get(url).json() == {**QUEUED, "status": "RUNNING"}
    now = timezone.now()
    lifecycle.fail(run, ValueError("secret"), "Traceback: secret", now, retry_at=None)
    lifecycle.record_runs([run])
    failed = {"status": "FAILED", "reason": "exception", "progress": None, "finished": True}
    assert client.get(url).json() == failed
    assert client.head(url).status_code == 200 and client.post(url).status_code == 405


def test_progress_is_shown(client: Client) -> None:
    """As the result has it."""
    result = tasks.add.enqueue(1)
    progress = {"done": 1, "total": 4, "message": "one", "data": {}}
    TaskRecord.objects.update(progress=progress)
    assert client.get(task_status_url(result)).json() == {**QUEUED, "progress": progress}


def test_only_a_signed_address_is_answered(client: Client, settings: Any) -> None:
    """404 for one that was changed, and for a deleted row; 410 for one that has expired."""
    result = tasks.add.enqueue(1)
    url = task_status_url(result)
    assert task_status_url(TaskRecord.objects.get()) == task_status_url(result.id)
    for wrong in (
        url[:-2] + "x/",
        url.replace(result.id, str(TaskRecord().id)),
        f"/tasks/{result.id}/",
        f"/tasks/{TimestampSigner(salt='another').sign(result.id)}/",
        f"/tasks/{TimestampSigner(salt=views.SALT).sign('no id')}/",
    ):
        answer = client.get(wrong)
        assert (answer.status_code, answer["Cache-Control"]) == (404, "no-store"), wrong
    settings.ASYNCQ = {**settings.ASYNCQ, "STATUS_LINK_SECONDS": timedelta(microseconds=1)}
    assert client.get(url).status_code == 410
    settings.ASYNCQ = {**settings.ASYNCQ, "STATUS_LINK_SECONDS": timedelta(hours=1)}
    TaskRecord.objects.all().delete()
    assert client.get(url).status_code == 404


def test_urls_that_are_missing_are_named(settings: Any) -> None:
    """The error has the line to add."""
    settings.ROOT_URLCONF = "django.contrib.staticfiles.urls"
    with pytest.raises(ImproperlyConfigured, match=r'include\("django_asyncq\.urls"\)'):
        task_status_url("id")


def test_wsgi_answers_at_once(client: Client) -> None:
    """A waiting request would hold a thread of the server."""
    url = task_status_url(tasks.add.enqueue(1))
    began = time.monotonic()
    assert client.get(url, {"wait": "25"}).json() == QUEUED
    assert time.monotonic() - began < 5


async def get(url: str, wait: str) -> Any:
    answer = await AsyncClient().get(url, {"wait": wait})
    return json.loads(answer.content)


async def in_thread(function: Any, *args: Any, **kwargs: Any) -> Any:
    def call() -> Any:
        try:
            return function(*args, **kwargs)
        finally:
            connections.close_all()

    return await asyncio.to_thread(call)


def test_asgi_answers_when_the_task_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Woken by the announcement; requests that are cut wait no more."""
    monkeypatch.setattr(waiters, "LOOK_SECONDS", 3600)
    monkeypatch.setattr(views, "CHANGE_SECONDS", 3600)
    result = tasks.add.enqueue(1)
    url = task_status_url(result)

    async def main() -> None:
        answers = [asyncio.ensure_future(get(url, "25")) for _ in range(3)]
        while not await in_thread(marked, result):
            await asyncio.sleep(0.01)
        answers[0].cancel()
        await in_thread(finish)
        assert await answers[1] == await answers[2] == SUCCEEDED
        assert await get(url, "25") == SUCCEEDED, "there is nothing to wait for"

    in_loop(main)
    assert not waiters.of_process()._by_id


def test_long_polls_share_a_thread_and_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request under ASGI has a thread, which would keep its connection: a database allows about 100."""
    monkeypatch.setattr(views, "CHANGE_SECONDS", 0.05)
    readers: list[set[int]] = []
    original = views._read

    def read(id: Any) -> Any:
        readers[-1].add(threading.get_ident())
        return original(id)

    monkeypatch.setattr(views, "_read", read)
    result = tasks.add.enqueue(1)
    url = task_status_url(result)
    open_connections: list[bool] = []

    async def poll() -> Any:
        async with ThreadSensitiveContext():  # as Django's handler for ASGI has one for each request
            answer = asyncio.ensure_future(get(url, "25"))
            await asyncio.sleep(0.5)
            open_connections.append(await sync_to_async(lambda: connection.connection is not None)())
            return await answer

    async def main() -> None:
        readers.append(set())
        polls = [asyncio.ensure_future(poll()) for _ in range(3)]
        while len(open_connections) < 3:
            await asyncio.sleep(0.01)
        readers.append(set())
        await in_thread(finish)
        assert await asyncio.gather(*polls) == [SUCCEEDED] * 3
        assert len(readers[-1]) == 1

    in_loop(main)
    assert open_connections == [connection.vendor == "sqlite" and connection.is_in_memory_db()] * 3  # type: ignore[attr-defined]
    assert reader.of_process()._thread is None


def test_a_poll_that_cannot_be_read_in_time_answers_what_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader may be kept by a slow database or Redis."""
    url = task_status_url(tasks.add.enqueue(1))
    goes_on = threading.Event()

    async def main() -> None:
        with reader.of_process().used() as thread:
            thread.submit(goes_on.wait)
            assert await get(url, "1") == QUEUED
            goes_on.set()

    in_loop(main)


def test_asgi_answers_a_change_and_a_deletion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is not announced, so the row is read now and then."""
    monkeypatch.setattr(views, "CHANGE_SECONDS", 0.05)
    result = tasks.add.enqueue(1)
    url = task_status_url(result)

    async def main() -> None:
        answer = asyncio.ensure_future(get(url, "25"))
        while not await in_thread(marked, result):
            await asyncio.sleep(0.01)
        await in_thread(TaskRecord.objects.update, progress={"done": 1, "total": None, "message": "", "data": {}})
        assert (await answer)["progress"]["done"] == 1
        answer = asyncio.ensure_future(get(url, "25"))
        await asyncio.sleep(0.1)
        await in_thread(TaskRecord.objects.all().delete)
        assert await answer == {"error": "there is no such task"}

    in_loop(main)


@pytest.mark.parametrize("wait", ["", "0", "-1", "1.5", "nan", "²", "soon"])
def test_asgi_answers_at_once_unless_asked_in_seconds(wait: str) -> None:
    """What is no whole number of seconds is no wait."""
    url = task_status_url(tasks.add.enqueue(1))
    assert in_loop(partial(get, url, wait)) == QUEUED


def test_a_long_poll_is_over_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a page asks for."""
    monkeypatch.setattr(views, "LONGEST_POLL_SECONDS", 0.2)
    url = task_status_url(tasks.add.enqueue(1))
    assert in_loop(partial(get, url, "9" * 99)) == QUEUED


def test_the_view_is_outside_of_atomic_requests() -> None:
    """Django refuses them for an asynchronous view, and a transaction could not see the task finish."""
    assert TaskStatusView.as_view()._non_atomic_requests == set(connections)  # type: ignore[attr-defined]

"""The pages of one queue, of one worker process, of one task of the code, and the way from a batch to its calls."""

from __future__ import annotations

import re
from datetime import timedelta
from html import unescape
from pathlib import Path

import pytest
from django.test import Client
from django.utils import timezone

from django_asyncq import control
from django_asyncq.core.names import uuid7
from django_asyncq.models import PauseKind, TaskRecord, TaskState

from .. import tasks
from ..admin_cases import LIST, client_with, error, make
from ..workers import wait_until, workers

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def viewer() -> Client:
    """A person who may only look."""
    return client_with("view_taskrecord")


def words(client: Client, address: str) -> str:
    """The text of a page, in one line."""
    return " ".join(unescape(re.sub("<[^>]+>", " ", client.get(address).content.decode())).split())


@pytest.mark.slow
def test_each_page_says_what_a_fleet_has_done(viewer: Client, tmp_path: Path) -> None:
    """Found by links, from the overview, the queues and the workers on."""
    with workers(tmp_path):
        for number in range(3):
            tasks.add.enqueue(number, 1)
        tasks.fail_until.enqueue(9, True)
        wait_until(lambda: not TaskRecord.objects.exclude(state__gte=TaskState.SUCCEEDED).exists(), "the end of all")
        row = TaskRecord.objects.filter(name="tests.tasks.add").latest("id")
        wait_until(lambda: "0.0 %" in words(viewer, f"{LIST}task/?name=tests.tasks.add"), "the counts of runs")
        of_task = words(viewer, f"{LIST}task/?name=tests.tasks.add")
        assert "This hour and the one before 3 0 0.0 % 0" in of_task and "7 days 3 0" in of_task
        of_queue = words(viewer, f"{LIST}queue/?queue=default")
        assert "Queued 0" in of_queue and "tests.tasks.fail_until 1 1 100.0 %" in of_queue
        listed = viewer.get(f"{LIST}workers/").content.decode()
        (address,) = set(map(unescape, re.findall(r'href="([^"]*/worker/\?id=[^"]*)"', listed)))
        of_worker = words(viewer, address)
        assert "idle" in of_worker and f"add {row.short_id}" in of_worker and "attempt 1" in of_worker
        page = viewer.get(f"{LIST}{row.pk}/change/").content.decode()
        for link in ("../../task/?name=tests.tasks.add", "../../queue/?backend=default&amp;queue=default"):
            assert f'href="{link}"' in page
    assert "It is not alive." in words(viewer, address)


def test_a_worker_that_nobody_knows_leads_back(viewer: Client) -> None:
    """With a sentence."""
    assert viewer.get(f"{LIST}worker/?id=gone", follow=True).redirect_chain[-1][0] == LIST
    make(errors=[error(worker="gone")])
    make(TaskState.SUCCEEDED, worker_ids=["other", "gone"])
    make(TaskState.SUCCEEDED, worker_ids=["gone", "other"])
    page = viewer.get(f"{LIST}worker/?id=gone").content.decode()
    assert "It is not alive." in page and len(re.findall("/change/", page)) == 2


def test_the_page_of_a_queue_shows_only_its_tasks(viewer: Client) -> None:
    """What was queued first is first; what waits says why."""
    now = timezone.now()
    old, new = (make(TaskState.QUEUED, queue_name="mail", enqueued_at=now - timedelta(hours=age)) for age in (2, 1))
    make(TaskState.QUEUED)
    failed = make(queue_name="mail")
    control.pause(PauseKind.QUEUE, "mail", by="ann", note="rate limit")
    page = viewer.get(f"{LIST}queue/?queue=mail").content.decode()
    assert re.findall(r"/([0-9a-f-]{36})/change/", page) == [str(each.pk) for each in (old, new, failed)]
    assert "rate limit" in page and page.count(">Its queue is paused<") == 2 and "Resume" not in page
    assert (
        "Resume"
        in client_with("view_taskrecord", "pause_queue", name="bob").get(f"{LIST}queue/?queue=mail").content.decode()
    )


def test_a_task_that_the_code_has_no_more_has_a_page(viewer: Client) -> None:
    """Its rows are there."""
    row = make(name="gone.tasks.old")
    page = viewer.get(f"{LIST}task/?name=gone.tasks.old").content.decode()
    assert "The code has no task of this name." in page and str(row.pk) in page


def test_a_batch_and_its_calls_link_to_each_other(viewer: Client) -> None:
    """The calls are found by an address that an action takes too."""
    batch = uuid7()
    members = [make(TaskState.QUEUED, batch_id=batch) for _ in range(2)]
    make(TaskState.QUEUED, id=batch, batch_size=2)
    page = viewer.get(f"{LIST}{batch}/change/").content.decode()
    (address,) = [unescape(each) for each in re.findall(r'href="([^"]*batch=[^"]*)"', page)]
    assert {row.pk for row in viewer.get(address).context["cl"].result_list} == {row.pk for row in members}
    assert f'href="../../{batch}/change/"' in viewer.get(f"{LIST}{members[0].pk}/change/").content.decode()

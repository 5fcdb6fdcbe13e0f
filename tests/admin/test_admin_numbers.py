"""A number beside a link or a button is that of the tasks that the link shows, the question names, the action takes."""

from __future__ import annotations

import re
from datetime import timedelta
from html import unescape

import pytest
from django.test import Client
from django.utils import timezone

from django_asyncq.broker import Broker
from django_asyncq.models import BulkAction, FailureReason, TaskState

from .. import tasks
from ..admin_cases import LIST, client_with, make

pytestmark = pytest.mark.django_db(transaction=True)

APP = "/admin/django_asyncq/"
PAGES = [
    APP,
    f"{APP}?span=7d",
    LIST,
    *(f"{LIST}?{query}" for query in ("state=failed", "queue=mail", "q=add", "reason=timeout", "within=1h")),
    *(f"{LIST}failures/?span={span}&by={by}" for span in ("1h", "24h", "all") for by in ("both", "task", "error")),
    f"{LIST}queues/",
    f"{APP}bulkaction/",
    f"{APP}gate/",
]
LINK = re.compile(r'<a\b[^>]*href="([^"]*)"[^>]*>(.*?)</a>', re.DOTALL)
# A whole number in the text of a link, but not that of a time: "9 h ago".
NUMBER = re.compile(r"(?<![\w.:-])(\d+)(?![\w.:-]| (?:ms|s|min|h|d|minutes|hours?|days)\b)")
# Of these pages, a link beside other filters has no number.
WITHOUT_NUMBERS = re.compile(r"\?(queue|q|reason|within)=|bulkaction|gate")


@pytest.fixture
def site() -> Client:
    """Tasks in each state, of several times, reasons and queues; and somebody who may do everything."""
    now = timezone.now()
    for age in (timedelta(minutes=5), timedelta(hours=3), timedelta(days=30)):
        for error in ("shop.CardDeclined", "shop.Timeout"):
            make(last_exception=error, finished_at=now - age, enqueued_at=now - age - timedelta(seconds=1))
    make(last_exception="shop.CardDeclined", reason=FailureReason.CANCELLED)
    make(last_exception="shop.CardDeclined", reason=FailureReason.DISCARDED)
    make(name="tests.tasks.tally", reason=FailureReason.TIMEOUT, last_exception="shop.Timeout", queue_name="mail")
    make(last_exception="", reason=FailureReason.EXPIRED)
    for ago in (timedelta(minutes=1), timedelta(days=2)):
        make(last_exception="shop.CardDeclined", retry_at=now, last_attempted_at=now - ago)
    for _ in range(2):
        make(TaskState.SUCCEEDED, queue_name="mail")
        make(TaskState.RUNNING, queue_name="mail", last_attempted_at=now - timedelta(hours=1), timeout_seconds=5)
    tasks.add.enqueue(1, 2)
    tasks.add.using(run_after=timedelta(hours=1)).enqueue(1, 2)
    for queue in ("default", "mail"):
        Broker().register_queue(queue)
    return client_with(is_superuser=True)


def links_of(client: Client, page: str) -> list[tuple[str, str]]:
    """The addresses and texts of the links of a page."""
    found = LINK.findall(client.get(page).content.decode())
    return [(unescape(address), " ".join(unescape(re.sub("<[^>]+>", " ", text)).split())) for address, text in found]


@pytest.mark.parametrize("page", PAGES)
def test_a_number_of_a_link_is_that_of_the_tasks_behind_it(site: Client, page: str) -> None:
    """On every page that has any."""
    looked = 0
    for address, text in links_of(site, page):
        full = LIST + address if address.startswith("?") and page.partition("?")[0] == LIST else address
        numbers = NUMBER.findall(text)
        if len(numbers) == 1 and full.startswith(f"{LIST}?"):
            assert len(site.get(full).context["cl"].result_list) == int(numbers[0]), (text, full)
            looked += 1
    assert (looked > 0) is not bool(WITHOUT_NUMBERS.search(page))


@pytest.mark.parametrize("page", PAGES)
def test_a_button_asks_about_as_many_tasks_as_it_then_takes(site: Client, page: str) -> None:
    """And as many as the list with its filter shows, whatever fails in between."""
    addresses = {address for address, _text in links_of(site, page) if address.startswith(f"{LIST}bulk/")}
    for address in sorted(addresses):
        number = question_of(site, address)
        make(last_exception="shop.CardDeclined", finished_at=timezone.now())
        assert question_of(site, address) == number
        for _ in range(2):
            site.post(address, {"confirmed": "yes", "reason": "all of them"})
        assert [action.total for action in BulkAction.objects.all()] == ([number] if number else [])
        BulkAction.objects.all().delete()


def question_of(client: Client, address: str) -> int:
    """How many tasks a question is about; 0 when it is not asked."""
    found = re.search(r"<title>(?:Retry|Cancel|Delete) (\d+) ", client.get(address, follow=True).content.decode())
    return int(found[1]) if found else 0

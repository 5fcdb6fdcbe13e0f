"""The question about an action beside millions of tasks: it says what it knows, goes on counting, and then asks."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from django_asyncq.admin import bulk
from django_asyncq.models import BulkAction, TaskState
from django_asyncq.storage import matching

from ..admin_cases import LIST, client_with, make, said
from ..browsing import Person

pytestmark = pytest.mark.django_db(transaction=True)
ASK = f"{LIST}bulk/?kind=delete&queue=rare"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer counts ten tasks."""
    monkeypatch.setattr(matching, "ROWS_PER_PART", 10)
    monkeypatch.setattr(bulk, "COUNTING_SECONDS", 0.0)


@pytest.fixture
def boss() -> Client:
    """Somebody who may delete."""
    return client_with("view_taskrecord", "delete_taskrecord", "view_bulkaction")


def followed(client: Client, url: str) -> list[Any]:
    """The answers to an address, until one leads no further by itself."""
    answers = [client.get(url, follow=True)]
    while refresh := answers[-1].headers.get("Refresh"):
        path = answers[-1].request["PATH_INFO"]
        answers.append(client.get(path + refresh.removeprefix("0; url=")))
    return answers


def title(answer: Any) -> str:
    return str(answer.context["title"])


def test_it_says_what_it_knows_and_goes_on_to_the_question(boss: Client) -> None:
    """The number is exact at the end, and the examples are the oldest."""
    for number in range(35):
        make(
            TaskState.SUCCEEDED if number % 2 else TaskState.FAILED, queue_name="rare" if number in (12, 30) else "mail"
        )
    answers = followed(boss, ASK)
    assert [title(each) for each in answers] == [
        "0 tasks so far …",
        "1 task so far …",
        "1 task so far …",
        "Delete 2 tasks?",
    ]
    assert len(answers[-1].context["question"].examples) == 2
    boss.post(answers[-1].wsgi_request.get_full_path(), {"confirmed": "yes", "reason": "old"})
    assert BulkAction.objects.get().total == 2


def test_a_number_that_was_made_up_is_not_believed(boss: Client) -> None:
    """Nor is that of another filter: it is counted from the beginning."""
    for number in range(15):
        make(TaskState.SUCCEEDED, queue_name="rare" if number < 3 else "mail")
    first = boss.get(ASK, follow=True)
    made_up = first.headers["Refresh"].removeprefix("0; url=").replace("queue=rare", "queue=mail")
    assert title(boss.get(f"{LIST}bulk/{made_up}")) == "7 tasks so far …"
    for rubbish in ("x", "x:y:z", "%00"):
        assert title(boss.get(f"{ASK}&counted={rubbish}", follow=True)) == "3 tasks so far …"


def test_a_browser_is_led_to_the_question(person: Person) -> None:
    """Without JavaScript too; the page that counts is looked at on the way."""
    for number in range(35):
        make(TaskState.SUCCEEDED, queue_name="rare" if number in (12, 30) else "mail")
    person.browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    person.open("taskrecord/bulk/?kind=delete&queue=rare")
    person.wait.until(lambda browser: person.text("h1") == "Delete 2 tasks?")
    assert "counted=" in person.browser.current_url


def test_what_an_index_leads_to_is_asked_at_once(boss: Client) -> None:
    """By name, by error, by what has not finished; and when nothing matches, it says so."""
    for _ in range(15):
        make(queue_name="rare", last_exception="shop.errors.CardDeclined")
    for query in ("kind=delete&error=shop.errors.CardDeclined", "kind=delete&state=failed&queue=rare"):
        assert title(boss.get(f"{LIST}bulk/?{query}", follow=True)) == "Delete 15 tasks?"
    (*_, last) = followed(boss, f"{LIST}bulk/?kind=delete&queue=none")
    assert said(last) == [("warning", "No task matches, so nothing was changed.")]

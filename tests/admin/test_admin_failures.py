"""The page of failures: groups, spans, spark lines, and the retry of a group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from django_asyncq.admin import failures
from django_asyncq.models import BulkAction, FailureReason, TaskState

from .. import tasks  # noqa: F401 - registers them
from ..admin_cases import LIST, client_with, error, make

pytestmark = pytest.mark.django_db(transaction=True)

FAILURES = f"{LIST}failures/"


def test_failures_are_grouped_by_task_and_error() -> None:
    """With how many, since when and until when."""
    now = timezone.now()
    for hours in (1, 2, 3):
        make(last_exception="shop.CardDeclined", finished_at=now - timedelta(hours=hours))
    make(last_exception="builtins.KeyError", finished_at=now - timedelta(minutes=5))
    make(last_exception="builtins.KeyError", retry_at=now, last_attempted_at=now)
    make(last_exception="", reason=FailureReason.CANCELLED)
    make(TaskState.SUCCEEDED)
    response = client_with("view_taskrecord").get(FAILURES)
    found = [(each.error, each.task, each.group.count, each.group.retrying) for each in response.context["groups"]]
    assert sorted(found) == [
        ("CardDeclined", "add", 3, 0),
        ("It was cancelled", "add", 1, 0),
        ("KeyError", "add", 1, 1),
    ]
    (group,) = [each.group for each in response.context["groups"] if each.error == "CardDeclined"]
    assert group.first == now - timedelta(hours=3) and group.last == now - timedelta(hours=1)
    assert sum(group.hours) == 3
    text = response.content.decode()
    assert "3 failures in 24 hours" in text and "name=tests.tasks.add&amp;error=shop.CardDeclined" in text


@pytest.mark.parametrize(("span", "count"), [("1h", 1), ("24h", 2), ("7d", 3), ("all", 4), ("x", 2)])
def test_the_span_chooses_by_when_a_task_failed(span: str, count: int) -> None:
    """Not by when it was enqueued."""
    now = timezone.now()
    for age in (timedelta(minutes=5), timedelta(hours=5), timedelta(days=3), timedelta(days=30)):
        make(finished_at=now - age)
    (shown,) = client_with("view_taskrecord").get(FAILURES, {"span": span}).context["groups"]
    assert shown.group.count == count


def test_the_page_says_when_it_has_not_looked_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest come first."""
    monkeypatch.setattr(failures, "MOST_FAILURES", 2)
    for _ in range(3):
        make()
    response = client_with("view_taskrecord").get(FAILURES)
    assert response.context["groups"][0].group.count == 2
    assert "Only the failures of the tasks enqueued last are looked at" in response.content.decode()


def test_a_page_without_failures_says_so() -> None:
    """No empty table."""
    assert "Nothing has failed in this time." in client_with("view_taskrecord").get(FAILURES).content.decode()


def groups_of(client: Client, **query: str) -> dict[tuple[str, str], Any]:
    """The rows of the page by task and error."""
    return {(each.task, each.error): each for each in client.get(FAILURES, query).context["groups"]}


def test_number_link_question_and_action_of_a_group_are_about_the_same_tasks() -> None:
    """Not those of before the page's time, nor those cancelled after such an error, nor what fails after the look."""
    now = timezone.now()
    for age in (timedelta(minutes=1), timedelta(minutes=2), timedelta(days=30)):
        make(last_exception="shop.CardDeclined", finished_at=now - age)
    make(last_exception="shop.CardDeclined", reason=FailureReason.CANCELLED)
    make(last_exception="builtins.KeyError")
    client = client_with("view_taskrecord", "retry_task", "view_bulkaction")
    group = groups_of(client, span="1h")["add", "CardDeclined"]
    make(last_exception="shop.CardDeclined", finished_at=timezone.now())
    assert group.count == "2"
    assert len(client.get(group.count_url).context["cl"].result_list) == 2
    text = client.get(group.retry_url).content.decode()
    assert "Retry 2 failed tasks?" in text and "last error: shop.CardDeclined" in text and "finished since: " in text
    assert not BulkAction.objects.exists()
    for _ in range(2):
        client.post(group.retry_url, {"confirmed": "yes"})
    assert BulkAction.objects.get().total == 2


def test_a_group_without_an_error_is_that_of_its_reason() -> None:
    """Not every failed task of the name."""
    make(last_exception="", reason=FailureReason.EXPIRED)
    make(last_exception="shop.CardDeclined")
    client = client_with("view_taskrecord", "retry_task", "view_bulkaction")
    client.post(groups_of(client)["add", "It had not begun in time"].retry_url, {"confirmed": "yes"})
    action = BulkAction.objects.get()
    assert action.total == 1 and action.matching["reason"] == ["expired"]


def test_the_newest_failure_is_first_and_new() -> None:
    """A hundred groups that fail more often, and have done so before, come behind it."""
    now = timezone.now()
    for number in range(failures.GROUPS_PER_PAGE + 1):
        for hours in (1, 30):
            make(last_exception=f"shop.Error{number}", finished_at=now - timedelta(hours=hours, minutes=number))
    make(last_exception="shop.Fresh", finished_at=now - timedelta(minutes=12))
    client = client_with("view_taskrecord")
    first = client.get(FAILURES).context["groups"]
    assert first[0].error == "Fresh" and [each.group.is_new for each in first] == [True] + [False] * (len(first) - 1)
    page = client.get(FAILURES, {"page": "2"})
    assert [each.error for each in page.context["groups"]] == ["Error49", "Error50"] and page.context["previous_url"]
    assert len(client.get(FAILURES, {"page": "99", "q": "ERROR5"}).context["groups"]) == 2


def test_what_failed_before_the_failures_that_are_looked_at_is_not_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only of what is really new the page says so."""
    monkeypatch.setattr(failures, "MOST_FAILURES", 2)
    now = timezone.now()
    make(last_exception="shop.Old", enqueued_at=now - timedelta(days=9), finished_at=now - timedelta(days=9))
    make(last_exception="shop.Old")
    make(last_exception="shop.New")
    found = groups_of(client_with("view_taskrecord"))
    assert [found["add", error].group.is_new for error in ("New", "Old")] == [True, False]
    assert found["add", "Old"].count == "at least 1"


def test_groups_by_task_and_by_error() -> None:
    """The links of each are about all its tasks."""
    for name in ("tests.tasks.add", "tests.tasks.tally"):
        make(name=name, last_exception="shop.CardDeclined")
    make(last_exception="", reason=FailureReason.EXPIRED)
    client = client_with("view_taskrecord", "retry_task")
    by_task, by_error = groups_of(client, by="task"), groups_of(client, by="error")
    assert {key: each.count for key, each in by_error.items()} == {
        ("", "CardDeclined"): "2",
        ("", "It had not begun in time"): "1",
    }
    assert sorted(each.count for each in by_task.values()) == ["1", "2"]
    for each in (*by_task.values(), *by_error.values()):
        assert str(len(client.get(each.count_url).context["cl"].result_list)) == each.count


def test_the_version_says_since_which_deploy() -> None:
    """Of the first and of the last failure of a group; no column while no failure has one."""
    now, client = timezone.now(), client_with("view_taskrecord")
    make(finished_at=now - timedelta(hours=2))
    assert "Version" not in client.get(FAILURES).content.decode()
    for hours, version in ((3, "1.2"), (1, "1.3")):
        errors = [error(app_version=version)]
        make(errors=errors, last_exception="shop.CardDeclined", finished_at=now - timedelta(hours=hours))
    assert groups_of(client)["add", "CardDeclined"].versions == "1.2 – 1.3"


def test_retry_group_needs_its_permission() -> None:
    """Whoever only looks is not offered it."""
    make()
    viewer = client_with("view_taskrecord", name="viewer")
    assert "Retry group" not in viewer.get(FAILURES).content.decode()
    assert viewer.get(groups_of(viewer)["add", "Glitch"].retry_url).status_code == 403
    assert client_with(name="none").get(FAILURES).status_code == 403


def test_a_spark_line_of_nothing_has_a_text() -> None:
    """And bars of at least two pixels for what there was."""
    assert "0 failures in 24 hours" in failures.spark_line([0] * 24)
    assert 'height="2"' in failures.spark_line([1, 1000])

"""The page of failures: groups, spans, spark lines, and the retry of a group."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from django_asyncq.admin import failure_page
from django_asyncq.models import BulkAction, FailureReason, TaskState

from . import tasks  # noqa: F401 - registers them
from .admin_cases import LIST, client_with, make

pytestmark = pytest.mark.django_db(transaction=True)

FAILURES = f"{LIST}failures/"


def test_failures_are_grouped_by_task_and_error() -> None:
    """With how many, since when and until when; the largest group first."""
    now = timezone.now()
    for hours in (1, 2, 3):
        make(last_exception="shop.CardDeclined", finished_at=now - timedelta(hours=hours))
    make(last_exception="builtins.KeyError", finished_at=now - timedelta(minutes=5))
    make(last_exception="builtins.KeyError", retry_at=now, last_attempted_at=now)
    make(last_exception="", reason=FailureReason.CANCELLED)
    make(TaskState.SUCCEEDED)
    response = client_with("view_taskrecord").get(FAILURES)
    found = [(each.error, each.task, each.group.count, each.group.retrying) for each in response.context["groups"]]
    assert found[0] == ("CardDeclined", "add", 3, 0) and found[1] == ("KeyError", "add", 1, 1)
    assert found[2] == ("It was cancelled", "add", 1, 0)
    group = response.context["groups"][0].group
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
    monkeypatch.setattr(failure_page, "MOST_FAILURES", 2)
    for _ in range(3):
        make()
    response = client_with("view_taskrecord").get(FAILURES)
    assert response.context["groups"][0].group.count == 2
    assert "Only the failures of the tasks enqueued last are looked at" in response.content.decode()


def test_a_page_without_failures_says_so() -> None:
    """No empty table."""
    assert "Nothing has failed in this time." in client_with("view_taskrecord").get(FAILURES).content.decode()


def test_a_group_is_retried_as_an_action() -> None:
    """The question has its number and its words; no other task is in it."""
    for _ in range(3):
        make(last_exception="shop.CardDeclined")
    make(last_exception="builtins.KeyError")
    client = client_with("view_taskrecord", "retry_task", "view_bulkaction")
    values = {"name": "tests.tasks.add", "error": "shop.CardDeclined"}
    text = client.post(f"{LIST}retry-group/", values).content.decode()
    assert "Retry 3 failed tasks?" in text and "last error: shop.CardDeclined" in text
    assert not BulkAction.objects.exists()
    client.post(f"{LIST}retry-group/", {**values, "confirmed": "yes"})
    action = BulkAction.objects.get()
    assert action.total == 3 and action.matching["last_exception"] == ["shop.CardDeclined"]


def test_a_group_without_an_error_is_that_of_its_reason() -> None:
    """Not every failed task of the name."""
    make(last_exception="", reason=FailureReason.EXPIRED)
    make(last_exception="shop.CardDeclined")
    client = client_with("view_taskrecord", "retry_task", "view_bulkaction")
    text = client.get(FAILURES).content.decode()
    assert "reason=expired" in text and 'name="reason" value="expired"' in text
    client.post(f"{LIST}retry-group/", {"name": "tests.tasks.add", "reason": "expired", "confirmed": "yes"})
    assert BulkAction.objects.get().total == 1
    assert client.post(f"{LIST}retry-group/", {"name": "tests.tasks.add", "confirmed": "yes"}).status_code == 302
    assert BulkAction.objects.count() == 1


def test_retry_group_needs_its_permission_and_a_post() -> None:
    """And rubbish starts nothing."""
    make()
    values = {"name": "tests.tasks.add", "error": "tests.tasks.Glitch", "confirmed": "yes"}
    viewer = client_with("view_taskrecord", name="viewer")
    assert viewer.post(f"{LIST}retry-group/", values).status_code == 403
    assert "Retry group" not in viewer.get(FAILURES).content.decode()
    allowed = client_with("view_taskrecord", "retry_task")
    assert allowed.get(f"{LIST}retry-group/").status_code == 405
    for name in ("", "\x00", "x" * 500):
        assert allowed.post(f"{LIST}retry-group/", {"name": name, "confirmed": "yes"}).status_code == 302
    assert not BulkAction.objects.exists()
    assert client_with(name="none").get(FAILURES).status_code == 403


def test_a_spark_line_of_nothing_has_a_text() -> None:
    """And bars of at least two pixels for what there was."""
    assert "0 failures in 24 hours" in failure_page.spark_line([0] * 24)
    assert 'height="2"' in failure_page.spark_line([1, 1000])

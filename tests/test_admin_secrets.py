"""What a task declares as sensitive is masked on its page, wherever it occurs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from django.utils import timezone

from django_asyncq import task
from django_asyncq.exceptions import InvalidOption
from django_asyncq.models import TaskLogLine, TaskState
from django_asyncq.redaction import MASK, Masker

from .admin_cases import LIST, client_with, error, make
from .tasks import takes_anything

pytestmark = pytest.mark.django_db

IBAN = "DE02120300000000202051"


@task(sensitive=("iban", "return"))
def pay_out(iban: str, amount: int, *, account: dict[str, Any] | None = None) -> str:
    """Stand in for a task with a secret that no word gives away."""
    return iban


NAME = "tests.test_admin_secrets.pay_out"


def test_a_sensitive_argument_is_masked_wherever_it_occurs() -> None:
    """In arguments, the error, the traceback, the log and progress; by position and by name."""
    text = f"no account {IBAN} at the bank"
    progress = {"done": 1, "message": text, "data": {"k": [text]}}
    for values in ({"args": [IBAN, 5]}, {"kwargs": {"iban": IBAN, "amount": 5}}):
        record = make(name=NAME, errors=[error(text, traceback=text)], progress=progress, cancelled_by=IBAN, **values)
        TaskLogLine.objects.create(
            task_id=record.pk, fence=1, attempt=1, number=1, logged_at=timezone.now(), level=20, logger="x", text=text
        )
        client = client_with("view_taskrecord", name=f"viewer{record.short_id}")
        for address in (f"{LIST}{record.pk}/change/", f"{LIST}{record.pk}/change/?full", LIST):
            page = client.get(address).content.decode()
            assert IBAN not in page, address
        assert MASK in client.get(f"{LIST}{record.pk}/change/").content.decode()


def test_a_sensitive_result_is_masked_whole() -> None:
    """Whatever it is."""
    record = make(TaskState.SUCCEEDED, name=NAME, return_value={"a": IBAN, "b": [1, 2]})
    page = client_with("view_taskrecord").get(f"{LIST}{record.pk}/change/").content.decode()
    assert IBAN not in page and MASK in page


def test_short_values_are_masked_in_arguments_only() -> None:
    """Otherwise half of a text would be masked."""
    masker = Masker(("a",), ("a", "b"), ["to", "x"], {})
    assert masker.positional(["to", "x"]) == [MASK, "x"] and masker.text("to be or not to be") == "to be or not to be"


def test_values_within_others_are_masked() -> None:
    """Texts and numbers of nested values; the longest first."""
    masker = Masker(("a",), (), [], {"a": {"k": ["secret", "secret words", 123456]}})
    assert masker.text("secret words, secret 123456") == f"{MASK}, {MASK} {MASK}"
    assert masker.data({"x": ["the secret words"]}) == {"x": [f"the {MASK}"]}
    assert masker.keyword({"a": 1, "b": 2}) == {"a": MASK, "b": 2}


@pytest.mark.parametrize("value", [("nothing",), 5, (5,), {"a": 1}, ("a.b",)])
def test_a_name_that_is_no_parameter_is_refused(value: Any) -> None:
    """A typing error would show what is to be hidden."""
    with pytest.raises(InvalidOption, match="sensitive"):
        replace(pay_out, sensitive=value)


def test_any_name_is_taken_where_the_function_takes_any() -> None:
    """One name, or a list of them, is a tuple afterwards; a call keeps what the declaration says."""
    assert replace(takes_anything, sensitive="whatever").sensitive == ("whatever",)
    assert replace(pay_out, sensitive=["iban"]).sensitive == ("iban",)
    assert pay_out.using(priority=3).sensitive == ("iban", "return")

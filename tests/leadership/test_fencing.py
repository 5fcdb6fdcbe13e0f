"""Fencing tokens: numbers that rise, and transactions that an older term cannot outlive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.models import F, QuerySet
from django.db.transaction import TransactionManagementError
from django.utils import timezone

from django_asyncq.exceptions import AsyncqError, LockLost
from django_asyncq.leadership import fencing
from django_asyncq.models import LockTerm, StartupRun


class Task(threading.Thread):
    """A function in a thread with its own connection; `result` waits for its result."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        super().__init__(daemon=True)
        self.function, self.arguments = function, arguments
        self.answer: Any = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Call the function."""
        try:
            self.answer = self.function(*self.arguments)
        except Exception as error:  # noqa: BLE001 - raised again by `result`
            self.error = error
        finally:
            connections.close_all()

    def result(self) -> Any:
        """Return what the function returned, or raise what it raised."""
        self.join(40)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.answer


def write(name: str, term: int) -> None:
    """Write a row."""
    StartupRun.objects.create(name=name, holder="", term=term, begun_at=timezone.now())


def written(name: str) -> list[int]:
    """The terms of the rows, in the order in which they were written."""
    return list(StartupRun.objects.filter(name=name).order_by("id").values_list("term", flat=True))


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", ["maintenance", "ä b", "x" * 200, "x" * 5000])
def test_terms_rise_by_one(name: str) -> None:
    """From 1 on, with the latest holder beside the number; a lock may have any name."""
    before = timezone.now() - timedelta(seconds=1)  # what is measured may differ by a round trip
    assert [fencing.begin(name, f"host {pid}") for pid in (7, 8)] == [1, 2]
    assert fencing.begin(f"{name}'s other", "h" * 1000) == 1
    row = LockTerm.objects.get(name=fencing._row_name(name))
    assert (row.number, row.holder) == (2, "host 8")
    assert row.begun_at >= before


@pytest.mark.django_db(transaction=True)
def test_many_begin_a_first_term_at_once() -> None:
    """Each gets its own number, without a gap, though none had found a row."""
    together = threading.Barrier(8)

    def begin_often() -> list[int]:
        together.wait(10)
        return [fencing.begin("race", "holder") for _ in range(5)]

    tasks = [Task(begin_often) for _ in range(8)]
    numbers = [task.result() for task in tasks]
    assert sorted(number for mine in numbers for number in mine) == list(range(1, 41))
    assert all(mine == sorted(mine) for mine in numbers)


@pytest.mark.django_db(transaction=True)
def test_a_row_inserted_meanwhile_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between finding no row and inserting one."""
    bulk_create = QuerySet.bulk_create

    def create_late(rows: QuerySet[LockTerm], *arguments: Any, **options: Any) -> list[LockTerm]:
        monkeypatch.setattr(QuerySet, "bulk_create", bulk_create)
        assert Task(fencing.begin, "maintenance", "").result() == 1
        return bulk_create(rows, *arguments, **options)

    monkeypatch.setattr(QuerySet, "bulk_create", create_late)
    assert fencing.begin("maintenance", "") == 2


@pytest.mark.django_db(transaction=True)
def test_term_cannot_begin_inside_a_transaction() -> None:
    """It could be rolled back, and the number used twice."""
    assert fencing.begin("maintenance", "") == 1
    with pytest.raises(RuntimeError), transaction.atomic():
        fencing.begin("maintenance", "")
    assert fencing.begin("maintenance", "") == 2


@pytest.mark.django_db(transaction=True)
def test_fence_needs_a_transaction() -> None:
    """Without one it would prove only the past."""
    number = fencing.begin("maintenance", "")
    with pytest.raises(TransactionManagementError):
        fencing.fence("maintenance", number)


@pytest.mark.django_db(transaction=True)
def test_fence_refuses_an_older_term() -> None:
    """The older holder's row is not written, the newer one's is, and the fence itself changes nothing."""
    older = fencing.begin("maintenance", "a 1")
    newer = fencing.begin("maintenance", "b 2")
    with fencing.fenced("maintenance", newer):
        write("maintenance", newer)
    for number in (older, newer + 1, 0):
        with pytest.raises(LockLost) as caught, fencing.fenced("maintenance", number):
            write("maintenance", number)
        assert isinstance(caught.value, AsyncqError)
        assert (caught.value.name, caught.value.term) == ("maintenance", number)
    with pytest.raises(LockLost), fencing.fenced("unknown", 1):
        write("unknown", 1)
    assert written("maintenance") == [newer]
    row = LockTerm.objects.get(name="maintenance")
    assert (row.number, row.holder) == (newer, "b 2")


@pytest.mark.django_db(transaction=True)
def test_newer_term_waits_for_the_older_ones_transaction() -> None:
    """So everything an older term writes is there before the newer term begins."""
    older = fencing.begin("maintenance", "")
    with fencing.fenced("maintenance", older):
        task = Task(fencing.begin, "maintenance", "")
        task.join(0.3)  # without a wait it would have finished by now
        assert task.is_alive()
        write("maintenance", older)
    newer = task.result()
    assert newer == older + 1
    with pytest.raises(LockLost), fencing.fenced("maintenance", older):
        write("maintenance", older)
    with fencing.fenced("maintenance", newer):
        write("maintenance", newer)
    assert written("maintenance") == [older, newer]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("is_kept", [True, False])
def test_older_term_waits_for_the_begin_of_a_newer_one(is_kept: bool) -> None:
    """A fence during an uncommitted newer term is refused if that commits, and accepted if it is rolled back."""
    older = fencing.begin("maintenance", "")

    def write_fenced() -> None:
        with fencing.fenced("maintenance", older):
            write("maintenance", older)

    with transaction.atomic():
        LockTerm.objects.filter(name="maintenance").update(number=F("number") + 1)
        task = Task(write_fenced)
        task.join(0.3)
        assert task.is_alive()
        transaction.set_rollback(not is_kept)
    if is_kept:
        with pytest.raises(LockLost):
            task.result()
    else:
        task.result()
    assert written("maintenance") == ([] if is_kept else [older])


@pytest.mark.django_db(transaction=True)
def test_writers_of_many_terms_are_in_order() -> None:
    """Threads begin terms and write under them at any time: no row has an older term than a row before it."""
    together = threading.Barrier(4)

    def compete() -> int:
        together.wait(10)
        refused = 0
        for _ in range(5):
            number = fencing.begin("maintenance", "")
            for _ in range(3):
                try:
                    with fencing.fenced("maintenance", number):
                        write("maintenance", number)
                except LockLost:
                    refused += 1
        return refused

    refused = sum(task.result() for task in [Task(compete) for _ in range(4)])
    accepted = written("maintenance")
    assert accepted == sorted(accepted)
    assert len(accepted) + refused == 60


class Router:
    """Write the terms to a separate database."""

    def db_for_write(self, model: type, **hints: Any) -> str | None:
        """Return that database."""
        return "terms" if model is LockTerm else None


def test_terms_are_in_the_database_of_the_router(settings: Any) -> None:
    """All functions use the database that LockTerm is written to."""
    settings.DATABASE_ROUTERS = [f"{__name__}.Router"]
    assert fencing.database() == "terms"

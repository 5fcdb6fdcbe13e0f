"""An option that does nothing without another one is refused where it is given alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from django_asyncq import Batch, cron, every, remote, task
from django_asyncq.core import compat, registry
from django_asyncq.core.needs import NEEDS_OF_RETRIES, NEEDS_OF_SCHEDULE, NEEDS_OF_TASK
from django_asyncq.core.schedules import Declaration
from django_asyncq.exceptions import InvalidOption
from django_asyncq.tasks import Task

from .. import unique_tasks
from .test_contract import giving_a_connection, plain, with_context


async def coroutine(a: int) -> None:
    """Do nothing."""


wrapped = giving_a_connection(coroutine)

ALONE: dict[str, Any] = {
    "queue_limit": 2,
    "expected_seconds": 3,
    "on_duplicate": "return",
    "unique_until": "start",
    "on_full": "wait",
    "max_waiting": 5,
    "ordered": True,
    "fair_weight": 2,
    "rate_per": "api",
    "burst": 5,
    "soft_timeout": 3,
    "payload": "bytes",
    "group": "g",
    "upgrade": lambda args, kwargs, from_version: (args, kwargs),
}


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declare nothing for other tests."""
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))


def test_every_option_of_the_tables_exists_and_has_its_default_there() -> None:
    """A task, or a schedule, that sets nothing lacks nothing."""
    assert set(ALONE) == set(NEEDS_OF_TASK)
    for kind, needs in ((Task, NEEDS_OF_TASK), (Task, NEEDS_OF_RETRIES), (Declaration, NEEDS_OF_SCHEDULE)):
        defaults = {field.name: field.default for field in fields(kind)}  # type: ignore[arg-type]
        assert {name: defaults[name] for name in needs} == {name: need.unset for name, need in needs.items()}


@pytest.mark.parametrize("option", ALONE)
def test_an_option_alone_is_refused_where_it_is_written(option: str) -> None:
    """By `@task`, by Django's own decorator where that takes options, and by `using`; with what else to write."""
    remedy = NEEDS_OF_TASK[option].remedy.partition("(")[0]
    refused = rf"tests\.core\.test_contract\.plain: {option}={re.escape(repr(ALONE[option]))} is not valid: {remedy}"
    if option != "group":
        with pytest.raises(InvalidOption, match=refused):
            task(**{option: ALONE[option]})(plain)
    declared = task(plain)
    if option not in ("payload", "upgrade", "rate_per", "burst", "fair_weight"):
        with pytest.raises(InvalidOption, match=refused):
            declared.using(**{option: ALONE[option]})
    if compat.HAS_DJANGO_TASKS and option != "group":
        from django.tasks import task as of_django

        with pytest.raises((InvalidOption, TypeError), match=f"{refused}|unexpected keyword"):
            of_django(**{option: ALONE[option]})(plain)


@pytest.mark.parametrize(
    "declare",
    [
        lambda: task(gate="g", queue_limit=2, expected_seconds=3)(plain).using(queue_limit=3, expected_seconds=4),
        lambda: task(plain).using(gate="g", queue_limit=2),
        lambda: task(unique=True, on_duplicate="return", unique_until=3)(plain).using(on_duplicate="follow"),
        lambda: task(plain).using(unique="{a}", on_duplicate="return"),
        lambda: task(soft_timeout=3, takes_context=True)(with_context),
        lambda: task(soft_timeout=3, isolated=True)(plain),
        lambda: task(soft_timeout=3)(coroutine),
        lambda: task(soft_timeout=3)(wrapped),
        lambda: task(payload="bytes", wire_name="a:b")(plain),
        lambda: task(payload="bytes", inbox="lines")(plain),
        lambda: task(batch=Batch(size=2))(plain).using(group="g"),
        lambda: remote("a:b", queue_name="default", group="g", gate="g", queue_limit=2),
        lambda: cron("* * * * *", missed="all", missed_cap=3),
        lambda: every(3, missed_cap=10),
    ],
)
def test_with_its_partner_it_is_taken(declare: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the declaration, or in `using`, whichever of the two has the other one."""
    monkeypatch.setattr("django_asyncq.core.names._declared", {})
    monkeypatch.setattr("django_asyncq.core.names._lists", {})
    declare()


def test_a_schedule_refuses_a_number_of_missed_occurrences_that_are_skipped() -> None:
    """As `cron` and `every` declare it."""
    with pytest.raises(InvalidOption, match='missed_cap=3 is not valid: it needs missed="all"'):
        every(3, missed_cap=3)


def test_a_call_that_need_not_be_unique_drops_what_belongs_to_it() -> None:
    """Its declaration says what becomes of duplicates; of this call there are none. What the call says is refused."""
    declared = task(unique=True, on_duplicate="return", unique_until="start")(plain)
    free = declared.using(unique=False)
    assert (free.unique, free.on_duplicate, free.unique_until) == (False, "reject", "end")
    assert unique_tasks.report.using(unique=False).unique is False
    with pytest.raises(InvalidOption, match="on_duplicate='follow' is not valid: it needs unique="):
        declared.using(unique=False, on_duplicate="follow")

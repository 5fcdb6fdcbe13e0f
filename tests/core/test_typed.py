"""Typed arguments become one form in the same JSON, and are read back as themselves."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.contrib.auth.models import Group
from django.utils.functional import SimpleLazyObject
from hypothesis import given
from hypothesis import strategies as some

from django_asyncq.core import payload, typed
from django_asyncq.core.calls import canonical_arguments
from django_asyncq.core.typed import KEY, ModelReference
from django_asyncq.exceptions import InvalidArguments, InvalidOption
from django_asyncq.tasks import task

from .. import typed_tasks

BERLIN = ZoneInfo("Europe/Berlin")
OFFSETS = some.integers(-86_000, 86_000).map(lambda seconds: timezone(timedelta(seconds=seconds)))
SCALARS = (
    some.datetimes(timezones=some.none() | OFFSETS).map(lambda value: value.replace(fold=0))
    | some.dates()
    | some.times(timezones=some.none() | OFFSETS).map(lambda value: value.replace(fold=0))
    | some.timedeltas()
    | some.decimals(allow_nan=False)
    | some.uuids()
)
ANY = some.recursive(
    some.none() | some.booleans() | some.integers(-(2**60), 2**60) | SCALARS,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text("ab$q", max_size=3), inner, max_size=3),
    max_leaves=8,
)


def carried(*args: Any, **kwargs: Any) -> payload.Payload:
    """Return arguments as the row of a typed task has them, after they have been JSON."""
    found = payload.of_call(args, kwargs, carry=typed.carried)
    return payload.Payload(*json.loads(payload.json_bytes(list(found))))


@given(ANY, ANY)
def test_every_value_comes_back_as_itself(first: Any, second: Any) -> None:
    """Of the same type and equal, wherever it stands."""
    back = typed.readable_call(*carried(first, named=second))
    assert repr(back) == repr(payload.Payload([first], {"named": second}))


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (datetime(2026, 11, 30, 10, 5, 0, 7, tzinfo=UTC), ["datetime", "2026-11-30T10:05:00.000007+00:00"]),
        (datetime(2026, 7, 1, 12, tzinfo=BERLIN), ["datetime", "2026-07-01T12:00:00+02:00"]),
        (date(2026, 11, 30), ["date", "2026-11-30"]),
        (time(10, 5), ["time", "10:05:00"]),
        (timedelta(days=-1, microseconds=1), ["timedelta", "-P0DT23H59M59.999999S"]),
        (Decimal("12.50"), ["decimal", "12.50"]),
        (uuid.UUID(int=7), ["uuid", "00000000-0000-0000-0000-000000000007"]),
        (ModelReference("auth.group", 7), ["instance", "auth.group", 7]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_form_is_the_documented_one(value: Any, form: list[Any]) -> None:
    """Other programs read it, and rows of an earlier release have it."""
    assert carried([value]).args == [[{KEY: form}]]
    # A form can be enqueued as it is: that of a row, or one that a person has typed.
    assert carried({KEY: form}).args == [{KEY: form}]


@pytest.mark.django_db
def test_an_instance_is_its_label_and_its_key() -> None:
    """Also one within a lazy object, as `request.user` is; and what a result shows of it."""
    group = Group.objects.create(name="a")
    form = {KEY: ["instance", "auth.group", group.pk]}
    assert carried(group, [SimpleLazyObject(lambda: group)], ModelReference("auth.group", group.pk)).args == [
        form,
        [form],
        form,
    ]
    key = uuid.uuid4()
    within = carried(ModelReference("auth.group", key), ModelReference("auth.group", ("a", 1)))
    assert within.args[0] == {KEY: ["instance", "auth.group", {KEY: ["uuid", str(key)]}]}
    assert typed.readable(within.args) == [ModelReference("auth.group", key), ModelReference("auth.group", ("a", 1))]
    assert typed.names_instance([[form]], {})
    assert not typed.names_instance([[1]], {"a": {KEY: ["date", "2026-11-30"]}})


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Group(name="new"), "args[0] is a auth.Group without a row: save it first"),
        (Group(pk=7, name="new"), "without a row"),
        (time(10, tzinfo=BERLIN), "a time in Europe/Berlin, whose offset depends on the date: pass a datetime"),
        (
            datetime(2026, 1, 1, tzinfo=timezone(timedelta(microseconds=1))),
            "a fraction of a second: pass it in UTC",
        ),
        (datetime(2026, 10, 25, 2, 30, fold=1), "has fold=1 and no time zone, so its text is not it: give it one"),
        ({KEY: ["date", "tomorrow"]}, "args[0] has the reserved key '$asyncq' and is no value of this package"),
        ({KEY: ["date", "2026-11-30"], "more": 1}, "has the reserved key"),
        ({KEY: ["colour", "red"]}, "with one of the kinds datetime, date, time, timedelta, decimal, uuid, instance"),
        ({KEY: ["timedelta", "soon"]}, "has the reserved key"),
        ({KEY: ["decimal", "many"]}, "has the reserved key"),
        ({KEY: ["uuid", 7]}, "has the reserved key"),
        ({KEY: ["instance", 7, 7]}, "has the reserved key"),
        ({KEY: ["instance", "auth.group"]}, "has the reserved key"),
        ({KEY: 7}, "has the reserved key"),
        ({KEY: ["instance", "shop.order", 7]}, "names the model 'shop.order', which this project does not have"),
        ([{1, 2}], "args[0][0] is a builtins.set, which JSON cannot carry: pass a list of it"),
    ],
    ids=str,
)
def test_refuses_what_would_not_come_back(value: Any, says: str) -> None:
    """With the place and the remedy."""
    with pytest.raises(InvalidArguments) as caught:
        carried(value)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "value", [date(2026, 11, 30), time(1), timedelta(1), Decimal(1), uuid.UUID(int=1), Group(pk=1)], ids=repr
)
def test_a_task_without_typed_arguments_refuses_them_and_says_so(value: Any) -> None:
    """The remedy names the option."""
    with pytest.raises(InvalidArguments, match="or declare the task with typed_arguments=True"):
        typed_tasks.untyped.enqueue(value)


def test_a_dict_of_another_program_that_only_looks_like_a_form_is_itself() -> None:
    """The value of a task that went before may be anything."""
    odd: list[Any] = [{KEY: ["colour", "red"]}, {KEY: None}, {KEY: ["date", "2026-11-30"], "more": [{KEY: 1}]}]
    assert typed.readable(odd) == odd


def test_the_setting_decides_for_tasks_that_do_not_say(settings: Any) -> None:
    """And a task's own option over it."""
    off = SimpleNamespace(typed_arguments=False)
    assert not typed.is_typed(typed_tasks.untyped)
    settings.ASYNCQ = {**settings.ASYNCQ, "TYPED_ARGUMENTS": True}
    assert typed.is_typed(typed_tasks.untyped)
    assert not typed.is_typed(off)
    assert typed.carry_of(off) is None


def test_the_option_is_true_or_false() -> None:
    """Any other value is refused where the task is declared."""
    with pytest.raises(InvalidOption, match="typed_arguments='typed' is not valid: give True or False"):
        task(typed_arguments="typed")(typed_tasks.described)  # type: ignore[call-overload]


def _until(day: date = date(2026, 1, 1), *, limit: Decimal = Decimal(5)) -> None:
    pass


def test_a_typed_default_is_no_part_of_a_key() -> None:
    """So f() and f(default) are the same call."""
    until = SimpleNamespace(
        func=_until, takes_context=False, typed_arguments=True, module_path="a.b", batch=None, unique=True
    )
    same = [carried(), carried(date(2026, 1, 1)), carried(day=date(2026, 1, 1), limit=Decimal(5))]
    assert len({canonical_arguments(until, *call) for call in same}) == 1
    assert canonical_arguments(until, *carried(date(2026, 1, 2))) != canonical_arguments(until, *carried())

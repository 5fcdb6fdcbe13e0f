"""Each value of a generated table means the same after the database: it is carried exactly, or refused by `enqueue`.

The table is every odd value in every container, by every way that leads to a row and back: one task, several tasks, a
return value, a schedule. The database is the one of the suite.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import json
import math
import sys
import types
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connections
from django.http import QueryDict
from django.utils import timezone
from django.utils.datastructures import CaseInsensitiveMapping, MultiValueDict
from django.utils.functional import SimpleLazyObject
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy
from hypothesis import given
from hypothesis import strategies as st

from django_asyncq import lifecycle
from django_asyncq.broker import Broker, keys
from django_asyncq.broker.message import decode_message
from django_asyncq.core import payload
from django_asyncq.core.fields import StoredJSONEncoder
from django_asyncq.exceptions import InvalidArguments, InvalidResult
from django_asyncq.models import Schedule, TaskRecord
from django_asyncq.storage.batches import read_rows

from .. import tasks
from ..runs import claimed

pytestmark = pytest.mark.django_db(transaction=True)


class Colour(enum.StrEnum):
    """A text with a name."""

    RED = "red"


class Size(enum.IntEnum):
    """A number with a name."""

    LARGE = 3


class Loud(str):
    """A text that compares by identity, so that a dict may hold it twice."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Twofold(int):
    """A number that converts to another."""

    def __int__(self) -> int:
        return 2 * int.__int__(self)


class Shouting(dict[str, str]):
    """A dict that reads otherwise than what it holds."""

    def __getitem__(self, key: str) -> str:
        return super().__getitem__(key).upper()


Pair = collections.namedtuple("Pair", "x y")

FLOATS = [
    *(
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.1,
        1e15,
        1e16,
        -1e16,
        1.5e16,
        1e17,
        1.2345678901234567e16,
        2.0**53,
        2.0**63,
        2.0**64,
        1e21,
    ),
    *(1e22, 1e23, -1e23, 1e100, 1e300, -1e300, 1.5e300, 1e-7, 1e-16, 1e-300, 5e-324, -5e-324),
    *(sys.float_info.max, -sys.float_info.max, sys.float_info.min, sys.float_info.epsilon, math.pi * 1e200),
]
INTEGERS = [0, 1, -1, 2**31, 2**53, 2**53 + 1, -(2**53) - 1, 10**16, 2**63 - 1, 2**63, -(2**63), 2**64 - 1]
TEXTS = [
    *("", " ", "é", "\N{SNOWMAN}", "\U0001f600", '"', "\\", "\\u0000", "\x01\x1f\x7f", "\u2028", "a" * 5000, "1e+16"),
    *('"-0.0"', '\\"1e+16', "-0.0", "[-0.0, 1e+16]", "e+", "\ufffe", "%s", "a\r\nb", "null", "a\u0301"),
]
EXACT: list[Any] = [None, True, False, *FLOATS, *INTEGERS, *TEXTS, [], {}, [[]], {"": {}}, {" ": 1, "": 2, "é": -0.0}]
# The value, and the plain value that it becomes: a subclass becomes its plain type, as the guide says.
CONVERTED: list[tuple[Any, Any]] = [
    ((1, 1e16), [1, 1e16]),
    (range(2), [0, 1]),
    (Pair(1, -0.0), [1, -0.0]),
    (collections.deque([1]), [1]),
    (b"\xc3\xa9", "é"),
    (Colour.RED, "red"),
    (Size.LARGE, 3),
    (Twofold(4), 4),
    (mark_safe("<b>"), "<b>"),
    (collections.OrderedDict(b=1, a=2), {"a": 2, "b": 1}),
    (collections.defaultdict(list, a=[1]), {"a": [1]}),
    (collections.Counter("aab"), {"a": 2, "b": 1}),
    (types.MappingProxyType({"a": 1e16}), {"a": 1e16}),
    (collections.ChainMap({"a": 1}, {"a": 2, "b": 3}), {"a": 1, "b": 3}),
    (CaseInsensitiveMapping({"Accept": "x"}), {"Accept": "x"}),
    ({Colour.RED: 1}, {"red": 1}),
]
REFUSED: list[Any] = [
    *(math.nan, math.inf, -math.inf, 2**64, -(2**63) - 1, 10**5000, "\x00", "a\x00b", "\ud800", "\udfff", b"\xff", 1j),
    *(
        {1: 1},
        {True: 1},
        {None: 1},
        {1.5: 1},
        {"a\x00": 1},
        {"\ud800": 1},
        {("a",): 1},
        {b"a": 1},
        {gettext_lazy("a"): 1},
    ),
    *(
        {Loud("a"): 1, Loud("a"): 2},
        QueryDict("a=1&a=2"),
        QueryDict("a=1"),
        QueryDict(""),
        MultiValueDict({"a": [1, 2]}),
    ),
    *(Shouting(a="b"), gettext_lazy("a"), SimpleLazyObject(lambda: "a"), SimpleLazyObject(lambda: 1), object(), Colour),
    *(SimpleLazyObject(dict), set(), frozenset([1]), {}.keys(), iter([1]), bytearray(b"a"), memoryview(b"a")),
    *(collections.UserString("a"), decimal.Decimal("1.1"), datetime.date(2026, 1, 1), uuid.UUID(int=1), len, ...),
    *(datetime.timedelta(1), enum.Enum("Plain", "A").A, types.SimpleNamespace(a=1), json.loads("[" * 70 + "]" * 70)),
]
CONTAINERS: list[Callable[[Any], Any]] = [
    lambda value: value,
    lambda value: {"deep": [{"b": [1, value, "x"], "bb": value}]},
]
CARRIED = [(wrap(value), wrap(plain)) for value, plain in [(v, v) for v in EXACT] + CONVERTED for wrap in CONTAINERS]


def is_same(first: Any, second: Any) -> bool:
    """Whether two plain values are equal, in their types and in the sign of a zero too. The order of keys is free."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(is_same(item, second[key]) for key, item in first.items())
    if isinstance(first, list):
        return len(first) == len(second) and all(map(is_same, first, second))
    return bool(first == second) and (
        not isinstance(first, float) or math.copysign(1, first) == math.copysign(1, second)
    )


def readings(id: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the arguments of a task as each reader finds them: the worker, Django's ORM, a result, a Go program."""
    (by_worker,) = read_rows([str(id)], "default")
    yield by_worker.args, by_worker.kwargs
    by_orm = TaskRecord.objects.get(id=id)
    yield by_orm.args, by_orm.kwargs
    result = tasks.add.get_backend().get_result(str(id))
    yield result.args, result.kwargs
    encoded = Broker().client.hget(keys.keys_of("default").task(str(id)), "msg")
    sent = json.loads(decode_message(encoded).payload)
    yield sent["args"], sent["kwargs"]


def test_a_task_gets_the_values_it_was_enqueued_with() -> None:
    """A single task: each value of the table, in the row and in the message, to the type and the sign of a zero."""
    for value, plain in CARRIED:
        result = tasks.takes_anything.enqueue(value, key=value)
        for args, kwargs in [(result.args, result.kwargs), *readings(result.id)]:
            assert is_same(args, [plain]), (value, args)
            assert is_same(kwargs, {"key": plain}), (value, kwargs)


def test_tasks_of_one_statement_get_the_values_they_were_enqueued_with() -> None:
    """PostgreSQL gets such rows as one JSON text, another way to the column."""
    results = tasks.takes_anything.enqueue_many(
        [tasks.takes_anything.arguments(value, key=value) for value, _ in CARRIED]
    )
    assert len(results) == len(CARRIED)
    for result, (value, plain) in zip(results, CARRIED, strict=True):
        for args, kwargs in readings(result.id):
            assert is_same(args, [plain]), (value, args)
            assert is_same(kwargs, {"key": plain}), (value, kwargs)


def test_a_result_is_what_the_task_returned() -> None:
    """All return values of the table, written by the statement of workers."""
    runs = [claimed() for _ in CARRIED]
    for run, (value, _) in zip(runs, CARRIED, strict=True):
        lifecycle.succeed(run, payload.storable_result(value), timezone.now())
    assert lifecycle.record_runs(runs) == []
    for run, (value, plain) in zip(runs, CARRIED, strict=True):
        found = TaskRecord.objects.get(id=run.record.id).return_value
        assert is_same(found, plain), (value, found)


def test_a_result_recorded_in_a_transaction_is_what_the_task_returned() -> None:
    """As tasks with `atomic=True` record it: a row alone."""
    for value, plain in CARRIED:
        run = claimed()
        assert lifecycle.complete(run, payload.storable_result(value), timezone.now())
        assert is_same(TaskRecord.objects.get(id=run.record.id).return_value, plain), value


def test_a_schedule_keeps_its_values() -> None:
    """Those of the row, from which each occurrence copies them."""
    for value, plain in CARRIED:
        given = payload.of_call([value], {"key": value})
        row = Schedule.objects.create(name="s", task="tests.tasks.add", interval_seconds=60, **given._asdict())
        found = Schedule.objects.get(id=row.id)
        assert is_same([found.args, found.kwargs], [[plain], {"key": plain}]), value
        row.delete()


def ways_to_enqueue(value: Any) -> Iterator[Callable[[], Any]]:
    """Yield calls that enqueue a value deep in their arguments."""
    yield lambda: tasks.add.enqueue({"a": [value]})
    yield lambda: tasks.add.enqueue_many([(1,), ({"a": [value]},)])
    yield lambda: tasks.takes_anything.enqueue(key={"a": [value]})
    yield lambda: tasks.takes_anything.enqueue_many([{"key": {"a": [value]}}])


def test_what_no_database_carries_is_refused_with_its_path() -> None:
    """By each way to enqueue, before anything is written; as a return value it is refused, or becomes a note."""
    for number, value in enumerate(REFUSED):
        for call in ways_to_enqueue(value):
            with pytest.raises(InvalidArguments) as caught:
                call()
            assert isinstance(caught.value, TypeError)
            assert isinstance(caught.value, ValueError)
            path = caught.value.path
            assert path.startswith(("args[0]['a'][0]", "kwargs['key']['a'][0]")), number
            assert str(caught.value).startswith(path), number
            assert ": " in str(caught.value), (number, "no remedy")
        if caught.value.is_json:
            assert payload.storable_result([value]).keys() == {"result_not_stored"}, number
        else:
            with pytest.raises(InvalidResult, match="the function had finished"):
                payload.storable_result([value])
    assert not TaskRecord.objects.exists()


@pytest.mark.parametrize("path", ["args[0]", "kwargs['a']"])
def test_deep_values_are_carried_or_refused_with_their_path(path: str) -> None:
    """Up to MAX_DEPTH; MariaDB stores 31 levels, of which the list of arguments is one."""
    most = 30 if getattr(connections["default"], "mysql_is_mariadb", False) else 64
    for depth in (30, 31, 64, 65):
        value = json.loads("[" * depth + "]" * depth)
        call = (lambda: tasks.add.enqueue(value)) if path == "args[0]" else (lambda: tasks.add.enqueue(a=value))  # noqa: B023
        if depth <= most:
            assert TaskRecord.objects.filter(id=call().id).exists()
            continue
        with pytest.raises(InvalidArguments, match="nested deeper than") as caught:
            call()
        assert caught.value.path == path + "[0]" * (64 if depth > 64 else most), depth
    assert TaskRecord.objects.count() == (1 if most == 30 else 3)


numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**63), 2**64 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts | st.sampled_from(TEXTS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)


@given(st.lists(values, max_size=10))
def test_any_plain_value_comes_back_from_the_column(args: list[Any]) -> None:
    """Random values, in the column alone."""
    row = TaskRecord.objects.create(name="a", args=args)
    assert is_same(TaskRecord.objects.get(id=row.id).args, args)
    row.delete()


@given(values)
def test_the_stored_text_means_what_json_means(value: Any) -> None:
    """Only the spelling of some numbers differs, and never what a text says."""
    text = StoredJSONEncoder().encode(value)
    assert is_same(json.loads(text), value)
    spelled: list[str] = []
    json.loads(text, parse_float=lambda digits: spelled.append(digits))
    assert not [digits for digits in spelled if "e+" in digits or digits == "-0.0"]


def test_each_column_for_values_has_the_encoder() -> None:
    """A new JSON column would otherwise change floats on PostgreSQL without an error."""
    from django.apps import apps
    from django.db.models import JSONField

    found = [field for model in apps.get_app_config("django_asyncq").get_models() for field in model._meta.get_fields()]
    documents = [field for field in found if isinstance(field, JSONField)]
    assert {field.name for field in documents if field.encoder is not StoredJSONEncoder} == {
        "errors",
        "worker_ids",
        "positions",
        "matching",
    }
    assert len(documents) > 6
    assert connections["default"].vendor

"""Which values JSON can carry exactly, and which are refused."""

from __future__ import annotations

import datetime
import decimal
import enum
import io
import json
import uuid
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.core.files.base import ContentFile
from django.db.models import FileField
from django.db.models.fields.files import FieldFile
from django.utils.translation import gettext_lazy
from hypothesis import given
from hypothesis import strategies as st

from django_asyncq.core import payload
from django_asyncq.exceptions import InvalidArguments

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.decimals() | st.uuids(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.sets(st.integers())
    ),
    max_leaves=10,
)


class Colour(enum.StrEnum):
    """A string that is also an enum member."""

    RED = "red"


@given(json_values)
def test_plain_values_come_back_unchanged(value: Any) -> None:
    """Every accepted value survives encoding exactly."""
    found = payload.of_call([value], {"k": value})
    assert json.loads(payload.json_bytes(found._asdict())) == {"args": [value], "kwargs": {"k": value}}


@given(anything)
def test_every_value_is_carried_or_refused(value: Any) -> None:
    """No other error than InvalidArguments, and accepted values are stable."""
    try:
        found = payload.of_call([value], {})
    except InvalidArguments as error:
        assert error.path
        return
    assert json.loads(payload.json_bytes(found.args)) == found.args


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        ({1, 2}, "builtins.set"),
        (datetime.datetime(2026, 1, 1), "datetime.datetime"),
        (decimal.Decimal("1.1"), "decimal.Decimal"),
        (uuid.UUID(int=1), "uuid.UUID"),
        ("\ud800", "surrogate"),
        ({"\ud800": 1}, "surrogate"),
        ("a\x00b", "NUL"),
        ({1: "x"}, "another key"),
        (2**64, "64 bits"),
        pytest.param(10**5000, "64 bits", id="5001 digits"),
        (b"\xff", "UTF-8"),
        (object(), "builtins.object"),
    ],
)
def test_refuses_values_that_would_come_back_changed(value: Any, says: str) -> None:
    """The error names the path and the problem."""
    with pytest.raises(InvalidArguments, match=says) as caught:
        payload.of_call([], {"deep": [value]})
    assert caught.value.path.startswith("kwargs['deep'][0]")


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (Group(pk=7), "pass its `pk`, and load the object in the task"),
        (Group.objects.none(), "pass a list of the primary keys"),
        (decimal.Decimal("1.1"), "pass `str()` of it, and make it a Decimal again in the task"),
        (uuid.UUID(int=1), "pass `str()` of it"),
        (gettext_lazy("Yes"), "pass `str()` of it"),
        (datetime.datetime(2026, 1, 1), "pass its `isoformat()`, and read it with `fromisoformat` in the task"),
        (datetime.date(2026, 1, 1), "pass its `isoformat()`"),
        (datetime.time(1), "pass its `isoformat()`"),
        (datetime.timedelta(1), "pass its `total_seconds()`"),
        (
            ContentFile(b"text", "a.txt"),
            "store it, and pass the `name` that it has in its storage",
        ),
        (FieldFile(None, FileField(), "a.txt"), "pass the `name` that it has in its storage"),
        (io.BytesIO(), "pass the `name` that it has in its storage"),
        ({1}, "pass a list of it"),
        (object(), "pass a key, a string or a number instead"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_refusal_says_what_to_pass_instead(value: Any, remedy: str) -> None:
    """For what people pass most, by its own name."""
    with pytest.raises(InvalidArguments) as caught:
        payload.of_call([value], {})
    assert remedy in str(caught.value)


def test_refuses_too_deep_and_too_large(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Depth and size are limited, and checked before anything else."""
    monkeypatch.setattr(payload, "MAX_DEPTH", 3)
    settings.ASYNCQ = {**settings.ASYNCQ, "MAX_ARGUMENTS_BYTES": 100}
    payload.of_call([[[[1]]]], {})
    with pytest.raises(InvalidArguments, match="nested deeper than 3 levels"):
        payload.of_call([[[[[1]]]]], {})
    with pytest.raises(InvalidArguments, match="MAX_ARGUMENTS_BYTES"):
        payload.of_call(["x" * 100], {})
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidArguments, match="nested deeper than 3 levels"):
        payload.of_call(endless, {})


@given(st.lists(json_values), st.dictionaries(texts, json_values))
def test_a_payload_that_is_not_measured_is_small_enough(args: list[Any], kwargs: dict[str, Any]) -> None:
    """A call is accepted or refused as if every call were encoded."""
    found = payload.of_call(args, kwargs)
    size = len(payload.json_bytes(found._asdict()))
    assert not payload.certainly_fits(found, size - 1)


@pytest.mark.parametrize("value", [-(2**63), 2**64 - 1, -1.7976931348623157e308, True, None, "\x1f" * 50, '"' * 50])
def test_the_longest_value_of_each_kind_is_not_underestimated(value: Any) -> None:
    """It never fits certainly in one byte less than it takes."""
    found = payload.of_call([value], {"\x01": value})
    size = len(payload.json_bytes(found._asdict()))
    assert payload.certainly_fits(found, 10 * size)
    assert not payload.certainly_fits(found, size - 1)


def test_copies_sequences_mappings_and_texts() -> None:
    """As in Django's normalize_json, tuples and ranges become lists, bytes text. Later changes have no effect."""
    inner = [1]
    found = payload.of_call([(1, 2), range(2), b"ok", Colour.RED, inner], {})
    inner.append(2)
    assert found.args == [[1, 2], [0, 1], "ok", "red", [1]]
    assert type(found.args[3]) is str


def test_text_for_storage_is_cut_in_the_middle_and_cleaned() -> None:
    """So errors with any content can be stored."""
    assert payload.storable_text("a\x00\ud800", 10) == "a\N{REPLACEMENT CHARACTER}?"
    cut = payload.storable_text("a" * 100 + "b" * 100, 20)
    assert cut.startswith("a" * 10)
    assert cut.endswith("b" * 10)
    assert "180 characters cut" in cut

"""The walls and clocks of other queues: their fields are ours where they can be said, and changes of the clocks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from django_asyncq.core.timing import Cron
from django_asyncq.moving.clocks import (
    FIELDS,
    Crontab,
    changes,
    each_time,
    each_wall_once,
    from_croniter,
    values_of,
    walls_of,
    zone_called,
)
from django_asyncq.moving.old import MINUTE, SECOND, CannotImport, every, once, rounded_up

BEGIN = datetime(2026, 1, 1)
BERLIN = zone_called("Europe/Berlin")


def some(least: int, most: int, **options: Any) -> st.SearchStrategy[frozenset[int]]:
    """Sets of values of a field, every one of them or some of them."""
    return st.just(frozenset(range(least, most + 1))) | st.frozensets(st.integers(least, most), min_size=1, **options)


CRONTABS = st.builds(
    Crontab,
    some(0, 59, max_size=8),
    some(0, 23, max_size=5),
    some(1, 31, max_size=9),
    some(1, 12),
    some(0, 6),
    st.frozensets(st.sampled_from([field.name for field in FIELDS])),
)


@settings(max_examples=300, deadline=None)
@given(CRONTABS)
def test_an_expression_says_what_the_fields_say(crontab: Crontab) -> None:
    """Or there is none, which is said; never another one."""
    try:
        expression = crontab.expression()
    except CannotImport as error:
        text = str(error)
        both = len(crontab.days) < 31 and len(crontab.weekdays) < 7
        assert ("only on days that match" in text and both) or "never fires" in text or "at most 200" in text
        return
    assert list(islice(walls_of(expression)(BEGIN), 40)) == list(islice(crontab.walls(BEGIN), 40))


@pytest.mark.parametrize(
    ("field", "text", "values"),
    [
        (0, "*/20", {0, 20, 40}),
        (0, "5,10-12", {5, 10, 11, 12}),
        (0, "58-1", {58, 59, 0, 1}),
        (0, "50-10/10", {50, 0, 10}),
        (2, "*/10", {1, 11, 21, 31}),
        (3, "Jan-mar,december", {1, 2, 3, 12}),
        (4, "sat-mon", {6, 0, 1}),
        (4, 3, {3}),
    ],
)
def test_values_of_a_field(field: int, text: object, values: set[int]) -> None:
    """As Celery reads them."""
    assert values_of(FIELDS[field], text) == values


@pytest.mark.parametrize(
    "text", ["", "60", "-1", "1-", "*/0", "5/2", "a", "1,,2", "*/x", "1-2-3", "²", "9" * 5_000, "*/00"]
)
def test_what_is_no_value_is_refused(text: str) -> None:
    """With the field and the text."""
    with pytest.raises(CannotImport, match=r"its minute .* is not valid"):
        values_of(FIELDS[0], text)


@settings(max_examples=500, deadline=None)
@given(st.text(alphabet="0123456789*/,-jansumo x", max_size=12), st.sampled_from(FIELDS))
def test_any_text_of_a_field_is_read_or_refused(text: str, field: Any) -> None:
    """Values are those of the field."""
    try:
        found = values_of(field, text)
    except CannotImport:
        return
    assert found <= frozenset(range(field.least, field.most + 1))


def test_days_of_croniter_are_either_unless_one_is_a_bare_star() -> None:
    """A step from a star would leave the decision to the other field here."""
    assert from_croniter("0 0 */2 * 5") == "0 0 1-31/2 * 5"
    assert from_croniter("0 0 13 * */2") == "0 0 13 * 0-6/2"
    assert from_croniter("0 0 */2 * ?") == "0 0 */2 * *"
    with pytest.raises(CannotImport, match="unknown name"):
        from_croniter("@reboot")


# Rule → what it fires of "every half hour" and of 02:30 in the two nights.
SPRING, AUTUMN = datetime(2027, 3, 28, tzinfo=UTC), datetime(2027, 10, 31, tzinfo=UTC)


def fired(occurrences: Any, since: datetime) -> list[str]:
    """Return what is fired from half past midnight to two o'clock, in UTC."""
    found = []
    for moment in occurrences(since + timedelta(minutes=15)):
        if moment > since + timedelta(hours=2):
            break
        found.append(f"{moment:%H:%M}")
    return found


def test_nights_in_which_the_clocks_change() -> None:
    """Each rule does what its queue does; `test_peers.py` asks the queues."""
    half_past, often = walls_of("30 2 * * *"), walls_of("*/30 * * * *")
    once_each, at_change = each_wall_once(half_past, BERLIN), each_time(half_past, BERLIN, at_change=True)
    shown = each_time(half_past, BERLIN, at_change=False)
    assert [fired(rule, SPRING) for rule in (once_each, at_change, shown)] == [["01:30"], ["01:00"], []]
    both = ["00:30", "01:30"]
    assert [fired(rule, AUTUMN) for rule in (once_each, at_change, shown)] == [["00:30"], both, both]
    assert fired(each_wall_once(often, BERLIN), AUTUMN) == ["00:30", "02:00"]
    assert fired(each_time(often, BERLIN, at_change=True), AUTUMN) == ["00:30", "01:00", "01:30", "02:00"]
    assert fired(each_wall_once(often, BERLIN), SPRING) == ["00:30", "01:00", "01:30", "02:00"]


def test_changes_of_the_clocks() -> None:
    """To the second, also where they move by half an hour; none in UTC."""
    begin = datetime(2026, 11, 21, 12, 0, 0, 7, tzinfo=UTC)
    berlin = [datetime(2027, 3, 28, 1, tzinfo=UTC), datetime(2027, 10, 31, 1, tzinfo=UTC)]
    assert list(changes(BERLIN, begin, 400)) == berlin
    lord_howe = datetime(2027, 4, 3, 15, tzinfo=UTC)
    assert next(changes(zone_called("Australia/Lord_Howe"), begin, 400)) == lord_howe
    assert list(changes(UTC, begin, 400)) == []


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 10**7), st.datetimes(datetime(2020, 1, 1), datetime(2030, 1, 1), timezones=st.just(UTC)))
def test_an_interval_is_later_than_the_moment_and_in_phase(seconds: int, last: datetime) -> None:
    """And never an interval later than it must be."""
    after = datetime(2026, 11, 21, 12, tzinfo=UTC)
    first, second = islice(every(seconds, last).old(after), 2)
    assert after < first and second - first == timedelta(seconds=seconds)
    assert first - after < timedelta(seconds=seconds + 1) or first - last <= timedelta(seconds=seconds + 1)
    assert (first - rounded_up(last, SECOND)) % timedelta(seconds=seconds) == timedelta()


def test_once_and_rounding() -> None:
    """A moment is rounded up, and fires if it is later itself."""
    moment = datetime(2026, 11, 21, 12, 0, 0, 5, tzinfo=UTC)
    assert list(once(moment).old(moment)) == []
    assert list(once(moment).old(moment - timedelta.resolution)) == [moment.replace(second=1, microsecond=0)]
    assert rounded_up(moment, MINUTE) == moment.replace(minute=1, microsecond=0)
    assert rounded_up(moment.replace(microsecond=0), MINUTE) == moment.replace(microsecond=0)
    for seconds in (0.5, 0, -3, 1.5):
        with pytest.raises(CannotImport, match="a whole number of seconds"):
            every(seconds, moment)


def test_our_own_rule_is_that_of_huey_where_a_field_is_a_star() -> None:
    """So its hourly tasks in a zone are the same."""
    ours = Cron("0 * * * *", "Europe/Berlin")
    theirs = each_time(walls_of("0 * * * *"), BERLIN, at_change=False)
    for begin in (SPRING, AUTUMN):
        assert list(islice(theirs(begin), 6)) == list(islice(ours.occurrences(begin), 6))

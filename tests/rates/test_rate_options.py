"""What a task may declare of its rate, and how its name is found."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_asyncq import Batch, task
from django_asyncq.core import registry
from django_asyncq.core.calls import rate_name
from django_asyncq.core.rates import StartRate, next_start_us, parsed, rate_of
from django_asyncq.exceptions import InvalidOption

from .. import rate_tasks
from ..core.test_contract import plain


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declare nothing for other tests."""
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))


@pytest.mark.parametrize(
    ("rate", "seconds"),
    [("600/m", (600, 60)), ("1/s", (1, 1)), ("10/30s", (10, 30)), ("5/h", (5, 3600)), ("2/7d", (2, 604_800))],
)
def test_a_rate_says_how_many_in_which_time(rate: str, seconds: tuple[int, int]) -> None:
    """A number, a slash, perhaps a number again, and a unit."""
    assert parsed(rate) == seconds
    assert rate_of(task(rate=rate, burst=3)(plain)) == StartRate(-(-seconds[1] * 1_000_000 // seconds[0]), 3)


@pytest.mark.parametrize(
    "rate", ["", "10", "10/", "/s", "0/s", "10/0s", "10/S", "10 /s", "-1/s", "1.5/s", "10/w", "10/400d", "١/s", 10]
)
def test_a_rate_that_means_nothing_is_refused(rate: Any) -> None:
    """With what to write."""
    with pytest.raises(InvalidOption, match="is not valid: give '10/s', '600/m'"):
        task(rate=rate)(plain)


@pytest.mark.parametrize("burst", [0, -1, 1.5, True, None, 1_000_001])
def test_a_burst_that_is_no_number_of_starts_is_refused(burst: Any) -> None:
    """It is how many may start at once."""
    with pytest.raises(InvalidOption, match=r"burst=.* is not valid: give a whole number from 1"):
        task(rate="10/s", burst=burst)(plain)


def test_a_burst_that_no_one_could_wait_for_is_refused() -> None:
    """Redis counts in microseconds, of which Lua knows only so many exactly."""
    with pytest.raises(InvalidOption, match="more than ten years"):
        task(rate="1/d", burst=4_000)(plain)


def test_the_name_is_that_of_the_task_or_as_declared() -> None:
    """A constant, a format over the arguments and their defaults, or a callable."""
    name = f"{plain.__module__}.plain"
    assert rate_name(task(plain), [1], {}) == ""
    assert rate_name(task(rate="1/s")(plain), [1], {}) == name
    assert rate_name(task(rate="1/s", rate_per="mail")(plain), [1], {}) == "mail"
    assert rate_name(rate_tasks.call_api, ["maps"], {}) == "api-maps"
    assert rate_name(rate_tasks.call_api, [], {"api": "mail"}) == "api-mail"
    assert rate_name(task(rate="1/s", rate_per=lambda a, **more: f"x-{a}")(plain), [1], {}) == "x-1"


def test_a_name_that_is_none_is_refused_when_the_call_is_enqueued(db: None) -> None:
    """The caller learns of it; nothing is written."""
    with pytest.raises(InvalidOption, match="rate name 'api-a b' is not valid"):
        rate_tasks.call_api.enqueue("a b")
    assert not rate_tasks.rows().exists()


def test_a_rate_belongs_to_the_declaration() -> None:
    """All calls of a name count together, so none has a rate of its own."""
    with pytest.raises(TypeError, match=r"rate.*write @task\(rate="):
        task(plain).using(rate="1/s")  # type: ignore[call-arg]


def test_a_batch_has_one_rate_for_all_its_calls() -> None:
    """It is one start, and its calls may have other arguments."""
    with pytest.raises(InvalidOption, match="a batch is one start"):
        task(batch=Batch(size=2), rate="1/s", rate_per="{a}")(plain)
    assert task(batch=Batch(size=2), rate="1/s", rate_per="mail")(plain).rate == "1/s"


def naive_starts(rate: StartRate, asked: list[int]) -> list[int]:
    """Return which of these times start, by counting: no window may have more than its share and the burst."""
    starts: list[int] = []
    for now in asked:
        first = [*starts, now]
        # For each earlier start: from there to now at most (now - start) / interval + burst.
        if all(
            (len(first) - place) * rate.interval_us <= (now - start) + rate.burst * rate.interval_us
            for place, start in enumerate(first)
        ):
            starts.append(now)
    return starts


@given(
    st.integers(1, 50),
    st.integers(1, 6),
    st.lists(st.integers(0, 60), max_size=60),
)
def test_the_count_keeps_every_window_and_wastes_nothing(interval: int, burst: int, gaps: list[int]) -> None:
    """It allows exactly the starts that a count of all windows allows."""
    rate, now, asked = StartRate(interval, burst), 1_000_000, []
    for gap in gaps:
        now += gap
        asked.append(now)
    starts: list[int] = []
    for moment in asked:
        if next_start_us(rate, starts) <= moment:
            starts.append(moment)
    assert starts == naive_starts(rate, asked)

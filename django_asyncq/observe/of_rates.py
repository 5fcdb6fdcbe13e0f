"""What is known of the rates: of the rows, of this code, and of Redis."""

from __future__ import annotations

from datetime import UTC, datetime

from .. import rates
from ..broker import redis_clock
from ..broker.reading import Reader, read
from ..core.aliases import is_redis_used
from ..core.calls import rate_name
from ..core.rates import StartRate, is_of_arguments
from ..core.registry import every_task
from ..exceptions import BrokerUnavailable
from ..models import Rate
from ..storage.routing import rows_of
from ..worker.rates import declared_rate, declared_rates
from .values import RateInfo

# Names may be as many as customers.
MOST_RATES = 200


class Rates:
    """List rates, for an `Inspector`."""

    def all(self) -> list[RateInfo]:
        """Return the rates that have a row, that tasks declare under a plain name, or for which tasks wait, by name."""
        names = {*rows_of(Rate).values_list("name", flat=True), *declared_rates(), *self._waiting()}
        return self._of(sorted(names))

    def get(self, name: str) -> RateInfo | None:
        """Return a rate; None when nothing is known of it."""
        if name in {each.rate for each in self.all()}:
            return self._of([name])[0]
        (found,) = self._of([name])
        return found if found.waiting or found.refused else None

    def limited(self, most: int = MOST_RATES) -> list[RateInfo]:
        """Return the rates that have a row, or for which tasks wait; those with a row first, at most so many."""
        names = list(rows_of(Rate).order_by("name").values_list("name", flat=True)[:most])
        return self._of([*names, *(name for name in self._waiting() if name not in names)][:most])

    def _waiting(self) -> list[str]:
        return rates.waiting_names() if is_redis_used() else []

    def _of(self, names: list[str]) -> list[RateInfo]:
        rows = {row.name: row.start_rate for row in rows_of(Rate).filter(name__in=names)}
        states = read("producer", rates.reading_states(names)) if is_redis_used() else {}
        now = redis_clock.seconds("producer") if states else 0.0
        return [_info(name, rows.get(name), states.get(name), now) for name in names]


def _info(name: str, row: StartRate | None, state: rates.State | None, now: float) -> RateInfo:
    rate = row or declared_rate(name)
    free_at = None
    if state is not None and rate is not None:
        free_us = state.until_us - (rate.burst - 1) * rate.interval_us
        free_at = datetime.fromtimestamp(free_us / 1e6, UTC) if now * 1e6 < free_us < 1e17 else None
    return RateInfo(
        name,
        None if rate is None else rate.interval_us / 1e6,
        None if rate is None else rate.burst,
        row is not None,
        0 if state is None else state.waiting,
        0 if state is None else state.refused,
        free_at,
    )


def reading_waiting(names: list[str]) -> Reader[dict[str, int]]:
    """Read how many tasks wait for some rates."""
    if not is_redis_used():
        return dict.fromkeys(names, 0)
    return {name: state.waiting for name, state in (yield from rates.reading_states(names)).items()}


def reading_waiting_without_row() -> Reader[dict[str, int]]:
    """Read how many tasks wait for the rates that have no row, so that only the tasks declare them; at most 200."""
    if not is_redis_used():
        return {}
    names = yield from rates.reading_waiting_names()
    known = set(rows_of(Rate).filter(name__in=names).values_list("name", flat=True))
    states = yield from rates.reading_states([name for name in names if name not in known][:MOST_RATES])
    return {name: state.waiting for name, state in states.items() if state.waiting}


def names_that_wait() -> list[str]:
    """Return the names of the tasks of this code that may wait for a rate for which some wait now.

    Without Redis it is not known for which, so none.
    """
    try:
        waiting = set(rates.waiting_names()) if is_redis_used() else set()
    except BrokerUnavailable:
        return []
    return [
        name
        for task in every_task()
        if task.rate is not None and waiting
        if is_of_arguments(task.rate_per) or rate_name(task, (), {}) in waiting
        for name in (task.module_path, *task.aliases)
    ]

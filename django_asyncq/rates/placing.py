"""Place the tasks that wait for a rate anew: after it was changed, and where those before them wait no more.

They wait in `scheduled`, each until its look, by the numbers that held when they were placed. The leader does this.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from ..broker import Broker, clients, entries, redis_clock, scripts
from ..broker.keys import changed_rates_key, due_channel, rate_looks_key, waiting_rates_key
from ..broker.reading import read
from ..core.guard import get_logger
from ..core.rates import StartRate
from ..models import Rate
from ..storage.publishing import publish_after_commit
from ..storage.routing import rows_of
from .counting import EARLY_US, IDS_PER_CALL, State, Waiter, build, forget_built, reading_states

logger = get_logger("django_asyncq.rates")

# Of one rate. What waits behind them keeps its place until it is looked at.
MOST_PLACED = 100_000
MOST_ROWS = 1_000
MICROSECONDS = 1_000_000


class Placed(NamedTuple):
    """How many tasks have a new place, and how many wait no more."""

    placed: int
    gone: int


def publish_rate(*, instance: Rate, using: str, **kwargs: Any) -> None:
    """Make a changed row take effect at once: the rate is built again, and the leader places anew what waits."""
    text = "rate %s: the change takes effect within a minute after Redis is reachable again: %s"
    publish_after_commit(instance, using, forget_built, logger, text)


def changed_names() -> set[str]:
    """Return the names of the rates that were changed since they were placed anew. Raises: BrokerUnavailable."""
    return set(entries.texts(scripts.send(clients.client("producer"), "smembers", changed_rates_key())))


def check_rows() -> None:
    """Have the rates placed anew that count by other numbers than their rows: a change was lost with a connection.

    Raises: BrokerUnavailable, django.db.Error.
    """
    waiting = scripts.send(clients.client("producer"), "smembers", waiting_rates_key())
    rows = {row.name: row.start_rate for row in rows_of(Rate).order_by("name")[:MOST_ROWS]}
    names = sorted({*rows, *entries.texts(waiting)})[:MOST_ROWS]
    for name, state in read("producer", reading_states(names)).items():
        if state.is_built and state.rate != rows.get(name):
            forget_built(name)


def place_anew(name: str, declared: StartRate | None) -> Placed:
    """Have the tasks that wait for a rate looked at one interval after the other, in the order in which they wait.

    declared: for a rate without a row; None: nobody here knows, so they keep their places.
    Raises: BrokerUnavailable, django.db.Error; a second call does the rest.
    """
    client = clients.client("producer")
    rate = build(name) or declared
    scripts.send(client, "srem", changed_rates_key(), name)
    if rate is None:
        return Placed(0, 0)
    state = read("producer", reading_states([name]))[name]
    now = int(redis_clock.seconds("producer") * MICROSECONDS)
    at = max(min(state.until_us, now + rate.burst * rate.interval_us) - (rate.burst - 1) * rate.interval_us, now)
    texts = entries.texts(scripts.send(client, "zrange", rate_looks_key(name), 0, MOST_PLACED - 1))
    placed = gone = 0
    for start in range(0, len(texts), IDS_PER_CALL):
        for waiters in _of_queues(texts[start : start + IDS_PER_CALL]):
            moments = _schedule(waiters, at, rate.interval_us)
            words = [word for waiter, at in zip(waiters, moments, strict=True) for word in (waiter.text, at)]
            scripts.run("rate_place", client, [rate_looks_key(name)], words)
            here = [moment for moment in moments if moment]
            at += len(here) * rate.interval_us
            placed, gone = placed + len(here), gone + len(moments) - len(here)
    return Placed(placed, gone)


def is_idle(state: State, rate: StartRate, now_us: int) -> bool:
    """Whether a rate would allow a start and nobody asks for it soon: those that were next wait no more."""
    free_at = state.until_us - (rate.burst - 1) * rate.interval_us
    patience = max(rate.interval_us, MICROSECONDS)
    return state.next_look_us is not None and free_at + patience < now_us and state.next_look_us > now_us + patience


def _of_queues(texts: Sequence[str]) -> list[list[Waiter]]:
    """Return the tasks of each queue together, in their order."""
    waiters = [waiter for text in texts if (waiter := Waiter.of(text)) is not None]
    waiters.sort(key=lambda each: each[:2])
    return [list(group) for _, group in groupby(waiters, key=lambda each: each[:2])]


def _schedule(waiters: Sequence[Waiter], at: int, interval_us: int) -> list[bytes]:
    """Schedule tasks of one queue; return when the turn of each is, from a time on; b"" for one not scheduled."""
    broker = Broker("producer", waiters[0].alias)
    keys = broker.keys(waiters[0].queue)
    arguments = [keys.task_prefix, due_channel(), at, interval_us, EARLY_US, *(each.id for each in waiters)]
    found: list[bytes] = scripts.run("reschedule", broker.client, [keys.scheduled, keys.due], arguments)
    return found

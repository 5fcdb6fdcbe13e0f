"""What Redis holds of a rate: its starts as one time, and when each task that waits is looked at next.

`lua/rate_take.lua` decides. A rate that was not built since Redis lost its memory gets the numbers of its row first;
one without a row has those that the task declares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from ..broker import clients, entries, redis_clock, scripts
from ..broker.access import Access
from ..broker.keys import changed_rates_key, rate_key, rate_looks_key, waiting_rates_key
from ..broker.reading import Command, Reader, read
from ..core.rates import StartRate
from ..models import Rate
from ..storage.routing import rows_of

IDS_PER_CALL = 200
# What is looked at a little late waits too.
LATE_US = 60_000_000
# By so much a task comes back from the schedule before its turn: forwarding and claiming it takes 5 to 50 ms.
EARLY_US = 50_000
SAMPLE = 100
Kind = Literal["claim", "start"]


class Waiter(NamedTuple):
    """A task that may wait for a rate. id: in Redis."""

    alias: str
    queue: str
    id: str

    @property
    def text(self) -> str:
        """How Redis knows it."""
        return "\n".join(self)

    @classmethod
    def of(cls, text: str) -> Waiter | None:
        """Return the one of a text from Redis; None when it is none."""
        parts = text.split("\n")
        return cls(*parts) if len(parts) == 3 and all(parts) else None


class Answer(NamedTuple):
    """What a rate has said, by Redis's clock. now_us: then, Unix microseconds. interval_us: between two starts.

    waits: for each task that may not start, when it is looked at next.
    """

    now_us: int
    interval_us: int
    waits: dict[Waiter, int]


def ask(broker: Access, name: str, rate: StartRate, waiters: Sequence[Waiter], kind: Kind) -> Answer | None:
    """Ask for some tasks, in the order in which they shall start; None when the rate must be built first.

    waiters: at most IDS_PER_CALL. "claim" places those that must wait, "start" also takes a start for each other one.
    Raises: BrokerUnavailable.
    """
    keys = [rate_key(name), rate_looks_key(name)]
    arguments = [kind, rate.interval_us, rate.burst, *(each.text for each in waiters)]
    head, *rest = scripts.run("rate_take", broker.client, keys, arguments)
    if head == b"unbuilt":
        return None
    interval, *moments = rest
    found = zip(waiters, map(entries.whole, moments), strict=True)
    waits = {waiter: at for waiter, at in found if at is not None}
    if waits:
        scripts.send(broker.client, "sadd", waiting_rates_key(), name)
    return Answer(entries.count(head), entries.count(interval), waits)


def give_back(broker: Access, name: str, rate: StartRate, taken_us: int) -> None:
    """Give back a start that was taken and not used. taken_us: `now_us` of the answer. Raises: BrokerUnavailable."""
    scripts.run("rate_back", broker.client, [rate_key(name)], [taken_us, rate.interval_us])


def build(name: str) -> StartRate | None:
    """Have a rate count by its row; return what that says, None without a row.

    Does nothing when the row is changed in the meantime: whoever asks next finds it unbuilt again.
    Raises: BrokerUnavailable, django.db.Error.
    """
    client = clients.client("producer")
    changes = scripts.send(client, "hget", rate_key(name), "changes") or b""
    found = row_of(name)
    numbers = ["", ""] if found is None else [found.interval_us, found.burst]
    scripts.run("rate_build", client, [rate_key(name)], [changes, *numbers])
    return found


def row_of(name: str) -> StartRate | None:
    """Return what the row of a rate says; None without one. Raises: django.db.Error."""
    row = rows_of(Rate).filter(name=name).first()
    return None if row is None else row.start_rate


def forget_built(name: str) -> None:
    """Have a rate built at its next use, and its waiting tasks placed anew. Raises: BrokerUnavailable."""
    client = clients.client("producer")
    scripts.run("forget_built", client, [rate_key(name)], ["interval", "burst"])
    scripts.send(client, "sadd", changed_rates_key(), name)


def waiting_names() -> list[str]:
    """Return what `reading_waiting_names` finds. Raises: BrokerUnavailable."""
    return read("producer", reading_waiting_names())


def reading_waiting_names() -> Reader[list[str]]:
    """Read the names of the rates for which tasks wait, sorted."""
    (found,) = yield [Command("smembers", [waiting_rates_key()])]
    return sorted(entries.texts(found))


def forget_waiting(name: str) -> None:
    """Note that no task waits for a rate; one that begins to wait at this moment is not forgotten.

    Raises: BrokerUnavailable.
    """
    client = clients.client("producer")
    scripts.send(client, "srem", waiting_rates_key(), name)
    if scripts.send(client, "zcard", rate_looks_key(name)):
        scripts.send(client, "sadd", waiting_rates_key(), name)


class State(NamedTuple):
    """What Redis holds of a rate. rate: of its row, if it was built with one. waiting: how many tasks wait.

    refused: how often a task had to wait, since Redis knows the rate. until: as of `core.rates`, Unix microseconds.
    next_look: of the task that is looked at first; None without one.
    """

    rate: StartRate | None
    is_built: bool
    waiting: int
    refused: int
    until_us: int
    next_look_us: int | None


def reading_states(names: Iterable[str]) -> Reader[dict[str, State]]:
    """Read what Redis holds of some rates."""
    listed = list(names)
    since = int((yield from redis_clock.reading_seconds()) * 1_000_000) - LATE_US
    commands = []
    for name in listed:
        commands += [
            Command("hmget", [rate_key(name)], ("built", "interval", "burst", "refused", "until")),
            Command("zcount", [rate_looks_key(name)], (since, "+inf")),
            Command(
                "zrange",
                [rate_looks_key(name)],
                (since, "+inf"),
                {"byscore": True, "offset": 0, "num": 1, "withscores": True},
            ),
        ]
    replies = yield commands
    found = {}
    for place, name in enumerate(listed):
        fields, waiting, first = replies[3 * place : 3 * place + 3]
        built, interval, burst, refused, until = fields
        every, most = entries.whole(interval), entries.whole(burst)
        found[name] = State(
            StartRate(every, most) if every and most else None,
            built is not None,
            entries.count(waiting),
            entries.count(refused),
            entries.count(until),
            int(first[0][1]) if first and abs(first[0][1]) < 1e18 else None,
        )
    return found


def waiting_in(alias: str, queue: str, most: int = 200) -> dict[str, int]:
    """Return about how many tasks of a queue wait for each rate, the most first. Raises: BrokerUnavailable.

    Of each rate the tasks that are next say how many of all are of the queue. most: rates that are looked at.
    """
    names = waiting_names()[:most]
    states = read("producer", reading_states(names))
    found = {}
    for name, state in states.items():
        first = scripts.send(clients.client("producer"), "zrange", rate_looks_key(name), 0, SAMPLE - 1)
        waiters = [waiter for text in entries.texts(first) if (waiter := Waiter.of(text)) is not None]
        own = [waiter for waiter in waiters if waiter[:2] == (alias, queue)]
        if own and state.waiting:
            found[name] = max(round(state.waiting * len(own) / len(waiters)), 1)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def reading_look_at(name: str, waiter: Waiter) -> Reader[float | None]:
    """Read when a task that waits is looked at next, in Unix seconds; None when it does not wait."""
    (found,) = yield [Command("zscore", [rate_looks_key(name)], (waiter.text,))]
    return None if found is None else float(found) / 1e6

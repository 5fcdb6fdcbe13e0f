"""Fair order on a real server: against a model, with plain tasks, after losses, and at a cost that does not grow."""

from __future__ import annotations

import itertools
import math
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from django_asyncq.broker import Broker, Dequeued, Entry, Lease, task_entries
from django_asyncq.broker.inspection import EntryState, Inspection
from django_asyncq.broker.keys import QueueKeys
from django_asyncq.core.fairness import UNIT, Share
from django_asyncq.testing.fair_order import FairOrder

QUEUE = "q"
WORKER = "w-1"
NUMBERS = itertools.count()


@pytest.fixture
def broker(own_keys: None) -> Broker:
    return Broker()


@pytest.fixture
def keys(own_keys: None) -> QueueKeys:
    return QueueKeys(QUEUE)


def share(key: str, weight: float = 1) -> Share:
    return Share(key, round(UNIT / weight))


def entry(id: str, key: str = "", weight: float = 1, **more: Any) -> Entry:
    """The key is the part of the id before its number."""
    key = key or id.rstrip("0123456789")
    return Entry(id, b"m", fair="" if key == "plain" else share(key, weight).text, **more)


def push(broker: Broker, *ids: str, queue: str = QUEUE, **more: Any) -> None:
    assert broker.enqueue(queue, [entry(id, **more) for id in ids]) == ["queued"] * len(ids)


def some(key: str, count: int) -> list[str]:
    return [f"{key}{number:05}" for number in range(count)]


def take(broker: Broker, count: int = 1, queue: str = QUEUE) -> Dequeued:
    return broker.dequeue(queue, WORKER, count, 30)


def ids(broker: Broker, count: int = 200) -> list[str]:
    return [lease.id for lease in take(broker, count).leases]


def keys_of(broker: Broker, count: int = 200) -> str:
    """The letters of the keys of the next tasks, in their order."""
    return "".join(id[0] for id in ids(broker, count))


# --- the order

KEYS = st.sampled_from("abc")
WEIGHTS = st.sampled_from([0.01, 0.5, 1, 3, 7, 100])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), KEYS, WEIGHTS, st.integers(1, 12)),
        st.tuples(st.just("take"), st.integers(1, 15)),
        st.tuples(st.just("cancel"), st.integers(0, 50)),
        st.tuples(st.just("requeue"), st.integers(1, 5)),
    ),
    max_size=25,
)


class Model(FairOrder[str]):
    """The order of the test kit, where no run is given back, and tasks that were. tags: of what was given out."""

    def __init__(self, tags: dict[str, int]) -> None:
        super().__init__()
        self.tags = tags

    def take(self, waiting: Sequence[tuple[str, Share | None]]) -> str:
        known = dict(self._tags)
        id = super().take(waiting)
        self.tags[id] = known[id][0]
        return id

    def put_back(self, id: str, of: Share) -> None:
        self._tags[id] = max(min(self.tags[id], self._clock), 1), of


@pytest.mark.usefixtures("own_keys")
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(priority=st.sampled_from([0, 100, -100]), steps=STEPS)
@example(priority=100, steps=[("push", "a", 100, 12), ("push", "b", 0.01, 12), ("push", "c", 3, 9)])
def test_the_order_is_that_of_the_model(priority: int, steps: list[Any]) -> None:
    """Also where weights differ by 10,000, where tasks are taken out again, and at each end of the priorities."""
    broker, queue = Broker(), uuid.uuid4().hex
    model, waiting = Model({}), list[tuple[str, Share | None]]()
    shares, leases = dict[str, Share](), list[Lease]()
    for step in [*steps, ("take", 200), ("take", 200)]:
        if step[0] == "push":
            _, key, weight, count = step
            new = [f"{key}{next(NUMBERS):09}" for _ in range(count)]
            push(broker, *new, queue=queue, weight=weight, priority=priority)
            shares |= dict.fromkeys(new, share(key, weight))
            waiting += [(id, shares[id]) for id in new]
            model.note(waiting)
        elif step[0] == "cancel" and waiting:
            id = waiting.pop(step[1] % len(waiting))[0]
            assert task_entries.take_out(broker, queue, [(id, 99)]) == ["removed"]
            model.note(waiting)
        elif step[0] == "take":
            expected = []
            for _ in range(min(step[1], len(waiting))):
                expected.append(model.take(waiting))
                waiting = [each for each in waiting if each[0] != expected[-1]]
            leases = take(broker, step[1], queue).leases
            assert [lease.id for lease in leases] == expected
            if not waiting:
                model = Model(model.tags)
        elif step[0] == "requeue" and leases:
            back, leases = leases[-step[1] :], []
            assert broker.requeue(queue, WORKER, back) == ["requeued"] * len(back)
            for id, _ in back:
                model.put_back(id, shares[id])
                waiting.append((id, shares[id]))
    assert not waiting


@pytest.mark.usefixtures("own_keys")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    weights=st.fixed_dictionaries({"a": WEIGHTS, "b": WEIGHTS}),
    pushes=st.lists(st.tuples(st.sampled_from(["a", "b", "plain"]), st.integers(1, 40)), min_size=2, max_size=10),
    batches=st.lists(st.integers(1, 9), min_size=1, max_size=60),
    priority=st.sampled_from([0, 7, -7]),
)
def test_unfairness_is_bounded(
    weights: dict[str, float], pushes: list[tuple[str, int]], batches: list[int], priority: int
) -> None:
    """Over any time in which two of them wait, what they get by their weight differs by one task of each at most.

    Plain tasks are one more, of weight 1. Source: the bound of Golestani 1994.
    """
    broker, queue = Broker(), uuid.uuid4().hex
    weights = {**weights, "plain": 1.0}
    left = Counter[str]()
    to_push, served = list(pushes), list[str]()
    # Which keys had tasks waiting before and after each that was served.
    waited = list[set[str]]()
    for count in [*batches, *[50] * 20]:
        if to_push:
            key, number = to_push.pop(0)
            new = [f"{key}{next(NUMBERS):09}" for _ in range(number)]
            push(broker, *new, queue=queue, key=key, weight=weights[key], priority=priority)
            left[key] += number
        for lease in take(broker, count, queue).leases:
            key = lease.id.rstrip("0123456789")
            served.append(key)
            left[key] -= 1
            waited.append(set(+left))
    assert not +left
    for one, other in itertools.combinations(weights, 2):
        # Weights are rounded to whole units.
        bound = 1.01 * (1 / weights[one] + 1 / weights[other])
        differences = [0.0]
        for key, waiting in zip(served, waited, strict=True):
            differences.append(differences[-1] + ((key == one) - (key == other)) / weights[key])
            if not {one, other} <= waiting:
                differences = [0.0]
            assert max(differences) - min(differences) <= bound, (one, other, served)


def test_one_who_floods_waits_behind_himself(broker: Broker) -> None:
    """10,000 tasks of one stand before at most as many of another as that one has."""
    flood = some("a", 2000)
    for start in range(0, 2000, 200):
        push(broker, *flood[start : start + 200])
    assert keys_of(broker, 5) == "aaaaa"
    push(broker, *some("b", 3), *some("c", 3))
    assert keys_of(broker, 10) == "abcabcabca"
    assert keys_of(broker, 5) == "aaaaa"


def test_a_weight_is_a_share(broker: Broker) -> None:
    """3 to 1 is 3 to 1, and 100 to 1 is that too, within one task."""
    push(broker, *some("a", 200), weight=3)
    push(broker, *some("b", 200))
    assert Counter(keys_of(broker, 120)) == {"a": 90, "b": 30}
    other = Broker()
    push(other, *some("x", 200), queue="other", weight=100)
    push(other, *some("y", 50), queue="other", weight=1)
    found = Counter(lease.id[0] for lease in take(other, 101, "other").leases)
    assert found["x"] in (99, 100, 101)


@pytest.mark.parametrize("priority", [0, 5, -5])
def test_plain_tasks_are_as_one_key(broker: Broker, priority: int) -> None:
    """Neither a flood of plain tasks nor one of a key starves the other, whoever came first."""
    push(broker, *some("plain", 150), priority=priority)
    assert keys_of(broker, 5) == "ppppp"
    push(broker, *some("a", 4), *some("b", 4), priority=priority)
    assert Counter(keys_of(broker, 12)) == {"a": 4, "b": 4, "p": 4}
    assert keys_of(broker, 3) == "ppp"
    push(broker, *some("c", 150), priority=priority)
    assert Counter(keys_of(broker, 20)) == {"c": 10, "p": 10}


def test_a_heavy_key_that_comes_one_at_a_time_does_not_starve_plain_tasks(broker: Broker) -> None:
    """The queue remembers while plain tasks wait, though nothing fair does."""
    push(broker, *some("plain", 60))
    served = ""
    for number in range(60):
        push(broker, f"a{number}", weight=4)
        served += keys_of(broker, 1)
    assert served.count("p") in (11, 12, 13)


def test_a_higher_priority_comes_first_whatever_the_keys(broker: Broker) -> None:
    """Fairness is within a priority; each priority has a count of its own."""
    push(broker, *some("a", 20), priority=-1)
    push(broker, *some("b", 3), priority=2)
    push(broker, *some("c", 3), priority=1)
    push(broker, *some("plain", 2), priority=1)
    push(broker, *some("d", 2))
    order = keys_of(broker, 30)
    assert order[:3] == "bbb"
    assert sorted(order[3:8]) == list("cccpp")
    assert order[8:] == "dd" + "a" * 20


def test_a_flood_at_a_low_priority_costs_nothing_at_a_high_one(broker: Broker) -> None:
    """Nor would a task of high priority set the others back."""
    push(broker, *some("a", 100), priority=-1)
    push(broker, *some("b", 10), priority=1)
    push(broker, "a90000", priority=1)
    assert keys_of(broker, 3) == "bab" or keys_of(broker, 0) == ""
    push(broker, "c00000", priority=-1)
    assert "c" in keys_of(broker, 12)


# --- tasks that wait again


def test_a_requeued_task_takes_its_place_again(broker: Broker) -> None:
    """In the order in which the tasks were given out, before what came later."""
    push(broker, *some("a", 3), *some("b", 3))
    leases = take(broker, 4).leases
    order = [lease.id for lease in leases]
    assert broker.requeue(QUEUE, WORKER, leases, raise_fence=True) == ["requeued"] * 4
    assert ids(broker)[:4] == order


def test_a_requeued_task_of_an_earlier_numbering_is_the_next(broker: Broker) -> None:
    """The numbers began anew since it was given out: its old one would stand behind everybody's."""
    push(broker, *some("a", 100))
    leases = take(broker, 100).leases
    push(broker, *some("b", 5))
    broker.requeue(QUEUE, WORKER, leases[-1:])
    assert keys_of(broker, 2)[0] == "a"


def test_what_is_left_to_others_waits_anew(broker: Broker) -> None:
    """Else all that this worker does not know would stand before the tasks of others."""
    push(broker, *some("a", 50))
    broker.code = "old"
    while leases := take(broker, 10).leases:
        assert broker.requeue(QUEUE, WORKER, leases, left_seconds=30) == ["requeued"] * len(leases)
    other = Broker()
    other.code = "new"
    push(other, "b00000")
    assert "b" in keys_of(other, 3)


def test_a_delayed_task_gets_its_place_when_it_is_due(broker: Broker) -> None:
    """It waits behind its own key, not before those that came in the meantime."""
    assert set(broker.schedule(QUEUE, [entry(id, due_at=1.0, priority=3) for id in some("a", 30)])) == {"scheduled"}
    push(broker, *some("b", 3), priority=3)
    assert broker.forward(QUEUE, "scheduled").moved == 30
    assert Counter(keys_of(broker, 6)) == {"a": 3, "b": 3}


def test_a_retried_task_is_pushed_as_the_row_says_now(broker: Broker, redis_client: redis.Redis, keys: Any) -> None:
    """Also without a key any more, when its code has none."""
    push(broker, "a00001")
    (lease,) = take(broker).leases
    assert broker.retry(QUEUE, WORKER, [(lease, b"m", 1.0)]) == ["retried"]
    assert broker.enqueue(QUEUE, [Entry("a00001", b"m")], again=True) == ["queued"]
    assert redis_client.hget(keys.task("a00001"), "fair") is None
    assert redis_client.lrange(keys.pending, 0, -1) == [b"a00001"]


def test_what_is_cancelled_costs_its_key_nothing(broker: Broker, redis_client: redis.Redis, keys: QueueKeys) -> None:
    """One who floods, cancels and enqueues again waits behind nobody's flood; removals of final rows count too."""
    flood = some("a", 120)
    push(broker, *flood, "b00000")
    assert task_entries.take_out(broker, QUEUE, [(id, 0) for id in flood[:50]]) == ["removed"] * 50
    assert broker.remove(QUEUE, flood[50:90]) == 40
    final = [EntryState(id, "pending", "") for id in flood[90:]]
    assert Inspection().remove_waiting(QUEUE, final) == 30
    push(broker, *some("c", 50), "a90000")
    assert "a" in keys_of(broker, 4)


def test_a_held_task_that_is_closed_costs_its_key_nothing(broker: Broker) -> None:
    """A cancel in a transaction holds its tasks first."""
    push(broker, *some("a", 40))
    holder = f"{task_entries.HOLDER}1"
    task_entries.hold(broker, QUEUE, some("a", 40), holder)
    done = task_entries.take_out(broker, QUEUE, [(id, None) for id in some("a", 40)], holder=holder)
    assert done == ["removed"] * 40
    push(broker, *some("c", 50), "a90000")
    assert "a" in keys_of(broker, 4)


def test_what_a_dead_holder_has_held_goes_back_to_its_place(broker: Broker) -> None:
    """It was never given out: as the next, all of it would stand before the tasks of others."""
    push(broker, *some("a", 40))
    holder = f"{task_entries.HOLDER}1"
    fences = task_entries.hold(broker, QUEUE, some("a", 40), holder)
    held = [Lease(id, int(fence)) for id, fence in zip(some("a", 40), fences, strict=True)]
    push(broker, *some("b", 3))
    assert broker.requeue(QUEUE, holder, held, raise_fence=True) == ["requeued"] * 40
    assert Counter(keys_of(broker, 6)) == {"a": 3, "b": 3}
    assert ids(broker) == some("a", 40)[3:]


def test_an_orphan_takes_its_place_again(broker: Broker, redis_client: redis.Redis, keys: QueueKeys) -> None:
    """The zset has lost it, the hash has not."""
    push(broker, *some("a", 3), *some("b", 3))
    redis_client.zrem(keys.priority, "a00001")
    assert Inspection().misplaced(QUEUE, ["a00001"]).orphans == ["a00001"]
    assert Inspection().repair_orphans(QUEUE, ["a00001"]) == 1
    assert sorted(ids(broker)) == sorted(some("a", 3) + some("b", 3))


def test_a_reasserted_task_is_requeued_as_the_next(broker: Broker) -> None:
    """Redis has lost its memory, and with it the place that the task had."""
    running = entry("a00001", fence=5)
    assert broker.reassert(QUEUE, WORKER, [running], 30) == ["reasserted"]
    push(broker, *some("b", 3))
    assert broker.requeue(QUEUE, WORKER, [Lease("a00001", 5)]) == ["requeued"]
    assert ids(broker)[0] == "a00001"


# --- what Redis keeps of it


def test_keys_are_forgotten(broker: Broker, redis_client: redis.Redis, keys: QueueKeys) -> None:
    """Those of which nothing waits, though the queue is never empty."""
    push(broker, *some("z", 200), priority=0)
    for round in range(30):
        push(broker, *(f"{key}0" for key in (f"k{round}x{each}y" for each in range(100))), *[f"z9{round:03}"])
        assert len(ids(broker, 100)) == 100
        # Those that wait, those that wait no more since the last push, the two of the level.
        waiting = redis_client.zcard(keys.priority)
        assert redis_client.zcard(keys.fair) <= waiting + 100 + 2
    assert 0 < redis_client.ttl(keys.fair) <= 604_800


def test_an_empty_queue_is_numbered_anew(broker: Broker, redis_client: redis.Redis, keys: QueueKeys) -> None:
    """So nothing is left of a queue that is idle."""
    push(broker, *some("a", 30))
    assert len(ids(broker, 30)) == 30
    assert not redis_client.exists(keys.fair)


def test_after_a_loss_of_what_it_knew_the_queue_goes_on(
    broker: Broker, redis_client: redis.Redis, keys: QueueKeys
) -> None:
    """What waits is found, though plain tasks wait too, and new keys come in between."""
    push(broker, *some("a", 100))
    assert keys_of(broker, 50) == "a" * 50
    redis_client.delete(keys.fair)
    push(broker, *some("plain", 100))
    push(broker, *some("b", 10))
    assert Counter(keys_of(broker, 30)) == {"a": 10, "b": 10, "p": 10}


@pytest.mark.parametrize(
    "member, score",
    [("0", 0.9999999), ("0", 7.5), ("0", math.inf), ("0:a", 0.99999999), ("0:", -math.inf), ("x y", 0.5)],
)
def test_rubbish_in_what_it_knows_stops_nothing(
    broker: Broker, redis_client: redis.Redis, keys: QueueKeys, member: str, score: float
) -> None:
    """Every task runs, of each kind."""
    push(broker, *some("a", 10))
    push(broker, *some("plain", 10))
    redis_client.zadd(keys.fair, {member: score})
    push(broker, *some("b", 10))
    order = "".join(keys_of(broker, 3) for _ in range(10))
    assert Counter(order) == {"a": 10, "b": 10, "p": 10}
    assert redis_client.zcard(keys.priority) == redis_client.llen(keys.pending) == 0


@pytest.mark.parametrize(
    "score",
    [
        0,
        1e300,
        -1e300,
        math.inf,
        -math.inf,
        0.5,
        100.5,
        -100.7,
        102,
        1e-300,
        math.nextafter(1, 0),
        math.nextafter(-1, 0),
    ],
)
def test_a_score_that_is_not_ours_stops_nothing(
    broker: Broker, redis_client: redis.Redis, keys: QueueKeys, score: float
) -> None:
    """Another program, or a person, may write any."""
    push(broker, *some("a", 3), *some("b", 3))
    push(broker, *some("plain", 2))
    redis_client.zadd(keys.priority, {"a00001": score, "ghost": score})
    assert Counter(keys_of(broker, 50)) == {"a": 3, "b": 3, "p": 2}
    assert not redis_client.exists(keys.priority, keys.fair)


@pytest.mark.parametrize("field", ["", "x", "0 0 a", "5 -1 a", "99999999999999999999 5 a", "1 1", "1 9999999999 a"])
def test_rubbish_in_the_hash_stops_nothing(
    broker: Broker, redis_client: redis.Redis, keys: QueueKeys, field: str
) -> None:
    """The task is a plain one then."""
    push(broker, "a00001", "b00001")
    leases = take(broker, 2).leases
    redis_client.hset(keys.task("a00001"), "fair", field)
    assert broker.requeue(QUEUE, WORKER, leases) == ["requeued"] * 2
    assert sorted(ids(broker)) == ["a00001", "b00001"]
    redis_client.hset(keys.task("a00001"), mapping={"fair": field, "state": "pending"})
    assert task_entries.take_out(broker, QUEUE, [("a00001", 9)]) == ["removed"]


def test_a_key_of_another_type_stops_nothing(broker: Broker, redis_client: redis.Redis, keys: QueueKeys) -> None:
    """It is set aside, and the queue begins anew."""
    push(broker, *some("a", 5))
    redis_client.delete(keys.fair)
    redis_client.set(keys.fair, "x")
    push(broker, *some("b", 5))
    assert Counter(keys_of(broker)) == {"a": 5, "b": 5}


# --- what it costs


def commands(client: redis.Redis) -> Counter[str]:
    """How often the server has executed each command."""
    return Counter({name: stats["calls"] for name, stats in client.info("commandstats").items()})


def cost(client: redis.Redis, call: Any) -> Counter[str]:
    before = commands(client)
    call()
    found = commands(client)
    found.subtract(before)
    return Counter({name: count for name, count in found.items() if count and "info" not in name})


def test_the_cost_does_not_grow_with_what_waits(own_redis: Any, key_prefix: str) -> None:
    """Of a push and of a claim, with 10 and with 100,000 waiting: the same commands, counted by the server."""
    client = redis.Redis.from_url(own_redis.url, protocol=2)
    broker = Broker()
    costs = []
    for count in (10, 100_000):
        for start in range(0, count, 200):
            size = min(200, count - start)
            push(broker, *(f"a{number:06}" for number in range(start, start + size)), queue=f"of{count}")
        # Scripts are loaded by now. The tokens that wake workers are counted elsewhere.
        push(broker, "b0", queue=f"of{count}")
        take(broker, 1, f"of{count}")
        client.delete(QueueKeys(f"of{count}").wake)
        pushed = cost(client, lambda count=count: push(broker, "c0", queue=f"of{count}"))
        taken = cost(client, lambda count=count: take(broker, 1, f"of{count}"))
        costs.append((pushed, taken))
    client.close()
    assert costs[0] == costs[1]


def test_many_are_pushed_with_as_many_scripts_as_plain_ones(own_redis: Any, key_prefix: str) -> None:
    """One for each 200, whatever their keys."""
    client = redis.Redis.from_url(own_redis.url, protocol=2)
    broker = Broker()
    push(broker, "a0", "plain0")
    fair = [entry(f"k{number % 300}x{number}", key=f"k{number % 300}") for number in range(10_000)]
    found = cost(client, lambda: broker.enqueue(QUEUE, fair))
    client.close()
    assert found["cmdstat_evalsha"] == 50


def test_a_queue_with_nothing_fair_asks_nothing_about_it(own_redis: Any, key_prefix: str) -> None:
    """A plain queue costs what it did: no command more."""
    client = redis.Redis.from_url(own_redis.url, protocol=2)
    broker = Broker()
    push(broker, *some("plain", 3))
    take(broker, 1)
    pushed = cost(client, lambda: push(broker, "plain9"))
    taken = cost(client, lambda: take(broker, 1))
    client.close()
    for name in ("zscore", "zrangebyscore", "zcount", "zrem", "expire"):
        assert f"cmdstat_{name}" not in pushed | taken
    assert (pushed["cmdstat_exists"], taken["cmdstat_exists"]) == (0, 3)

"""Rates in Redis: what may start, what waits until when, and what becomes of it."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from django_asyncq import lifecycle, rates
from django_asyncq.broker import Broker
from django_asyncq.broker.keys import QueueKeys, rate_key, rate_looks_key
from django_asyncq.broker.reading import read
from django_asyncq.core.names import ALONE
from django_asyncq.core.rates import StartRate, next_start_us
from django_asyncq.models import Rate, TaskRecord, TaskState
from django_asyncq.rates.counting import State
from django_asyncq.testing import EmbeddedRedis
from django_asyncq.worker.job import Job, JobPhase, Jobs
from django_asyncq.worker.rates import RateKeeper, name_of, waiter_of

from .. import acl, rate_tasks
from ..rate_tasks import call_api, hourly

pytestmark = pytest.mark.django_db(transaction=True)

QUEUE, WORKER = "default", "w:1:rates"
HOUR_US = 3_600_000_000
HOURLY = StartRate(HOUR_US, 2)
NAME = "hourly"


def keeper() -> RateKeeper:
    """Of a worker process."""
    return RateKeeper(Broker(), WORKER, Jobs())


def claim(of: RateKeeper, count: int = 200) -> list[Job]:
    """Claim tasks as a worker does; return the jobs that may begin, as far as is known then."""
    runs = lifecycle.claim(of.broker, QUEUE, WORKER, count, "default").runs
    tasks = {f"tests.rate_tasks.{name}": each for name, each in vars(rate_tasks).items()}
    return of.admit([Job(run, tasks[run.record.name], time.monotonic()) for run in runs])


def waiter(number: int) -> rates.Waiter:
    """One that is no row."""
    return rates.Waiter("default", QUEUE, str(number))


def ask(numbers: list[int], kind: Any = "start", rate: StartRate = HOURLY, name: str = NAME) -> rates.Answer:
    """Ask a rate, which is built first."""
    while (found := rates.ask(Broker(), name, rate, [waiter(each) for each in numbers], kind)) is None:
        rates.build(name)
    return found


def state(name: str = NAME) -> State:
    """What Redis holds."""
    return read("producer", rates.reading_states([name]))[name]


def move(microseconds: int, name: str = NAME) -> None:
    """Let time pass for a rate: what it remembers lies further back."""
    client = Broker().client
    for field in ("until", "again"):
        if (found := client.hget(rate_key(name), field)) is not None:
            client.hset(rate_key(name), field, str(int(found) - microseconds))
    for member, score in client.zrange(rate_looks_key(name), 0, -1, withscores=True):
        client.zadd(rate_looks_key(name), {member: score - microseconds})


operations = st.lists(st.tuples(st.integers(0, 4_000_000), st.integers(1, 4), st.booleans()), min_size=1, max_size=25)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.integers(1, 3_000_000), st.integers(1, 5), operations)
def test_redis_allows_what_the_count_allows(interval: int, burst: int, steps: list[tuple[int, int, bool]]) -> None:
    """At any times, for any number at once; one that is given back is none, and the bound of each window holds."""
    rate, name, shift = StartRate(interval, burst), f"r{time.monotonic_ns()}", 0
    starts: list[int] = []
    with_returned: list[int] = []
    any_returned = False
    for gap, count, is_given_back in steps:
        move(gap, name)
        shift += gap
        found = ask(list(range(count)), "start", rate, name)
        now = found.now_us + shift
        for number in range(count):
            may = waiter(number) not in found.waits
            if not any_returned:
                assert may == (next_start_us(rate, starts) <= now)
            elif may:
                # Never more than without those that were given back; perhaps fewer.
                assert next_start_us(rate, starts) <= now
            if not may:
                continue
            if is_given_back and number == 0:
                any_returned = True
                with_returned.append(now)
                rates.give_back(Broker(), name, rate, found.now_us)
            else:
                starts.append(now)
    for place, start in enumerate(starts):
        for later in range(place, len(starts)):
            assert (later - place + 1) * interval <= starts[later] - start + burst * interval


def test_what_must_wait_is_looked_at_one_interval_after_the_other() -> None:
    """What comes for the first time goes to the end of the line without asking; a claim takes no start."""
    first = ask([1, 2, 3, 4], "claim")
    assert [first.waits[waiter(each)] - first.now_us for each in (3, 4)] == [HOUR_US, 2 * HOUR_US]
    assert state().until_us == 0
    behind = ask([5], "claim")
    assert behind.waits[waiter(5)] == first.waits[waiter(4)] + HOUR_US
    assert ask([1, 2]).waits == {}
    assert (state().waiting, state().refused) == (3, 3)


def test_one_whose_look_has_come_is_not_sent_to_the_end() -> None:
    """It gets the next start, before those that come for the first time."""
    ask([1, 2])
    waits = ask([3, 4], "claim").waits
    move(HOUR_US // 2)
    # Another has come in between: it is looked at when the next start is free.
    again = ask([3])
    assert abs(again.waits[waiter(3)] - (waits[waiter(3)] - HOUR_US // 2)) < 1000
    move(HOUR_US // 2)
    assert ask([3, 4], "claim").waits.keys() == {waiter(4)}
    assert ask([3]).waits == {}
    assert state().waiting == 1


def test_looks_that_all_came_due_in_an_outage_are_spaced_anew() -> None:
    """The bound holds, the refused come one after the other, and new ones behind them."""
    ask([1, 2])
    ask(list(range(3, 13)), "claim")
    move(11 * HOUR_US)
    found = ask(list(range(3, 13)), "claim")
    assert sorted(at - found.now_us for at in found.waits.values()) == [HOUR_US * place for place in range(1, 9)]
    assert ask([3, 4]).waits == {}
    assert ask([99], "claim").waits[waiter(99)] == max(found.waits.values()) + HOUR_US


def test_the_work_does_not_grow_with_what_waits() -> None:
    """Ten or ten thousand that wait: a claim and a start send Redis the same commands."""
    counts = []
    for waiting in (10, 10_000):
        name = f"of-{waiting}"
        ask([1, 2], "start", HOURLY, name)
        for start in range(0, waiting, 200):
            ask(list(range(100 + start, 100 + min(start + 200, waiting))), "claim", HOURLY, name)
        assert state(name).waiting == waiting
        client = acl.unrestricted(Broker().client)
        client.config_resetstat()
        ask([7, 8], "claim", HOURLY, name)
        ask([100], "start", HOURLY, name)
        counts.append({key: each["calls"] for key, each in client.info("commandstats").items() if "info" not in key})
    assert counts[0] == counts[1]


def test_a_row_counts_from_its_commit_on_and_without_it_the_declaration() -> None:
    """Also where tasks have started by the other numbers: what they took counts as at most a full burst."""
    ask([1, 2])
    row = Rate.objects.create(name=NAME, starts=1000, seconds=1, burst=3)
    assert ask([3], "claim").waits.keys() == {waiter(3)}
    move(3_000)
    assert ask([4, 5, 6]).waits == {}
    # However quick this is, the three starts are over.
    move(3_000)
    row.name = "other"
    row.save()
    assert ask([7, 8, 9]).waits[waiter(9)] > time.time() * 1e6 + 1e9
    row.name, row.burst = NAME, 1
    row.save()
    row.delete()
    assert state().is_built is False
    assert ask([10]).waits.keys() == {waiter(10)}


def test_a_row_that_is_changed_while_it_is_read_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that has read the old numbers does not write them."""
    row = Rate.objects.create(name=NAME, starts=1, seconds=60)
    real = rates.counting.row_of

    def read_and_change(name: str) -> StartRate | None:
        found = real(name)
        if row.starts == 1:
            row.starts = 2
            row.save()
        return found

    monkeypatch.setattr(rates.counting, "row_of", read_and_change)
    ask([1])
    assert state().rate == StartRate(30_000_000, 1)


def test_an_emptied_redis_costs_one_burst() -> None:
    """What started before is forgotten, so a burst may start again, and no more."""
    assert ask([1, 2, 3]).waits.keys() == {waiter(3)}
    Broker().client.delete(rate_key(NAME), rate_looks_key(NAME))
    assert ask([4, 5, 6]).waits.keys() == {waiter(6)}


@pytest.mark.parametrize("field", ["built", "interval", "burst", "until", "again", "refused", "changes"])
@pytest.mark.parametrize("value", ["", "x", "-1", "1e300", "9" * 30, "nan", "\xff"])
def test_odd_fields_stop_nothing(field: str, value: str) -> None:
    """At worst a burst more, or one burst that is not free now."""
    ask([1, 2])
    Broker().client.hset(rate_key(NAME), field, value)
    Broker().client.zadd(rate_looks_key(NAME), {"odd": float("inf"), "a\nb": float("-inf")})
    found = ask([3, 4, 5])
    assert all(at <= found.now_us + 5 * HOUR_US for at in found.waits.values())
    rates.forget_built(NAME)
    rates.place_anew(NAME, HOURLY)
    assert state().is_built


# --- tasks


def test_a_task_that_must_wait_is_scheduled_without_an_attempt() -> None:
    """Its lease is gone, its row stays QUEUED, and it comes due at its look."""
    for _ in range(4):
        hourly.enqueue()
    of = keeper()
    jobs = claim(of)
    assert len(jobs) == 2
    keys, client = QueueKeys(QUEUE), of.broker.client
    assert (client.zcard(keys.scheduled), client.zcard(keys.lease), client.hlen(keys.held(WORKER))) == (2, 2, 2)
    assert TaskRecord.objects.filter(state=TaskState.QUEUED, attempt=0).count() == 4
    (_, first), (_, second) = client.zrange(keys.due, 0, -1, withscores=True)
    assert second - first == 3_600_000
    assert [of.may_start(job) for job in jobs] == [True, True]
    assert claim(of) == []


def test_a_start_that_was_free_at_the_claim_may_be_taken_by_another() -> None:
    """The run does not begin, and nothing is lost."""
    for _ in range(2):
        hourly.enqueue()
    of = keeper()
    jobs = claim(of)
    assert len(jobs) == 2
    ask([1])
    assert [of.may_start(job) for job in jobs] == [True, False]
    assert of.broker.client.zcard(QueueKeys(QUEUE).scheduled) == 1
    assert jobs[1].phase is JobPhase.WAITING


def test_what_may_start_in_an_instant_is_held_without_a_slot() -> None:
    """It is not scheduled, is no work that waits for a slot, and is released when its turn has come."""
    Rate.objects.create(name=NAME, starts=20, seconds=1, burst=1)
    for _ in range(4):
        hourly.enqueue()
    of = keeper()
    first = claim(of)
    assert len(first) == 1
    assert (len(of.jobs.held), of.jobs.count) == (2, 0)
    assert of.broker.client.zcard(QueueKeys(QUEUE).scheduled) == 1
    assert 0 < of.until_release() <= 0.05
    assert set(of.jobs.held) == set(of.jobs.all)
    assert of.may_start(first[0])
    for _ in range(2):
        (job,) = released(of)
        # Whatever time this test has lost.
        move(1_000_000)
        assert of.may_start(job)
    assert not of.jobs.held


def test_what_may_start_within_two_intervals_is_held_too() -> None:
    """At five starts a second two are held for 0.2 and 0.4 s: claimed again, each would meet the next one there."""
    Rate.objects.create(name=NAME, starts=5, seconds=1, burst=1)
    for _ in range(4):
        hourly.enqueue()
    of = keeper()
    assert len(claim(of)) == 1
    assert (len(of.jobs.held), of.broker.client.zcard(QueueKeys(QUEUE).scheduled)) == (2, 1)
    assert 0.1 < of.until_release() <= 0.2


def test_nothing_is_held_for_long_or_in_quarantine() -> None:
    """With a start every second, all that waits is scheduled; in quarantine too, whatever the rate."""
    row = Rate.objects.create(name=NAME, starts=1, seconds=1, burst=1)
    for _ in range(4):
        hourly.enqueue()
    of = keeper()
    assert len(claim(of, 2)) == 1 and not of.jobs.held
    row.starts = 20
    row.save()
    alone = RateKeeper(of.broker, f"{WORKER}{ALONE}", Jobs())
    assert len(claim(alone)) <= 1 and not alone.jobs.held
    assert of.broker.client.zcard(QueueKeys(QUEUE).scheduled) >= 2


def released(of: RateKeeper) -> list[Job]:
    """Take the next one that is released, as if its time had come."""
    return of.jobs.take_held(min(of.jobs.held.values()))


def test_a_start_that_was_taken_too_long_ago_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process stood still after it had taken it; the task is claimed again at once."""
    hourly.enqueue()
    of = keeper()
    (job,) = claim(of)
    real = rates.ask

    def slow(*args: Any) -> Any:
        found = real(*args)
        time.sleep(0.3)
        return found

    monkeypatch.setattr(rates, "ask", slow)
    assert not of.may_start(job)
    monkeypatch.setattr(rates, "ask", real)
    assert of.broker.forward(QUEUE, "scheduled").moved == 1
    (job,) = claim(of)
    assert of.may_start(job)
    # Both were there again, but for the time that has passed since.
    move(2_000_000)
    assert ask([1]).waits == {}


def test_what_waits_for_a_slot_has_taken_nothing() -> None:
    """So a worker that stops gives nothing back."""
    hourly.enqueue()
    of = keeper()
    (job,) = claim(of)
    lifecycle.requeue(of.broker, WORKER, [job.run])
    assert ask([1, 2]).waits == {}


def test_a_cancelled_job_takes_no_start() -> None:
    """Nothing of it is called."""
    hourly.enqueue()
    of = keeper()
    (job,) = claim(of)
    job.is_cancelled = True
    assert of.may_start(job)
    assert ask([1, 2]).waits == {}


def test_while_redis_cannot_be_asked_nothing_starts(own_redis: EmbeddedRedis) -> None:
    """The job waits for the main thread, which requeues it."""
    hourly.enqueue()
    of = keeper()
    (job,) = claim(of)
    own_redis.stop()
    assert not of.may_start(job)
    assert list(of.jobs.waiting) == [job]


def test_the_process_of_an_isolated_run_asks_for_nothing() -> None:
    """The slot that waits for it has taken the start."""
    rate_tasks.hourly_isolated.enqueue()
    of = RateKeeper(Broker(), f"{WORKER}-isolated", Jobs())
    (job,) = claim(of)
    assert job.rate == ""
    (job,) = keeper().admit([job])
    assert job.rate == NAME


def test_names_come_from_the_arguments_as_they_are_now() -> None:
    """Each api has its own rate; one that cannot be named has that of its task."""
    call_api.enqueue("a")
    call_api.enqueue("b")
    of = keeper()
    assert sorted(job.rate for job in claim(of)) == ["api-a", "api-b"]
    record = TaskRecord(name=call_api.module_path, args=[], kwargs={"other": 1})
    assert name_of(call_api, record) == "tests.rate_tasks.call_api"


def test_a_change_has_those_that_wait_looked_at_by_the_new_numbers() -> None:
    """In their order; a task that was cancelled leaves no gap."""
    results = [hourly.enqueue() for _ in range(12)]
    of = keeper()
    for job in claim(of):
        assert of.may_start(job)
    client, keys = of.broker.client, QueueKeys(QUEUE)
    results[4].cancel()
    assert state().waiting == 10
    Rate.objects.create(name=NAME, starts=10, seconds=1, burst=1)
    assert rates.changed_names() == {NAME}
    before = client.zrange(keys.due, 0, -1)
    assert rates.place_anew(NAME, HOURLY) == rates.Placed(9, 1)
    assert rates.changed_names() == set()
    assert client.zrange(keys.due, 0, -1) == before
    moments = [score for _, score in client.zrange(keys.due, 0, -1, withscores=True)]
    assert {later - first for first, later in pairwise(moments)} <= {99, 100, 101}
    assert moments[-1] < (time.time() + 2) * 1000
    assert state().waiting == 9
    waits = waiter_of(TaskRecord.objects.get(pk=results[5].id))
    assert read("producer", rates.reading_look_at(NAME, waits)) == pytest.approx(moments[2] / 1000 + 0.05, abs=0.002)


def test_a_change_that_never_reached_redis_is_found() -> None:
    """The leader compares the rows with what Redis counts by."""
    ask([1, 2, 3])
    Rate.objects.bulk_create([Rate(name=NAME, starts=5, seconds=1)])
    rates.check_rows()
    assert rates.changed_names() == {NAME}
    rates.place_anew(NAME, HOURLY)
    assert state().rate == StartRate(200_000, 1)
    Rate.objects.all().delete()
    rates.place_anew(NAME, None)
    rates.check_rows()
    assert rates.changed_names() == set()

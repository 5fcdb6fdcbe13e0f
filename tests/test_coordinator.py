"""The coordinator: one holder at a time, whatever dies, freezes, forks or goes away."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_asyncq import coordinator as module
from django_asyncq.broker import scripts
from django_asyncq.coordinator import Owner, StartupTaskCoordinator
from django_asyncq.exceptions import BrokerUnavailable, InvalidOption
from django_asyncq.testing import EmbeddedRedis

from .proxy import Proxy
from .workers import ROOT, wait_until

TTL = 30
LOCK_SCRIPTS = ("lock_acquire", "lock_renew", "lock_release")

CONTENDER = """
import json, os, sys
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from django_asyncq.coordinator import StartupTaskCoordinator

options = json.loads(sys.argv[1])
client = redis.Redis.from_url(options.pop("url"), protocol=2, retry=Retry(NoBackoff(), 0), socket_timeout=5)
coordinator = StartupTaskCoordinator(client, **options)
for line in sys.stdin:
    verb, *arguments = json.loads(line)
    if verb == "fork":
        # The child keeps all it inherited and outlives its parent, until the input ends.
        child = os.fork()
        if child == 0:
            os.read(int(arguments[0]), 1)
            os._exit(0)
        answer = child
    else:
        answer = getattr(coordinator, verb)(*arguments)
    print(json.dumps(answer), flush=True)
"""

RACE = """
import json, multiprocessing, sys
import redis
from django_asyncq.coordinator import StartupTaskCoordinator

def contend(options, name, start, finish, answers):
    client = redis.Redis.from_url(options["url"], protocol=2)
    contender = StartupTaskCoordinator(client, single_instance=options["single_instance"])
    start.wait(30)
    answers.put(contender.acquire(name, 30))
    finish.wait(30)  # nobody has died before all have asked

if __name__ == "__main__":
    options, name, count = json.loads(sys.argv[1])
    context = multiprocessing.get_context("fork")
    start, finish, answers = context.Barrier(count), context.Event(), context.Queue()
    processes = [
        context.Process(target=contend, args=(options, name, start, finish, answers)) for _ in range(count)
    ]
    for process in processes:
        process.start()
    print(json.dumps([answers.get(timeout=30) for _ in processes]))
    finish.set()
    for process in processes:
        process.join()
"""


class Contender:
    """A process with a coordinator, told what to do line by line."""

    def __init__(self, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONTENDER, json.dumps(options)],
            cwd=ROOT,
            env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def ask(self, verb: str, *arguments: Any) -> Any:
        """Have it call a method of its coordinator; return the answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([verb, *arguments]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        """Kill it, and wait until it is gone."""
        self.process.kill()
        self.close()

    def close(self) -> None:
        """Kill what may be stopped or running, and tidy up."""
        self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def name(key_prefix: str) -> str:
    """A lock of this test alone."""
    return f"{key_prefix}:startup"


@pytest.fixture
def url() -> str:
    """The suite's server."""
    return os.environ["ASYNCQ_TEST_REDIS_URL"]


@pytest.fixture
def contender() -> Iterator[Callable[..., Contender]]:
    """Start processes; all are ended with the test."""
    started: list[Contender] = []

    def start(**options: Any) -> Contender:
        started.append(Contender(**options))
        return started[-1]

    yield start
    for process in started:
        process.close()


@pytest.fixture
def connect() -> Iterator[Callable[[str], redis.Redis]]:
    """Build clients that repeat nothing and wait half a second at most."""
    clients: list[redis.Redis] = []

    def build(url: str) -> redis.Redis:
        options: dict[str, Any] = {"socket_timeout": 0.5, "socket_connect_timeout": 0.5}
        clients.append(redis.Redis.from_url(url, protocol=2, retry=Retry(NoBackoff(), 0), **options))
        return clients[-1]

    yield build
    for client in clients:
        client.close()


@pytest.fixture
def no_redis() -> Iterator[str]:
    """An address where nothing listens, and nothing will."""
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"redis://127.0.0.1:{taken.getsockname()[1]}/0"


def value_of(client: redis.Redis, name: str) -> str:
    """What is written in a lock; "" for none."""
    return (client.get(f"task_lock:{name}") or b"").decode()


# --- taking


@pytest.mark.parametrize("single_instance", [True, False])
def test_twenty_at_once_and_one_has_it(url: str, name: str, single_instance: bool) -> None:
    """Of processes that ask at one instant exactly one is told yes."""
    job = json.dumps([{"url": url, "single_instance": single_instance}, name, 20])
    done = subprocess.run(
        [sys.executable, "-c", RACE, job],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answers = json.loads(done.stdout)
    assert (len(answers), answers.count(True)) == (20, 1)


def test_acquiring_again_is_a_yes_and_prolongs(redis_client: redis.Redis, name: str) -> None:
    """What one holds one may take again; another may not."""
    holder = StartupTaskCoordinator()
    assert holder.acquire(name, 5)
    assert holder.acquire(name, TTL)
    assert redis_client.pttl(f"task_lock:{name}") > 5000
    assert not StartupTaskCoordinator().acquire(name, TTL)


def test_value_names_the_owner(redis_client: redis.Redis, name: str) -> None:
    """Host, boot, pid and start time of the holder stand in the lock."""
    StartupTaskCoordinator().acquire(name, TTL)
    owner = Owner.read(value_of(redis_client, name))
    assert owner is not None
    assert (owner.host, owner.pid) == (socket.gethostname(), os.getpid())
    assert owner.boot == module.BOOT_ID.read_text().strip()
    assert owner.start == Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[19]


@pytest.mark.parametrize(
    ("single_instance", "environment", "expected"),
    [(None, "", True), (None, "false", False), (True, "no", True)],
)
def test_mode_comes_from_the_argument_or_the_settings(
    redis_client: redis.Redis,
    name: str,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
    single_instance: bool | None,
    environment: str,
    expected: bool,
) -> None:
    """Single-instance is the default; SINGLE_INSTANCE_MODE and the argument say otherwise."""
    monkeypatch.setenv("SINGLE_INSTANCE_MODE", environment)
    settings.ASYNCQ = {**settings.ASYNCQ}
    mine = Owner.of_this_process(socket.gethostname())
    redis_client.set(f"task_lock:{name}", mine._replace(start="1").value(), px=60_000)
    assert StartupTaskCoordinator(single_instance=single_instance).acquire(name, TTL) is expected


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf")])
def test_refuses_a_ttl_that_is_none(name: str, ttl: float) -> None:
    """A lock without an end, or without a life, is a mistake of the caller."""
    with pytest.raises(InvalidOption):
        StartupTaskCoordinator().acquire(name, ttl)


def test_works_with_a_client_that_decodes(url: str, name: str) -> None:
    """A project's own client may have decode_responses set."""
    with redis.Redis.from_url(url, protocol=2, decode_responses=True) as client:
        holder = StartupTaskCoordinator(client)
        assert holder.acquire(name, TTL)
        assert not StartupTaskCoordinator(client).acquire(name, TTL)
        assert holder.renew(name)


# --- death and life of holders


def test_killed_holder_is_succeeded_at_once_in_single_instance_mode(
    redis_client: redis.Redis, url: str, name: str, contender: Callable[..., Contender]
) -> None:
    """The owner is provably dead, so its long TTL does not matter."""
    holder = contender(url=url, single_instance=True)
    assert holder.ask("acquire", name, 600)
    holder.kill()
    successor = StartupTaskCoordinator(single_instance=True)
    assert successor.acquire(name, TTL)
    assert 0 < redis_client.pttl(f"task_lock:{name}") <= TTL * 1000


def test_zombie_counts_as_dead(url: str, name: str, contender: Callable[..., Contender]) -> None:
    """A killed holder whose parent has not waited for it, as in containers without init, is dead."""
    holder = contender(url=url, single_instance=True)
    assert holder.ask("acquire", name, 600)
    os.kill(holder.pid, signal.SIGKILL)
    stat = Path(f"/proc/{holder.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "a zombie")
    assert StartupTaskCoordinator(single_instance=True).acquire(name, TTL)


def test_killed_holder_is_succeeded_after_its_ttl_in_multi_instance_mode(
    redis_client: redis.Redis, url: str, name: str, contender: Callable[..., Contender]
) -> None:
    """Nobody judges an owner dead there; the TTL ends its lock."""
    holder = contender(url=url, single_instance=False)
    assert holder.ask("acquire", name, 600)
    holder.kill()
    successor = StartupTaskCoordinator(single_instance=False)
    assert not any(successor.acquire(name, TTL) for _ in range(5))
    redis_client.pexpire(f"task_lock:{name}", 1000)  # all but its last second is over
    wait_until(lambda: successor.acquire(name, TTL), "the successor", 5)


@pytest.mark.parametrize("single_instance", [True, False])
def test_late_starter_never_takes_a_live_lock(
    redis_client: redis.Redis, url: str, name: str, single_instance: bool, contender: Callable[..., Contender]
) -> None:
    """The holder lives, so its lock stays as it is, whatever its age and whoever starts."""
    holder = contender(url=url, single_instance=single_instance)
    assert holder.ask("acquire", name, TTL)
    written = value_of(redis_client, name)
    redis_client.persist(f"task_lock:{name}")
    for _ in range(5):
        assert not StartupTaskCoordinator(single_instance=single_instance).acquire(name, TTL)
    assert value_of(redis_client, name) == written
    assert redis_client.pttl(f"task_lock:{name}") == -1
    assert holder.ask("renew", name)


def test_frozen_holder_loses_and_notices(
    redis_client: redis.Redis, url: str, name: str, contender: Callable[..., Contender]
) -> None:
    """Stopped past its TTL and woken: it does not trust the lock, cannot renew it, and takes nothing away."""
    holder = contender(url=url, single_instance=True)
    assert holder.ask("acquire", name, 2)
    os.kill(holder.pid, signal.SIGSTOP)
    successor = StartupTaskCoordinator(single_instance=True)
    assert not successor.acquire(name, TTL), "a stopped process is alive"
    wait_until(lambda: successor.acquire(name, TTL), "the successor", 5)
    written = value_of(redis_client, name)
    os.kill(holder.pid, signal.SIGCONT)
    assert holder.ask("is_held", name) is False
    assert holder.ask("renew", name) is False
    holder.ask("release", name)
    assert value_of(redis_client, name) == written
    assert successor.is_held(name)


DEAD = {"boot": "another", "start": "1", "pid": 2**22 + 7}


@pytest.mark.parametrize("change", ["boot", "start", "pid"])
def test_takes_over_from_an_owner_that_is_provably_dead(redis_client: redis.Redis, name: str, change: str) -> None:
    """Rebooted, pid given to another process (a restarted container's too), or pid gone."""
    dead = Owner.of_this_process("shop-1")._replace(**{change: DEAD[change]})
    redis_client.set(f"task_lock:{name}", dead.value(), px=60_000)
    assert not StartupTaskCoordinator(single_instance=False, instance="shop-1").acquire(name, TTL)
    assert not StartupTaskCoordinator(single_instance=True, instance="shop-2").acquire(name, TTL)
    assert StartupTaskCoordinator(single_instance=True, instance="shop-1").acquire(name, TTL)


@pytest.mark.parametrize("value", ["", "a token", "a|b|c", "t|h|b|x|1", "t|h|b|0|1", "t|h|b|-1|1", "\x00|" * 4])
def test_value_of_another_program_is_never_taken(redis_client: redis.Redis, name: str, value: str) -> None:
    """What cannot be read cannot be judged dead."""
    redis_client.set(f"task_lock:{name}", value, px=60_000)
    assert not StartupTaskCoordinator(single_instance=True).acquire(name, TTL)
    assert value_of(redis_client, name) == value


def test_doubt_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden by /proc, unknown start time, a pid that is no pid, another host: all count as alive."""
    mine = Owner.of_this_process("here")
    assert not mine.is_provably_dead(mine)
    assert not mine._replace(start="").is_provably_dead(mine)
    assert not mine._replace(boot="", pid=2**40).is_provably_dead(mine)
    assert not mine._replace(boot="other", host="there").is_provably_dead(mine)
    monkeypatch.setattr(module, "_process", lambda pid: (False, ""))
    assert not mine._replace(start="1").is_provably_dead(mine)


def test_take_over_is_refused_when_the_lock_changed_hands(
    redis_client: redis.Redis, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the judgement and the take-over another was quicker: its lock stays."""
    dead = Owner.of_this_process("here")._replace(pid=DEAD["pid"])
    redis_client.set(f"task_lock:{name}", dead.value(), px=60_000)
    quicker = StartupTaskCoordinator(single_instance=True, instance="here")
    judge = Owner.is_provably_dead

    def judge_slowly(owner: Owner, witness: Owner) -> bool:
        monkeypatch.setattr(Owner, "is_provably_dead", judge)
        assert quicker.acquire(name, TTL)
        return judge(owner, witness)

    monkeypatch.setattr(Owner, "is_provably_dead", judge_slowly)
    assert not StartupTaskCoordinator(single_instance=True, instance="here").acquire(name, TTL)
    assert quicker.renew(name)


# --- scripts


def test_each_reply_word_and_no_write_on_refusal(redis_client: redis.Redis, name: str) -> None:
    """held, taken, renewed, released, stale; a refusal leaves value and TTL as they were."""
    key = f"task_lock:{name}"
    redis_client.set(key, "other")
    refusals = [
        scripts.run("lock_acquire", redis_client, [key], ["mine", 1000, ""]),
        scripts.run("lock_acquire", redis_client, [key], ["mine", 1000, "dead"]),
        scripts.run("lock_renew", redis_client, [key], ["mine", 1000]),
        scripts.run("lock_release", redis_client, [key], ["mine"]),
    ]
    assert refusals == [[b"taken", b"other"], [b"taken", b"other"], b"stale", b"stale"]
    assert (redis_client.get(key), redis_client.pttl(key)) == (b"other", -1)
    assert scripts.run("lock_acquire", redis_client, [key], ["mine", 9000, "other"]) == [b"held"]
    assert scripts.run("lock_acquire", redis_client, [key], ["mine", 1000, ""]) == [b"held"]
    assert scripts.run("lock_renew", redis_client, [key], ["mine", 9000]) == b"renewed"
    assert 1000 < redis_client.pttl(key) <= 9000
    assert scripts.run("lock_release", redis_client, [key], ["mine"]) == b"released"
    assert scripts.run("lock_renew", redis_client, [key], ["mine", 9000]) == b"stale"
    assert redis_client.exists(key) == 0


# --- trust, renewal, release


def test_trust_ends_before_the_ttl_counted_from_before_the_call(name: str) -> None:
    """The last tenth of the TTL is not trusted."""
    clock = Clock()
    holder = StartupTaskCoordinator(clock=clock)
    assert holder.acquire(name, 10)
    clock.now += 8.9
    assert holder.is_held(name)
    clock.now += 0.2
    assert not holder.is_held(name)


def test_slow_reply_uses_up_trust(name: str, redis_client: redis.Redis) -> None:
    """A yes that took longer than the TTL is worth nothing."""
    clock = Clock()

    class SlowClient:
        def evalsha(self, *arguments: Any) -> Any:
            clock.now += 11
            return redis_client.eval(scripts.script("lock_acquire").text, *arguments[1:])

    holder = StartupTaskCoordinator(SlowClient(), clock=clock)
    assert holder.acquire(name, 10) is False
    assert not holder.is_held(name)


def test_tick_renews_at_a_third(redis_client: redis.Redis, name: str) -> None:
    """Before a third of the TTL nothing is sent; after it the TTL starts anew."""
    clock = Clock()
    holder = StartupTaskCoordinator(clock=clock)
    holder.acquire(name, TTL)
    redis_client.pexpire(f"task_lock:{name}", 5000)
    clock.now += 9
    assert holder.tick() == []
    assert redis_client.pttl(f"task_lock:{name}") <= 5000
    assert holder.tick(now=clock.now + 2) == []
    assert redis_client.pttl(f"task_lock:{name}") > 5000
    clock.now += 26
    assert holder.is_held(name), "counted from the renewal"


def test_tick_tells_a_lost_lock_once(redis_client: redis.Redis, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The lock vanished (an emptied server): told once, no longer held, and free to be taken again."""
    clock = Clock()
    holder = StartupTaskCoordinator(clock=clock)
    holder.acquire(name, TTL)
    redis_client.delete(f"task_lock:{name}")
    clock.now += 11
    assert holder.tick() == [name]
    assert holder.tick() == []
    assert not holder.is_held(name)
    assert "is lost" in caplog.text
    assert holder.acquire(name, TTL)


def test_refused_acquire_ends_trust_in_an_older_one(redis_client: redis.Redis, name: str) -> None:
    """Redis says that another has it; what this process believed does not count."""
    holder = StartupTaskCoordinator()
    holder.acquire(name, TTL)
    redis_client.set(f"task_lock:{name}", "another")
    assert not holder.acquire(name, TTL)
    assert not holder.is_held(name)


def test_release_by_another_changes_nothing(redis_client: redis.Redis, name: str) -> None:
    """Neither one that never held it nor one that lost it can give it back."""
    loser, holder = StartupTaskCoordinator(), StartupTaskCoordinator()
    loser.acquire(name, TTL)
    redis_client.delete(f"task_lock:{name}")
    holder.acquire(name, TTL)
    written = value_of(redis_client, name)
    loser.release(name)
    StartupTaskCoordinator().release(name)
    assert value_of(redis_client, name) == written
    holder.release(name)
    assert value_of(redis_client, name) == ""
    assert not holder.is_held(name)


def test_hold_gives_back_what_it_took_and_nothing_else(redis_client: redis.Redis, name: str) -> None:
    """An inner hold of what is held already leaves it to the outer one; an error gives it back too."""
    holder, other = StartupTaskCoordinator(), StartupTaskCoordinator()
    with pytest.raises(ZeroDivisionError), holder.hold(name, TTL) as is_held:
        assert is_held
        with other.hold(name) as others:
            assert not others
        with holder.hold(name) as again:
            assert again
        assert holder.is_held(name)
        raise ZeroDivisionError
    assert value_of(redis_client, name) == ""


def test_async_twins_do_the_same(redis_client: redis.Redis, name: str) -> None:
    """aacquire, arenew, arelease and ahold wrap the plain ones."""

    async def use() -> None:
        holder, other = StartupTaskCoordinator(), StartupTaskCoordinator()
        assert await holder.aacquire(name, TTL)
        assert await holder.arenew(name)
        async with other.ahold(name, TTL) as is_held:
            assert not is_held
        await holder.arelease(name)
        async with other.ahold(name) as is_held:
            assert is_held

    asyncio.run(use())
    assert value_of(redis_client, name) == ""


def test_cancelled_ahold_leaves_no_lock(redis_client: redis.Redis, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled while the thread was taking it: it is given back all the same."""
    holder = StartupTaskCoordinator()
    begun, go_on = threading.Event(), threading.Event()
    acquire = holder.acquire

    def acquire_slowly(name: str, ttl: float) -> bool:
        begun.set()
        go_on.wait(10)
        return acquire(name, ttl)

    monkeypatch.setattr(holder, "acquire", acquire_slowly)

    async def use() -> None:
        async def body() -> None:
            async with holder.ahold(name, TTL):
                pytest.fail("it was cancelled before")

        task = asyncio.create_task(body())
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(use())
    assert value_of(redis_client, name) == ""
    assert not holder.is_held(name)


def test_release_during_a_renewal_is_final(redis_client: redis.Redis, name: str) -> None:
    """A renewal in flight in one thread cannot bring back what another gives up."""
    sent, answered = threading.Event(), threading.Event()

    class SlowClient:
        def evalsha(self, digest: str, *arguments: Any) -> Any:
            text = next(one.text for one in map(scripts.script, LOCK_SCRIPTS) if one.digest == digest)
            reply = redis_client.eval(text, *arguments)
            if digest == scripts.script("lock_renew").digest:
                sent.set()
                answered.wait(10)
            return reply

    holder = StartupTaskCoordinator(SlowClient())
    assert holder.acquire(name, TTL)
    renewal = threading.Thread(target=holder.renew, args=(name,))
    renewal.start()
    sent.wait(10)
    release = threading.Thread(target=holder.release, args=(name,))
    release.start()
    release.join(0.2)  # it waits for the renewal; one that did not would be through by now
    answered.set()
    renewal.join(10)
    release.join(10)
    assert not holder.is_held(name)
    assert value_of(redis_client, name) == ""


# --- Redis away


def test_lost_reply_on_acquire_is_held_by_the_asker(
    own_redis: EmbeddedRedis, name: str, connect: Callable[[str], redis.Redis]
) -> None:
    """The lock had landed: the asker has it, in Redis, at its first acquire too."""
    direct = connect(own_redis.url)
    with Proxy(("127.0.0.1", own_redis.port)) as proxy:
        client = connect(proxy.url())
        asker = StartupTaskCoordinator(client)
        # Else the reply that is lost would be the greeting's, or that the script is not known.
        client.ping()
        direct.script_load(scripts.script("lock_acquire").text)
        proxy.drop = 1
        assert asker.acquire(name, TTL)
        assert proxy.drop == 0
    assert direct.info("commandstats")["cmdstat_evalsha"]["calls"] == 2, "both have landed"
    assert asker.is_held(name)
    assert not StartupTaskCoordinator(direct).acquire(name, TTL)


def database_of(client: redis.Redis) -> int:
    """The number of a client's database."""
    return int(client.connection_pool.connection_kwargs.get("db", 0))


def test_redis_away_later_is_a_no_and_trust_ends_in_time(
    redis_client: redis.Redis,
    redis_proxy: Proxy,
    name: str,
    connect: Callable[[str], redis.Redis],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No file is locked then, the outage is logged once, and the lock is trusted until its own time only."""
    clock = Clock()
    client = connect(redis_proxy.url(database_of(redis_client)))
    holder = StartupTaskCoordinator(client, tmp_path / "locks", clock=clock)
    assert holder.acquire(name, TTL)
    redis_proxy.close()
    clock.now += 11
    assert holder.tick() == []
    assert holder.renew(name) is False
    assert holder.acquire(f"{name}2", TTL) is False
    assert holder.is_held(name), "until its time"
    clock.now += 17
    assert not holder.is_held(name)
    assert holder.tick() == [name]
    assert holder.tick() == []
    assert sum("away" in record.message for record in caplog.records) == 1
    assert not (tmp_path / "locks").exists()


def test_never_switches_from_redis_to_files_or_back(
    own_redis: EmbeddedRedis, name: str, connect: Callable[[str], redis.Redis], tmp_path: Path
) -> None:
    """What was chosen at the first acquire stays, whether Redis goes or comes."""
    with_redis = StartupTaskCoordinator(connect(own_redis.url), tmp_path / "first")
    assert with_redis.acquire(name, TTL)
    own_redis.kill()
    with_files = StartupTaskCoordinator(connect(own_redis.url), tmp_path / "second")
    assert with_files.acquire(name, TTL)
    assert with_redis.acquire(f"{name}2", TTL) is False
    own_redis.restart()
    assert with_files.acquire(f"{name}3", TTL)
    assert with_redis.renew(name) is False, "the emptied server does not know it"
    assert with_redis.acquire(f"{name}4", TTL)
    with connect(own_redis.url) as client:
        assert list(client.scan_iter("task_lock:*")) == [f"task_lock:{name}4".encode()]
    assert not (tmp_path / "first").exists()
    assert len(list((tmp_path / "second").iterdir())) == 2


# --- forks


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_child_of_a_fork_holds_nothing(redis_client: redis.Redis, name: str) -> None:
    """It neither trusts, renews, releases nor, as another owner, takes the parent's lock."""
    holder = StartupTaskCoordinator(single_instance=True)
    assert holder.acquire(name, TTL)
    redis_client.pexpire(f"task_lock:{name}", 5000)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            answers = [
                holder.is_held(name),
                holder.renew(name),
                holder.acquire(name, TTL),
                bool(holder.tick()),
            ]
            holder.release(name)
            code = 1 if any(answers) else 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert 0 < redis_client.pttl(f"task_lock:{name}") <= 5000
    assert holder.renew(name)


def test_pid_is_compared_where_python_was_not_told_of_the_fork(
    redis_client: redis.Redis, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork by a C library runs no hooks; the pid tells."""
    holder = StartupTaskCoordinator()
    assert holder.acquire(name, TTL)
    written = value_of(redis_client, name)
    redis_client.pexpire(f"task_lock:{name}", 5000)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        assert not holder.is_held(name)
        assert not holder.renew(name)
        holder.release(name)
    assert value_of(redis_client, name) == written
    assert redis_client.pttl(f"task_lock:{name}") <= 5000
    assert holder.is_held(name)


def test_forked_child_does_not_keep_a_file_lock_alive(
    no_redis: str,
    name: str,
    contender: Callable[..., Contender],
    connect: Callable[[str], redis.Redis],
    tmp_path: Path,
) -> None:
    """The child outlives its killed parent and has closed the lock's file."""
    holder = contender(url=no_redis, lock_dir=str(tmp_path))
    assert holder.ask("acquire", name, TTL)
    child = holder.ask("fork", 0)
    holder.process.kill()
    holder.process.wait(10)
    os.kill(child, 0)  # it lives
    successor = StartupTaskCoordinator(connect(no_redis), tmp_path)
    wait_until(lambda: successor.acquire(name, TTL), "the successor", 5)


# --- files


def test_file_lock_excludes_other_processes_until_death(
    no_redis: str,
    name: str,
    contender: Callable[..., Contender],
    connect: Callable[[str], redis.Redis],
    tmp_path: Path,
) -> None:
    """Without Redis at start: a second process is refused; a killed holder's lock is free; the file stays."""
    folder = tmp_path / "made" / "here"
    holder = contender(url=no_redis, lock_dir=str(folder))
    assert holder.ask("acquire", name, TTL)
    (path,) = folder.iterdir()
    inode = path.stat().st_ino
    owner = Owner.read(path.read_text().strip())
    assert owner is not None and owner.pid == holder.pid and owner.start
    second = StartupTaskCoordinator(connect(no_redis), folder)
    assert not second.acquire(name, TTL)
    assert not second.is_held(name)
    holder.kill()
    assert second.acquire(name, TTL)
    assert second.is_held(name) and second.renew(name) and second.acquire(name, TTL)
    assert second.tick(now=10.0**9) == []
    second.release(name)
    assert not second.is_held(name)
    assert path.stat().st_ino == inode
    third = StartupTaskCoordinator(connect(no_redis), folder)
    assert third.acquire(name, TTL)


def test_file_lock_survives_a_close_of_the_same_file(
    no_redis: str,
    name: str,
    contender: Callable[..., Contender],
    connect: Callable[[str], redis.Redis],
    tmp_path: Path,
) -> None:
    """POSIX record locks would be dropped here; flock is not."""
    holder = StartupTaskCoordinator(connect(no_redis), tmp_path)
    assert holder.acquire(name, TTL)
    (path,) = tmp_path.iterdir()
    path.open("r+").close()
    assert contender(url=no_redis, lock_dir=str(tmp_path)).ask("acquire", name, TTL) is False


def test_lock_file_replaced_meanwhile_is_not_trusted(
    no_redis: str,
    name: str,
    connect: Callable[[str], redis.Redis],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody unlinked the file between its opening and its locking: the one that is there now is locked."""
    holder = StartupTaskCoordinator(connect(no_redis), tmp_path)
    path = tmp_path / module._file_name(name)
    flock = module.fcntl.flock

    def unlink_first(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(module.fcntl, "flock", flock)
        path.unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(module.fcntl, "flock", unlink_first)
    assert holder.acquire(name, TTL)
    assert path.exists()
    assert not StartupTaskCoordinator(connect(no_redis), tmp_path).acquire(name, TTL)


def test_any_name_makes_a_file_of_its_own() -> None:
    """No name leaves the folder, and no two share a file."""
    names = [
        "upkeep",
        "a/b",
        "a_b",
        "../../etc/passwd",
        "..",
        ".",
        "ä",
        "x" * 5000,
        "x" * 4999,
        "a\x00b",
        "a\nb",
    ]
    files = [module._file_name(name) for name in names]
    assert len(set(files)) == len(names)
    assert all("/" not in file and "\x00" not in file and len(file) < 150 for file in files)
    assert files[0] == "upkeep.lock"


def test_folder_that_cannot_be_used_is_told_and_chooses_nothing(
    own_redis: EmbeddedRedis, name: str, connect: Callable[[str], redis.Redis], tmp_path: Path
) -> None:
    """Neither Redis nor files: an error that names the remedy; Redis may still be chosen later."""
    (tmp_path / "file").touch()
    coordinator = StartupTaskCoordinator(connect(own_redis.url), tmp_path / "file" / "locks")
    own_redis.kill()
    with pytest.raises(BrokerUnavailable, match="TASK_LOCK_DIR"):
        coordinator.acquire(name, TTL)
    own_redis.restart()
    assert coordinator.acquire(name, TTL)


def test_platform_without_flock_is_told(
    no_redis: str,
    name: str,
    connect: Callable[[str], redis.Redis],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On Windows there is no file lock, and the error says so."""
    monkeypatch.setattr(module, "fcntl", None)
    with pytest.raises(BrokerUnavailable, match="does not support file locks"):
        StartupTaskCoordinator(connect(no_redis), tmp_path).acquire(name, TTL)

"""The coordinator: one holder at a time, whatever dies, freezes, forks or goes away."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from asgiref.sync import sync_to_async
from django.db import connections
from django.utils import timezone
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_asyncq.broker import scripts
from django_asyncq.exceptions import BrokerUnavailable, InvalidOption, LockLost
from django_asyncq.leadership import fencing, lock_files, owner
from django_asyncq.leadership.coordinator import StartupTaskCoordinator
from django_asyncq.leadership.hold import trust_clock
from django_asyncq.leadership.owner import Owner
from django_asyncq.models import StartupRun
from django_asyncq.testing import EmbeddedRedis

from .clock import Clock
from .proxy import Proxy
from .workers import ROOT, environment, wait_until

TTL = 30
LOCK_SCRIPTS = ("lock_acquire", "lock_renew", "lock_release")

CONTENDER = """
import json, os, socket, sys
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

options = json.loads(sys.argv[1])
if host := options.pop("host", None):
    socket.gethostname = lambda: host
if options.pop("orm", False):
    import django
    django.setup()
from django_asyncq.leadership.coordinator import StartupTaskCoordinator

client = redis.Redis.from_url(options.pop("url"), protocol=2, retry=Retry(NoBackoff(), 0), socket_timeout=5)
coordinator = StartupTaskCoordinator(client, **options)

def fork(descriptor):
    # The child keeps all it inherited and outlives its parent, until the input ends.
    child = os.fork()
    if child == 0:
        os.read(descriptor, 1)
        os._exit(0)
    return child

def write(name, term=None):
    # Write a row, fenced by the hold's term or by one that was remembered.
    from django.utils import timezone
    from django_asyncq.leadership import fencing
    from django_asyncq.exceptions import LockLost
    from django_asyncq.models import StartupRun
    try:
        number = coordinator.term(name) if term is None else term
        with coordinator.fenced(name) if term is None else fencing.fenced(name, term):
            StartupRun.objects.create(name=name, holder=str(os.getpid()), term=number, begun_at=timezone.now())
    except LockLost as error:
        return type(error).__name__
    return number

for line in sys.stdin:
    verb, *arguments = json.loads(line)
    function = {"fork": fork, "write": write}.get(verb) or getattr(coordinator, verb)
    print(json.dumps(function(*arguments)), flush=True)
"""

RACE = """
import json, multiprocessing, sys
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from django_asyncq.leadership.coordinator import StartupTaskCoordinator

def contend(options, name, barrier, winners):
    client = redis.Redis.from_url(options.pop("url"), protocol=2, retry=Retry(NoBackoff(), 0))
    contender = StartupTaskCoordinator(client, **options)
    for number in range(len(winners)):
        barrier.wait(60)
        if contender.acquire(f"{name}-{number}", 60):
            with winners.get_lock():
                winners[number] += 1
    barrier.wait(60)  # nobody has died before all have asked

if __name__ == "__main__":
    options, name, count, rounds = json.loads(sys.argv[1])
    context = multiprocessing.get_context("fork")
    barrier, winners = context.Barrier(count), context.Array("i", rounds)
    processes = [context.Process(target=contend, args=(options, name, barrier, winners)) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print(json.dumps([[process.exitcode for process in processes], list(winners)]))
"""


class Contender:
    """A process with a coordinator, told what to do line by line. orm: it needs this test's database too."""

    def __init__(self, **options: Any) -> None:
        variables = environment() if options.get("orm") else {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONTENDER, json.dumps(options)],
            cwd=ROOT,
            env=variables,
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


def lock_path(folder: Path, name: str) -> Path:
    """The file of a lock."""
    return folder / lock_files.file_name(name)


def open_lock_files(folder: Path) -> int:
    """How many descriptors of lock files in a folder this process has."""
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(link.startswith(f"{folder}/") for link in links)


def value_of(client: redis.Redis, name: str) -> str:
    """What is written in a lock; "" for none."""
    return (client.get(f"task_lock:{name}") or b"").decode()


# --- taking


@pytest.mark.parametrize("kind", ["single-instance", "multi-instance", "files"])
def test_fifty_at_once_and_one_has_it_in_each_of_a_hundred_rounds(
    url: str, no_redis: str, name: str, kind: str, tmp_path: Path
) -> None:
    """Of processes that ask at one instant exactly one is told yes."""
    options = {
        "url": no_redis if kind == "files" else url,
        "single_instance": kind != "multi-instance",
        "lock_dir": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", RACE, json.dumps([options, name, 50, 100])],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # fifty warnings that Redis is away
        text=True,
        timeout=100,
        check=True,
    )
    assert json.loads(done.stdout) == [[0] * 50, [1] * 100]


def test_acquiring_again_is_a_yes_and_prolongs(redis_client: redis.Redis, name: str) -> None:
    """What one holds one may take again; another may not."""
    holder = StartupTaskCoordinator()
    assert holder.acquire(name, 5)
    assert holder.acquire(name, TTL)
    assert redis_client.pttl(f"task_lock:{name}") > 5000
    assert not StartupTaskCoordinator().acquire(name, TTL)


@pytest.mark.parametrize("single_instance", [True, False])
def test_value_names_the_owner(redis_client: redis.Redis, name: str, tmp_path: Path, single_instance: bool) -> None:
    """Boot, time of the lock file, host and pid of the holder stand in the lock; no file in multi-instance mode."""
    StartupTaskCoordinator(None, tmp_path, single_instance=single_instance).acquire(name, TTL)
    holder = Owner.read(value_of(redis_client, name))
    assert holder is not None
    assert (holder.host, holder.pid) == (socket.gethostname(), os.getpid())
    assert holder.boot == owner.BOOT_ID.read_text().strip()
    if not single_instance:
        assert (holder.written, list(tmp_path.iterdir())) == ("", [])
        return
    path = lock_path(tmp_path, name)
    assert holder.written == str(path.stat().st_ctime_ns)
    assert Owner.read(path.read_text().strip()) == holder._replace(written="")


@pytest.mark.parametrize(
    ("single_instance", "in_environment", "expected"),
    [(None, "", True), (None, "false", False), (True, "no", True)],
)
def test_mode_comes_from_the_argument_or_the_settings(
    redis_client: redis.Redis,
    name: str,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    single_instance: bool | None,
    in_environment: str,
    expected: bool,
) -> None:
    """Single-instance is the default; SINGLE_INSTANCE_MODE and the argument say otherwise."""
    monkeypatch.setenv("SINGLE_INSTANCE_MODE", in_environment)
    settings.ASYNCQ = {**settings.ASYNCQ}
    assert StartupTaskCoordinator(None, tmp_path, single_instance=single_instance).acquire(name, TTL)
    assert lock_path(tmp_path, name).exists() is expected


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
    redis_client: redis.Redis, url: str, name: str, contender: Callable[..., Contender], tmp_path: Path
) -> None:
    """Its lock file is free, so its long TTL does not matter; nor does its host name, as with another container."""
    holder = contender(url=url, lock_dir=str(tmp_path), single_instance=True, host="container-1")
    assert holder.ask("acquire", name, 600)
    successor = StartupTaskCoordinator(None, tmp_path, single_instance=True)
    assert not successor.acquire(name, TTL)
    holder.kill()
    assert successor.acquire(name, TTL)
    assert 0 < redis_client.pttl(f"task_lock:{name}") <= TTL * 1000
    third = contender(url=url, lock_dir=str(tmp_path), single_instance=True, host="container-2")
    assert third.ask("acquire", name, TTL) is False


def test_zombie_counts_as_dead(url: str, name: str, contender: Callable[..., Contender], tmp_path: Path) -> None:
    """A killed holder whose parent has not waited for it, as in containers without init, has let go of its file."""
    holder = contender(url=url, lock_dir=str(tmp_path), single_instance=True)
    assert holder.ask("acquire", name, 600)
    os.kill(holder.pid, signal.SIGKILL)
    stat = Path(f"/proc/{holder.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "a zombie")
    assert StartupTaskCoordinator(None, tmp_path, single_instance=True).acquire(name, TTL)


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


def test_same_host_name_with_another_folder_proves_nothing(
    url: str, name: str, contender: Callable[..., Contender], tmp_path: Path
) -> None:
    """Two containers of one host name: while one lives the other never gets its lock, and then after its TTL only."""
    ttl = 2
    holder = contender(url=url, lock_dir=str(tmp_path / "one"), single_instance=True)
    newcomer = StartupTaskCoordinator(None, tmp_path / "two", single_instance=True)
    assert holder.ask("acquire", name, ttl)
    for _ in range(5):
        assert not newcomer.acquire(name, TTL)
        assert not StartupTaskCoordinator(None, tmp_path / "two", single_instance=True).acquire(name, TTL)
    last_renewal = time.monotonic()
    assert holder.ask("renew", name)
    holder.kill()
    wait_until(lambda: newcomer.acquire(name, TTL), "the successor", ttl + 1)
    assert time.monotonic() >= last_renewal + ttl


def test_copied_lock_file_proves_nothing(
    url: str, name: str, contender: Callable[..., Contender], tmp_path: Path
) -> None:
    """A folder that was copied with all its times, as into an image, holds no proof, whether the owner lives or not."""
    holder = contender(url=url, lock_dir=str(tmp_path / "one"), single_instance=True)
    assert holder.ask("acquire", name, 600)
    for copy in ("two", "three"):
        shutil.copytree(tmp_path / "one", tmp_path / copy)
    assert not StartupTaskCoordinator(None, tmp_path / "two", single_instance=True).acquire(name, TTL)
    holder.kill()
    assert not StartupTaskCoordinator(None, tmp_path / "three", single_instance=True).acquire(name, TTL)
    assert StartupTaskCoordinator(None, tmp_path / "one", single_instance=True).acquire(name, TTL)


def abandoned_lock(client: redis.Redis, name: str, folder: Path, **changes: str) -> Owner:
    """A lock whose owner has signed the file and is gone; the value in Redis differs from the truth as told."""
    dead = StartupTaskCoordinator(client, folder, single_instance=True)
    assert dead.acquire(name, 600)
    written = Owner.read(value_of(client, name))
    assert written is not None
    dead._drop(name)
    client.set(f"task_lock:{name}", written._replace(**changes).value(), px=60_000)
    return written


DOUBTS = [{"token": "another"}, {"written": "1"}, {"written": ""}, {"boot": "another"}, {"boot": ""}]


@pytest.mark.parametrize("change", DOUBTS, ids=str)
def test_doubt_means_alive(redis_client: redis.Redis, name: str, tmp_path: Path, change: dict[str, str]) -> None:
    """Another's file, another time of it, no file, or another kernel: the lock stays as it is."""
    abandoned_lock(redis_client, name, tmp_path, **change)
    written = value_of(redis_client, name)
    newcomer = StartupTaskCoordinator(None, tmp_path, single_instance=True)
    assert not any(newcomer.acquire(name, TTL) for _ in range(3))
    assert value_of(redis_client, name) == written


@pytest.mark.parametrize("change", [{}, {"host": "another"}], ids=str)
def test_host_and_pid_are_for_people_only(
    redis_client: redis.Redis, name: str, tmp_path: Path, change: dict[str, str]
) -> None:
    """The proof is the file, whatever the value says of the host; in multi-instance mode there is none."""
    abandoned_lock(redis_client, name, tmp_path, **change)
    assert not StartupTaskCoordinator(None, tmp_path, single_instance=False).acquire(name, TTL)
    assert StartupTaskCoordinator(None, tmp_path, single_instance=True).acquire(name, TTL)


@pytest.mark.parametrize(("platform", "expected"), [("linux", False), ("darwin", True)])
def test_no_boot_id(
    redis_client: redis.Redis,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    expected: bool,
) -> None:
    """Elsewhere than on Linux there is none to compare; a Linux without one is a sandbox, and in doubt."""
    monkeypatch.setattr(owner, "BOOT_ID", tmp_path / "none")
    abandoned_lock(redis_client, name, tmp_path)
    monkeypatch.setattr(sys, "platform", platform)
    assert StartupTaskCoordinator(None, tmp_path, single_instance=True).acquire(name, TTL) is expected


@pytest.mark.parametrize("value", ["", "a token", "a|b|c", "t|b|w|h|1", "t|b|1|h|x", "t|b|1|h|-1", "\x00|" * 4])
def test_value_of_another_program_is_never_taken(redis_client: redis.Redis, name: str, value: str) -> None:
    """What cannot be read cannot be judged dead."""
    redis_client.set(f"task_lock:{name}", value, px=60_000)
    assert not StartupTaskCoordinator(single_instance=True).acquire(name, TTL)
    assert value_of(redis_client, name) == value


def test_a_dead_owners_lock_is_not_acquired_when_it_has_a_new_owner(
    redis_client: redis.Redis, name: str, tmp_path: Path
) -> None:
    """After the proof and before the second request, the TTL expired and another host acquired the lock: it stays."""
    abandoned_lock(redis_client, name, tmp_path)
    quicker = StartupTaskCoordinator(None, tmp_path / "elsewhere", single_instance=True)

    class Client:
        """The suite's server; after its first reply the lock changes hands."""

        def evalsha(self, *arguments: Any) -> Any:
            reply = redis_client.evalsha(*arguments)
            if not quicker.is_held(name):
                assert reply[0] == b"taken"
                redis_client.delete(f"task_lock:{name}")
                assert quicker.acquire(name, TTL)
            return reply

        eval = redis_client.eval

    slower = StartupTaskCoordinator(Client(), tmp_path, single_instance=True)
    assert not slower.acquire(name, TTL)
    assert quicker.renew(name)


def test_proof_outlives_an_outage(
    redis_client: redis.Redis,
    redis_proxy: Proxy,
    url: str,
    name: str,
    contender: Callable[..., Contender],
    connect: Callable[[str], redis.Redis],
    tmp_path: Path,
) -> None:
    """Who had read the dead owner's signature while Redis was away takes over later, though it has signed since."""
    holder = contender(url=url, lock_dir=str(tmp_path), single_instance=True)
    assert holder.ask("acquire", name, 600)
    successor = StartupTaskCoordinator(
        connect(redis_proxy.url(database_of(redis_client))), tmp_path, single_instance=True
    )
    other = StartupTaskCoordinator(None, tmp_path, single_instance=True)
    assert successor.acquire(f"{name}2", TTL), "chooses Redis"
    holder.kill()
    redis_proxy.go_away()
    assert not successor.acquire(name, TTL)
    assert not other.acquire(name, TTL), "it reads the successor's signature, which proves nothing of the holder"
    assert not successor.acquire(name, TTL)
    assert successor.evidence
    redis_proxy.come_back()
    assert successor.acquire(name, TTL)
    assert not successor.evidence, "else it would grow with each signature"
    assert not other.acquire(name, TTL)


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


@pytest.mark.parametrize("single_instance", [True, False])
def test_late_starters_get_nothing_for_many_ttls(
    redis_client: redis.Redis,
    url: str,
    name: str,
    single_instance: bool,
    contender: Callable[..., Contender],
    tmp_path: Path,
) -> None:
    """A holder that ticks keeps its lock, in whatever folder newcomers start. ASYNCQ_TEST_LATE_SECONDS: how long."""
    seconds, ttl = float(os.environ.get("ASYNCQ_TEST_LATE_SECONDS", "5")), 1.5
    options: dict[str, Any] = {"single_instance": single_instance}
    holder = StartupTaskCoordinator(None, tmp_path, **options)
    assert holder.acquire(name, ttl)
    written = value_of(redis_client, name)
    lost: list[str] = []
    over = threading.Event()

    def keep() -> None:
        while not over.wait(0.05):
            lost.extend(holder.tick())

    keeper = threading.Thread(target=keep)
    keeper.start()
    try:
        deadline = time.monotonic() + seconds
        number = 0
        while time.monotonic() < deadline and not over.wait(0.02):
            number += 1
            folder = tmp_path if number % 2 else tmp_path / "another"
            assert not StartupTaskCoordinator(None, folder, **options).acquire(name, TTL), number
        for folder in (tmp_path, tmp_path / "another"):
            assert contender(url=url, lock_dir=str(folder), **options).ask("acquire", name, TTL) is False
        assert (lost, value_of(redis_client, name)) == ([], written)
        assert holder.is_held(name)
    finally:
        over.set()
        keeper.join(10)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("single_instance", [True, False])
def test_frozen_holder_loses_and_notices(
    url: str, name: str, contender: Callable[..., Contender], tmp_path: Path, single_instance: bool
) -> None:
    """Stopped past its TTL and woken: it trusts, renews, takes and releases nothing, and writes under no term."""
    ttl = 2
    holder = contender(url=url, lock_dir=str(tmp_path / "one"), single_instance=single_instance, orm=True)
    successor = StartupTaskCoordinator(None, tmp_path / "two", single_instance=single_instance)
    assert holder.ask("acquire", name, ttl)
    term = holder.ask("write", name)
    assert holder.ask("renew", name)
    renewed_at = time.monotonic()
    os.kill(holder.pid, signal.SIGSTOP)
    assert not successor.acquire(name, TTL), "a stopped process is alive"
    wait_until(lambda: successor.acquire(name, TTL), "the successor", ttl + 1)
    assert time.monotonic() - renewed_at < ttl + 1
    with successor.fenced(name) as number:
        assert number > term
    os.kill(holder.pid, signal.SIGCONT)
    assert holder.ask("is_held", name) is False
    assert holder.ask("write", name, term) == "LockLost"
    assert holder.ask("write", name) == "LockLost"
    assert holder.ask("renew", name) is False
    assert holder.ask("acquire", name, ttl) is False
    holder.ask("release", name)
    assert StartupRun.objects.filter(name=name).count() == 1
    assert successor.renew(name)


def test_frozen_holder_is_succeeded_on_its_own_storage_too(
    url: str, redis_client: redis.Redis, name: str, contender: Callable[..., Contender], tmp_path: Path
) -> None:
    """Its file stays locked, but its trust is over by its own word. Once it lets go, its successor has the file."""
    ttl = 1
    holder = contender(url=url, lock_dir=str(tmp_path), single_instance=True)
    successor = StartupTaskCoordinator(None, tmp_path, single_instance=True)
    assert holder.ask("acquire", name, ttl)
    os.kill(holder.pid, signal.SIGSTOP)
    assert not successor.acquire(name, TTL), "a stopped process is alive"
    stopped_at = time.monotonic()
    wait_until(lambda: successor.acquire(name, TTL), "the successor", ttl + 1)
    assert time.monotonic() - stopped_at < ttl + 1
    assert successor.renew(name)
    owner = Owner.read(redis_client.get(f"task_lock:{name}").decode())
    assert owner is not None
    assert not owner.written, "the file is not its own yet"
    os.kill(holder.pid, signal.SIGCONT)
    assert holder.ask("tick") == [name]
    assert holder.ask("acquire", name, ttl) is False
    assert successor.renew(name)
    signed = Owner.read(redis_client.get(f"task_lock:{name}").decode())
    assert signed is not None
    assert signed.token == owner.token
    assert signed.written == str(lock_path(tmp_path, name).stat().st_ctime_ns)
    assert successor.acquire(name, TTL)
    assert successor.renew(name)


def test_successor_of_a_frozen_one_has_a_successor_at_once(
    url: str, name: str, contender: Callable[..., Contender], tmp_path: Path
) -> None:
    """After it has the file: its death can be proved."""
    frozen, second = (contender(url=url, lock_dir=str(tmp_path), single_instance=True) for _ in range(2))
    assert frozen.ask("acquire", name, 0.2)
    os.kill(frozen.pid, signal.SIGSTOP)
    wait_until(lambda: second.ask("acquire", name, TTL), "the second", 5)
    frozen.kill()
    assert second.ask("renew", name)
    second.kill()
    assert StartupTaskCoordinator(None, tmp_path, single_instance=True).acquire(name, TTL)


def test_redis_that_forgot_a_lock_does_not_open_it(
    url: str, redis_client: redis.Redis, name: str, contender: Callable[..., Contender], tmp_path: Path
) -> None:
    """In single-instance mode: its holder lives, and by its own word may still trust it."""
    holder = contender(url=url, lock_dir=str(tmp_path), single_instance=True)
    assert holder.ask("acquire", name, TTL)
    redis_client.delete(f"task_lock:{name}")
    other = StartupTaskCoordinator(None, tmp_path, single_instance=True)
    assert not other.acquire(name, TTL)
    assert holder.ask("renew", name) is False
    assert other.acquire(name, TTL)


def test_file_that_somebody_else_has_for_good_ends_the_hold(
    url: str, redis_client: redis.Redis, name: str, contender: Callable[..., Contender], tmp_path: Path
) -> None:
    """One is stopped, a second succeeds it in Redis, a third has chosen files and gets the file: it is the third's."""
    frozen = contender(url=url, lock_dir=str(tmp_path), single_instance=True)
    assert frozen.ask("acquire", name, 0.2)
    os.kill(frozen.pid, signal.SIGSTOP)
    second = StartupTaskCoordinator(None, tmp_path, single_instance=True)
    wait_until(lambda: second.acquire(name, TTL), "the second", 5)
    away = redis.Redis(port=1, protocol=2, retry=Retry(NoBackoff(), 0))
    third = StartupTaskCoordinator(away, tmp_path, single_instance=True)
    assert not third.acquire(name, TTL)
    frozen.kill()
    assert third.acquire(name, TTL)
    assert second.renew(name) is False
    assert not second.acquire(name, TTL)
    assert third.is_held(name)


def test_file_that_may_become_the_lock_is_promised_for_ever(
    redis_client: redis.Redis, name: str, tmp_path: Path
) -> None:
    """While the first request is out, however long; nobody else takes the lock meanwhile."""
    other = StartupTaskCoordinator(None, tmp_path, single_instance=True)
    meanwhile: list[bool] = []

    class Dying:
        """A client whose only answer is that Redis is away."""

        def evalsha(self, *arguments: Any) -> None:
            wait_until(lambda: trust_clock() > asked_at + 0.2, "more than the TTL")
            meanwhile.append(other.acquire(name, TTL))
            raise redis.ConnectionError("away")

    asked_at = trust_clock()
    holder = StartupTaskCoordinator(Dying(), tmp_path, single_instance=True)
    assert holder.acquire(name, 0.1)
    assert meanwhile == [False, False]
    assert not other.acquire(name, TTL)


@pytest.mark.parametrize("said", ["", "rubbish", "token 0 1", "{token} nan", "{token} inf", "other 0"])
def test_promise_that_cannot_be_read_means_for_ever(
    name: str, tmp_path: Path, redis_client: redis.Redis, said: str
) -> None:
    """Doubt means alive."""
    holder = StartupTaskCoordinator(None, tmp_path, single_instance=True)
    assert holder.acquire(name, TTL)
    redis_client.delete(f"task_lock:{name}")
    other = StartupTaskCoordinator(None, tmp_path, single_instance=True)
    promise = lock_path(tmp_path, name).with_suffix(".until")
    promise.write_text(said.replace("{token}", holder.owner.token))
    assert not other.acquire(name, TTL)
    promise.write_text(f"{holder.owner.token} 0")
    assert other.acquire(name, TTL), "the holder says that it is over, and Redis that it is free"


def test_promise_is_there_while_it_is_renewed(name: str, tmp_path: Path, redis_client: redis.Redis) -> None:
    """Who is stopped in the midst of it leaves the older or the newer one: without any, nobody could ever succeed."""
    holder = StartupTaskCoordinator(None, tmp_path, single_instance=True)
    assert holder.acquire(name, TTL)
    assert holder.renew(name)
    reader = StartupTaskCoordinator(None, tmp_path, single_instance=True)
    found: set[float] = set()
    renewing = threading.Thread(target=lambda: [holder.renew(name) for _ in range(300)])
    renewing.start()
    while renewing.is_alive():
        found.add(lock_files.LockFolder(tmp_path).trusted_until(name, reader.owner))
    renewing.join()
    assert len(found) > 10
    assert math.inf not in found


# --- file and Redis together


def test_every_end_of_a_hold_lets_go_of_its_file(redis_client: redis.Redis, name: str, tmp_path: Path) -> None:
    """Given back, lost in a tick, refused a renewal, refused an acquire: the file is free each time."""
    clock = Clock()
    holder = StartupTaskCoordinator(None, tmp_path, single_instance=True, clock=clock)
    key = f"task_lock:{name}"

    def lose_in_tick() -> None:
        redis_client.delete(key)
        clock.now += TTL
        assert holder.tick() == [name]

    def lose_in_renewal() -> None:
        redis_client.delete(key)
        assert not holder.renew(name)

    def be_refused() -> None:
        redis_client.set(key, "another")
        assert not holder.acquire(name, TTL)

    ends: list[Callable[[], Any]] = [lambda: holder.release(name), lose_in_tick, lose_in_renewal, be_refused]
    before = open_lock_files(tmp_path)
    for end in ends:
        redis_client.delete(key)
        assert holder.acquire(name, TTL)
        with pytest.raises(BlockingIOError):
            lock_files.LockFolder(tmp_path).lock(name, holder.owner)
        end()
        assert not holder.is_held(name)
        lock_files.LockFolder(tmp_path).lock(name, holder.owner).unlock()
    assert open_lock_files(tmp_path) == before


def test_lock_of_a_forgotten_coordinator_lasts_until_its_time(
    redis_client: redis.Redis, name: str, tmp_path: Path
) -> None:
    """The object is gone, its process lives: nobody takes the lock early, and the file is free when it has run out."""
    clock = Clock()
    assert StartupTaskCoordinator(None, tmp_path, single_instance=True, clock=clock).acquire(name, TTL)
    gc.collect()
    newcomer = StartupTaskCoordinator(None, tmp_path, single_instance=True)
    assert not newcomer.acquire(name, TTL)
    clock.now += TTL
    redis_client.delete(f"task_lock:{name}")
    assert newcomer.acquire(name, TTL)
    assert open_lock_files(tmp_path) == 1


def test_errors_leave_no_file_locked(redis_client: redis.Redis, name: str, tmp_path: Path) -> None:
    """Neither an error of the server nor many refusals leave a descriptor behind."""
    redis_client.lpush(f"task_lock:{name}", "no string")
    asker = StartupTaskCoordinator(None, tmp_path, single_instance=True)
    redis_client.set(f"task_lock:{name}2", "another", px=60_000)
    assert not asker.acquire(f"{name}2", TTL)
    before = open_lock_files(tmp_path)
    for _ in range(20):
        with pytest.raises(redis.ResponseError):
            asker.acquire(name, TTL)
        assert not asker.acquire(f"{name}2", TTL)
    assert open_lock_files(tmp_path) == before
    redis_client.delete(f"task_lock:{name}")
    assert StartupTaskCoordinator(None, tmp_path, single_instance=True).acquire(name, TTL)


def test_holder_that_gave_up_is_succeeded_at_once(
    redis_client: redis.Redis,
    redis_proxy: Proxy,
    name: str,
    connect: Callable[[str], redis.Redis],
    tmp_path: Path,
) -> None:
    """Redis went away for the holder only: it is trusted until its time, then another of its storage goes on."""
    clock = Clock()
    holder = StartupTaskCoordinator(
        connect(redis_proxy.url(database_of(redis_client))), tmp_path, single_instance=True, clock=clock
    )
    other = StartupTaskCoordinator(None, tmp_path, single_instance=True)
    assert holder.acquire(name, TTL)
    redis_proxy.go_away()
    clock.now += TTL / 2
    assert holder.tick() == []
    assert holder.is_held(name)
    assert not other.acquire(name, TTL)
    redis_proxy.come_back()
    assert holder.tick() == [] and holder.is_held(name)
    redis_proxy.go_away()
    clock.now += TTL
    assert holder.tick() == [name]
    assert other.acquire(name, TTL), "Redis still bears the holder's name"
    redis_proxy.come_back()
    assert not holder.acquire(name, TTL)
    other.release(name)
    assert holder.acquire(name, TTL)


def test_release_that_could_not_be_sent_hurts_nobody(
    redis_client: redis.Redis,
    redis_proxy: Proxy,
    name: str,
    connect: Callable[[str], redis.Redis],
    tmp_path: Path,
) -> None:
    """Redis was away: the next of this storage has it at once; a deletion that comes late deletes no newer hold."""
    holder = StartupTaskCoordinator(connect(redis_proxy.url(database_of(redis_client))), tmp_path, single_instance=True)
    assert holder.acquire(name, TTL)
    left = value_of(redis_client, name)
    redis_proxy.go_away()
    holder.release(name)
    redis_proxy.come_back()
    assert holder.acquire(name, TTL)
    late = scripts.run("lock_release", redis_client, [f"task_lock:{name}"], [left])
    assert late == b"stale"
    assert holder.renew(name)


def test_taken_again_with_a_file_that_another_has_signed(
    redis_client: redis.Redis, redis_proxy: Proxy, name: str, connect: Callable[[str], redis.Redis], tmp_path: Path
) -> None:
    """A lock of one's own is a yes even if the file has been signed anew since its value was written."""
    clock = Clock()
    holder = StartupTaskCoordinator(
        connect(redis_proxy.url(database_of(redis_client))), tmp_path, single_instance=True, clock=clock
    )
    assert holder.acquire(name, TTL)
    clock.now += TTL
    redis_proxy.go_away()
    assert holder.tick() == [name]
    redis_proxy.come_back()
    stranger = Owner.of_this_process()
    lock_files.LockFolder(tmp_path).lock(name, stranger).unlock()
    assert holder.acquire(name, TTL)
    mine = Owner.read(value_of(redis_client, name))
    assert mine is not None and mine.written == str(lock_path(tmp_path, name).stat().st_ctime_ns)


def test_signature_stays_when_the_file_is_locked_again(name: str, tmp_path: Path, redis_client: redis.Redis) -> None:
    """Taken, given back and taken again by one coordinator: neither the file's time nor the value changes."""
    holder = StartupTaskCoordinator(None, tmp_path, single_instance=True)
    values = set()
    for _ in range(3):
        assert holder.acquire(name, TTL)
        values.add(value_of(redis_client, name))
        holder.release(name)
    assert len(values) == 1


def test_file_mode_and_redis_mode_exclude_each_other(
    url: str, no_redis: str, name: str, connect: Callable[[str], redis.Redis], tmp_path: Path
) -> None:
    """On one storage, in single-instance mode, one lock has one holder whatever its kind."""
    with_redis = StartupTaskCoordinator(connect(url), tmp_path, single_instance=True)
    with_files = StartupTaskCoordinator(connect(no_redis), tmp_path, single_instance=True)
    assert with_files.acquire(f"{name}2", TTL), "chooses files"
    assert with_redis.acquire(name, TTL)
    assert not with_files.acquire(name, TTL)
    with_redis.release(name)
    assert with_files.acquire(name, TTL)
    assert not with_redis.acquire(name, TTL)
    assert not StartupTaskCoordinator(connect(url), tmp_path, single_instance=True).acquire(name, TTL)


def test_refused_by_the_file_chooses_nothing(
    url: str, no_redis: str, name: str, connect: Callable[[str], redis.Redis], tmp_path: Path
) -> None:
    """Who was refused before Redis was asked may still begin with either kind."""
    holder = StartupTaskCoordinator(connect(url), tmp_path, single_instance=True)
    newcomer = StartupTaskCoordinator(connect(no_redis), tmp_path, single_instance=True)
    assert holder.acquire(name, TTL)
    assert not newcomer.acquire(name, TTL)
    assert newcomer.uses_files is None
    holder.release(name)
    assert newcomer.acquire(name, TTL)
    assert newcomer.uses_files is True


@pytest.mark.parametrize("why", ["folder", "platform"])
def test_folder_that_cannot_be_used_leaves_redis_alone(
    redis_client: redis.Redis,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    why: str,
) -> None:
    """Single-instance mode goes on without files, says so once, and nobody can prove such an owner dead."""
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "locks"
    if why == "platform":
        folder = tmp_path
        monkeypatch.setattr(lock_files, "fcntl", None)
    holder = StartupTaskCoordinator(None, folder, single_instance=True)
    assert holder.acquire(name, TTL) and holder.acquire(f"{name}2", TTL)
    assert sum("cannot be used" in record.message for record in caplog.records) == 1
    written = Owner.read(value_of(redis_client, name))
    assert written is not None and written.written == ""
    assert not StartupTaskCoordinator(None, tmp_path / "other", single_instance=True).acquire(name, TTL)
    assert holder.renew(name)
    holder.release(name)
    assert value_of(redis_client, name) == ""


def test_full_disk_still_locks(
    redis_client: redis.Redis, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file cannot be signed: it is locked all the same, only the owner cannot be proved dead."""

    def fail(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    holder = StartupTaskCoordinator(None, tmp_path, single_instance=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        assert holder.acquire(name, TTL)
    written = Owner.read(value_of(redis_client, name))
    assert written is not None and written.written == ""
    redis_client.delete(f"task_lock:{name}")
    assert not StartupTaskCoordinator(None, tmp_path, single_instance=True).acquire(name, TTL)


# --- terms


@pytest.mark.django_db(transaction=True)
def test_each_hold_has_a_term_of_its_own(redis_client: redis.Redis, name: str) -> None:
    """Drawn when first asked for, kept through renewals, higher for the next hold, of whomever."""
    clock = Clock()
    first = StartupTaskCoordinator(clock=clock)
    second = StartupTaskCoordinator()
    assert first.acquire(name, TTL)
    term = first.term(name)
    clock.now += TTL / 2
    assert first.tick() == []
    assert first.acquire(name, TTL) and first.term(name) == term
    with pytest.raises(LockLost):
        second.term(name)
    first.release(name)
    with pytest.raises(LockLost):
        first.term(name)
    assert second.acquire(name, TTL)
    assert second.term(name) == term + 1
    second.release(name)
    assert first.acquire(name, TTL)

    async def ask() -> int:
        number = await first.aterm(name)
        await sync_to_async(connections.close_all)()
        return number

    assert asyncio.run(ask()) == term + 2
    clock.now += TTL
    with pytest.raises(LockLost):
        first.term(name)
    assert first.acquire(name, TTL)
    assert first.term(name) == term + 3, "trust had ended, so another may have held it"


@pytest.mark.django_db(transaction=True)
def test_trust_that_ends_while_redis_is_asked_ends_the_term(redis_client: redis.Redis, name: str) -> None:
    """The answer is a yes, but another may have had the lock before it came."""
    clock = Clock()

    class SlowClient:
        def evalsha(self, digest: str, *arguments: Any) -> Any:
            clock.now += 20
            return redis_client.eval(scripts.script("lock_acquire").text, *arguments)

    holder = StartupTaskCoordinator(SlowClient(), clock=clock)
    assert holder.acquire(name, 30)
    assert holder.term(name) == 1
    assert holder.acquire(name, 300)
    assert holder.term(name) == 2


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("is_taken_again", [False, True])
def test_hold_lost_while_its_term_is_drawn(
    redis_client: redis.Redis, name: str, monkeypatch: pytest.MonkeyPatch, is_taken_again: bool
) -> None:
    """The number that came too late is nobody's term."""
    holder = StartupTaskCoordinator()
    assert holder.acquire(name, TTL)
    begin = fencing.begin

    def begin_slowly(*arguments: Any) -> int:
        monkeypatch.setattr(fencing, "begin", begin)
        holder.release(name)
        assert not is_taken_again or holder.acquire(name, TTL)
        return begin(*arguments)

    monkeypatch.setattr(fencing, "begin", begin_slowly)
    with pytest.raises(LockLost) as caught:
        holder.term(name)
    assert (caught.value.name, caught.value.term) == (name, 1)
    assert holder.is_held(name) is is_taken_again
    assert not is_taken_again or holder.term(name) == 2


@pytest.mark.django_db(transaction=True)
def test_threads_of_one_hold_share_its_term(name: str) -> None:
    """Both ask first at one time, and one number is drawn."""
    holder = StartupTaskCoordinator()
    assert holder.acquire(name, TTL)
    together = threading.Barrier(4)
    found: list[int] = []

    def ask() -> None:
        together.wait(10)
        found.append(holder.term(name))
        connections.close_all()

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [1, 1, 1, 1]


def write_fenced(holder: StartupTaskCoordinator, name: str, label: str) -> int:
    """Write a row that bears the term it was accepted under."""
    with holder.fenced(name) as term:
        StartupRun.objects.create(name=name, holder=label, term=term, begun_at=timezone.now())
    return term


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("is_fenced", [True, False])
def test_accepted_terms_never_decrease_and_do_without_the_fence(
    redis_client: redis.Redis, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_fenced: bool
) -> None:
    """Redis forgot the lock and the older holder has not noticed: only the fence keeps its write out."""
    if not is_fenced:
        monkeypatch.setattr(fencing, "fence", lambda name, number: None)
    older, newer = (StartupTaskCoordinator(None, tmp_path / folder, single_instance=True) for folder in "ab")
    assert older.acquire(name, TTL)
    write_fenced(older, name, "older")
    redis_client.delete(f"task_lock:{name}")
    assert newer.acquire(name, TTL)
    write_fenced(newer, name, "newer")
    assert older.is_held(name), "as far as it knows"
    if is_fenced:
        with pytest.raises(LockLost) as caught:
            write_fenced(older, name, "older")
        assert (caught.value.name, caught.value.term) == (name, 1)
        assert not older.is_held(name), "given up"
        lock_files.LockFolder(tmp_path / "a").lock(name, older.owner).unlock()
        assert newer.renew(name)
    else:
        write_fenced(older, name, "older")
    accepted = list(StartupRun.objects.filter(name=name).order_by("id").values_list("term", flat=True))
    assert accepted == ([1, 2] if is_fenced else [1, 2, 1])


@pytest.mark.django_db(transaction=True)
def test_error_in_the_body_of_a_fenced_write_leaves_the_hold(name: str) -> None:
    """It rolls back; another lock's LockLost that passes through gives up nothing here either."""
    holder = StartupTaskCoordinator()
    assert holder.acquire(name, TTL)
    for error in (ZeroDivisionError(), LockLost("another", 1)):
        with pytest.raises(type(error)), holder.fenced(name):
            StartupRun.objects.create(name=name, holder="", term=1, begun_at=timezone.now())
            raise error
    assert holder.is_held(name)
    assert not StartupRun.objects.filter(name=name).exists()


class Writer(threading.Thread):
    """Competes for a lock and writes its term as long as it has it."""

    def __init__(self, holder: StartupTaskCoordinator, name: str, label: str, over: threading.Event) -> None:
        super().__init__(daemon=True)
        self.holder, self.lock_name, self.label, self.over = holder, name, label, over
        self.written = 0
        self.error: Exception | None = None

    def run(self) -> None:
        """Write until it is over; losing is part of it."""
        try:
            while not self.over.wait(0.01):
                self.holder.tick()
                with suppress(LockLost):
                    if self.holder.is_held(self.lock_name) or self.holder.acquire(self.lock_name, 0.6):
                        write_fenced(self.holder, self.lock_name, self.label)
                        self.written += 1
        except Exception as error:  # noqa: BLE001 - shown by the test
            self.error = error
        finally:
            connections.close_all()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("has_fallback", [True, False])
def test_terms_do_not_decrease_while_redis_flaps(
    redis_client: redis.Redis, name: str, connect: Callable[[str], redis.Redis], tmp_path: Path, has_fallback: bool
) -> None:
    """Redis goes and comes, and forgets. ASYNCQ_TEST_FLAP_SECONDS: how long. With the fallback one writer holds a
    file for good while the other has Redis, so two write at a time; without it both compete in Redis."""
    seconds = float(os.environ.get("ASYNCQ_TEST_FLAP_SECONDS", "3"))
    address = redis_client.connection_pool.connection_kwargs
    over = threading.Event()
    with Proxy((address["host"], address["port"])) as one, Proxy((address["host"], address["port"])) as two:
        clients = [connect(proxy.url(database_of(redis_client))) for proxy in (one, two)]
        holders = [StartupTaskCoordinator(client, tmp_path, single_instance=False) for client in clients]
        if has_fallback:
            two.go_away()
        for holder in holders:
            assert holder.acquire(f"{name}0", TTL), "chooses its kind"
            holder.release(f"{name}0")
        writers = [Writer(holder, name, label, over) for holder, label in zip(holders, "ab", strict=True)]
        for writer in writers:
            writer.start()
        deadline, turn = time.monotonic() + seconds, 0
        while time.monotonic() < deadline:
            turn += 1
            proxy = (one, two)[turn % 2]
            proxy.go_away()
            over.wait(0.1 if turn % 3 else 0.8)  # some outages outlast the TTL
            if turn % 4 == 0:
                redis_client.delete(f"task_lock:{name}")
            proxy.come_back()
            over.wait(0.1)
        over.set()
        for writer in writers:
            writer.join(30)
    assert [writer.error for writer in writers] == [None, None]
    assert holders[1].uses_files is has_fallback
    accepted = list(StartupRun.objects.filter(name=name).order_by("id").values_list("term", flat=True))
    assert accepted == sorted(accepted)
    assert len(set(accepted)) > 1, "the lock has changed hands"
    assert all(writer.written for writer in writers)


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
    """No file takes its place, the outage is logged once, and the lock is trusted until its own time only."""
    clock = Clock()
    client = connect(redis_proxy.url(database_of(redis_client)))
    holder = StartupTaskCoordinator(client, tmp_path / "locks", single_instance=False, clock=clock)
    assert holder.acquire(name, TTL)
    redis_proxy.close()
    clock.now += 11
    assert holder.tick() == []
    assert holder.renew(name) is False
    assert holder.acquire(f"{name}2", TTL) is False
    assert holder.acquire(name, TTL) and holder.is_held(name), "until its time"
    clock.now += 17
    assert not holder.is_held(name)
    assert holder.tick() == [name]
    assert holder.tick() == []
    assert sum("expire in time" in record.message for record in caplog.records) == 1
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
    assert not lock_path(tmp_path / "second", f"{name}4").exists()
    assert len(list((tmp_path / "second").glob("*.lock"))) == 2


# --- forks


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("single_instance", [True, False])
def test_child_of_a_fork_holds_nothing(redis_client: redis.Redis, name: str, single_instance: bool) -> None:
    """It neither trusts, renews, releases nor, as another owner, takes the parent's lock."""
    holder = StartupTaskCoordinator(single_instance=single_instance)
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


@pytest.mark.parametrize("is_away", [True, False])
def test_forked_child_does_not_keep_a_lock_file_locked(
    url: str,
    no_redis: str,
    name: str,
    contender: Callable[..., Contender],
    connect: Callable[[str], redis.Redis],
    tmp_path: Path,
    is_away: bool,
) -> None:
    """The child outlives its killed parent and has closed the file, beside Redis as well as without it."""
    address = no_redis if is_away else url
    holder = contender(url=address, lock_dir=str(tmp_path), single_instance=True)
    assert holder.ask("acquire", name, 600)
    child = holder.ask("fork", 0)
    holder.process.kill()
    holder.process.wait(10)
    os.kill(child, 0)  # it lives
    successor = StartupTaskCoordinator(connect(address), tmp_path, single_instance=True)
    wait_until(lambda: successor.acquire(name, TTL), "the successor", 5)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_child_of_a_fork_during_an_acquire_does_not_keep_the_file_open(name: str, tmp_path: Path) -> None:
    """The descriptor of another thread that had not got to note its hold yet is closed in the child too."""
    asked, go_on = threading.Event(), threading.Event()

    class SlowClient:
        def evalsha(self, *arguments: Any) -> Any:
            asked.set()
            go_on.wait(10)
            return [b"taken", b"another"]

    asker = StartupTaskCoordinator(SlowClient(), tmp_path, single_instance=True)
    thread = threading.Thread(target=asker.acquire, args=(name, TTL))
    thread.start()
    asked.wait(10)
    pid = os.fork()
    if pid == 0:
        os._exit(open_lock_files(tmp_path))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    go_on.set()
    thread.join(10)


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
    path = lock_path(folder, name)
    inode = path.stat().st_ino
    signature = Owner.read(path.read_text().strip())
    assert signature is not None and signature.pid == holder.pid
    assert (folder / ".gitignore").read_text() == "*\n"
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
    lock_path(tmp_path, name).open("r+").close()
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
    path = lock_path(tmp_path, name)
    flock = lock_files.fcntl.flock

    def unlink_first(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(lock_files.fcntl, "flock", flock)
        path.unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(lock_files.fcntl, "flock", unlink_first)
    assert holder.acquire(name, TTL)
    assert path.exists()
    assert not StartupTaskCoordinator(connect(no_redis), tmp_path).acquire(name, TTL)


def test_any_name_makes_a_file_of_its_own() -> None:
    """No name leaves the folder, and no two share a file."""
    names = [
        "maintenance",
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
    found = [lock_files.file_name(name) for name in names]
    assert len(set(found)) == len(names)
    assert all("/" not in file and "\x00" not in file and len(file) < 150 for file in found)
    assert found[0] == "maintenance.lock"


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
    monkeypatch.setattr(lock_files, "fcntl", None)
    with pytest.raises(BrokerUnavailable, match="does not support file locks"):
        StartupTaskCoordinator(connect(no_redis), tmp_path).acquire(name, TTL)

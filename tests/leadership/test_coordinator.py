"""The startup lock coordinator: one holder at a time, whatever is killed, frozen, forked or unreachable."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from asgiref.sync import sync_to_async
from django.conf import settings as django_settings
from django.db import connections
from django.utils import timezone
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_asyncq import conf
from django_asyncq.broker import scripts
from django_asyncq.core.time import steady_seconds
from django_asyncq.exceptions import BrokerUnavailable, InvalidOption, LockLost
from django_asyncq.leadership import coordinator as hold
from django_asyncq.leadership import fencing, lock_files
from django_asyncq.leadership.coordinator import StartupTaskCoordinator, environment_scope, key_of
from django_asyncq.leadership.lock_files import Owner
from django_asyncq.models import StartupRun
from django_asyncq.testing import EmbeddedRedis

from .. import acl
from ..clock import Clock
from ..proxy import Proxy
from ..workers import ROOT, environment, wait_until

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
    # The child keeps everything it inherited and outlives its parent, until the input is closed.
    child = os.fork()
    if child == 0:
        os.read(descriptor, 1)
        os._exit(0)
    return child

def write(name, term=None):
    # Write a row, fenced by the hold's term or by a remembered one.
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
    barrier.wait(60)  # no process exits before all have asked

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
    """A process with a coordinator that obeys commands, one per line. orm: it also needs this test's database."""

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
        """Have it call a method of its coordinator; return the result."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([verb, *arguments]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        """Kill it, and wait until it is dead."""
        self.process.kill()
        self.close()

    def close(self) -> None:
        """Kill it, stopped or running, and clean up."""
        self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()


@pytest.fixture
def name(key_prefix: str) -> str:
    """The name of a lock that only this test uses."""
    return f"{key_prefix}:startup"


@pytest.fixture
def url() -> str:
    """The address of the suite's server, as the package uses it."""
    return acl.package_url(os.environ["ASYNCQ_TEST_REDIS_URL"])


@pytest.fixture
def contender() -> Iterator[Callable[..., Contender]]:
    """Start processes; all are killed when the test finishes."""
    started: list[Contender] = []

    def start(**options: Any) -> Contender:
        started.append(Contender(**options))
        return started[-1]

    yield start
    for process in started:
        process.close()


@pytest.fixture
def connect() -> Iterator[Callable[[str], redis.Redis]]:
    """Build clients that repeat nothing and wait at most half a second."""
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
    """An address on which no server listens, and none will."""
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"redis://127.0.0.1:{taken.getsockname()[1]}/0"


def folder_of(path: Path) -> lock_files.LockFolder:
    """A folder of lock files, as a coordinator of the suite's Redis uses it."""
    return lock_files.LockFolder(path, environment_scope)


def lock_path(folder: Path, name: str) -> Path:
    """The file of a lock."""
    return folder / lock_files.file_name(name, environment_scope())


def open_lock_files(folder: Path) -> int:
    """How many descriptors of lock files in a folder this process has."""
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(link.startswith(f"{folder}/") for link in links)


def value_of(client: redis.Redis, name: str) -> str:
    """The value of a lock; "" for none."""
    return (client.get(key_of(name)) or b"").decode()


# --- acquiring


@pytest.mark.parametrize("kind", ["single-instance", "multi-instance", "files"])
def test_one_of_fifty_processes_acquires_in_each_of_a_hundred_rounds(
    url: str, no_redis: str, name: str, kind: str, tmp_path: Path
) -> None:
    """All ask at the same moment, and exactly one acquires the lock."""
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
        stderr=subprocess.DEVNULL,  # fifty warnings that Redis is unreachable
        text=True,
        timeout=100,
        check=True,
    )
    assert json.loads(done.stdout) == [[0] * 50, [1] * 100]


def test_acquiring_a_held_lock_extends_it(redis_client: redis.Redis, name: str) -> None:
    """The holder may acquire again; another may not."""
    holder = StartupTaskCoordinator()
    assert holder.acquire(name, 5)
    assert holder.acquire(name, TTL)
    assert redis_client.pttl(key_of(name)) > 5000
    assert not StartupTaskCoordinator().acquire(name, TTL)


@pytest.mark.parametrize("single_instance", [True, False])
def test_value_names_the_owner(redis_client: redis.Redis, name: str, tmp_path: Path, single_instance: bool) -> None:
    """The lock has the holder's boot id, file time, host and pid; no file in multi-instance mode."""
    StartupTaskCoordinator(None, tmp_path, single_instance=single_instance).acquire(name, TTL)
    holder = Owner.read(value_of(redis_client, name))
    assert holder is not None
    assert (holder.host, holder.pid) == (socket.gethostname(), os.getpid())
    assert holder.boot == lock_files.BOOT_ID.read_text().strip()
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
    """Single-instance is the default; SINGLE_INSTANCE_MODE and the argument override it."""
    monkeypatch.setenv("SINGLE_INSTANCE_MODE", in_environment)
    settings.ASYNCQ = {**settings.ASYNCQ}
    assert StartupTaskCoordinator(None, tmp_path, single_instance=single_instance).acquire(name, TTL)
    assert lock_path(tmp_path, name).exists() is expected


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf")])
def test_a_ttl_that_is_not_positive_and_finite_is_refused(name: str, ttl: float) -> None:
    """A lock that never expires, or at once, is a mistake of the caller."""
    with pytest.raises(InvalidOption):
        StartupTaskCoordinator().acquire(name, ttl)


def test_works_with_a_client_that_decodes(url: str, name: str) -> None:
    """A project's own client may have decode_responses set."""
    with redis.Redis.from_url(url, protocol=2, decode_responses=True) as client:
        holder = StartupTaskCoordinator(client)
        assert holder.acquire(name, TTL)
        assert not StartupTaskCoordinator(client).acquire(name, TTL)
        assert holder.renew(name)


# --- dead and live holders


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
    assert 0 < redis_client.pttl(key_of(name)) <= TTL * 1000
    third = contender(url=url, lock_dir=str(tmp_path), single_instance=True, host="container-2")
    assert third.ask("acquire", name, TTL) is False


def test_zombie_counts_as_dead(url: str, name: str, contender: Callable[..., Contender], tmp_path: Path) -> None:
    """A killed holder whose parent has not waited for it, as in containers without init, has lost its file lock."""
    holder = contender(url=url, lock_dir=str(tmp_path), single_instance=True)
    assert holder.ask("acquire", name, 600)
    os.kill(holder.pid, signal.SIGKILL)
    stat = Path(f"/proc/{holder.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "a zombie")
    assert StartupTaskCoordinator(None, tmp_path, single_instance=True).acquire(name, TTL)


def test_killed_holder_is_succeeded_after_its_ttl_in_multi_instance_mode(
    redis_client: redis.Redis, url: str, name: str, contender: Callable[..., Contender]
) -> None:
    """There no owner can be proved dead; the lock expires with its TTL."""
    holder = contender(url=url, single_instance=False)
    assert holder.ask("acquire", name, 600)
    holder.kill()
    successor = StartupTaskCoordinator(single_instance=False)
    assert not any(successor.acquire(name, TTL) for _ in range(5))
    redis_client.pexpire(key_of(name), 1000)  # only its last second is left
    wait_until(lambda: successor.acquire(name, TTL), "the successor", 5)


def test_same_host_name_with_another_folder_proves_nothing(
    url: str, name: str, contender: Callable[..., Contender], tmp_path: Path
) -> None:
    """Two containers with one host name: while one lives the other never acquires, and then only after the TTL."""
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
    """A folder that was copied with all its times, as into an image, is no proof, whether the owner lives or not."""
    holder = contender(url=url, lock_dir=str(tmp_path / "one"), single_instance=True)
    assert holder.ask("acquire", name, 600)
    for copy in ("two", "three"):
        shutil.copytree(tmp_path / "one", tmp_path / copy)
    assert not StartupTaskCoordinator(None, tmp_path / "two", single_instance=True).acquire(name, TTL)
    holder.kill()
    assert not StartupTaskCoordinator(None, tmp_path / "three", single_instance=True).acquire(name, TTL)
    assert StartupTaskCoordinator(None, tmp_path / "one", single_instance=True).acquire(name, TTL)


def abandoned_lock(client: redis.Redis, name: str, folder: Path, **changes: str) -> Owner:
    """A lock whose owner has signed the file and is dead; `changes` alter the value in Redis."""
    dead = StartupTaskCoordinator(client, folder, single_instance=True)
    assert dead.acquire(name, 600)
    written = Owner.read(value_of(client, name))
    assert written is not None
    dead._drop(name)
    client.set(key_of(name), written._replace(**changes).value(), px=60_000)
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
def test_a_missing_boot_id_is_doubt_on_linux_only(
    redis_client: redis.Redis,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    expected: bool,
) -> None:
    """Other systems have none to compare; Linux without one is a sandbox."""
    monkeypatch.setattr(lock_files, "BOOT_ID", tmp_path / "none")
    abandoned_lock(redis_client, name, tmp_path)
    monkeypatch.setattr(sys, "platform", platform)
    assert StartupTaskCoordinator(None, tmp_path, single_instance=True).acquire(name, TTL) is expected


@pytest.mark.parametrize("value", ["", "a token", "a|b|c", "t|b|w|h|1", "t|b|1|h|x", "t|b|1|h|-1", "\x00|" * 4])
def test_a_lock_of_another_program_is_never_acquired(redis_client: redis.Redis, name: str, value: str) -> None:
    """An owner whose value cannot be read cannot be proved dead."""
    redis_client.set(key_of(name), value, px=60_000)
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
                redis_client.delete(key_of(name))
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
    """The dead owner's signature was read during an outage.

    It is a proof afterwards, though the file was signed since.
    """
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
    assert not successor.evidence, "otherwise it would grow with each signature"
    assert not other.acquire(name, TTL)


@pytest.mark.parametrize("single_instance", [True, False])
def test_a_late_starter_never_acquires_a_live_lock(
    redis_client: redis.Redis, url: str, name: str, single_instance: bool, contender: Callable[..., Contender]
) -> None:
    """The holder lives, so its lock stays, whatever its age and whichever process starts."""
    holder = contender(url=url, single_instance=single_instance)
    assert holder.ask("acquire", name, TTL)
    written = value_of(redis_client, name)
    redis_client.persist(key_of(name))
    for _ in range(5):
        assert not StartupTaskCoordinator(single_instance=single_instance).acquire(name, TTL)
    assert value_of(redis_client, name) == written
    assert redis_client.pttl(key_of(name)) == -1
    assert holder.ask("renew", name)


@pytest.mark.parametrize("single_instance", [True, False])
def test_late_starters_acquire_nothing_for_many_ttls(
    redis_client: redis.Redis,
    url: str,
    name: str,
    single_instance: bool,
    contender: Callable[..., Contender],
    tmp_path: Path,
) -> None:
    """A holder that ticks keeps its lock, whatever folder the newcomers use. ASYNCQ_TEST_LATE_SECONDS: for how long."""
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
def test_a_frozen_holder_loses_its_lock_and_notices(
    url: str, name: str, contender: Callable[..., Contender], tmp_path: Path, single_instance: bool
) -> None:
    """Stopped past its TTL and continued, it trusts, renews, acquires and releases nothing, and writes no row."""
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
    """Its file stays locked, but by its own word its trust is over.

    When it unlocks the file, its successor locks it.
    """
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
    lock_files = Owner.read(redis_client.get(key_of(name)).decode())
    assert lock_files is not None
    assert not lock_files.written, "the file is not its own yet"
    os.kill(holder.pid, signal.SIGCONT)
    assert holder.ask("tick") == [name]
    assert holder.ask("acquire", name, ttl) is False
    assert successor.renew(name)
    signed = Owner.read(redis_client.get(key_of(name)).decode())
    assert signed is not None
    assert signed.token == lock_files.token
    assert signed.written == str(lock_path(tmp_path, name).stat().st_ctime_ns)
    assert successor.acquire(name, TTL)
    assert successor.renew(name)


def test_the_successor_of_a_frozen_holder_is_succeeded_at_once(
    url: str, name: str, contender: Callable[..., Contender], tmp_path: Path
) -> None:
    """When it has locked the file, its death can be proved."""
    frozen, second = (contender(url=url, lock_dir=str(tmp_path), single_instance=True) for _ in range(2))
    assert frozen.ask("acquire", name, 0.2)
    os.kill(frozen.pid, signal.SIGSTOP)
    wait_until(lambda: second.ask("acquire", name, TTL), "the second", 5)
    frozen.kill()
    assert second.ask("renew", name)
    second.kill()
    assert StartupTaskCoordinator(None, tmp_path, single_instance=True).acquire(name, TTL)


def test_a_lock_that_redis_forgot_is_not_free(
    url: str, redis_client: redis.Redis, name: str, contender: Callable[..., Contender], tmp_path: Path
) -> None:
    """In single-instance mode: its holder lives and, by its own word, may still trust it."""
    holder = contender(url=url, lock_dir=str(tmp_path), single_instance=True)
    assert holder.ask("acquire", name, TTL)
    redis_client.delete(key_of(name))
    other = StartupTaskCoordinator(None, tmp_path, single_instance=True)
    assert not other.acquire(name, TTL)
    assert holder.ask("renew", name) is False
    assert other.acquire(name, TTL)


def test_a_process_that_uses_only_files_ends_the_hold(
    url: str, redis_client: redis.Redis, name: str, contender: Callable[..., Contender], tmp_path: Path
) -> None:
    """One is stopped, a second succeeds it in Redis.

    A third uses files and locks the file: the third holds the lock.
    """
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


def test_a_file_that_may_become_the_lock_is_trusted_for_ever(
    redis_client: redis.Redis, name: str, tmp_path: Path
) -> None:
    """While the first request is out, however long; no other process acquires the lock meanwhile."""
    other = StartupTaskCoordinator(None, tmp_path, single_instance=True)
    meanwhile: list[bool] = []

    class Dying:
        """A client that always finds Redis unreachable."""

        def evalsha(self, *arguments: Any) -> None:
            wait_until(lambda: steady_seconds() > asked_at + 0.2, "more than the TTL")
            meanwhile.append(other.acquire(name, TTL))
            raise redis.ConnectionError("away")

    asked_at = steady_seconds()
    holder = StartupTaskCoordinator(Dying(), tmp_path, single_instance=True)
    assert holder.acquire(name, 0.1)
    assert meanwhile == [False, False]
    assert not other.acquire(name, TTL)


@pytest.mark.parametrize("said", ["", "rubbish", "token 0 1", "{token} nan", "{token} inf", "other 0"])
def test_trust_that_cannot_be_read_lasts_for_ever(
    name: str, tmp_path: Path, redis_client: redis.Redis, said: str
) -> None:
    """Doubt means alive."""
    holder = StartupTaskCoordinator(None, tmp_path, single_instance=True)
    assert holder.acquire(name, TTL)
    redis_client.delete(key_of(name))
    other = StartupTaskCoordinator(None, tmp_path, single_instance=True)
    promise = lock_path(tmp_path, name).with_suffix(".until")
    promise.write_text(said.replace("{token}", holder.owner.token))
    assert not other.acquire(name, TTL)
    promise.write_text(f"{holder.owner.token} 0")
    assert other.acquire(name, TTL), "its trust is over by its own word, and Redis says it is free"


def test_published_trust_exists_while_it_is_renewed(name: str, tmp_path: Path, redis_client: redis.Redis) -> None:
    """A process stopped during the write leaves the older or the newer line.

    Without one it could never be succeeded.
    """
    holder = StartupTaskCoordinator(None, tmp_path, single_instance=True)
    assert holder.acquire(name, TTL)
    assert holder.renew(name)
    folder = folder_of(tmp_path)
    found: set[float] = set()
    seen_enough = threading.Event()

    def renew() -> None:
        for _ in range(300):
            holder.renew(name)
        while not seen_enough.is_set():
            holder.renew(name)

    renewing = threading.Thread(target=renew)
    renewing.start()
    while renewing.is_alive():
        found.add(folder.trusted_until(name, holder.owner))
        if len(found) > 10:
            seen_enough.set()
    renewing.join()
    assert math.inf not in found


# --- file and Redis together


def test_the_file_is_unlocked_however_a_hold_is_lost(redis_client: redis.Redis, name: str, tmp_path: Path) -> None:
    """Released, lost in a tick, refused a renewal, refused an acquire: the file is free each time."""
    clock = Clock()
    holder = StartupTaskCoordinator(None, tmp_path, single_instance=True, clock=clock)
    key = key_of(name)

    def lose_in_tick() -> None:
        redis_client.delete(key)
        clock.now += TTL
        assert holder.tick() == [name]

    def lose_in_renewal() -> None:
        redis_client.delete(key)
        assert not holder.renew(name)

    def be_refused() -> None:
        redis_client.set(key, "another", px=60_000)
        assert not holder.acquire(name, TTL)

    ends: list[Callable[[], Any]] = [lambda: holder.release(name), lose_in_tick, lose_in_renewal, be_refused]
    before = open_lock_files(tmp_path)
    for end in ends:
        redis_client.delete(key)
        assert holder.acquire(name, TTL)
        with pytest.raises(BlockingIOError):
            folder_of(tmp_path).lock(name, holder.owner)
        end()
        assert not holder.is_held(name)
        folder_of(tmp_path).lock(name, holder.owner).unlock()
    assert open_lock_files(tmp_path) == before


def test_the_lock_of_a_garbage_collected_coordinator_lasts_until_it_expires(
    redis_client: redis.Redis, name: str, tmp_path: Path
) -> None:
    """Its process lives: no other acquires the lock early, and the file is free when it has expired."""
    clock = Clock()
    assert StartupTaskCoordinator(None, tmp_path, single_instance=True, clock=clock).acquire(name, TTL)
    gc.collect()
    newcomer = StartupTaskCoordinator(None, tmp_path, single_instance=True)
    assert not newcomer.acquire(name, TTL)
    clock.now += TTL
    redis_client.delete(key_of(name))
    assert newcomer.acquire(name, TTL)
    assert open_lock_files(tmp_path) == 1


def test_errors_leave_no_file_locked(redis_client: redis.Redis, name: str, tmp_path: Path) -> None:
    """Neither an error of the server nor many refusals leave a descriptor open."""
    redis_client.acl_setuser(name, enabled=True, nopass=True, categories=["+@all"], commands=["-evalsha"], keys=["*"])
    address = redis_client.connection_pool.connection_kwargs
    refused = redis.Redis(address["host"], address["port"], username=name, password="any", protocol=2)
    asker = StartupTaskCoordinator(None, tmp_path, single_instance=True)
    unlucky = StartupTaskCoordinator(refused, tmp_path, single_instance=True)
    redis_client.set(key_of(f"{name}2"), "another", px=60_000)
    assert not asker.acquire(f"{name}2", TTL)
    before = open_lock_files(tmp_path)
    for _ in range(20):
        assert not unlucky.acquire(name, TTL)
        assert not asker.acquire(f"{name}2", TTL)
    assert open_lock_files(tmp_path) == before
    redis_client.acl_deluser(name)
    assert StartupTaskCoordinator(None, tmp_path, single_instance=True).acquire(name, TTL)


def test_a_holder_that_lost_trust_is_succeeded_at_once(
    redis_client: redis.Redis,
    redis_proxy: Proxy,
    name: str,
    connect: Callable[[str], redis.Redis],
    tmp_path: Path,
) -> None:
    """Redis is unreachable for the holder only.

    Its lock is trusted until it expires, then another process succeeds it.
    """
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


def test_a_release_that_could_not_be_sent_harms_no_other_hold(
    redis_client: redis.Redis,
    redis_proxy: Proxy,
    name: str,
    connect: Callable[[str], redis.Redis],
    tmp_path: Path,
) -> None:
    """The next process on this storage acquires at once; a deletion that arrives late deletes no newer hold."""
    holder = StartupTaskCoordinator(connect(redis_proxy.url(database_of(redis_client))), tmp_path, single_instance=True)
    assert holder.acquire(name, TTL)
    left = value_of(redis_client, name)
    redis_proxy.go_away()
    holder.release(name)
    redis_proxy.come_back()
    assert holder.acquire(name, TTL)
    late = scripts.run("lock_release", redis_client, [key_of(name)], [left])
    assert late == b"stale"
    assert holder.renew(name)


def test_a_lock_can_be_acquired_again_when_another_has_signed_the_file(
    redis_client: redis.Redis, redis_proxy: Proxy, name: str, connect: Callable[[str], redis.Redis], tmp_path: Path
) -> None:
    """A coordinator's own lock is held even if the file has been signed again since its value was written."""
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
    folder_of(tmp_path).lock(name, stranger).unlock()
    assert holder.acquire(name, TTL)
    mine = Owner.read(value_of(redis_client, name))
    assert mine is not None and mine.written == str(lock_path(tmp_path, name).stat().st_ctime_ns)


def test_signature_stays_when_the_file_is_locked_again(name: str, tmp_path: Path, redis_client: redis.Redis) -> None:
    """One coordinator acquires, releases and acquires: neither the file's time nor the value changes."""
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
    """On one storage, in single-instance mode, a lock has one holder of either kind."""
    with_redis = StartupTaskCoordinator(connect(url), tmp_path, single_instance=True)
    with_files = StartupTaskCoordinator(connect(no_redis), tmp_path, single_instance=True)
    assert with_files.acquire(f"{name}2", TTL), "chooses files"
    assert with_redis.acquire(name, TTL)
    assert not with_files.acquire(name, TTL)
    with_redis.release(name)
    assert with_files.acquire(name, TTL)
    assert not with_redis.acquire(name, TTL)
    assert not StartupTaskCoordinator(connect(url), tmp_path, single_instance=True).acquire(name, TTL)


def test_a_refusal_by_the_file_chooses_neither_redis_nor_files(
    url: str, no_redis: str, name: str, connect: Callable[[str], redis.Redis], tmp_path: Path
) -> None:
    """A coordinator that was refused before Redis was asked may still begin with either."""
    holder = StartupTaskCoordinator(connect(url), tmp_path, single_instance=True)
    newcomer = StartupTaskCoordinator(connect(no_redis), tmp_path, single_instance=True)
    assert holder.acquire(name, TTL)
    assert not newcomer.acquire(name, TTL)
    assert newcomer.uses_files is None
    holder.release(name)
    assert newcomer.acquire(name, TTL)
    assert newcomer.uses_files is True


@pytest.mark.parametrize("why", ["folder", "platform"])
def test_without_a_usable_folder_locks_are_in_redis_only(
    redis_client: redis.Redis,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    why: str,
) -> None:
    """Single-instance mode continues without files and logs it once; such an owner cannot be proved dead."""
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "locks"
    if why == "platform":
        folder = tmp_path
        monkeypatch.setattr(lock_files, "HAS_FLOCK", False)
        # Such a platform has no locks of coordinators that were garbage-collected, but tests before may have left some.
        monkeypatch.setattr(hold, "_orphans", [])
    holder = StartupTaskCoordinator(None, folder, single_instance=True)
    assert holder.acquire(name, TTL) and holder.acquire(f"{name}2", TTL)
    assert sum("cannot be used" in record.message for record in caplog.records) == 1
    written = Owner.read(value_of(redis_client, name))
    assert written is not None and written.written == ""
    assert not StartupTaskCoordinator(None, tmp_path / "other", single_instance=True).acquire(name, TTL)
    assert holder.renew(name)
    holder.release(name)
    assert value_of(redis_client, name) == ""


def test_a_full_disk_does_not_prevent_a_lock(
    redis_client: redis.Redis, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file cannot be signed, but it is locked; only the owner cannot be proved dead."""

    def fail(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    holder = StartupTaskCoordinator(None, tmp_path, single_instance=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        assert holder.acquire(name, TTL)
    written = Owner.read(value_of(redis_client, name))
    assert written is not None and written.written == ""
    redis_client.delete(key_of(name))
    assert not StartupTaskCoordinator(None, tmp_path, single_instance=True).acquire(name, TTL)


# --- leadership terms


@pytest.mark.django_db(transaction=True)
def test_each_hold_has_its_own_term(redis_client: redis.Redis, name: str) -> None:
    """It begins when it is first asked for, lasts through renewals, and is higher for the next hold of any process."""
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
def test_trust_that_expires_during_a_renewal_ends_the_term(redis_client: redis.Redis, name: str) -> None:
    """Redis says yes, but another process may have held the lock before the reply arrived."""
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
def test_a_hold_lost_while_its_term_begins_has_no_term(
    redis_client: redis.Redis, name: str, monkeypatch: pytest.MonkeyPatch, is_taken_again: bool
) -> None:
    """No hold gets the number that came too late."""
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
    """Both ask first at the same time, and one number is used."""
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
    """Write a row with the term under which it was accepted."""
    with holder.fenced(name) as term:
        StartupRun.objects.create(name=name, holder=label, term=term, begun_at=timezone.now())
    return term


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("is_fenced", [True, False])
def test_accepted_terms_never_decrease_with_the_fence_and_do_without(
    redis_client: redis.Redis, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_fenced: bool
) -> None:
    """Redis forgot the lock and the older holder has not noticed: only the fence refuses its write."""
    if not is_fenced:
        monkeypatch.setattr(fencing, "fence", lambda name, number: None)
    older, newer = (StartupTaskCoordinator(None, tmp_path / folder, single_instance=True) for folder in "ab")
    assert older.acquire(name, TTL)
    write_fenced(older, name, "older")
    redis_client.delete(key_of(name))
    assert newer.acquire(name, TTL)
    write_fenced(newer, name, "newer")
    assert older.is_held(name), "as far as it knows"
    if is_fenced:
        with pytest.raises(LockLost) as caught:
            write_fenced(older, name, "older")
        assert (caught.value.name, caught.value.term) == (name, 1)
        assert not older.is_held(name), "given up"
        folder_of(tmp_path / "a").lock(name, older.owner).unlock()
        assert newer.renew(name)
    else:
        write_fenced(older, name, "older")
    accepted = list(StartupRun.objects.filter(name=name).order_by("id").values_list("term", flat=True))
    assert accepted == ([1, 2] if is_fenced else [1, 2, 1])


@pytest.mark.django_db(transaction=True)
def test_an_error_in_a_fenced_body_keeps_the_hold(name: str) -> None:
    """It rolls back; a LockLost of another lock that passes through releases nothing here either."""
    holder = StartupTaskCoordinator()
    assert holder.acquire(name, TTL)
    for error in (ZeroDivisionError(), LockLost("another", 1)):
        with pytest.raises(type(error)), holder.fenced(name):
            StartupRun.objects.create(name=name, holder="", term=1, begun_at=timezone.now())
            raise error
    assert holder.is_held(name)
    assert not StartupRun.objects.filter(name=name).exists()


class Writer(threading.Thread):
    """Compete for a lock, and write its term while holding it."""

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
        except Exception as error:  # noqa: BLE001 - reported by the test
            self.error = error
        finally:
            connections.close_all()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("has_fallback", [True, False])
def test_terms_do_not_decrease_while_redis_flaps(
    redis_client: redis.Redis, name: str, connect: Callable[[str], redis.Redis], tmp_path: Path, has_fallback: bool
) -> None:
    """Redis is stopped, restarted and emptied. ASYNCQ_TEST_FLAP_SECONDS: for how long.

    With the fallback one writer holds a file while the other holds the lock in Redis, so two write at a time. Without
    it both compete in Redis.
    """
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
            over.wait(0.1 if turn % 3 else 0.8)  # some outages are longer than the TTL
            if turn % 4 == 0:
                redis_client.delete(key_of(name))
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
    key = key_of(name)
    redis_client.set(key, "other", px=60_000)
    refusals = [
        scripts.run("lock_acquire", redis_client, [key], ["mine", 1000, ""]),
        scripts.run("lock_acquire", redis_client, [key], ["mine", 1000, "dead"]),
        scripts.run("lock_renew", redis_client, [key], ["mine", 1000]),
        scripts.run("lock_release", redis_client, [key], ["mine"]),
    ]
    assert refusals == [[b"taken", b"other"], [b"taken", b"other"], b"stale", b"stale"]
    assert redis_client.get(key) == b"other"
    assert 9000 < redis_client.pttl(key) <= 60_000
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
    """A yes that took longer than the TTL is not trusted."""
    clock = Clock()

    class SlowClient:
        def evalsha(self, *arguments: Any) -> Any:
            clock.now += 11
            return redis_client.eval(scripts.script("lock_acquire").text, *arguments[1:])

    holder = StartupTaskCoordinator(SlowClient(), clock=clock)
    assert holder.acquire(name, 10) is False
    assert not holder.is_held(name)


def test_tick_renews_at_a_third_of_the_ttl(redis_client: redis.Redis, name: str) -> None:
    """Before that nothing is sent; then the TTL starts again."""
    clock = Clock()
    holder = StartupTaskCoordinator(clock=clock)
    holder.acquire(name, TTL)
    redis_client.pexpire(key_of(name), 5000)
    clock.now += 9
    assert holder.tick() == []
    assert redis_client.pttl(key_of(name)) <= 5000
    assert holder.tick(now=clock.now + 2) == []
    assert redis_client.pttl(key_of(name)) > 5000
    clock.now += 26
    assert holder.is_held(name), "counted from the renewal"


def test_tick_returns_a_lost_lock_once(redis_client: redis.Redis, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The lock vanished from an emptied server: it is returned once, is no longer held, and can be acquired again."""
    clock = Clock()
    holder = StartupTaskCoordinator(clock=clock)
    holder.acquire(name, TTL)
    redis_client.delete(key_of(name))
    clock.now += 11
    assert holder.tick() == [name]
    assert holder.tick() == []
    assert not holder.is_held(name)
    assert "is lost" in caplog.text
    assert holder.acquire(name, TTL)


def test_a_refused_acquire_ends_the_trust_in_an_older_hold(redis_client: redis.Redis, name: str) -> None:
    """Redis says that another holds it; what this process believed does not count."""
    holder = StartupTaskCoordinator()
    holder.acquire(name, TTL)
    redis_client.set(key_of(name), "another", px=60_000)
    assert not holder.acquire(name, TTL)
    assert not holder.is_held(name)


def test_release_by_another_changes_nothing(redis_client: redis.Redis, name: str) -> None:
    """Neither a coordinator that never held it nor one that lost it can release it."""
    loser, holder = StartupTaskCoordinator(), StartupTaskCoordinator()
    loser.acquire(name, TTL)
    redis_client.delete(key_of(name))
    holder.acquire(name, TTL)
    written = value_of(redis_client, name)
    loser.release(name)
    StartupTaskCoordinator().release(name)
    assert value_of(redis_client, name) == written
    holder.release(name)
    assert value_of(redis_client, name) == ""
    assert not holder.is_held(name)


def test_hold_releases_only_what_it_acquired(redis_client: redis.Redis, name: str) -> None:
    """An inner hold of a held lock leaves it to the outer one; an error releases it too."""
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


def test_async_methods_do_the_same(redis_client: redis.Redis, name: str) -> None:
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
    """Cancelled while the thread acquires it, the lock is released all the same."""
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
    """A renewal in flight in one thread cannot restore what another releases."""
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
    release.join(0.2)  # it waits for the renewal; otherwise it would have finished by now
    answered.set()
    renewal.join(10)
    release.join(10)
    assert not holder.is_held(name)
    assert value_of(redis_client, name) == ""


# --- Redis unreachable


def test_an_acquire_whose_reply_is_lost_holds_the_lock(
    own_redis: EmbeddedRedis, name: str, connect: Callable[[str], redis.Redis]
) -> None:
    """The command had arrived: the asker holds the lock in Redis, also at its first acquire."""
    direct = connect(own_redis.url)
    with Proxy(("127.0.0.1", own_redis.port)) as proxy:
        client = connect(proxy.url())
        asker = StartupTaskCoordinator(client)
        # Otherwise the lost reply would be that of the handshake, or the error for an unknown script.
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


def test_an_outage_after_the_first_acquire_refuses_and_trust_expires(
    redis_client: redis.Redis,
    redis_proxy: Proxy,
    name: str,
    connect: Callable[[str], redis.Redis],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No file replaces Redis, the outage is logged once, and the lock is trusted only until it expires."""
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
    assert sum("locks cannot be acquired" in record.message for record in caplog.records) == 1
    assert not (tmp_path / "locks").exists()


def test_the_end_of_an_outage_is_logged_once(
    own_redis: EmbeddedRedis, name: str, connect: Callable[[str], redis.Redis], caplog: pytest.LogCaptureFixture
) -> None:
    """By whatever call finds it."""
    caplog.set_level("INFO", "django_asyncq")
    holder = StartupTaskCoordinator(connect(own_redis.url), single_instance=False)
    assert holder.acquire(name, TTL)
    own_redis.kill()
    assert holder.renew(name) is False
    own_redis.restart()
    holder.renew(name)
    assert holder.acquire(f"{name}2", TTL)
    assert [record.getMessage() for record in caplog.records].count("locks can be acquired and renewed again") == 1


def test_never_switches_from_redis_to_files_or_back(
    own_redis: EmbeddedRedis, name: str, connect: Callable[[str], redis.Redis], tmp_path: Path
) -> None:
    """The choice at the first acquire stays, whatever happens to Redis."""
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
        assert list(client.scan_iter(f"{conf.current().lock_prefix}*")) == [key_of(f"{name}4").encode()]
    assert not lock_path(tmp_path / "second", f"{name}4").exists()
    assert len(list((tmp_path / "second").glob("*.lock"))) == 2


# --- environments in one folder


def in_environment(settings: Any, location: str, prefix: str) -> Any:
    """Switch to the settings of an environment."""
    settings.ASYNCQ = {**django_settings.ASYNCQ, "KEY_PREFIX": prefix}
    settings.CACHES = {"default": {**django_settings.CACHES["default"], "LOCATION": location}}


@pytest.mark.parametrize("is_reachable", [True, False])
def test_environments_with_different_redis_or_prefix_share_a_folder(
    url: str, own_redis: EmbeddedRedis, name: str, settings: Any, tmp_path: Path, no_redis: str, is_reachable: bool
) -> None:
    """Each has a leader of its own. A password in the address makes no difference, so it may be changed."""
    first, second = (url, own_redis.url) if is_reachable else (no_redis, no_redis.replace("/0", "/1"))
    holders = []
    for location, prefix in ((first, "asynq:blue"), (second, "asynq:blue"), (first, "asynq:green")):
        in_environment(settings, location, prefix)
        # In Redis, the name of a lock begins with the prefix.
        holders.append(StartupTaskCoordinator(None, tmp_path, single_instance=True))
        assert holders[-1].acquire(f"{name}.{prefix}", TTL), (location, prefix)
        rival = StartupTaskCoordinator(None, tmp_path, single_instance=True)
        assert not rival.acquire(f"{name}.{prefix}", TTL)
        assert rival.holder(f"{name}.{prefix}").token == holders[-1].owner.token
    in_environment(settings, first.replace("://", "://:changed@"), "asynq:blue")
    assert folder_of(tmp_path).signer(f"{name}.asynq:blue").token == holders[0].owner.token
    assert len(list(tmp_path.glob("*.lock"))) == 3
    assert not [path for path in tmp_path.iterdir() if "changed" in path.name or re.search(r"127\D0\D0\D1", path.name)]


def test_wrong_password_chooses_neither_redis_nor_files(
    own_redis: EmbeddedRedis, name: str, connect: Callable[[str], redis.Redis], tmp_path: Path, caplog: Any
) -> None:
    """Nothing is acquired, the reason is logged once, and Redis is used when the password is right again."""
    admin = connect(own_redis.url)
    admin.config_set("requirepass", "right")
    coordinator = StartupTaskCoordinator(connect(own_redis.url), tmp_path, single_instance=True)
    for _ in range(3):
        assert not coordinator.acquire(name, TTL)
    assert coordinator.uses_files is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "Authentication required" in line and "user name and password in" in line
    admin.config_set("requirepass", "")
    assert coordinator.acquire(name, TTL) and coordinator.uses_files is False


@pytest.mark.parametrize("single_instance", [True, False])
def test_who_holds_a_lock_is_known_after_a_refusal(
    url: str, name: str, contender: Callable[..., Contender], single_instance: bool, tmp_path: Path
) -> None:
    """Host and pid, and since when where there is a file; before the first `acquire` nothing is known."""
    begun_at = timezone.now() - timedelta(seconds=1)
    process = contender(url=url, lock_dir=str(tmp_path), single_instance=single_instance)
    mine = StartupTaskCoordinator(None, tmp_path, single_instance=single_instance)
    assert process.ask("acquire", name, TTL) and mine.holder(name) is None
    assert not mine.acquire(name, TTL)
    found = mine.holder(name)
    assert found is not None and str(found) == f"{socket.gethostname()}:{process.pid}"
    if single_instance:
        assert found.since is not None and begun_at < found.since <= timezone.now()
    else:
        assert found.since is None
    process.ask("release", name)
    assert mine.acquire(name, TTL) and mine.holder(name) == mine.owner


# --- forks


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("single_instance", [True, False])
def test_child_of_a_fork_holds_nothing(redis_client: redis.Redis, name: str, single_instance: bool) -> None:
    """It does not trust, renew or release the parent's lock, nor, as another owner, acquire it."""
    holder = StartupTaskCoordinator(single_instance=single_instance)
    assert holder.acquire(name, TTL)
    redis_client.pexpire(key_of(name), 5000)
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
    assert 0 < redis_client.pttl(key_of(name)) <= 5000
    assert holder.renew(name)


def test_a_fork_without_fork_hooks_is_noticed_by_the_pid(
    redis_client: redis.Redis, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork by a C library runs no Python hooks."""
    holder = StartupTaskCoordinator()
    assert holder.acquire(name, TTL)
    written = value_of(redis_client, name)
    redis_client.pexpire(key_of(name), 5000)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        assert not holder.is_held(name)
        assert not holder.renew(name)
        holder.release(name)
    assert value_of(redis_client, name) == written
    assert redis_client.pttl(key_of(name)) <= 5000
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
    """The child outlives its killed parent and has closed the file, with Redis as well as without."""
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
    """A descriptor that another thread has opened, but not yet recorded as a hold, is closed in the child too."""
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
    """The file was unlinked between opening and locking: the new one is locked."""
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


def test_every_lock_name_has_its_own_file() -> None:
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
    found = [lock_files.file_name(name, "redis asynq") for name in names]
    assert len(set(found)) == len(names)
    assert all("/" not in file and "\x00" not in file and len(file) < 150 for file in found)
    assert re.fullmatch(r"maintenance-[0-9a-f]{16}\.lock", found[0])


def test_neither_redis_nor_a_usable_folder_is_an_error(
    own_redis: EmbeddedRedis, name: str, connect: Callable[[str], redis.Redis], tmp_path: Path
) -> None:
    """It names the remedy, and Redis may still be chosen later."""
    (tmp_path / "file").touch()
    coordinator = StartupTaskCoordinator(connect(own_redis.url), tmp_path / "file" / "locks")
    own_redis.kill()
    with pytest.raises(BrokerUnavailable, match="TASK_LOCK_DIR"):
        coordinator.acquire(name, TTL)
    own_redis.restart()
    assert coordinator.acquire(name, TTL)


def test_a_platform_without_flock_is_an_error(
    no_redis: str,
    name: str,
    connect: Callable[[str], redis.Redis],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On Windows there is no flock, and the error says so."""
    monkeypatch.setattr(lock_files, "HAS_FLOCK", False)
    with pytest.raises(BrokerUnavailable, match="does not support file locks"):
        StartupTaskCoordinator(connect(no_redis), tmp_path).acquire(name, TTL)

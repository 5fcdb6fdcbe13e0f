"""The supervisor's own decisions, with processes that never begin."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from django_asyncq import conf, lifecycle
from django_asyncq.broker import Broker, Extended
from django_asyncq.broker.keys import alive_key
from django_asyncq.supervisor import Supervisor, WorkersCannotStart
from django_asyncq.testing import EmbeddedRedis
from django_asyncq.worker.options import WorkerOptions

from .workers import environment, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def handlers() -> Iterator[None]:
    """Give the signal handlers of the test process back: the supervisor sets its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_burst_that_cannot_start_still_shuts_down_in_order(handlers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One error, raised once: the maintenance has ended and no process is left, though others failed meanwhile."""
    for name, value in environment(ASYNCQ_TEST_BREAK_WORKERS="1").items():
        monkeypatch.setenv(name, value)
    supervisor = Supervisor(WorkerOptions(concurrency=1), processes=3, burst=True)
    supervisor.maintenance.nothing_left = lambda backend: False  # type: ignore[method-assign]
    with pytest.raises(WorkersCannotStart):
        supervisor.run()
    assert supervisor.children == []
    assert not supervisor.maintenance.is_alive()


def test_a_process_ended_while_starting_at_shutdown_is_no_failure(
    handlers: None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """A burst that is over before its processes have begun ends without an error in the log."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    supervisor = Supervisor(WorkerOptions(concurrency=1), processes=2, burst=True)
    supervisor.run()
    assert supervisor.children == []
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
    wait_until(lambda: not supervisor.maintenance.is_alive(), "the end of the maintenance")


def test_only_a_loss_of_memory_has_the_running_asserted(
    own_redis: EmbeddedRedis, own_keys: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the first mark of a new Redis, which at maxmemory could not be answered; a loss until a new mark is seen."""
    asserted: list[str] = []
    monkeypatch.setattr(lifecycle, "reassert", lambda broker, worker_id, ids: asserted.append(worker_id))
    supervisor = Supervisor(WorkerOptions(queues={"default": 1}))
    running = [SimpleNamespace(id="a")]
    supervisor.children.append(
        SimpleNamespace(worker_id="w", board=SimpleNamespace(running=lambda: running))  # type: ignore[arg-type]
    )
    monkeypatch.setattr(Broker, "extend", lambda *arguments: [Extended(1, [])])
    seen = []
    for step in ("none", "mark", "same", "lost", "lost", "mark", "same"):
        if step == "lost":
            supervisor.broker.client.delete(alive_key())
        elif step == "mark":
            supervisor.broker.client.set(alive_key(), 100 + len(seen))
        asserted.clear()
        supervisor._renew()
        seen.append(bool(asserted))
    assert seen == [False, False, False, True, True, True, False]


def test_what_is_begun_while_leases_are_renewed_is_not_looked_for(
    own_redis: EmbeddedRedis, own_keys: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on the board, and not among the leases renewed: the next beat would wait for its row for nothing."""
    asserted: list[set[str]] = []
    monkeypatch.setattr(lifecycle, "reassert", lambda broker, worker_id, ids: asserted.append(ids))
    supervisor = Supervisor(WorkerOptions(queues={"default": 1}))
    running = [SimpleNamespace(id="a")]
    supervisor.children.append(
        SimpleNamespace(worker_id="w", board=SimpleNamespace(running=running.copy))  # type: ignore[arg-type]
    )

    def extend(*arguments: object) -> list[Extended]:
        running.append(SimpleNamespace(id="b"))
        return [Extended(1, [])]

    monkeypatch.setattr(Broker, "extend", extend)
    supervisor._renew()
    assert asserted == []
    supervisor._renew()
    assert asserted == [{"a", "b"}]


def test_a_redis_that_is_away_is_told_once_and_asked_again_soon(
    own_redis: EmbeddedRedis, own_keys: None, caplog: pytest.LogCaptureFixture
) -> None:
    """However many beats it misses: one line when it goes, one when it is back."""
    caplog.set_level(logging.INFO, logger="django_asyncq.supervisor")
    supervisor = Supervisor(WorkerOptions(concurrency=1))
    supervisor.beat()
    own_redis.kill()
    for _ in range(3):
        supervisor._beat_at = 0.0
        supervisor.beat()
        assert supervisor._beat_at <= time.monotonic() + conf.current().beat_retry_seconds
    own_redis.restart()
    supervisor._beat_at = 0.0
    supervisor.beat()
    assert supervisor._beat_at > time.monotonic() + conf.current().beat_seconds - 1
    words = [record.getMessage().split(":")[0] for record in caplog.records]
    assert words == ["leases cannot be renewed", "leases are renewed again"]

"""How a sleeping thread is woken: with a reason that it expects, by a signal, or by a socket of any number."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from django_asyncq.worker.wakeup import FD_SETSIZE, Notice, Reason, Wakeup, readable

PATIENCE_SECONDS = 10.0


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The descriptors that were written to, one for each system call."""
    found: list[int] = []
    write = os.write

    def counted(descriptor: int, data: bytes) -> int:
        found.append(descriptor)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", counted)
    yield found


def test_expected_reasons_wake_and_are_read_once() -> None:
    """Each wait has the reasons that were given since the one before."""
    wakeup = Wakeup(expected=[Reason.PUSH])
    wakeup.expect(Reason.REPORTED)
    for _ in range(3):
        wakeup.notify(Reason.PUSH)
        wakeup.notify(Reason.REPORTED)
        assert wakeup.wait(PATIENCE_SECONDS).reasons == {Reason.PUSH, Reason.REPORTED}
        assert wakeup.wait(0).reasons == set()


def test_reason_that_nobody_expects_costs_no_system_call(writes: list[int]) -> None:
    """Nor does one that is given again before it is read; slots notify after each task."""
    wakeup = Wakeup()
    for _ in range(100):
        wakeup.notify(Reason.IDLE)
    assert writes == []
    wakeup.expect(Reason.IDLE)
    for _ in range(100):
        wakeup.notify(Reason.IDLE)
    assert len(writes) == 1
    wakeup.wait(0)
    wakeup.ignore(Reason.IDLE)
    wakeup.notify(Reason.IDLE)
    assert len(writes) == 1


def test_notice_is_an_event_for_a_listener() -> None:
    """Setting it gives its reason."""
    wakeup = Wakeup(expected=[Reason.PUSH])
    Notice(wakeup, Reason.PUSH).set()
    assert wakeup.wait(PATIENCE_SECONDS).reasons == {Reason.PUSH}


def test_no_reason_is_lost_between_threads() -> None:
    """Each one is given again and again while the owner reads; the last of each kind is read in the end."""
    wakeup = Wakeup(expected=list(Reason))
    given = [Reason.PUSH, Reason.IDLE, Reason.REPORTED]
    read: dict[Reason, int] = dict.fromkeys(given, 0)
    seen = {reason: threading.Event() for reason in given}

    def give(reason: Reason) -> None:
        for _ in range(500):
            seen[reason].clear()
            wakeup.notify(reason)
            assert seen[reason].wait(PATIENCE_SECONDS)

    threads = [threading.Thread(target=give, args=(reason,)) for reason in given]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while min(read.values()) < 500 and time.monotonic() < deadline:
        for reason in wakeup.wait(PATIENCE_SECONDS).reasons:
            read[reason] += 1
            seen[reason].set()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert read == dict.fromkeys(given, 500)


def test_signal_is_a_reason_of_its_own() -> None:
    """Also when another reason came with it."""
    wakeup = Wakeup(expected=[Reason.PUSH])
    before: Any = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    descriptor = signal.set_wakeup_fd(-1)
    try:
        wakeup.attach_signals()
        wakeup.notify(Reason.PUSH)
        signal.raise_signal(signal.SIGUSR1)
        assert wakeup.wait(PATIENCE_SECONDS).reasons == {Reason.PUSH, Reason.SIGNAL}
        signal.raise_signal(signal.SIGUSR1)
        assert wakeup.wait(PATIENCE_SECONDS).reasons == {Reason.SIGNAL}
    finally:
        signal.set_wakeup_fd(descriptor)
        signal.signal(signal.SIGUSR1, before)


def test_descriptors_of_any_number_can_be_slept_on() -> None:
    """`select` cannot look at numbers above 1,023, which a process has that has opened so many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= FD_SETSIZE + 10:
        pytest.skip("this system allows no such number")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FD_SETSIZE + 10), hard))
    read, write = os.pipe()
    try:
        high = fcntl.fcntl(read, fcntl.F_DUPFD, FD_SETSIZE)
        begun = time.monotonic()
        assert readable([high], 0.05) == []
        assert time.monotonic() - begun >= 0.04
        os.write(write, b"x")
        assert readable([high, read], PATIENCE_SECONDS) == [high, read]
        assert readable([read], None) == [read]
        os.close(high)
    finally:
        os.close(read)
        os.close(write)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

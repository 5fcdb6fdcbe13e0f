"""A process of `test_inbox_faults` that leads and reads inboxes, as the leader of a fleet does, until it is killed."""

from __future__ import annotations

import sys
import time

import django

django.setup()

from django_asyncq.broker import Broker, foreign  # noqa: E402
from django_asyncq.core.registry import load_task_modules  # noqa: E402
from django_asyncq.interop import inbox as service  # noqa: E402
from django_asyncq.leadership.coordinator import StartupTaskCoordinator  # noqa: E402

LOCK = "inbox.reader"


def main(per_page: int) -> None:
    """Wait for the lock, then read. per_page: few documents, so that many steps lie between two kills."""
    load_task_modules()
    service.PER_PAGE = per_page
    foreign.TAKEN_SECONDS = 0.5
    coordinator = StartupTaskCoordinator()
    while not coordinator.acquire(LOCK, 30):
        time.sleep(0.02)
    reader = service.InboxService(Broker(), lambda: coordinator.fenced(LOCK))
    while True:
        coordinator.tick()
        reader.tick(time.monotonic())
        time.sleep(0.05)


main(int(sys.argv[1]))

"""Tasks whose failures are reported to Sentry."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import sentry_sdk

from django_asyncq import task
from django_asyncq.context import TaskContext


@task(takes_context=True, max_attempts=2, backoff=0)
def fails_twice(context: TaskContext, mark: str) -> None:
    """Fail in each attempt; leave traces in the scope."""
    sentry_sdk.set_tag("mark", mark)
    sentry_sdk.add_breadcrumb(message=f"crumb of {mark}, attempt {context.attempt}")
    time.sleep(0.05)
    raise LookupError(f"no {mark}")


@task(max_attempts=2, backoff=3_600)
def fails_for_now(mark: str) -> None:
    """Fail; be retried much later."""
    raise LookupError(f"no {mark}")


@task()
async def fails_in_the_loop(mark: str) -> None:
    """Do the same in the event loop, beside others."""
    sentry_sdk.set_tag("mark", mark)
    await asyncio.sleep(0.05)
    sentry_sdk.add_breadcrumb(message=f"crumb of {mark}")
    await asyncio.sleep(0.05)
    raise LookupError(f"no {mark}")


@task(isolated=True, schedulable=True)
def fails_alone(mark: str) -> None:
    """Fail in a process of its own."""
    sentry_sdk.set_tag("mark", mark)
    raise LookupError(f"no {mark}")


@task(isolated=True)
def dies(mark: str) -> None:
    """Take the process along."""
    os._exit(9)


@task(sensitive="iban")
def pays(iban: str, pin: int, amount: int, key: Any = None) -> None:
    """Fail with its secrets in all places."""
    copy = [iban, pin, amount]
    sentry_sdk.add_breadcrumb(message=f"paying from {iban}", data={"password": "hunter22"})
    sentry_sdk.capture_message(f"asked the bank for {iban}")
    raise ValueError(f"no account {copy[0]}, password=hunter22")


@task(sensitive="pin")
def dials(pin: int) -> None:
    """Fail with a number that is a secret."""
    digits = [pin]
    raise ValueError(str(len(digits)))

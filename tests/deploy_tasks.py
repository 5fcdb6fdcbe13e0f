"""The tasks of a project at two moments: ASYNCQ_TEST_DEPLOY is "old" or "new"; without it there are none."""

from __future__ import annotations

import os
import time
from typing import Any

from django_asyncq import every, task

CODE = os.environ.get("ASYNCQ_TEST_DEPLOY", "")
SWEEP = every(seconds=1, name="sweep") if os.environ.get("ASYNCQ_TEST_SWEEP") else None


def ran(task: str, *values: Any) -> None:
    from .tasks import note

    note("ran", code=CODE, task=task, values=list(values))


def without_currency(args: list[Any], kwargs: dict[str, Any], from_version: int) -> tuple[list[Any], dict[str, Any]]:
    """What version 1 of `charge` was called with → version 2."""
    order, cents, currency = args
    return [order, {"amount": cents, "currency": currency}], kwargs


if CODE == "old":

    @task
    def send(order: int) -> None:
        """It is renamed."""
        ran("send", order)

    @task
    def charge(order: int, cents: int, currency: str) -> None:
        """Its arguments change."""
        ran("charge", order, cents, currency)

    @task
    def greet(name: str) -> None:
        """It gets another argument, with a default."""
        ran("greet", name)

    @task
    def remind(order: int) -> None:
        """It is removed."""
        ran("remind", order)

    @task(gate="old-gate", queue_limit=5)
    def export(order: int) -> None:
        """It gets another gate."""
        ran("export", order)

    @task
    def archive(order: int) -> None:
        """It goes to another queue."""
        ran("archive", order)

    @task(schedule=SWEEP)
    def sweep() -> None:
        """It is renamed, and has a schedule."""
        ran("sweep")


if CODE == "new":

    @task(aliases="tests.deploy_tasks.send")
    def send_receipt(order: int) -> None:
        """It was `send`."""
        ran("send", order)

    @task(version=2, upgrade=without_currency)
    def charge(order: int, price: dict[str, Any]) -> None:  # type: ignore[no-redef]
        """It got cents and a currency."""
        ran("charge", order, price["amount"], price["currency"])

    @task
    def greet(name: str, language: str = "en") -> None:  # type: ignore[no-redef]
        """It has got another argument."""
        ran("greet", name, language)

    @task(gate="new-gate", queue_limit=5)
    def export(order: int) -> None:
        """It had another gate."""
        ran("export", order)

    @task(queue_name="shared")
    def archive(order: int) -> None:
        """It was in the default queue."""
        ran("archive", order)

    @task(aliases="tests.deploy_tasks.sweep", schedule=SWEEP)
    def sweep_up() -> None:
        """It was `sweep`."""
        ran("sweep")

    @task
    def fresh(order: int) -> None:
        """Old code does not have it."""
        time.sleep(0)
        ran("fresh", order)

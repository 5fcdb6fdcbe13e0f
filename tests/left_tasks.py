"""The task that runs the messages of asynq's captures; `test_left_behind` gives it their types, for one test each."""

from __future__ import annotations

from typing import Any

from django_asyncq import Batch, BatchItem, task


def an_hour(exception: BaseException, result: Any) -> float:
    """Return an hour in seconds, as in the captures; the usual time is a random one."""
    return 3600


@task(max_attempts=2, backoff=an_hour, give_up_on=(LookupError,))
def body(*args: object) -> None:
    """Stand for the function of any message; the test says how its run ends."""


@task(batch=Batch(size=3, within=60))
def together(items: list[BatchItem]) -> None:
    """Stand for the function that runs the members of a group."""

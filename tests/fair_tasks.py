"""Tasks of the tests with fair keys. Each returns what it was called with."""

from __future__ import annotations

from typing import Any

from django_asyncq import task

WEIGHTS = {"heavy": 3, "light": 1}


@task(fair="{tenant}")
def export(tenant: str, number: int = 0) -> list[Any]:
    """Fair by the tenant."""
    return [tenant, number]


@task(fair=lambda tenant, number: f"tenant {tenant}", fair_weight=lambda tenant, number: WEIGHTS.get(tenant, 1))
def weighted(tenant: str, number: int) -> list[Any]:
    """Fair by the tenant, some of whom get more."""
    return [tenant, number]


@task
def plain(tenant: str, number: int = 0) -> list[Any]:
    """Of no key."""
    return [tenant, number]


@task(fair="{password}", sensitive="password")
def secret(password: str) -> None:
    """Its key is a secret, as a project should not have it."""

"""How a state machine is run: the settings of Hypothesis, and what is still while it runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings


def profile(examples: int, steps: int = 30, **more: Any) -> settings:
    """Return settings for this many sequences of this many steps."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        **more,
    )


@pytest.fixture(autouse=True)
def quiet(settings: Any) -> Iterator[None]:
    """Leases do not expire, and what the machine kills is not logged."""
    settings.ASYNCQ = {**settings.ASYNCQ, "LEASE_SECONDS": 1200, "PUSH_BATCH_SECONDS": 0}
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)

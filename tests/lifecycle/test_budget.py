"""A plain task pays for nothing that it does not use: its calls are counted, and may not become more."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import django
import pytest
from django.db import connection

from django_asyncq.lifecycle.base import OWN_RECEIVERS
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.signals import task_state_changed, task_state_changing
from django_asyncq.testing import failpoints

from .. import calls

# One new function in thirty is noticed; that Django or a driver calls one more is not a fault of ours.
MARGIN = 1.03

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(
        sys.version_info[:2] != (3, 13) or django.VERSION[:2] != (6, 1) or connection.vendor == "mysql",
        reason="the figures are those of Python 3.13, Django 6.1, SQLite and PostgreSQL",
    ),
]


def test_a_plain_task_makes_no_more_calls_than_it_did(settings: Any) -> None:
    """And no more functions of this package.

    `ASYNCQ_TEST_WRITE_CALLS=1 python runtests.py tests/lifecycle/test_budget.py` after a change that is worth them.
    """
    # An earlier test of this process may have armed some.
    failpoints.remove()
    # Each push by its caller, so that no thread decides how many are pushed together.
    settings.ASYNCQ = {**settings.ASYNCQ, "PUSH_BATCH_SECONDS": 0}
    found = calls.measured()
    assert TaskRecord.objects.filter(state=TaskState.SUCCEEDED).count() == 2 * calls.TASKS
    if os.environ.get("ASYNCQ_TEST_WRITE_CALLS"):
        known = json.loads(calls.KEPT.read_text()) if calls.KEPT.exists() else {}
        calls.KEPT.write_text(json.dumps(known | {connection.vendor: found}, indent=1, sort_keys=True) + "\n")
    before = calls.kept(connection.vendor)
    for name, figures in found.items():
        came = sorted(set(figures["functions"]) - set(before[name]["functions"]))
        assert figures["calls"] <= before[name]["calls"] * MARGIN, f"{name}: functions that came: {came}"


def test_a_call_more_for_each_task_is_noticed() -> None:
    """The count is that of calls, and names the functions of the package."""
    with calls.counted() as counted:
        for _ in range(calls.TASKS):
            assert not TaskRecord(name="a").is_final
    figures = counted.each()
    assert "models/tasks.py TaskRecord.is_final" in figures["functions"]
    assert figures["calls"] > 1


@pytest.mark.parametrize("signal", [task_state_changing, task_state_changed])
def test_each_signal_of_states_has_one_receiver_of_this_package(signal: Any) -> None:
    """By that number a signal that nobody else listens to is known, and not sent for tasks without a gate."""
    uids = [str(key[0]) for key, *_ in signal.receivers]
    assert len([uid for uid in uids if uid.startswith("django_asyncq.gates.")]) == OWN_RECEIVERS

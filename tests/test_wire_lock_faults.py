"""A producer that is killed at each step: asynq's unique lock and the gate slot go, or belong to the row."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import pytest
from django.db.models import F

from django_asyncq import conf, gates
from django_asyncq.broker import Broker
from django_asyncq.maintenance.reconciler import Reconciler
from django_asyncq.models import TaskRecord
from django_asyncq.testing import crash_at

from .test_wire_lock import client, go_takes, holder, lock
from .workers import ROOT, environment

pytestmark = pytest.mark.django_db(transaction=True)

PRODUCER = """
import django
django.setup()
from django.db import transaction
from tests.test_wire_lock import deliver
with transaction.atomic():
    deliver.using(gate="g", queue_limit=5).enqueue("a")
"""


@pytest.mark.parametrize(
    ("point", "is_committed"),
    [
        ("enqueue.slot_acquired", False),
        ("enqueue.row_inserted", False),
        ("enqueue.committed", True),
        ("enqueue.pushed", True),
    ],
)
def test_a_killed_producer_leaves_nothing_that_lasts(point: str, is_committed: bool) -> None:
    """Without a row, lock and slot expire within a minute; with one, the sweep makes both last."""
    killed = subprocess.run(
        [sys.executable, "-c", PRODUCER],
        env={**crash_at(point), **environment(), "ASYNCQ_CRASH": f"{point}:1"},
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert killed.returncode == -9, killed.stderr.decode()
    provisional = conf.current().provisional_seconds
    assert TaskRecord.objects.count() == int(is_committed)
    (slot,) = gates.slots("g")
    assert holder() == slot.id
    if not is_committed:
        assert 0 < client().ttl(lock()) <= provisional
        assert client().zscore(gates.keys("g").members, slot.id) <= client().time()[0] + provisional
        # Redis removes it by itself.
        client().delete(lock())
        assert go_takes()
        return
    TaskRecord.objects.update(enqueued_at=F("enqueued_at") - timedelta(seconds=10))
    Reconciler(Broker()).sweep()
    row = TaskRecord.objects.get()
    assert holder() == str(row.id)
    assert client().ttl(lock()) > 80_000
    assert client().zscore(gates.keys("g").members, str(row.id)) > client().time()[0] + provisional

"""How long `check-deploy` takes beside many live rows: ASYNCQ_TEST_ROWS says how many, and `-s` shows it."""

from __future__ import annotations

import os
import time

import pytest
from django.db import connection

from django_asyncq.core.names import uuid7
from django_asyncq.models import TaskRecord
from django_asyncq.observe.deploying import check_deploy

from .. import tasks

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.long, pytest.mark.timeout(1800)]
ROWS = int(os.environ.get("ASYNCQ_TEST_ROWS", "100000"))
NAMES = (tasks.add, tasks.add_async, tasks.noop)


def test_many_live_rows_are_checked_in_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """Of three tasks, in two forms each; nothing is found."""
    for start in range(0, ROWS, 5000):
        TaskRecord.objects.bulk_create(
            TaskRecord(
                id=uuid7(),
                name=NAMES[number % 3].module_path,
                args=[number, 1] if number % 2 else [number],
                kwargs={} if number % 2 else {"b": 2},
            )
            for number in range(start, min(start + 5000, ROWS))
        )
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE")
    began = time.perf_counter()
    found = check_deploy()
    took = time.perf_counter() - began
    with capsys.disabled():
        print(f"\ncheck-deploy: {found.tasks:,} live rows, {connection.vendor}: {took:.2f} s")
    assert found.tasks == ROWS
    assert found.mistakes == []

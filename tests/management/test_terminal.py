"""`manage.py asyncq` on a terminal of its own, and behind a pipe: real processes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from django_asyncq.models import TaskRecord
from django_asyncq.testing import EmbeddedRedis

from ..workers import ROOT, environment

pytestmark = pytest.mark.django_db(transaction=True)


def begin(*arguments: str, **more: Any) -> subprocess.Popen[bytes]:
    """Begin the command in a process of its own."""
    return subprocess.Popen([sys.executable, "-m", "django", "asyncq", *arguments], env=environment(), cwd=ROOT, **more)


def test_a_reader_that_stops_is_no_error(own_redis: EmbeddedRedis, own_keys: None) -> None:
    """As `head` does."""
    TaskRecord.objects.bulk_create(TaskRecord(name="tests.tasks.add", headers={"a": "x" * 50}) for _ in range(1000))
    process = begin("tasks", "list", "--limit", "1000", "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    text = process.stderr.read()
    process.wait(20)
    process.stderr.close()
    assert b"Traceback" not in text

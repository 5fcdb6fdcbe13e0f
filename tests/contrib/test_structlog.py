"""What a project binds in the context variables of structlog: the example of docs/guides/logging.md, really run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from structlog.contextvars import bind_contextvars, clear_contextvars, get_contextvars, merge_contextvars

from django_asyncq import task
from django_asyncq.models import TaskRecord, TaskState
from django_asyncq.signals import run_started
from django_asyncq.testing import run_tasks

from ..json_log import found_in

pytestmark = pytest.mark.django_db(transaction=True)

_example = found_in("bind_to_run")
bound_headers = _example["bound_headers"]
# The example connects itself; these tests do so for one test each.
assert run_started.disconnect(_example["bind_to_run"])
lines: list[dict[str, Any]] = []


@task()
def binds(name: str) -> None:
    """Bind, and log from a thread as well."""
    bind_contextvars(**{name: "own"})
    structlog.get_logger().info("in the body", name=name)


@task()
async def binds_in_the_loop(name: str) -> None:
    """Do the same in the event loop."""
    bind_contextvars(**{name: "own"})
    await asyncio.to_thread(structlog.get_logger().info, "in the body", name=name)


@pytest.fixture(autouse=True)
def _prepared(settings: Any) -> Iterator[None]:
    settings.TASKS = {"default": {"BACKEND": "django_asyncq.testing.TestBackend", "QUEUES": []}}
    settings.ASYNCQ = {**settings.ASYNCQ, "HEADER_SOURCES": ["tests.contrib.test_structlog.bound_headers"]}

    def keep(logger: Any, method: str, event: Any) -> Any:
        lines.append(dict(event))
        raise structlog.DropEvent

    structlog.configure(processors=[merge_contextvars, keep])
    run_started.connect(_example["bind_to_run"])
    yield
    run_started.disconnect(_example["bind_to_run"])
    structlog.reset_defaults()
    clear_contextvars()
    lines.clear()


@pytest.mark.parametrize("body", [binds, binds_in_the_loop])
def test_a_line_has_what_the_request_and_the_body_have_bound(body: Any) -> None:
    """And nothing of another run; what the caller had bound is as it was."""
    bind_contextvars(request="r-1")
    results = [body.enqueue(name) for name in ("one", "two")]
    clear_contextvars()
    bind_contextvars(caller="c")
    run_tasks()
    assert get_contextvars() == {"caller": "c"}
    assert [line["task_id"] for line in lines] == [result.id for result in results]
    first, second = lines
    assert first["request"] == second["request"] == "r-1" and first["attempt"] == 1
    assert first["one"] == second["two"] == "own" and "two" not in first and "one" not in second


def test_without_anything_bound_there_is_no_header() -> None:
    """The row is that of a plain task."""
    binds.enqueue("one")
    assert TaskRecord.objects.get().headers is None


@pytest.mark.parametrize("written", ["{", json.dumps({"request": "r-2"})])
def test_what_another_program_wrote_costs_no_run(written: str) -> None:
    """It is read where it can be."""
    binds.using(headers={"log-context": written}).enqueue("one")
    run_tasks()
    assert TaskRecord.objects.get().state == TaskState.SUCCEEDED
    assert [line.get("request") for line in lines] == [None if written == "{" else "r-2"]

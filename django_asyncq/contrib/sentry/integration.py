"""One event for each task that has failed finally, wherever that is noticed; none for a failure that is retried.

Each run has scopes of its own, in threads and in the event loop, so tags and breadcrumbs of one run are in no event of
another. The trace of the caller goes on in the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import sentry_sdk
from sentry_sdk.integrations import Integration
from sentry_sdk.integrations.logging import ignore_logger
from sentry_sdk.scope import Scope, use_isolation_scope, use_scope

from ...core.header_sources import register_header_source
from ...core.logs import FRAMEWORK_LOGGERS, RUN_LOGGER
from ...signals import run_ended, run_started, task_failed, task_state_changed
from .crons import check_in
from .events import describe, event_of_failure

if TYPE_CHECKING:
    from ...models import TaskRecord, TaskState

# Their ERROR lines are about the failures of which events are sent here.
ABOUT_FAILURES = (RUN_LOGGER, *FRAMEWORK_LOGGERS)
ORIGIN = "auto.queue.django_asyncq"


class AsyncqIntegration(Integration):
    """Sends failures of tasks, and continues traces through them.

    monitor_schedules: whether each schedule is a cron monitor in Sentry, which gets check-ins from its occurrences.
    """

    identifier = "django_asyncq"

    def __init__(self, *, monitor_schedules: bool = False) -> None:
        self.monitor_schedules = monitor_schedules
        if monitor_schedules:
            # Only then: a signal of states that somebody listens to is sent for every task.
            task_state_changed.connect(check_in_occurrences, dispatch_uid=f"{__name__}.check_in")

    @staticmethod
    def setup_once() -> None:
        """Connect it. Sentry calls this once in a process."""
        for name in ABOUT_FAILURES:
            ignore_logger(name)
        register_header_source(headers_of_enqueue)
        # Not as receivers, each of which Sentry would trace.
        run_started.connect_directly(begin_scopes)
        run_ended.connect_directly(end_scopes)
        task_failed.connect_directly(send_failure)


def _current() -> AsyncqIntegration | None:
    """Return the integration of the client that this process uses; None without one."""
    return sentry_sdk.get_client().get_integration(AsyncqIntegration)


class _Scopes(NamedTuple):
    """The two scopes of a run: what is sent in them belongs to it."""

    isolation: Scope
    current: Scope


class _Open(NamedTuple):
    """The run of a context, and how to leave its scopes."""

    stack: ExitStack
    isolation: Scope
    transaction: Any


_open: ContextVar[_Open | None] = ContextVar("django_asyncq_sentry_run", default=None)
# The scopes of runs that have raised, as long as somebody has the row: whether that is final is decided later.
_raised: WeakKeyDictionary[TaskRecord, _Scopes] = WeakKeyDictionary()


def headers_of_enqueue(task: Any) -> dict[str, str]:
    """Return the headers that continue the trace of the caller in the worker."""
    if _current() is None:
        return {}
    found = {"sentry-trace": sentry_sdk.get_traceparent(), "baggage": sentry_sdk.get_baggage()}
    return {name: value for name, value in found.items() if value}


def begin_scopes(*, record: TaskRecord, **kwargs: Any) -> None:
    """Begin the scopes and the transaction of a run."""
    if _current() is None:
        return
    with ExitStack() as stack:
        scope = stack.enter_context(sentry_sdk.isolation_scope())
        describe(scope, record)
        transaction = sentry_sdk.continue_trace(
            _trace_of(record), op="queue.process", name=record.name, source="task", origin=ORIGIN
        )
        stack.enter_context(sentry_sdk.start_transaction(transaction))
        transaction.set_data("messaging.system", "django_asyncq")
        transaction.set_data("messaging.destination.name", record.queue_name)
        transaction.set_data("messaging.message.id", str(record.id))
        transaction.set_data("messaging.message.retry.count", record.attempt - 1)
        if (waited := record.waited_seconds) is not None:
            # In milliseconds, for the page of queues.
            transaction.set_data("messaging.message.receive.latency", max(waited * 1_000, 0.0))
        _open.set(_Open(stack.pop_all(), scope, transaction))


def end_scopes(*, record: TaskRecord, exception: BaseException | None, **kwargs: Any) -> None:
    """End those of the run of this context, if one has begun here; keep them for the event of its failure."""
    found = _open.get()
    if found is None:
        return
    _open.set(None)
    found.transaction.set_status("ok" if exception is None else "internal_error")
    if exception is not None:
        # A copy, since the transaction leaves its scope when it ends.
        current = sentry_sdk.get_current_scope().fork()
        current.span = found.transaction
        # An earlier attempt's row is equal to this one, and as the key it would end with that.
        _raised.pop(record, None)
        _raised[record] = _Scopes(found.isolation, current)
    found.stack.close()


def send_failure(*, record: TaskRecord, exception: BaseException | None, **kwargs: Any) -> None:
    """Send the event of a final failure."""
    if _current() is None:
        return
    event, hint = event_of_failure(record, exception)
    with _scopes_of(record) as scope:
        scope.set_tag("attempt", str(record.attempt))
        scope.set_tag("reason", record.get_reason_display())
        sentry_sdk.capture_event(event, hint)


def check_in_occurrences(
    sender: type[TaskRecord], *, records: Iterable[TaskRecord], old: TaskState | None, new: TaskState, **kwargs: Any
) -> None:
    """Send the monitors of schedules what has become of their occurrences."""
    integration = _current()
    if integration is not None and integration.monitor_schedules:
        for record in records:
            check_in(record, old, new)


def _trace_of(record: TaskRecord) -> dict[str, str]:
    return {str(name).lower(): str(value) for name, value in (record.headers or {}).items()}


@contextmanager
def _scopes_of(record: TaskRecord) -> Iterator[Scope]:
    """Enter the scopes of the run that has failed; new ones where it is not known, as in a supervisor."""
    found = _raised.pop(record, None)
    if found is not None:
        with use_isolation_scope(found.isolation), use_scope(found.current):
            yield found.isolation
        return
    with sentry_sdk.isolation_scope() as scope:
        describe(scope, record)
        sentry_sdk.continue_trace(_trace_of(record))
        # Not that of what is going on here.
        sentry_sdk.get_current_scope().span = None
        yield scope

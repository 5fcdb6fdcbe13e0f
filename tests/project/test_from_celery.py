"""`docs/reference/from-celery.md` has a row for every name of Celery's that four public projects use."""

from __future__ import annotations

import re
from inspect import signature

import pytest

from django_asyncq import signals
from django_asyncq.context import TaskContext
from django_asyncq.core.compat import TaskResult
from django_asyncq.core.foreign_words import options_of
from django_asyncq.core.options import TaskOptions
from django_asyncq.core.schedules import ScheduleOptions
from django_asyncq.models import TaskRecord
from django_asyncq.observe.inspector import Inspector, Queues, Tasks, Workers
from django_asyncq.results import AsyncqResult
from django_asyncq.tasks import Task
from django_asyncq.testing import run_tasks

from .test_docs import ROOT

PAGE = (ROOT / "docs" / "reference" / "from-celery.md").read_text()
GUIDE = ROOT / "docs" / "guides" / "coming-from" / "celery.md"
# Extracted from the code of geonode 5.1.1, mayan-edms 4.12.2, pretix 2026.8.0 and weblate 2026.10.1: options of the
# decorator and of calls, methods, attributes, classes, signals and settings, without their prefix. Names only.
USED = {
    "Declaring": """
        Celery Task DjangoTask abstract acks_late app.task autodiscover_tasks autoretry_for base before_start bind
        config_from_object expires get_exponential_backoff_interval get_task_logger ignore_result max_retries name
        on_failure on_success after_return queue rate_limit retry_backoff retry_backoff_max retry_jitter retry_kwargs
        default_retry_delay shared_task soft_time_limit throws time_limit track_started trail __call__ apply_async
    """,
    "In a run": """
        current_task MaxRetriesExceededError Retry self.request.id self.request.retries self.request.args
        self.request.kwargs self.request.headers self.request.called_directly self.max_retries self.retry countdown exc
        max_retries args kwargs self.app self.update_state
    """,
    "Calling": """
        apply apply_async args kwargs countdown delay delay_on_commit expires map priority queue task_id time_limit uuid
        link_error
    """,
    "Workflows": """
        Signature chain chord clone group immutable link_error on_error s set si signature
    """,
    "Results": """
        AsyncResult DisabledBackend TimeoutError args disable_sync_subtasks failed get get_task_meta info ready result
        revoke state states successful terminate traceback
    """,
    "Signals": """
        after_setup_logger after_setup_task_logger before_task_publish on_after_configure task_failure task_postrun
        task_prerun task_received worker_before_create_process worker_process_init task_revoked
    """,
    "Workers and control": """
        broker_connection connection connection_or_acquire ensure_connection queue_declare llen control.terminate ping
        inspect purge
    """,
    "Beat": """
        CrontabSchedule IntervalSchedule PeriodicTask PersistentScheduler DatabaseScheduler add_periodic_task args
        beat_schedule beat_scheduler crontab enable_utc expires kwargs options schedule timezone
    """,
    "Settings": """
        Exchange Queue accept_content broker_connection_retry broker_connection_retry_on_startup broker_login_method
        broker_transport_options broker_url broker_use_ssl loader max_cached_results message_compression priority_steps
        register result_backend_transport_options result_expires result_persistent result_serializer
        send_task_error_emails sep task_acks_late task_always_eager task_create_missing_queues task_default_exchange
        task_default_exchange_type task_default_priority task_default_queue task_default_routing_key
        task_eager_propagates task_ignore_result task_queue_max_priority task_queues task_result_expires task_routes
        task_send_sent_event task_serializer task_soft_time_limit task_track_started worker_disable_rate_limits
        worker_max_memory_per_child worker_pool_restarts worker_prefetch_multiplier worker_send_task_events
        control_queue_exclusive event_queue_exclusive result_backend_thread_safe
    """,
    "Tests": "task_always_eager task_eager_propagates apply mock",
}


def rows(section: str) -> list[tuple[str, str]]:
    """Return the two cells of each row of a section."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    found = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in text.splitlines() if line.startswith("| ")]
    assert all(len(cells) == 2 for cells in found), found
    return [(old, new) for old, new in found if old not in ("Celery", "---")]


def words_of(section: str) -> set[str]:
    """Return what stands between backticks in the first cells, and each name in it, dotted or alone."""
    spans = [span for old, _ in rows(section) for span in re.findall(r"`([^`]+)`", old)]
    return {word for span in spans for word in (*re.findall(r"[\w.]+", span), *re.findall(r"\w+", span))}


@pytest.mark.parametrize("section", USED)
def test_every_name_that_public_projects_use_has_a_row(section: str) -> None:
    """In the section where a reader looks for it."""
    assert sorted(set(USED[section].split()) - words_of(section)) == []


def test_the_sections_are_these() -> None:
    """In this order, so that the list above is about all of the page."""
    assert re.findall(r"^## (.*)", PAGE, re.MULTILINE) == list(USED)


@pytest.mark.parametrize("section", USED)
def test_every_row_says_something(section: str) -> None:
    """A name of ours, a link, or that there is nothing; and no name has two rows in one section."""
    for old, new in rows(section):
        assert re.search(r"`|\]\(|none|nothing|always|same|database|settings|SIGTERM", new), f"{old}: {new}"
    whole = [span for old, _ in rows(section) for span in re.findall(r"`([^`]+)`", old)]
    assert sorted({span for span in whole if whole.count(span) > 1}) == []


def test_the_guide_leads_to_the_page() -> None:
    """It has the most common rows, and no room for the others."""
    assert "(../../reference/from-celery.md)" in GUIDE.read_text()


def test_what_to_write_is_there() -> None:
    """Options of `@task` and of a call, attributes of a context and of a result, methods of the Inspector, columns."""
    text = "\n".join(new for section in USED for _, new in rows(section))
    of_calls = {
        "@task": {*TaskOptions.__annotations__, "takes_context", "batch", "priority", "queue_name"},
        "using": options_of(Task.using),
        r"context\.retry": options_of(TaskContext.retry),
        r"result\.wait": set(signature(AsyncqResult.wait).parameters),
        r"result\.cancel": set(signature(AsyncqResult.cancel).parameters),
        "run_tasks": set(signature(run_tasks).parameters),
        "cron": {"timezone", *ScheduleOptions.__annotations__},
    }
    for call, known in of_calls.items():
        found = re.findall(rf"(?<![\w.]){call}\(((?:[^()]|\([^()]*\))*)\)", text)
        names = {
            name for options in found for name in re.findall(r"(?:^|, )(\w+)=", re.sub(r"\([^()]*\)", "", options))
        }
        assert names and names <= known, (call, names - known)
    columns = {field.attname for field in TaskRecord._meta.concrete_fields}
    owners = {
        "context.record": {*columns, *dir(TaskRecord)},
        "context": {*dir(TaskContext), "record"},
        "result": {*dir(AsyncqResult), *TaskResult.__dataclass_fields__},
        "context.task_result": {*dir(AsyncqResult), *TaskResult.__dataclass_fields__},
        "Inspector().workers": set(dir(Workers)),
        "Inspector().queues": set(dir(Queues)),
        "Inspector().tasks": set(dir(Tasks)),
        "Inspector()": set(dir(Inspector)) | {"workers", "queues", "tasks"},
    }
    for owner, known in owners.items():
        names = set(re.findall(rf"(?<![\w.]){re.escape(owner)}\.(\w+)", text))
        assert names and names <= known, (owner, names - known)
    for name in re.findall(r"`((?:task|run|worker)_[a-z]+(?:_[a-z]+)?)`", text):
        assert hasattr(signals, name) or name in columns | {"task_id", "run_tasks", "run_after", "worker_ids"}, name

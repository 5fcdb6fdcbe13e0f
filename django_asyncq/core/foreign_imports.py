"""Say what to write in place of a name that this package does not have, as in `from django_asyncq import shared_task`.

Imported when such a name was asked for, and never before.
"""

from __future__ import annotations

import inspect

from .foreign_words import ALWAYS, AROUND, ATTEMPTS, FAILED, WORKFLOW, by_word

DECLARE = "write from django_asyncq import task, and @task above the function"
CALL = "declare the function with @task, and write send_receipt.enqueue(7) for a call of it"
NO_APP = "remove it: the settings TASKS and ASYNCQ say what it would, and each app's tasks.py is found by itself"
RESULT = "write send_receipt.get_result(result_id), with the task that the result is of"
SCHEDULE = 'write @task(schedule=cron("0 6 * * *")), or schedule=every(minutes=5), both from django_asyncq'
STEP = "write send_receipt.step(7): a call for chain and group, from django_asyncq"
CHAIN = 'write chain(a.step(1), b.using(after={"rows": previous}).step()), from django_asyncq'
CHORD = (
    'write group([a.step(1), a.step(2)], then=b.using(after={"rows": previous}).step()).enqueue(), from django_asyncq'
)
MANY = "write send_receipt.enqueue_many([(1,), (2,)]), and wait_all(results) for the values"
CURRENT = "write from django_asyncq.context import current_task, or @task(takes_context=True) for all that a run can do"
QUEUES = 'a queue is a name: write @task(queue_name="mails"), and list it in QUEUES of the settings TASKS'
WORKERS = "write python manage.py runworkers"
LOGGER = "write logging.getLogger(__name__); TaskLogFilter, from django_asyncq, adds the id and the name of the task"
ONE_AT_A_TIME = 'write @task(unique="{order_id}") for one at a time'
STATUS = "read result.status, a TaskResultStatus of Django's tasks framework"
STORED = "remove it: each call is a row of django_asyncq.models.TaskRecord, and its result is in that row"

# Public names of ours, by the module that has them.
ELSEWHERE = {
    name: f"write from django_asyncq.{module} import {name}"
    for module, names in (
        ("backend", "AsyncqBackend"),
        ("exceptions", "InvalidOption InvalidTiming UnknownGate EnqueueRefused ParentFailed TaskExpired"),
        ("leadership", "StartupTaskCoordinator"),
        ("models", "TaskRecord TaskState TaskLogLine Gate Rate Schedule Occurrence Pause StartupRun"),
        ("observe.inspector", "Inspector TaskFilter"),
        (
            "signals",
            "task_state_changing task_state_changed run_started run_ended run_lost task_failed worker_started "
            "worker_stopping fleet_problem",
        ),
        ("testing", "TestBackend EmbeddedRedis run_tasks run_schedules travel make_context enqueued assert_enqueued"),
    )
    for name in names.split()
}
# Names of other task queues.
OF_OTHERS = by_word(
    ("shared_task actor job db_task on_commit_task background", DECLARE),
    ("async_task enqueue defer send_task apply_async delay", CALL),
    ("Celery Huey RedisHuey RedisBroker RabbitmqBroker set_broker get_broker current_app app huey celery", NO_APP),
    ("AsyncResult GroupResult ResultSet EagerResult Job fetch get_result result Result", RESULT),
    ("crontab schedule periodic_task db_periodic_task PeriodicTask CrontabSchedule IntervalSchedule Repeat", SCHEDULE),
    ("signature subtask Signature maybe_signature", STEP),
    ("pipeline Chain async_chain", CHAIN),
    ("chord", CHORD),
    ("chunks xmap xstarmap async_iter Iter", MANY),
    ("link depends_on", WORKFLOW),
    ("current_task get_current_job CurrentMessage get_current_task", CURRENT),
    ("Queue Exchange get_queue", QUEUES),
    ("Worker SimpleWorker Consumer beat", WORKERS),
    ("Task Actor Middleware DjangoTask", AROUND),
    ("get_task_logger", LOGGER),
    ("lock_task TaskLock QueueOnce", ONE_AT_A_TIME),
    ("states", STATUS),
    ("TaskResult DBTaskResult Success Failure OrmQ", STORED),
    ("Retry RetryTask", f"{ATTEMPTS}, and context.retry(in_=30) in the function"),
    ("Ignore Reject CancelExecution AbortTask", 'write raise Discard("why"), from django_asyncq'),
    ("SoftTimeLimitExceeded", "write from django_asyncq import SoftTimeout"),
    ("TimeLimitExceeded TimeLimit", "write from django_asyncq import TaskTimeout"),
    ("TaskRevokedError Abort", "write from django_asyncq import TaskCancelled"),
    ("WorkerLostError", "write from django_asyncq import WorkerLost"),
    ("MaxRetriesExceededError", FAILED),
    ("acks_late", ALWAYS),
    ("task_prerun pre_execute before_process_message", ELSEWHERE["run_started"]),
    ("task_postrun post_execute after_process_message", ELSEWHERE["run_ended"]),
    ("task_failure", FAILED),
    ("task_success task_retry task_revoked after_task_publish", ELSEWHERE["task_state_changed"]),
    ("before_task_publish pre_enqueue", ELSEWHERE["task_state_changing"]),
    ("worker_process_init worker_init worker_ready on_startup", ELSEWHERE["worker_started"]),
    ("worker_process_shutdown worker_shutdown worker_shutting_down on_shutdown", ELSEWHERE["worker_stopping"]),
    ("StubBroker DramatiqTestCase", ELSEWHERE["TestBackend"]),
)
NAMES = {**OF_OTHERS, **ELSEWHERE}


def no_name(package: str, name: str) -> AttributeError | ImportError:
    """Return the error for a name that the package does not have. To be called by its `__getattr__`.

    It is an AttributeError, so that `hasattr` works. Python replaces that of a `from … import` by an ImportError
    without its text; so in such a statement a known word gets an ImportError from here.
    """
    answer = NAMES.get(name)
    if answer is None:
        return AttributeError(f"module {package!r} has no attribute {name!r}")
    if _is_asked_by_an_import(package):
        return ImportError(f"cannot import name {name!r} from {package!r}: {answer}", name=package)
    # Without the module: Python would add a name that is spelled alike.
    return AttributeError(f"module {package!r} has no attribute {name!r}: {answer}", name=name)


def _is_asked_by_an_import(package: str) -> bool:
    """Return whether `__getattr__` is called by the import system, which asks a package for each name after `import`.

    Before the statement itself does: a name that is missing might be a submodule. Where Python is made otherwise, the
    answer is False, and the reader gets Python's own text.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") in (__name__, package):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == "<frozen importlib._bootstrap>"

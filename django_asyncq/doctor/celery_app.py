"""Celery's app, remote control, errors and signals, and the packages around it: what each becomes here."""

from __future__ import annotations

from ..core.foreign_words import OPTIONS
from .celery_tasks import ADMIN, OF_CALL, PLACES_OF_CALL, SIGNALS, STOPS
from .vocabulary import Use, but, differs, drops, each, lacks, maps, options, to

USES_OF_APP: dict[str, Use] = {
    "celery.Celery": maps(
        "",
        "remove the app: tasks are declared by `from django_asyncq import task`, and settings are those of Django",
        takes="settings",
        options=options(
            ("main", drops("remove it")),
            (
                "broker backend include set_as_current autofinalize task_cls loader amqp events log control "
                "tasks config_source "
                "namespace strict_typing fixups changes",
                drops("remove it"),
            ),
        ),
        positions=("main",),
    ),
    **each(
        "config_from_object config_from_envvar config_from_cmdline",
        maps("", "remove it: the settings are those of Django"),
        "App.",
    ),
    **each(
        "autodiscover_tasks finalize set_default set_current start loader oid main",
        maps("", "remove it: a worker imports the tasks.py of each installed app, and what those import"),
        "App.",
    ),
    "App.send_task": but(
        "{task_name}{using}.enqueue({args})",
        "a task is imported, not named by a text; one that another program runs is remote(…)",
        options={**OF_CALL, "name": to("task_name", "{value:function}")},
        positions=("name", *PLACES_OF_CALL),
    ),
    "App.signature": but(
        "{task_name}{using}.step({args})",
        "a task is imported, not named by a text",
        options={**OF_CALL, "task": to("task_name", "{value:function}")},
        positions=("task", "args", "kwargs"),
    ),
    "App.add_periodic_task": but(
        "@task(schedule={schedule})",
        "a schedule is declared with its task; schedules that people make belong in the admin, for schedulable=True",
        options=options(
            ("schedule", to("schedule", "{value:schedule}")),
            (
                "sig",
                drops("the task that gets the schedule; its arguments go to args= and kwargs= of cron() or every()"),
            ),
            ("name args kwargs", drops("it goes to cron() or every()")),
            ("opts expires queue priority", differs("", "", "it is an option of the task")),
        ),
        positions=("schedule", "sig", "args", "kwargs", "name"),
    ),
    **each(
        "on_after_configure on_after_finalize on_configure on_after_fork on_init",
        maps(
            "",
            "remove it: schedules are declared with their tasks; other code belongs in AppConfig.ready() or "
            "a startup_task",
        ),
        "App.",
    ),
    **each(
        "on_after_configure.connect on_after_finalize.connect on_configure.connect on_after_fork.connect",
        maps(
            "",
            "remove it: schedules are declared with their tasks; other code belongs in AppConfig.ready() or "
            "a startup_task",
        ),
        "App.",
    ),
    "App.register_task": maps("@task", "a function with @task is registered by itself"),
    "App.tasks": lacks("import the task; of a name alone: `manage.py asyncq tasks enqueue NAME`"),
    "App.tasks.*": lacks("import the task: a name from outside is never looked up"),
    **each(
        "App.current_task App.current_worker_task",
        but("current_task()", "from django_asyncq.context; the run that the code is in"),
    ),
    "App.GroupResult": but("wait_all(results)", "keep the ids of the results; a group has no row of its own"),
    "App.ResultSet": but("wait_all(results)", "a list of results serves"),
    **each(
        "connection connection_or_acquire connection_for_read connection_for_write broker_connection pool amqp "
        "producer_pool producer_or_acquire default_connection default_producer",
        lacks("there is no broker connection; `manage.py asyncq health` says whether tasks are being run"),
        "App.",
    ),
    "App.amqp.*": lacks("there are no messages, exchanges and routing keys"),
    "Connection.*": lacks("there is no broker connection; `manage.py asyncq health` says whether tasks are being run"),
    "App.backend": lacks("results are rows: TaskRecord and task.get_result(id)"),
    "App.backend.*": lacks("results are rows: TaskRecord and task.get_result(id)"),
    **each(
        "steps user_options log log_cls events Worker Beat worker_main WorkController loader_cls task_cls",
        lacks('the worker has no parts to replace: see ASYNCQ["AROUND"], the signals and `manage.py runworkers`'),
        "App.",
    ),
    **each("events.* log.* steps.* user_options.*", lacks("the worker has no parts to replace"), "App."),
    "App.close": maps("", "remove it"),
    "App.now": maps("timezone.now()"),
    "App.timezone": maps("timezone.get_default_timezone()"),
    "App.bugreport": lacks("`manage.py asyncq health` says whether tasks are being run"),
    # --- remote control
    "App.control": lacks(ADMIN),
    **each(
        "revoke terminate",
        but(
            "task.get_result({args}).cancel()",
            "one id at a time; a task that runs is asked to stop",
            options=options(
                ("task_id", to("args", "{value}")),
                ("terminate signal", differs("", "", STOPS)),
                ("destination reply connection timeout limit", drops("remove it")),
            ),
            positions=("task_id",),
        ),
        "App.control.",
    ),
    "App.control.revoke_by_stamped_headers": lacks("choose rows: `manage.py asyncq tasks cancel --task NAME`"),
    "App.control.inspect": but(
        "Inspector()", "from django_asyncq.observe.inspector: tasks, queues and workers as rows"
    ),
    **each(
        "App.control.ping Inspect.ping",
        but("Inspector().workers.all()", "or `manage.py asyncq health`, whose exit code says it"),
    ),
    **each(
        "active reserved scheduled revoked query_task",
        but("Inspector().tasks.page()", "rows of all workers at once, with states and queues"),
        "Inspect.",
    ),
    **each(
        "stats report conf hello clock memdump memsample objgraph",
        but("Inspector().workers.all()", "what is known of each worker process"),
        "Inspect.",
    ),
    **each("active_queues registered registered_tasks", but("Inspector().queues.all()", ADMIN), "Inspect."),
    **each(
        "purge discard_all",
        but("`manage.py asyncq queues purge NAME`", "it cancels and deletes the tasks that wait in one queue"),
        "App.control.",
    ),
    **each(
        "rate_limit time_limit",
        lacks("rate, timeout and soft_timeout belong to the declaration; a row Rate changes a rate"),
        "App.control.",
    ),
    **each(
        "add_consumer cancel_consumer",
        lacks("pause a queue, for all workers: `manage.py asyncq queues pause NAME`"),
        "App.control.",
    ),
    **each(
        "pool_grow pool_shrink pool_restart autoscale",
        lacks("start or stop `manage.py runworkers` processes; the scale of a queue says how many"),
        "App.control.",
    ),
    "App.control.shutdown": lacks(
        "send SIGTERM to `manage.py runworkers`, or drain: `manage.py asyncq workers drain NAME`"
    ),
    **each("broadcast election enable_events disable_events heartbeat Mailbox", lacks(ADMIN), "App.control."),
    # --- other names of the package
    "celery.current_task": but("current_task()", "from django_asyncq.context; the run that the code is in"),
    "celery.uuid": maps("str(uuid.uuid4())"),
    "celery.schedules.crontab": maps(
        "cron({cron})",
        positions=("minute", "hour", "day_of_week", "day_of_month", "month_of_year"),
        options=options(
            ("fields", to("", "minute hour day_of_month month_of_year day_of_week")),
            ("days", differs("", "day_of_month day_of_week", "both days must match there; here either is enough")),
            (
                "nowfun app tz",
                differs("", "", 'the time zone is cron(…, timezone="Europe/Berlin"), by default TIME_ZONE'),
            ),
        ),
    ),
    "celery.schedules.schedule": maps(
        "{every}",
        options=options(("run_every", to("every", "{value:schedule}")), ("relative app nowfun", drops("remove it"))),
        positions=("run_every",),
    ),
    "celery.schedules.solar": lacks("the sun is no schedule: a task that is due each minute can ask where it stands"),
    "class celery.schedules.schedule": lacks(
        "schedules are cron() and every(): others are made by a task that is due often"
    ),
    "class celery.schedules.crontab": lacks(
        "schedules are cron() and every(): others are made by a task that is due often"
    ),
    **each(
        "crontab_parser maybe_schedule BaseSchedule ParseException schstate",
        lacks("schedules are cron() and every()"),
        "celery.schedules.",
    ),
    "celery.beat.*": lacks("schedules are rows, and one of the workers fires them: nothing is to be replaced"),
    "celery.utils.log.get_task_logger": maps("logging.getLogger({args})"),
    "celery.utils.log.*": maps("logging", "a plain logger serves; TaskLogFilter adds the id and name of the task"),
    "celery.app.log.*": maps("TaskLogFilter", "from django_asyncq: it adds the id and name of the task to each line"),
    "celery.utils.*": lacks("it is no part of a task queue: use Python's or Django's own"),
    "celery.local.*": lacks("it is no part of a task queue: use Python's or Django's own"),
    **each(
        "bin worker bootsteps loaders platforms concurrency app.base app.utils app.defaults app.amqp app.control "
        "app.routes app.registry app.builtins app.backends app.trace fixups security apps _state "
        "events backends apps.beat apps.worker",
        lacks("the parts of Celery's programs have no counterpart"),
        "celery.",
    ),
    **each(
        "bin.* worker.* bootsteps.* loaders.* platforms.* concurrency.* app.* fixups.* security.* apps.* _state.* "
        "events.* backends.*",
        lacks("the parts of Celery's programs have no counterpart"),
        "celery.",
    ),
    "class celery.app.*": lacks("the parts of Celery's programs have no counterpart"),
    **each(
        "class celery.worker.* class celery.bootsteps.* class celery.loaders.* class celery.backends.* "
        "class celery.bin.* "
        "class celery.events.*",
        lacks("the parts of Celery's programs have no counterpart"),
    ),
    "class celery.beat.*": lacks("schedules are rows, and one of the workers fires them: nothing is to be replaced"),
    "class celery.Celery": lacks("there is no app to derive from: remove it"),
    "celery.contrib.abortable.AbortableTask": but(
        "", "every task can be asked: context.should_stop and context.check()"
    ),
    "class celery.contrib.abortable.AbortableTask": but(
        "", "every task can be asked: context.should_stop and context.check()"
    ),
    "celery.contrib.abortable.AbortableAsyncResult": but("task.get_result({args})", "result.cancel() asks it to stop"),
    **each(
        "celery.contrib.testing.* celery.contrib.pytest.* pytest_celery.*",
        but("", "use run_tasks() of django_asyncq.testing; asyncq_workers starts real workers"),
    ),
    "celery.contrib.*": lacks("it has no counterpart here"),
    **each(
        "celery.Celery.__class_getitem__ celery.__version__ celery.VERSION celery.version_info", maps("", "remove it")
    ),
}

USES_OF_ERRORS: dict[str, Use] = {
    "celery.exceptions.SoftTimeLimitExceeded": but(
        "SoftTimeout", "from django_asyncq; in a `def` it is raised by context.check()"
    ),
    "celery.exceptions.TimeLimitExceeded": but(
        "TaskTimeout", "from django_asyncq; in a `def` it is raised by context.check()"
    ),
    "celery.exceptions.MaxRetriesExceededError": but("", "none is raised: context.attempt says which attempt it is"),
    "celery.exceptions.Retry": but(
        "context.retry(…)", "the exception of a retry is private: do not catch Exception around it"
    ),
    "celery.exceptions.Ignore": but("Discard({args})", "from django_asyncq: the task is over, and no failure"),
    "celery.exceptions.Reject": but(
        "Discard({args})",
        "from django_asyncq; to run it again: context.retry(in_=0)",
        options=options(("reason", to("args", "{value}")), ("requeue", differs("", "", "context.retry(in_=0)"))),
        positions=("reason", "requeue"),
    ),
    "celery.exceptions.TimeoutError": maps("WaitTimeout", "from django_asyncq, raised by result.wait()"),
    "celery.exceptions.TaskRevokedError": but(
        "TaskCancelled", "from django_asyncq; wait() raises TaskFailed with the reason"
    ),
    "celery.exceptions.WorkerLostError": maps("WorkerLost", "from django_asyncq"),
    "celery.exceptions.Terminated": maps("TaskCancelled", "from django_asyncq"),
    "celery.exceptions.OperationalError": but(
        "BrokerUnavailable", "enqueue() does not need Redis, unless the task has a gate"
    ),
    "celery.exceptions.NotRegistered": lacks("a task that no worker knows waits, and an alert says so"),
    "celery.exceptions.ChordError": but("TaskFailed", "what waits for a task that failed has failed too"),
    "celery.exceptions.*": lacks("no error of this kind is raised here: see the reference of errors"),
}

RUN = "it carries record, the row, in place of sender and task_id"
USES_OF_SIGNALS: dict[str, Use] = {
    **each("task_prerun task_prerun.connect", but("@receiver(run_started)", f"{SIGNALS}; {RUN}"), "celery.signals."),
    **each(
        "task_postrun task_postrun.connect task_success task_success.connect task_retry task_retry.connect",
        but("@receiver(run_ended)", f"{SIGNALS}; {RUN}, and exception"),
        "celery.signals.",
    ),
    **each(
        "task_failure task_failure.connect",
        but("@receiver(task_failed)", f"{SIGNALS}, once for a final failure; {RUN}"),
        "celery.signals.",
    ),
    **each(
        "task_revoked task_revoked.connect",
        but("@receiver(task_state_changed)", f"{SIGNALS}; reason is CANCELLED in the rows"),
        "celery.signals.",
    ),
    **each(
        "task_received task_received.connect",
        lacks("a worker that takes a task sends nothing before run_started"),
        "celery.signals.",
    ),
    **each(
        "task_rejected task_rejected.connect task_unknown task_unknown.connect task_internal_error "
        "task_internal_error.connect",
        lacks("a task that no worker knows waits, and an alert says so"),
        "celery.signals.",
    ),
    **each(
        "before_task_publish before_task_publish.connect",
        but("@receiver(task_state_changing)", f'{SIGNALS}; for headers: ASYNCQ["HEADER_SOURCES"]'),
        "celery.signals.",
    ),
    **each(
        "after_task_publish after_task_publish.connect",
        but("@receiver(task_state_changed)", f"{SIGNALS}; old is None"),
        "celery.signals.",
    ),
    **each(
        "worker_process_init worker_process_init.connect worker_init worker_init.connect worker_ready "
        "worker_ready.connect celeryd_init celeryd_init.connect "
        "celeryd_after_setup celeryd_after_setup.connect",
        but(
            "@receiver(worker_started)",
            f"{SIGNALS}, in each worker process; what is done once for the fleet is a startup_task",
        ),
        "celery.signals.",
    ),
    **each(
        "worker_process_shutdown worker_process_shutdown.connect worker_shutdown worker_shutdown.connect "
        "worker_shutting_down worker_shutting_down.connect",
        but("@receiver(worker_stopping)", f"{SIGNALS}, in each worker process that ends in order"),
        "celery.signals.",
    ),
    **each(
        "setup_logging setup_logging.connect after_setup_logger after_setup_logger.connect "
        "after_setup_task_logger after_setup_task_logger.connect",
        maps("", "remove it: Django's LOGGING holds for the workers too"),
        "celery.signals.",
    ),
    **each(
        "beat_init beat_init.connect beat_embedded_init beat_embedded_init.connect",
        lacks("there is no beat: a startup_task runs once for the fleet"),
        "celery.signals.",
    ),
    "celery.signals.*": lacks("it has no counterpart here: see the reference of signals"),
}

SCHEDULE_ROWS = (
    "a schedule is a row of the model Schedule, made in the admin or in code, for tasks with "
    "schedulable=True; or it is "
    "declared: @task(schedule=cron(…))"
)
AROUND_IT = (
    "django_celery_beat django_celery_results kombu billiard amqp flower celery_once "
    "celery_singleton redbeat celery_batches "
    "django_celery_email djcelery_email celery_progress django_celery_monitor djcelery "
    "tenant_schemas_celery celery_haystack "
    "django_celery_haystack celery_redbeat"
)
NONE_OF_KOMBU = 'queues are names in TASKS[…]["QUEUES"]; exchanges, routing keys and messages do not exist'
USES_AROUND: dict[str, Use] = {
    "django_celery_beat.models.*": lacks(SCHEDULE_ROWS),
    "django_celery_beat.schedulers.*": maps("", "remove it: schedules in the admin need no scheduler of their own"),
    "django_celery_beat.*": lacks(SCHEDULE_ROWS),
    "class django_celery_beat.*": lacks(SCHEDULE_ROWS),
    "django_celery_results.models.*": but(
        "TaskRecord", "from django_asyncq.models: every task has a row, with its result and its errors"
    ),
    "django_celery_results.*": but(
        "TaskRecord", "from django_asyncq.models: every task has a row, with its result and its errors"
    ),
    "class django_celery_results.*": but(
        "", "the page of a task in the admin has its result, its errors and each attempt"
    ),
    "kombu.*": lacks(NONE_OF_KOMBU),
    "class kombu.*": lacks(NONE_OF_KOMBU),
    **each(
        "billiard.* amqp.* vine.*",
        lacks("use Python's multiprocessing; a task may start processes, and isolated=True runs in one"),
    ),
    **each("celery_once.* celery_singleton.* class celery_once.* class celery_singleton.*", lacks(OPTIONS["once"])),
    **each("redbeat.* celery_redbeat.*", maps("", "remove it: schedules are rows, and one of the workers fires them")),
    **each(
        "celery_batches.* class celery_batches.*",
        lacks("write @task(batch=Batch(size=100, within=timedelta(seconds=2)))"),
    ),
    **each("flower.* class flower.*", lacks(ADMIN)),
    "celery_progress.*": but("context.progress(done, total, message)", "TaskStatusView shows it to a page"),
    **each("djcelery_email.* django_celery_email.*", lacks("write a task that sends the mail")),
    "djcelery.*": lacks("the Celery of Django before version 3.1 has no counterpart"),
    **each(
        "celery_worker celery_session_worker celery_app celery_session_app celery_config celery_parameters "
        "celery_enable_logging celery_includes celery_worker_parameters celery_worker_pool use_celery_app_trap",
        but("", "use run_tasks() of django_asyncq.testing; the fixture asyncq_workers starts real workers"),
        "fixture ",
    ),
    "package celery": maps("", "uninstall it when the old queue is empty"),
    **each(
        "django-celery-beat django-celery-results kombu billiard amqp vine flower celery-once "
        "celery-singleton celery-redbeat "
        "celery-batches celery-progress django-celery-email pytest-celery celery-types",
        maps("", "remove it with celery; its tables and rows are not read"),
        "package ",
    ),
    **each(
        "django_celery_beat django_celery_results djcelery_email celery_progress djcelery django_celery_monitor",
        maps("", "remove it from INSTALLED_APPS at the end; its tables and rows are not read"),
        "app ",
    ),
    "migration": but(
        "",
        "a migration depends on this app: it must stay installed, or the migrations be squashed, before it is removed",
    ),
}

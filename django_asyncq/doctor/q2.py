"""django-q2, and the django-q before it: what each name of it becomes here."""

from __future__ import annotations

import re

from ..core.foreign_words import ALWAYS, FAILED, KEPT, OPTIONS, WORKFLOW
from .vocabulary import Command, Use, Vocabulary, but, differs, drops, each, has_none, lacks, maps, options, to

DECLARE = "the function must be declared with @task, and is imported, not named by a text"
PICKLE = "arguments are JSON; dates, Decimal, UUIDs and model instances travel with @task(typed_arguments=True)"
ADMIN = "use the admin of this package, `manage.py asyncq` or the Inspector"
SIGNALS = "from django_asyncq.signals; it carries record, the row"
SCHEDULE_ROWS = (
    "a schedule is declared with its task, or is a row of the model Schedule, made in the admin for "
    "tasks with schedulable=True"
)
OF_ALL = "it belongs to each task, not to the cluster"

OF_CALL = options(
    ("func", to("function", "{value:function}")),
    ("hook", has_none(f"{FAILED}; or {WORKFLOW}")),
    ("group", differs("", "", "wait_all(results) for several; the rows of one workflow belong together")),
    ("save", drops(KEPT)),
    ("sync", differs("", "", "in tests use run_tasks(), or the mode immediate")),
    ("cached", drops("remove it: results are rows")),
    ("ack_failure", drops(ALWAYS)),
    ("iter_count iter_cached", drops("remove it")),
    ("chain", has_none(WORKFLOW)),
    ("broker", drops("remove it")),
    ("cluster", to("using", "queue_name={value}")),
    ("timeout", to("using", "timeout={value}")),
    ("task_name", differs("", "", OPTIONS["name"])),
    ("q_options", has_none("write each of its keys as an option of using()")),
)
OF_SCHEDULE = options(
    ("func", to("of", "{value:function}")),
    ("cron", to("schedule", "cron({value:quoted})")),
    ("minutes", to("schedule", "every(minutes={value})")),
    ("name", drops("name= of cron() or every()")),
    (
        "schedule_type",
        differs("", "", "DAILY and others are cron() or every(…); ONCE is task.using(run_after=…).enqueue(…)"),
    ),
    ("next_run", differs("", "", "starts_at= of cron() or every(); of ONCE: run_after=")),
    ("repeats", differs("", "", "ends_at= of cron() or every()")),
    ("hook", has_none(FAILED)),
    ("cluster", differs("", "", "queue_name= of the task")),
    ("intended_date_kwarg", has_none("the time is in the row of the occurrence")),
    ("q_options", has_none("they are options of the task")),
    ("kwargs args", drops("args= and kwargs= of cron() or every()")),
)

USES: dict[str, Use] = {
    "django_q.tasks.async_task": but(
        "{function}{using}.enqueue({args})", DECLARE, options=OF_CALL, positions=("func",), takes="function"
    ),
    "django_q.tasks.schedule": but(
        "@task(schedule={schedule})  # {of}",
        f"{SCHEDULE_ROWS}; {DECLARE}",
        options=OF_SCHEDULE,
        positions=("func",),
        takes="function",
    ),
    "django_q.tasks.async_iter": but(
        "{function}.enqueue_many([…])",
        f"one task for each call; wait_all(results) gives the values. {DECLARE}",
        options={**OF_CALL, "args_iter": differs("", "", "[(each,) for each in …]")},
        positions=("func", "args_iter"),
    ),
    "django_q.tasks.async_chain": but(
        "chain(task.step(…), …).enqueue()",
        "a step begins when the one before has succeeded",
        options={**OF_CALL, "chain": differs("", "", "a step for each tuple")},
        positions=("chain", "group", "cached", "sync", "broker"),
    ),
    "django_q.tasks.result": but(
        "task.get_result({args}).wait({wait})",
        "a result is of a task; wait is in milliseconds there, in seconds here",
        options=options(
            ("task_id", to("args", "{value}")),
            ("wait", differs("wait", "timeout={value:ms_as_seconds}", "seconds, not milliseconds")),
            ("cached", drops("remove it")),
        ),
        positions=("task_id", "wait", "cached"),
    ),
    "django_q.tasks.fetch": but(
        "task.get_result({args})",
        "a result is of a task; of an id alone: TaskRecord.objects.get(id=…)",
        options=options(
            ("task_id", to("args", "{value}")),
            ("wait", differs("", "", "result.wait(timeout=…) in seconds")),
            ("cached", drops("remove it")),
        ),
        positions=("task_id", "wait", "cached"),
    ),
    **each(
        "result_group fetch_group count_group delete_group result_cached fetch_cached "
        "result_group_cached fetch_group_cached count_group_cached delete_cached delete_group_cached",
        but("wait_all(results)", "keep the results, or the workflow_id of their rows"),
        "django_q.tasks.",
    ),
    "django_q.tasks.queue_size": but("Inspector().queues.get(name).queued", "from django_asyncq.observe.inspector"),
    **each(
        "django_q.tasks.AsyncTask django_q.tasks.Iter django_q.tasks.Chain",
        but("task.enqueue(…)", "enqueue_many(…) for many calls, chain(…) for one behind the other"),
    ),
    **each(
        "run append fetch result length wait fetch_group result_group group hook save cached sync args "
        "kwargs func id started stopped broker current timeout",
        lacks("write task.enqueue(…), enqueue_many or chain; each returns results"),
        "AsyncTask.",
    ),
    "django_q.tasks.*": lacks("it has no counterpart here"),
    # --- rows
    "django_q.models.Schedule": but("Schedule", f"from django_asyncq.models; {SCHEDULE_ROWS}"),
    **each(
        "ONCE MINUTES HOURLY DAILY WEEKLY BIWEEKLY MONTHLY BIMONTHLY QUARTERLY YEARLY CRON TYPE",
        but("cron(…)", 'cron("@daily") and others, or every(…); ONCE is run_after='),
        "django_q.models.Schedule.",
    ),
    "django_q.models.Schedule.*": but("Schedule", f"from django_asyncq.models; {SCHEDULE_ROWS}"),
    **each(
        "django_q.models.Task django_q.models.Task.* django_q.models.Success django_q.models.Success.* "
        "django_q.models.Failure django_q.models.Failure.* django_q.models.OrmQ django_q.models.OrmQ.*",
        but("TaskRecord", "from django_asyncq.models: TaskRecord.objects.failed() and others"),
    ),
    **each(
        "class django_q.models.Schedule class django_q.models.Task class django_q.models.OrmQ",
        lacks("write a table of your own that holds the id of the row"),
    ),
    "django_q.models.*": but("TaskRecord", "from django_asyncq.models"),
    **each("django_q.admin.* class django_q.admin.*", lacks("the admin of this package has pages of its own")),
    # --- signals
    "django_q.signals.pre_enqueue": but("task_state_changing", SIGNALS),
    "django_q.signals.pre_execute": but("run_started", SIGNALS),
    **each("django_q.signals.post_execute django_q.signals.post_execute_in_worker", but("run_ended", SIGNALS)),
    "django_q.signals.post_spawn": but("worker_started", "from django_asyncq.signals, in each worker process"),
    **each(
        "pre_enqueue.connect pre_execute.connect post_execute.connect post_execute_in_worker.connect "
        "post_spawn.connect",
        but(
            "@receiver(run_started)",
            "from django_asyncq.signals: task_state_changing, run_started, run_ended, worker_started",
        ),
        "django_q.signals.",
    ),
    **each(
        "django_q.brokers.* django_q.cluster.* django_q.conf.* django_q.status.* django_q.monitor.* "
        "django_q.signing.* django_q.core_signing.* django_q.queues.* django_q.utils.* "
        "django_q.worker.* django_q.scheduler.* django_q.pusher.* django_q.timeout.* "
        "django_q.humanhash.* django_q.management.* django_q.apps.* django_q.core.* "
        "class django_q.brokers.* class django_q.cluster.*",
        lacks(ADMIN),
    ),
    "django_q.exceptions.*": lacks("no error of this kind is raised here: see the reference of errors"),
    "django_q.exceptions.TimeoutException": maps("TaskTimeout", "from django_asyncq"),
    "django_q.errors.*": lacks("no error of this kind is raised here: see the reference of errors"),
    **each("django_q_registry.*", maps("", "remove it: a schedule is declared with its task")),
    # --- settings
    "settings.Q_CLUSTER": maps("", "remove it at the end"),
    **each(
        "name label cluster_name bulk catch_up_ guard_cycle poll testing cached cache compress "
        "cpu_affinity daemonize_workers log_level save_limit_per scheduler",
        maps("", "remove it"),
        "settings.Q_CLUSTER.",
    ),
    "settings.Q_CLUSTER.workers": but(
        'ASYNCQ = {{"PROCESSES": {value}, "CONCURRENCY": 1}}',
        "one task in each of so many processes; threads are cheaper where the code allows them",
    ),
    "settings.Q_CLUSTER.timeout": but(
        'ASYNCQ = {{"TIMEOUT_SECONDS": {value}}}',
        "a `def` task is asked to stop, and its process replaced if it does not",
    ),
    "settings.Q_CLUSTER.retry": but(
        "", f"it is for lost tasks, which run again by themselves here; {OF_ALL}: backoff="
    ),
    "settings.Q_CLUSTER.max_attempts": but(
        'ASYNCQ = {{"MAX_ATTEMPTS": {value}}}',
        "0 retries without end there; here a number is needed, and 1 is the default",
    ),
    "settings.Q_CLUSTER.ack_failures": maps("", ALWAYS),
    "settings.Q_CLUSTER.save_limit": but("", KEPT),
    "settings.Q_CLUSTER.queue_limit": maps("", "remove it: a worker takes no more than it can begin"),
    "settings.Q_CLUSTER.recycle": maps("", "write `manage.py runworkers --max-tasks N`"),
    "settings.Q_CLUSTER.max_rss": but("", "write `manage.py runworkers --max-memory-mb N`: megabytes, not kilobytes"),
    "settings.Q_CLUSTER.catch_up": but("", 'it is missed= of each schedule: "skip", "once" or "all"'),
    "settings.Q_CLUSTER.time_zone": maps(
        "", 'remove it: schedules are in TIME_ZONE, or cron(…, timezone="Europe/Berlin")'
    ),
    "settings.Q_CLUSTER.sync": but("", "in tests use run_tasks(), or the mode immediate"),
    **each(
        "redis django_redis",
        maps('ASYNCQ = {{"REDIS": {value}}}', "an address that django-q does not use, or an alias in CACHES"),
        "settings.Q_CLUSTER.",
    ),
    **each(
        "orm orm_db_alias sqs iron_mq mongo mongo_db disque_nodes disque_auth disque_fastack broker_class has_replica",
        but("", 'the queues are in Redis: write ASYNCQ["REDIS"]'),
        "settings.Q_CLUSTER.",
    ),
    "settings.Q_CLUSTER.ALT_CLUSTERS": but(
        "", "clusters are queues: queue_name= of the tasks, --queues of the workers"
    ),
    "settings.Q_CLUSTER.error_reporter": lacks('use Sentry\'s integration, or the alerts: ASYNCQ["ALERTS"]'),
    "settings.Q_CLUSTER_NAME": maps("", "remove it: workers serve the queues of --queues"),
    # --- commands
    "command qcluster": maps(
        "python manage.py runworkers {command}",
        options=options(
            ("--name -n", to("command", "--queues {value}")),
            ("--run-once", to("command", "--burst")),
            ("--verbosity -v --settings --pythonpath --no-color --traceback", drops("")),
        ),
    ),
    **each(
        "qmonitor qinfo qmemory",
        but(
            "python manage.py asyncq stats",
            "and workers list; the admin shows more",
            options=options(("--run-once --config --ids --workers -w --verbosity", drops(""))),
        ),
        "command ",
    ),
    **each("django-q django-q2 django-q-registry", maps("", "uninstall it when the old queue is empty"), "package "),
    **each(
        "django_q django_q_registry",
        maps("", "remove it from INSTALLED_APPS at the end; its rows are not read"),
        "app ",
    ),
    "migration": but("", "a migration depends on this app: it must stay installed, or the migrations be squashed"),
}
del USES["settings.Q_CLUSTER.catch_up_"]
SAME = {
    **{
        f"django_q.{name}": f"django_q.tasks.{name}"
        for name in (
            "async_task",
            "schedule",
            "result",
            "fetch",
            "async_iter",
            "async_chain",
            "queue_size",
            "result_group",
            "fetch_group",
            "count_group",
            "delete_group",
        )
    },
    **{f"django_q.{name}": f"django_q.models.{name}" for name in ("Schedule", "Task", "Success", "Failure", "OrmQ")},
    "django_q.tasks.Async": "django_q.tasks.AsyncTask",
    "django_q.tasks.Schedule": "django_q.models.Schedule",
    "django_q.tasks.Task": "django_q.models.Task",
    **{f"django_q.tasks.{name}()": "AsyncTask" for name in ("AsyncTask", "Iter", "Chain")},
}
SETTING = re.compile(r"Q_CLUSTER(?:_NAME)?")


def setting_name(name: str) -> str:
    """Return the name of a setting of django-q; "" for what is none."""
    return name if SETTING.fullmatch(name) else ""


HAS_VALUE = frozenset(["--name", "-n", "--verbosity", "-v", "--settings", "--pythonpath"])
VOCABULARY = Vocabulary(
    name="q2",
    packages=re.compile(r"django_q(?:_registry)?"),
    uses=USES,
    same=SAME,
    words=re.compile(r"django_q|Q_CLUSTER|qcluster|qmonitor|qinfo|qmemory"),
    setting=setting_name,
    commands=(
        Command(re.compile(r"(?<![\w-])qcluster\b(?!\.)"), "qcluster", (), HAS_VALUE),
        Command(re.compile(r"(?<![\w-])(?:qmonitor|qinfo|qmemory)\b(?!\.)"), "{}", (), HAS_VALUE),
    ),
    distributions=re.compile(r"django-q2?(?:-.*)?"),
)

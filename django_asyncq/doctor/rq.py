"""RQ, django-rq and rq-scheduler: what each name of them becomes here."""

from __future__ import annotations

import re

from ..core.foreign_words import BACKOFF, FAILED, KEPT, OF_RESULT, OPTIONS
from .vocabulary import Command, Use, Vocabulary, but, differs, drops, each, has_none, lacks, maps, options, to

ADMIN = "use the admin of this package, `manage.py asyncq` or the Inspector"
PICKLE = "arguments are JSON; dates, Decimal, UUIDs and model instances travel with @task(typed_arguments=True)"
RETRY = "max counts the retries after the first attempt, max_attempts all attempts: it is one more"
DECLARE = "the function must be declared with @task; one of a library is called by a task of your own"
TIMEOUT = (
    "RQ stops a function after 180 s by itself and by a signal; here there is no timeout unless it "
    "is given, and a `def` task is asked to stop"
)
NO_CONNECTION = 'there is no connection to pass: the queues are in ASYNCQ["REDIS"]'

OF_CALL = options(
    ("timeout job_timeout", differs("using", "timeout={value}", TIMEOUT)),
    ("ttl", to("using", "expires={value}")),
    ("result_ttl failure_ttl", differs("", "", KEPT)),
    ("at_front=True", differs("using", "priority=100", "higher comes first, from −100 to 100")),
    ("at_front", differs("", "", OPTIONS["at_front"])),
    ("retry", differs("using", "{value:options}", RETRY)),
    (
        "depends_on",
        differs("using", "after={value:listed}", "results, as enqueue() returns them; it fails when one of them fails"),
    ),
    ("on_success on_failure on_stopped", has_none(FAILED)),
    ("job_id", has_none(OPTIONS["job_id"])),
    ("unique", has_none(OPTIONS["once"])),
    ("meta description", differs("", "", OPTIONS["meta"])),
    ("rate_limit", has_none(OPTIONS["rate_limit"])),
    ("repeat", has_none(OPTIONS["repeat"])),
    ("webhooks", has_none("write a receiver of task_state_changed that calls it")),
    ("pipeline connection", drops("remove it: enqueue() is part of the transaction")),
    ("args", to("args", "{value:spread}")),
    ("kwargs", to("args", "{value:spread_named}")),
    ("queue_name", to("using", "queue_name={value}")),
    ("serializer", has_none(PICKLE)),
)
OF_TASK = options(
    ("queue func_or_queue", to("task", "queue_name={value}")),
    ("connection queue_class", drops(NO_CONNECTION)),
    ("timeout", differs("task", "timeout={value}", TIMEOUT)),
    ("ttl", to("task", "expires={value}")),
    ("result_ttl failure_ttl", differs("", "", KEPT)),
    ("retry", differs("task", "{value:options}", RETRY)),
    ("at_front=True", differs("task", "priority=100", "higher comes first, from −100 to 100")),
    ("at_front", differs("", "", OPTIONS["at_front"])),
    ("depends_on", has_none("it belongs to one call: task.using(after=[result]).enqueue(…)")),
    ("on_success on_failure on_stopped", has_none(FAILED)),
    ("meta description webhooks", differs("", "", OPTIONS["meta"])),
)
CALL = but(
    "{function}{using}.enqueue({args})",
    DECLARE,
    takes="function",
    options={**OF_CALL, "f": to("function", "{value}"), "func": to("function", "{value}")},
    positions=("f",),
)
LATER = {**OF_CALL, "f": to("function", "{value}"), "when": to("using", "run_after={value}")}
PERIODIC = lacks(
    "a schedule is declared with its task, or made in the admin: schedules of code are not enqueued",
)

OF_QUEUE = options(
    ("name", to("queue", "{value}")),
    (
        "connection default_timeout is_async job_class serializer death_penalty_class async_ queue_class autocommit",
        drops(""),
    ),
    ("default_result_ttl commit_mode", drops("")),
)

USES: dict[str, Use] = {
    "rq.job": maps("@task{task}", options=OF_TASK, positions=("queue", "connection", "timeout", "result_ttl", "ttl")),
    "Task()": maps("{it}.func({args})", "a task is not callable: .func is the plain function", takes="function"),
    "Task.delay": maps("{it}.enqueue({args})", takes="function"),
    # --- queues
    "rq.Queue": maps(
        "task.using(queue_name={queue})",
        'a queue is a name: it stands in TASKS[…]["QUEUES"]',
        options=OF_QUEUE,
        positions=("name",),
    ),
    "rq.get_queue": maps(
        "task.using(queue_name={queue})",
        'a queue is a name: it stands in TASKS[…]["QUEUES"]',
        options=OF_QUEUE,
        positions=("name",),
    ),
    **each("rq.get_queues rq.get_queue_by_index rq.queues", lacks(ADMIN)),
    "rq.enqueue": CALL,
    "Queue.enqueue": CALL,
    "Queue.enqueue_call": but(
        "{function}{using}.enqueue({args})",
        DECLARE,
        options={**OF_CALL, "func": to("function", "{value}")},
        positions=("func", "args", "kwargs", "timeout"),
    ),
    "Queue.enqueue_in": but(
        "{function}{using}.enqueue({args})", DECLARE, options=LATER, positions=("when", "f"), takes="function"
    ),
    "Queue.enqueue_at": but(
        "{function}{using}.enqueue({args})",
        "the datetime must be aware; " + DECLARE,
        options=LATER,
        positions=("when", "f"),
        takes="function",
    ),
    "Queue.enqueue_many": but("{it}.enqueue_many([…])", "task.enqueue_many([(1,), (2,)]), for each task its own"),
    "Queue.enqueue_job": lacks("enqueue the task again, with its arguments"),
    "Queue.prepare_data": but("task.arguments(…)", "for task.enqueue_many([…])"),
    "Queue.create_job": lacks("a call is not made without being enqueued: task.step(…) is one for chain and group"),
    **each(
        "empty delete",
        but("`manage.py asyncq queues purge NAME`", "it cancels and deletes the tasks that wait"),
        "Queue.",
    ),
    **each(
        "count is_empty job_ids jobs get_jobs get_job_ids get_job_position fetch_job remove",
        but("Inspector().queues.get(name)", "and Inspector().tasks.page(TaskFilter(queue=name)), as rows"),
        "Queue.",
    ),
    **each(
        "failed_job_registry finished_job_registry started_job_registry scheduled_job_registry deferred_job_registry "
        "canceled_job_registry ready_job_registry",
        but("TaskRecord.objects", "rows have states: TaskRecord.objects.failed()"),
        "Queue.",
    ),
    "Queue.name": maps("queue_name"),
    **each("connection key is_async serializer run_sync all", lacks(NO_CONNECTION), "Queue."),
    # --- results and the run
    "rq.get_current_job": but("current_task()", "from django_asyncq.context; or @task(takes_context=True)"),
    "rq.cancel_job": maps("task.get_result(id).cancel()"),
    "rq.requeue_job": but("Inspector().tasks.retry([id])", "the admin has the action, too"),
    **each(
        "rq.job.Job rq.job.JobStatus",
        but("TaskRecord", "from django_asyncq.models; enqueue() returns a result, with status and return_value"),
    ),
    **each(
        "fetch fetch_many exists",
        but(
            "task.get_result({args})",
            "a result is of a task; of an id alone: TaskRecord.objects.get(id=…)",
            options=options(("id", to("args", "{value}")), ("connection serializer", drops(NO_CONNECTION))),
            positions=("id",),
        ),
        "rq.job.Job.",
    ),
    "rq.job.Job.create": lacks("a call is not made without being enqueued"),
    **each("id get_id", maps("{it}.id"), "Job."),
    **each("result return_value latest_result results", but("{it}.return_value", OF_RESULT["result"]), "Job."),
    **each(
        "get_status is_finished is_failed is_queued is_started is_scheduled is_deferred is_canceled is_stopped",
        but("{it}.status", OF_RESULT["state"]),
        "Job.",
    ),
    **each("exc_info", maps("{it}.errors[-1].traceback"), "Job."),
    **each(
        "meta get_meta save_meta",
        but("context.progress(done, total, message)", "progress is two numbers and a text; result.progress shows it"),
        "Job.",
    ),
    "Job.refresh": maps("{it}.refresh()"),
    "Job.cancel": maps("{it}.cancel()"),
    "Job.requeue": but("Inspector().tasks.retry([id])", "the admin has the action, too"),
    **each("delete cleanup save perform set_status register_dependency", lacks(KEPT), "Job."),
    **each("args kwargs", maps("{it}.args and {it}.kwargs"), "Job."),
    **each(
        "enqueued_at started_at ended_at created_at",
        maps("{it}.enqueued_at, {it}.started_at, {it}.finished_at"),
        "Job.",
    ),
    **each(
        "func func_name description origin timeout retries_left retry_intervals worker_name dependency connection "
        "get_position ttl",
        lacks("read the row: TaskRecord.objects.get(id=…)"),
        "Job.",
    ),
    # --- options as values
    "rq.Retry": maps(
        "{arguments}",
        options=options(
            ("max", to("arguments", "max_attempts={value:plus_one}", RETRY)),
            ("interval", to("arguments", "backoff={value}", f"for several times a callable: {BACKOFF}")),
            ("enqueue_at_front", drops("remove it")),
        ),
        positions=("max", "interval"),
    ),
    "rq.Repeat": lacks(OPTIONS["repeat"]),
    "rq.Callback": lacks(FAILED),
    "rq.RateLimit": but(
        'rate="10/m"', "rate holds starts in a time back; what runs at the same time is a gate, an admission limit"
    ),
    "rq.Webhook": lacks("write a receiver of task_state_changed that calls it"),
    "rq.job.Dependency": but(
        "after={after}",
        'results; allow_failure is after_failure="run"',
        options=options(
            ("jobs", to("after", "{value:listed}")),
            ("allow_failure enqueue_at_front", differs("", "", 'after_failure="run"')),
        ),
        positions=("jobs",),
    ),
    # --- workers and others
    **each(
        "rq.Worker rq.SimpleWorker rq.SpawnWorker rq.get_worker rq.Connection",
        lacks("workers are `manage.py runworkers`; in tests: run_tasks()"),
    ),
    **each(
        "class rq.Worker class rq.SimpleWorker class rq.SpawnWorker",
        lacks("a worker has no parts to replace: see AROUND and the signals"),
    ),
    **each(
        "class rq.Queue class rq.job.Job",
        lacks("there is no class to derive from: see AROUND, headers and the signals"),
    ),
    **each(
        "all count work find_by_key get_current_job",
        but("Inspector().workers.all()", "what is known of each worker process"),
        "Worker.",
    ),
    "rq.get_connection": lacks(NO_CONNECTION),
    "rq.get_scheduler": but("", "a schedule is declared with its task, or made in the admin"),
    **each(
        "enqueue_at enqueue_in",
        but("{function}{using}.enqueue({args})", DECLARE, options=LATER, positions=("when", "f"), takes="function"),
        "Scheduler.",
    ),
    "Scheduler.schedule": lacks(
        "write @task(schedule=every(seconds=…, starts_at=…)), or make the schedule in the admin"
    ),
    "Scheduler.cron": but(
        "@task(schedule=cron({cron_text}))",
        "the schedule is declared with its task",
        options=options(
            ("cron_string", to("cron_text", "{value:quoted}")),
            (
                "func args kwargs id timeout description meta repeat queue_name result_ttl ttl "
                "use_local_timezone depends_on on_success on_failure at_front",
                differs("", "", "it is an option of the task, or of cron()"),
            ),
        ),
        positions=("cron_string", "func", "args", "kwargs", "repeat", "queue_name"),
    ),
    **each(
        "get_jobs cancel count change_execution_time enqueue_job run",
        but("`manage.py asyncq schedules list`", "and disable NAME; rows of the model Schedule"),
        "Scheduler.",
    ),
    "rq.cron.register": but(
        "@task(schedule={schedule})",
        "the schedule is declared with its task",
        options=options(
            ("cron", to("schedule", "cron({value:quoted})")),
            ("interval", to("schedule", "every(seconds={value})")),
            ("queue_name", differs("", "", "queue_name= of the task")),
            ("func", drops("the task that gets the schedule")),
            ("args kwargs name", drops("it goes to cron() or every()")),
            (
                "job_timeout result_ttl ttl failure_ttl meta webhooks timeout",
                differs("", "", "it is an option of the task"),
            ),
        ),
        positions=("func", "queue_name", "args", "kwargs"),
    ),
    "rq.cron.*": lacks("schedules are cron() and every() in @task(…)"),
    "rq.exceptions.*": lacks("no error of this kind is raised here: see the reference of errors"),
    "rq.timeouts.JobTimeoutException": but(
        "TaskTimeout", "from django_asyncq; in a `def` it is raised by context.check()"
    ),
    "rq.timeouts.*": lacks("write @task(timeout=60)"),
    **each(
        "rq.registry.* class rq.registry.*", but("TaskRecord.objects", "rows have states: TaskRecord.objects.failed()")
    ),
    **each(
        "rq.command.* rq.worker.* rq.worker_registration.* rq.suspension.* rq.serializers.* rq.utils.* "
        "rq.defaults.* rq.contrib.* rq.worker_pool.* "
        "rq.queue.* rq.results.* rq.group.* rq.scheduler.* rq.local.* rq.logutils.* rq.executions.*",
        lacks(ADMIN),
    ),
    **each(
        "rq.management.* rq.jobs.* rq.settings.* rq.models.* rq.admin.* rq.urls rq.templatetags.* "
        "rq.views.* rq.workers.* rq.connection_utils.* "
        "rq.thread_queue.* rq.stats_views.* rq.utils_.* rq.apps.*",
        lacks(ADMIN),
    ),
    "rq_scheduler.*": but("", "a schedule is declared with its task, or made in the admin"),
    # --- settings
    "settings.RQ_QUEUES": but(
        'TASKS = {{"default": {{"BACKEND": "django_asyncq.backend.AsyncqBackend", "QUEUES": […]}}}}',
        'the names of the queues; their place is ASYNCQ["REDIS"]',
    ),
    "settings.RQ_QUEUES.*": maps(
        'ASYNCQ = {{"REDIS": {redis}}}',
        options=options(
            ("URL", to("redis", "{value}")),
            (
                "HOST PORT DB USERNAME PASSWORD SSL SSL_CERT_REQS UNIX_SOCKET_PATH SENTINELS MASTER_NAME "
                "SOCKET_TIMEOUT CONNECTION_KWARGS SENTINEL_KWARGS "
                "REDIS_CLIENT_KWARGS USE_REDIS_CACHE",
                differs("", "", "write it as an address: redis://host:6379/1"),
            ),
            ("DEFAULT_TIMEOUT DEFAULT_RESULT_TTL", differs("", "", TIMEOUT)),
            ("ASYNC", differs("", "", "in tests use run_tasks(), or the mode immediate")),
            ("AUTOCOMMIT COMMIT_MODE", drops("remove it: the row is part of the transaction")),
            ("SERIALIZER", has_none(PICKLE)),
        ),
    ),
    "settings.RQ": maps("", "remove it with django_rq"),
    **each("COMMIT_MODE AUTOCOMMIT", maps("", "remove it: the row is part of the transaction"), "settings.RQ."),
    **each("DEFAULT_RESULT_TTL RESULT_TTL DEFAULT_TIMEOUT FAILURE_TTL", but("", KEPT), "settings.RQ."),
    **each(
        "JOB_CLASS QUEUE_CLASS WORKER_CLASS SCHEDULER_CLASS SHOW_ADMIN_LINK API_TOKEN",
        lacks("there is no class to replace"),
        "settings.RQ.",
    ),
    **each(
        "RQ_SHOW_ADMIN_LINK RQ_API_TOKEN RQ_PROMETHEUS_ENABLED RQ_ADMIN_ENABLED RQ_TRACK_FUTURE",
        maps("", "remove it: the admin has its own pages, and MONITOR_TOKEN is for monitors"),
        "settings.",
    ),
    **each("RQ_EXCEPTION_HANDLERS", lacks(FAILED), "settings."),
    **each("RQ_DEFAULT_TIMEOUT RQ_DEFAULT_RESULT_TTL", but("", TIMEOUT), "settings."),
    # --- commands
    "command rqworker": maps(
        "python manage.py runworkers {command}",
        "queues are given by --queues a,b: by name, not as words",
        options=options(
            (
                "--with-scheduler --worker-class -w --job-class -j --queue-class --name -n --sentry-dsn "
                "--sentry-ca-certs --sentry-debug --pid --verbosity -v "
                "--quiet -q --path -P --log-level --logging_level --logging-level --serializer -S --url -u "
                "--config -c --results-ttl --worker-ttl --maintenance-interval "
                "--disable-default-exception-handler --dequeue-strategy --exception-handler --max-idle-time "
                "--disable-job-desc-logging --date-format --log-format",
                drops(""),
            ),
            ("--burst -b", to("command", "--burst")),
            ("--max-jobs", to("command", "--max-tasks {value}")),
            ("--job-timeout --default-worker-ttl --default-result-ttl", differs("", "", TIMEOUT)),
        ),
    ),
    "command rqworker-pool": maps(
        "python manage.py runworkers {command}",
        "queues are given by --queues a,b",
        options=options(
            ("--num-workers -n", to("command", "--processes {value} --concurrency 1")),
            ("--burst -b", to("command", "--burst")),
            (
                "--logging-level --queue-class -Q --job-class -J --worker-class -W --quiet -q --verbose -v --url "
                "-u --config -c --path -P",
                drops(""),
            ),
        ),
    ),
    **each(
        "rqscheduler rqcron",
        maps(
            "",
            "remove it: no process fires schedules, one of the workers does",
            options=options(
                (
                    "--queue -q --interval -i --pid --verbosity -v --host -H --port -p --db -d --password -P --url "
                    "-u --burst -b --logging-level",
                    drops(""),
                )
            ),
        ),
        "command ",
    ),
    **each(
        "rqstats rqenqueue rqsuspend rqresume",
        but("python manage.py asyncq", "stats, tasks enqueue, queues pause and queues resume"),
        "command ",
    ),
    **each(
        "rq django-rq rq-scheduler rq-dashboard django-rq-scheduler django-tasks-scheduler",
        maps("", "uninstall it when the old queue is empty"),
        "package ",
    ),
    **each(
        "django_rq django_rq_scheduler rq_scheduler",
        maps("", "remove it from INSTALLED_APPS at the end"),
        "app ",
    ),
    "migration": but("", "a migration depends on this app: it must stay installed, or the migrations be squashed"),
}
SAME = {
    **{
        f"django_rq.{name}": f"rq.{name}"
        for name in (
            "job",
            "enqueue",
            "get_queue",
            "get_connection",
            "get_worker",
            "get_scheduler",
            "jobs",
            "queues",
            "settings",
            "models",
            "management",
            "urls",
            "apps",
            "admin",
            "templatetags",
            "views",
            "stats_views",
        )
    },
    **dict.fromkeys(("rq.decorators.job", "django_rq.decorators.job"), "rq.job"),
    **{
        f"django_rq.queues.{name}": f"rq.{name}"
        for name in ("get_queue", "get_queues", "get_scheduler", "get_connection", "enqueue", "get_queue_by_index")
    },
    **{f"django_rq.connection_utils.{name}": f"rq.{name}" for name in ("get_connection",)},
    **{
        f"rq.{module}.{name}": f"rq.{name}"
        for module, names in {
            "queue": "Queue",
            "worker": "Worker SimpleWorker SpawnWorker",
            "job": "Retry Repeat Callback get_current_job cancel_job requeue_job",
            "connections": "Connection get_current_connection",
            "retry": "Retry",
            "repeat": "Repeat",
            "callbacks": "Callback",
        }.items()
        for name in names.split()
    },
    "rq.get_current_connection": "rq.get_connection",
    "django_rq.queues.DjangoRQ": "rq.Queue",
    "class django_rq.queues.DjangoRQ": "class rq.Queue",
    "class rq.queue.Queue": "class rq.Queue",
    "class rq.worker.Worker": "class rq.Worker",
    "django_rq.workers.get_worker": "rq.get_worker",
    "rq.Job": "rq.job.Job",
    "rq_scheduler.Scheduler()": "Scheduler",
    "rq_scheduler.scheduler.Scheduler": "rq_scheduler.Scheduler",
    "rq.get_scheduler()": "Scheduler",
    **dict.fromkeys(("rq.Queue()", "rq.get_queue()"), "Queue"),
    "rq.get_queues()[]": "Queue",
    "rq.job@": "Task",
    "rq.job()()": "Task",
    **dict.fromkeys(
        (
            "Task.delay()",
            "rq.enqueue()",
            "Queue.enqueue()",
            "Queue.enqueue_in()",
            "Queue.enqueue_at()",
            "Queue.enqueue_call()",
            "Queue.fetch_job()",
            "rq.get_current_job()",
            "rq.job.Job()",
            "rq.job.Job.fetch()",
            "rq.job.Job.create()",
            "Scheduler.schedule()",
            "Scheduler.cron()",
            "Scheduler.enqueue_at()",
            "Scheduler.enqueue_in()",
        ),
        "Job",
    ),
    **dict.fromkeys(("rq.Worker()", "rq.SimpleWorker()", "rq.get_worker()", "rq.Worker"), "Worker"),
}
del SAME["rq.Worker"]
SETTING = re.compile(r"RQ|RQ_[A-Z_]+")


def setting_name(name: str) -> str:
    """Return the name of a setting of django-rq; "" for what is none."""
    return name if SETTING.fullmatch(name) else ""


HAS_VALUE = frozenset(
    [
        "--num-workers",
        "-n",
        "--max-jobs",
        "--job-timeout",
        "--worker-class",
        "-w",
        "-W",
        "--job-class",
        "-j",
        "-J",
        "--queue-class",
        "-Q",
        "--name",
        "--sentry-dsn",
        "--pid",
        "--verbosity",
        "-v",
        "--path",
        "-P",
        "--serializer",
        "-S",
        "--url",
        "-u",
        "--config",
        "-c",
        "--logging-level",
        "--log-level",
        "--queue",
        "--interval",
        "-i",
        "--host",
        "-H",
        "--port",
        "-p",
        "--db",
        "-d",
        "--password",
        "--default-worker-ttl",
        "--default-result-ttl",
        "--results-ttl",
        "--worker-ttl",
        "--maintenance-interval",
        "--dequeue-strategy",
        "--max-idle-time",
        "--exception-handler",
    ]
)
VOCABULARY = Vocabulary(
    name="rq",
    packages=re.compile(r"rq|django_rq|rq_scheduler|rq_dashboard|django_rq_scheduler"),
    uses=USES,
    same=SAME,
    words=re.compile(
        r"\brq\b|rq(?:worker|scheduler|cron|stats|enqueue|suspend|resume)|django_rq|rq_scheduler|RQ_QUEUES|\bRQ\b|RQ_|\.delay\b|\.enqueue(?:_in|_at|_call)?\b"
    ),
    setting=setting_name,
    given={},
    guesses={
        "delay": "Task.delay",
        "enqueue_call": "Queue.enqueue_call",
        "enqueue_in": "Queue.enqueue_in",
        "enqueue_at": "Queue.enqueue_at",
        "enqueue": "Queue.enqueue",
    },
    commands=(
        Command(re.compile(r"(?<![\w-])rqworker-pool\b"), "rqworker-pool", (), HAS_VALUE),
        Command(
            re.compile(r"(?<![\w-])(?:rqworker(?!-pool|\.)|rq worker(?!-pool))\b"), "rqworker", (), HAS_VALUE - {"-n"}
        ),
        Command(re.compile(r"(?<![\w-])(?:rqscheduler|rqcron)\b"), "{}", (), HAS_VALUE),
        Command(re.compile(r"(?<![\w-])(?:rqstats|rqenqueue|rqsuspend|rqresume)\b"), "{}", (), HAS_VALUE),
    ),
    distributions=re.compile(
        r"rq|django-rq|rq-scheduler|rq-dashboard|django-rq-scheduler|django-tasks-scheduler|rq-.*"
    ),
)

"""Dramatiq, with its Django app and its schedulers: what each name of it becomes here."""

from __future__ import annotations

import re

from ..core.foreign_words import BACKOFF, CONTEXT, FAILED, KEPT, NAMED, OF_RESULT, OPTIONS
from .vocabulary import Command, Implied, Use, Vocabulary, but, differs, drops, each, has_none, lacks, maps, options, to

RETRIES = "max_retries counts those after the first attempt, max_attempts all attempts: it is one more"
PRIORITY = "lower came first there; here higher comes first, so the sign is turned"
MILLISECONDS = "seconds, not milliseconds; a `def` task is asked to stop, and its process replaced if it does not"
MIDDLEWARE = 'code around every task is a function in ASYNCQ["AROUND"]; what is to be known of runs are the signals'
LIMITER = "none in a body: rate= holds starts back, a gate is an admission limit"

OF_TASK = options(
    ("queue_name", to("task", "queue_name={value}")),
    ("max_retries", differs("task", "max_attempts={value:plus_one}", RETRIES)),
    ("max_retries=None", differs("task", "max_attempts=1_000_000", "None retries for ever; here a number is needed")),
    ("min_backoff max_backoff", differs("", "", BACKOFF)),
    ("throws", to("task", "give_up_on={value}")),
    ("retry_when", has_none(OPTIONS["retry_when"])),
    ("time_limit", differs("task", "timeout={value:ms_as_seconds}", MILLISECONDS)),
    ("max_age", to("task", "expires={value:ms_as_seconds}", "seconds, not milliseconds")),
    ("priority", differs("task", "priority={value:negated}", PRIORITY)),
    ("actor_name", drops(NAMED)),
    ("broker actor_class", drops("remove it")),
    ("store_results result_ttl", drops(KEPT)),
    ("notify_shutdown", differs("task", "takes_context=True", OPTIONS["notify_shutdown"])),
    ("on_failure on_success on_retry_exhausted", has_none(FAILED)),
    ("pipe_ignore pipe_target", has_none(OPTIONS["pipe_target"])),
    ("periodic", to("task", "schedule={value}")),
    ("crontab", to("task", "schedule=cron({value:quoted})")),
)
OF_CALL = options(
    ("args", to("args", "{value:spread}")),
    ("kwargs", to("args", "{value:spread_named}")),
    ("delay", to("using", "run_after={value:milliseconds}")),
    ("max_retries", differs("using", "max_attempts={value:plus_one}", RETRIES)),
    ("time_limit", differs("using", "timeout={value:ms_as_seconds}", MILLISECONDS)),
    ("max_age", to("using", "expires={value:ms_as_seconds}", "seconds, not milliseconds")),
    ("queue_name", to("using", "queue_name={value}")),
    ("min_backoff max_backoff throws retry_when", has_none("it belongs to the task: @task(…)")),
    ("on_failure on_success on_retry_exhausted", has_none(FAILED)),
    ("pipe_ignore pipe_target", has_none(OPTIONS["pipe_target"])),
    ("store_results result_ttl", drops(KEPT)),
)
HOOKS = (
    "before_process_message after_process_message after_skip_message before_enqueue after_enqueue "
    "before_ack after_ack before_nack after_nack "
    "before_delay_message before_declare_actor after_declare_actor before_declare_queue "
    "after_declare_queue after_declare_delay_queue "
    "before_worker_boot after_worker_boot before_worker_shutdown after_worker_shutdown "
    "after_process_boot before_worker_thread_shutdown "
    "after_worker_thread_boot before_consumer_thread_shutdown after_consumer_thread_boot actor_options forks"
)

USES: dict[str, Use] = {
    "dramatiq.actor": maps(
        "@task{task}",
        options=OF_TASK,
        implied=(
            Implied(
                "",
                "max_retries",
                differs(
                    "task",
                    "max_attempts=21",
                    "20 retries are dramatiq's default; here a task is not retried unless it says so",
                ),
            ),
            Implied(
                "",
                "time_limit",
                differs("", "", "ten minutes are dramatiq's default of time_limit; here there is none: timeout=600"),
            ),
        ),
    ),
    "class dramatiq.Actor": lacks(f"a class for tasks does not exist; {MIDDLEWARE}"),
    **each(
        "dramatiq.Actor dramatiq.GenericActor class dramatiq.GenericActor",
        lacks("a class for tasks does not exist: a task is a function with @task"),
    ),
    "class dramatiq.GenericActor.perform": maps("@task", "the body becomes a function"),
    "class dramatiq.GenericActor.Meta": but("", "the attributes of Meta are options of @task(…)"),
    "Task()": maps("{it}.func({args})", "a task is not callable: .func is the plain function", takes="function"),
    "Task.send": maps("{it}.enqueue({args})", takes="function"),
    "Task.send_with_options": maps("{it}{using}.enqueue({args})", options=OF_CALL),
    "Task.message": maps("{it}.step({args})", takes="function"),
    "Task.message>": but(
        '{it}.using(after={{"{first}": previous}}).step({args})',
        "the value of the step before arrives by name",
        takes="function",
    ),
    "Task.message_with_options": maps("{it}{using}.step({args})", options=OF_CALL),
    "Task.fn": maps("{it}.func"),
    **each("logger", maps("logging.getLogger(__name__)"), "Task."),
    **each("options priority queue_name actor_name broker", but("{it}", "options are attributes of the task"), "Task."),
    "dramatiq.pipeline": but(
        "chain({steps})", "the value of a step arrives by name: after={…: previous}; it is enqueued by .enqueue()"
    ),
    "dramatiq.group": maps("group({list})", "it is enqueued by .enqueue(), which returns a list of results"),
    "Signature|": but("chain({steps})", "the value of a step arrives by name: after={…: previous}"),
    "Signature.run": maps("{it}.enqueue()"),
    **each(
        "get_result get_results",
        but("result.wait()", "of what .enqueue() returned; of a group: wait_all(results)"),
        "Signature.",
    ),
    **each(
        "completed completed_count wait add_completion_callback",
        but("wait_all(results)", "of what .enqueue() returned; what follows a group is then="),
        "Signature.",
    ),
    **each(
        "pipe copy message_id options args kwargs actor_name queue_name asdict encode decode "
        "message_datetime message_timestamp",
        lacks("read the row of the result that enqueue() returns"),
        "Signature.",
    ),
    "Result.get_result": but(
        "{it}.wait({wait})",
        OF_RESULT["get"],
        options=options(
            ("timeout", differs("wait", "timeout={value:ms_as_seconds}", "seconds, not milliseconds")),
            ("block backend", drops("remove it")),
        ),
    ),
    "Result.message_id": maps("{it}.id"),
    **each(
        "options args kwargs actor_name queue_name copy asdict encode message_timestamp",
        but("{it}", "read result.task, result.args and result.kwargs"),
        "Result.",
    ),
    "dramatiq.Message": lacks("there are no messages: remote(…) enqueues what another program runs"),
    "dramatiq.errors.Retry": but(
        "context.retry({retry})",
        f"no exception to raise; {CONTEXT}",
        options=options(("delay", to("retry", "in_={value:milliseconds}")), ("message", drops("remove it"))),
        positions=("message", "delay"),
    ),
    "dramatiq.errors.RateLimitExceeded": lacks(LIMITER),
    "dramatiq.errors.*": lacks("no error of this kind is raised here: see the reference of errors"),
    "dramatiq.middleware.CurrentMessage": but(
        "current_task()", "from django_asyncq.context; or @task(takes_context=True)"
    ),
    "dramatiq.middleware.CurrentMessage.get_current_message": but(
        "current_task()", "from django_asyncq.context; or @task(takes_context=True)"
    ),
    "dramatiq.middleware.Retries": maps("", "remove it: write max_attempts and backoff in @task(…)"),
    "dramatiq.middleware.SkipMessage": but(
        "Discard({args})", "from django_asyncq: the task is over, and no failure", takes="function"
    ),
    "dramatiq.middleware.TimeLimitExceeded": but(
        "TaskTimeout", "from django_asyncq; in a `def` it is raised by context.check()"
    ),
    "dramatiq.middleware.Shutdown": but("context.should_stop", OPTIONS["notify_shutdown"]),
    **each(
        "AgeLimit AsyncIO Callbacks GroupCallbacks Pipelines ShutdownNotifications TimeLimit Prometheus Prometheus.*",
        maps("", "remove it: its work is done by options of the task, or by nobody"),
        "dramatiq.middleware.",
    ),
    "class dramatiq.Middleware": lacks(MIDDLEWARE),
    **each(HOOKS, but("", f"write a receiver of a signal; {MIDDLEWARE}"), "class dramatiq.Middleware."),
    "dramatiq.middleware.*": lacks(MIDDLEWARE),
    "class dramatiq.middleware.*": lacks(MIDDLEWARE),
    **each("dramatiq.rate_limits.* dramatiq.rate_limits.backends.*", lacks(LIMITER)),
    **each("dramatiq.results.* class dramatiq.results.*", maps("", "remove it: results are always stored, as rows")),
    **each("dramatiq.brokers.stub.StubBroker", maps("TestBackend", "of django_asyncq.testing, with run_tasks()")),
    "dramatiq.brokers.*": maps("", 'remove it: the place of the queues is ASYNCQ["REDIS"]'),
    **each(
        "dramatiq.get_broker dramatiq.set_broker dramatiq.Broker class dramatiq.Broker",
        lacks('there is no broker to set: the place of the queues is ASYNCQ["REDIS"]'),
    ),
    **each(
        "add_middleware enqueue join flush flush_all get_actor get_declared_actors get_declared_queues "
        "declare_actor declare_queue close consume actors queues middleware",
        lacks("there is no broker; in tests use run_tasks(), to look use the Inspector"),
        "Broker.",
    ),
    **each("dramatiq.Worker dramatiq.Worker.*", lacks("workers are `manage.py runworkers`; in tests: run_tasks()")),
    **each(
        "dramatiq.get_encoder dramatiq.set_encoder dramatiq.Encoder dramatiq.JSONEncoder "
        "dramatiq.PickleEncoder class dramatiq.Encoder class dramatiq.JSONEncoder",
        lacks("arguments are JSON; dates, Decimal, UUIDs and model instances travel with @task(typed_arguments=True)"),
    ),
    "dramatiq.get_logger": maps("logging.getLogger(…)"),
    **each(
        "dramatiq.composition.* dramatiq.message.* dramatiq.worker.* dramatiq.cli.* dramatiq.common.* "
        "dramatiq.logging.* dramatiq.canteen.* dramatiq.broker.* dramatiq.encoder.* dramatiq.threading.*",
        lacks("it has no counterpart here"),
    ),
    # --- around it
    "django_dramatiq.test.*": but("", "use run_tasks() of django_asyncq.testing"),
    "class django_dramatiq.test.*": but("", "use run_tasks() of django_asyncq.testing"),
    **each(
        "django_dramatiq.models.* class django_dramatiq.models.* django_dramatiq.tasks.*",
        but("TaskRecord", "from django_asyncq.models: every task has a row"),
    ),
    **each(
        "django_dramatiq.middleware.* django_dramatiq.*",
        maps("", "remove it: connections are cared for, and every task has a row"),
    ),
    **each(
        "periodiq.cron", maps("cron({args})", options=options(("spec", to("args", "{value}"))), positions=("spec",))
    ),
    **each("periodiq.* dramatiq_crontab.*", maps("", "remove it: one of the workers fires schedules")),
    "dramatiq_crontab.cron": but("@task(schedule=cron({args}))", "the schedule is an option of the task"),
    **each("dramatiq_abort.*", but("result.cancel()", "context.should_stop says that it was cancelled")),
    **each("dramatiq_pg.* django_dramatiq_pg.* class dramatiq_pg.*", lacks("the queues are in Redis")),
    # --- settings
    "settings.DRAMATIQ_BROKER": maps("", "remove it at the end"),
    "settings.DRAMATIQ_BROKER.BROKER": maps("", 'write ASYNCQ["REDIS"]; RabbitMQ is not supported'),
    "settings.DRAMATIQ_BROKER.OPTIONS": maps("", 'write ASYNCQ["REDIS"]: an address that dramatiq does not use'),
    "settings.DRAMATIQ_BROKER.OPTIONS.url": maps(
        'ASYNCQ = {{"REDIS": {value}}}', "an address that dramatiq does not use"
    ),
    **each(
        "host port db password heartbeat_timeout dead_message_ttl requeue_deadline requeue_interval "
        "namespace client connection_pool max_priority confirm_delivery parameters "
        "maintenance_chance socket_timeout",
        but("", 'write ASYNCQ["REDIS"], and ["LEASE_SECONDS"] for how long a worker may be silent'),
        "settings.DRAMATIQ_BROKER.OPTIONS.",
    ),
    "settings.DRAMATIQ_BROKER.MIDDLEWARE": but("", MIDDLEWARE),
    **each(
        "DRAMATIQ_RESULT_BACKEND DRAMATIQ_RATE_LIMITER_BACKEND",
        maps("", "remove it: results are rows of your database"),
        "settings.",
    ),
    **each(
        "DRAMATIQ_TASKS_DATABASE DRAMATIQ_AUTODISCOVER_MODULES DRAMATIQ_REGISTRY DRAMATIQ_NTHREADS "
        "DRAMATIQ_NPROCS DRAMATIQ_IGNORED_MODULES DRAMATIQ_ACTORS DRAMATIQ_CRONTAB",
        but("", "workers import the tasks.py of each installed app; processes and threads are options of runworkers"),
        "settings.",
    ),
    # --- commands
    "command rundramatiq": maps(
        "python manage.py runworkers {command}",
        options=options(
            ("--processes -p", to("command", "--processes {value}")),
            ("--threads -t", to("command", "--concurrency {value}")),
            ("--queues -Q", to("command", "--queues {value}", "separated by commas")),
            ("--reload --watch", to("command", "--reload")),
            ("--use-gevent", has_none("there are no greenlets: processes with threads, and async def")),
            (
                "--path -P --pid-file --log-file --skip-logging --use-spawn --fork-function -f "
                "--worker-fork-timeout --worker-shutdown-timeout --reload-use-polling "
                "--watch-use-polling -i --watch-include -x --watch-exclude --verbose -v --version --verbosity "
                "--worker-prefetch-multiplier",
                drops(""),
            ),
        ),
    ),
    **each(
        "periodiq crontab",
        maps(
            "",
            "remove it: no process fires schedules, one of the workers does",
            options=options(("--no-heartbeat --no-task-loading -v --verbose --path -P", drops(""))),
        ),
        "command ",
    ),
    "command delete_old_tasks": maps("", "remove it: retention deletes old rows by itself"),
    **each(
        "dramatiq django-dramatiq periodiq dramatiq-crontab dramatiq-abort dramatiq-pg django-dramatiq-pg",
        maps("", "uninstall it when the old queue is empty"),
        "package ",
    ),
    **each(
        "django_dramatiq django_dramatiq_pg dramatiq_crontab",
        maps("", "remove it from INSTALLED_APPS at the end"),
        "app ",
    ),
    "migration": but("", "a migration depends on this app: it must stay installed, or the migrations be squashed"),
}
SAME = {
    "dramatiq.actor.actor": "dramatiq.actor",
    "dramatiq.actor@": "Task",
    "dramatiq.actor()()": "Task",
    **{
        f"dramatiq.{name}": f"dramatiq.errors.{name}"
        for name in [
            "Retry",
            "RateLimitExceeded",
            "DramatiqError",
            "BrokerError",
            "DecodeError",
            "ActorNotFound",
            "QueueNotFound",
            "QueueJoinTimeout",
            "BrokerConnectionError",
            "ConnectionClosed",
            "ConnectionFailed",
        ]
    },
    "dramatiq.middleware.Middleware": "dramatiq.Middleware",
    "dramatiq.Middleware": "dramatiq.middleware.Middleware_",
    "dramatiq.message.Message": "dramatiq.Message",
    "class dramatiq.middleware.Middleware": "class dramatiq.Middleware",
    **{
        f"dramatiq.middleware.{module}.{name}": f"dramatiq.middleware.{name}"
        for module, name in (
            ("current_message", "CurrentMessage"),
            ("retries", "Retries"),
            ("time_limit", "TimeLimitExceeded"),
            ("shutdown", "Shutdown"),
        )
    },
    **{f"dramatiq.composition.{name}": f"dramatiq.{name}" for name in ("pipeline", "group")},
    **dict.fromkeys(
        (
            "Task.message()",
            "Task.message_with_options()",
            "dramatiq.pipeline()",
            "dramatiq.group()",
            "Signature|",
            "Signature.pipe()",
        ),
        "Signature",
    ),
    **dict.fromkeys(("Task.send()", "Task.send_with_options()"), "Result"),
    **dict.fromkeys(
        (
            "dramatiq.get_broker()",
            "dramatiq.brokers.stub.StubBroker()",
            "dramatiq.brokers.redis.RedisBroker()",
            "dramatiq.brokers.rabbitmq.RabbitmqBroker()",
        ),
        "Broker",
    ),
}
del SAME["dramatiq.Middleware"]
SETTING = re.compile(r"DRAMATIQ_[A-Z_]+")


def setting_name(name: str) -> str:
    """Return the name of a setting of django-dramatiq; "" for what is none."""
    return name if SETTING.fullmatch(name) else ""


HAS_VALUE = frozenset(
    [
        "--processes",
        "-p",
        "--threads",
        "-t",
        "--path",
        "-P",
        "--pid-file",
        "--log-file",
        "--fork-function",
        "-f",
        "--worker-fork-timeout",
        "--worker-shutdown-timeout",
        "-i",
        "--watch-include",
        "-x",
        "--watch-exclude",
        "--verbosity",
        "--queues",
        "-Q",
        "--watch",
    ]
)
VOCABULARY = Vocabulary(
    name="dramatiq",
    packages=re.compile(r"dramatiq|django_dramatiq(?:_pg)?|periodiq|dramatiq_\w+"),
    uses=USES,
    same=SAME,
    words=re.compile(r"dramatiq|periodiq|DRAMATIQ|send_with_options|delete_old_tasks|crontab"),
    setting=setting_name,
    guesses={"send_with_options": "Task.send_with_options", "message_with_options": "Task.message_with_options"},
    commands=(
        Command(
            re.compile(r"(?<![\w-])(?:rundramatiq\b|(?<!install )(?<!_)dramatiq (?=[\w.\-]+))"),
            "rundramatiq",
            (),
            HAS_VALUE,
        ),
        Command(re.compile(r"(?<![\w-])periodiq\s"), "periodiq", (), HAS_VALUE),
        Command(re.compile(r"(?<=manage\.py )(?:crontab|delete_old_tasks)\b"), "{}", (), HAS_VALUE),
    ),
    distributions=re.compile(r"(?:django-)?dramatiq(?:-.*)?|periodiq"),
)

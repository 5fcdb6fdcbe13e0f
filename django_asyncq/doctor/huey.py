"""Huey, with its Django app: what each name of it becomes here."""

from __future__ import annotations

import re

from ..core.foreign_words import BACKOFF, CONTEXT, FAILED, NAMED, OF_RESULT, OPTIONS
from .vocabulary import (
    Command,
    Given,
    Use,
    Vocabulary,
    but,
    differs,
    drops,
    each,
    has_none,
    lacks,
    maps,
    options,
    to,
)

RETRIES = "retries counts those after the first attempt, max_attempts all attempts: it is one more"
KILLED = "a task whose worker is killed runs again here, and is lost there: it must bear a second run"
PRIORITY = "−100 to 100, higher comes first, as there"
ADMIN = "use the admin of this package, `manage.py asyncq` or the Inspector"
LOCK = "it refuses at the enqueue, not at the run; a lock around a part of a body is one of your database"
SIGNALS = "from django_asyncq.signals; it carries record, the row, in place of signal and task"
DAYS = "both days must match there; here either is enough"

OF_TASK = options(
    ("retries", differs("task", "max_attempts={value:plus_one}", RETRIES)),
    ("retry_delay", to("task", "backoff={value}")),
    ("retry_backoff", differs("task", "", f"the default is random and doubles; {BACKOFF}")),
    ("priority", differs("task", "priority={value}", PRIORITY)),
    ("context", to("task", "takes_context=True", "the context comes first, not as task=")),
    ("expires", differs("task", "expires={value}", "a duration; a moment belongs to one call")),
    (
        "timeout",
        differs("task", "timeout={value}", "a `def` task is asked to stop, and its process replaced if it does not"),
    ),
    ("name", drops(NAMED)),
    ("queue", to("task", "queue_name={value}")),
)
OF_PERIODIC = {**OF_TASK, "validate_datetime": to("task", "schedule={value}")}
OF_SCHEDULE = options(
    ("args", to("args", "{value:spread}")),
    ("kwargs", to("args", "{value:spread_named}")),
    ("delay", to("using", "run_after={value:seconds}")),
    ("eta", to("using", "run_after={value}", "the datetime must be aware")),
    ("priority", differs("using", "priority={value}", PRIORITY)),
    ("retries", differs("using", "max_attempts={value:plus_one}", RETRIES)),
    ("retry_delay retry_backoff", has_none("backoff belongs to the task: @task(backoff=…)")),
    ("expires", to("using", "expires={value}")),
    ("timeout", to("using", "timeout={value}")),
    ("id convert_utc", drops("remove it")),
)
TASK = maps("@task{task}", options=OF_TASK)
PERIODIC = maps("@task{task}", options=OF_PERIODIC, positions=("validate_datetime",))
AROUND_RUN = f'write a receiver, {SIGNALS}; code around every task: ASYNCQ["AROUND"]'

USES: dict[str, Use] = {
    **each("Huey.task djhuey.task djhuey.db_task", TASK),
    "djhuey.on_commit_task": maps("@task{task}", OPTIONS["on_commit"], options=OF_TASK),
    **each("Huey.periodic_task djhuey.periodic_task djhuey.db_periodic_task", PERIODIC),
    "Huey.context_task": lacks(
        'name a function that returns a context manager in ASYNCQ["AROUND"], or use `with` in the body'
    ),
    # --- calls
    "Task()": but(
        "{it}.enqueue({args})",
        f"a task is not callable here; {KILLED}",
        takes="function",
        options=options(
            (
                "priority delay eta expires",
                differs("", "", "an argument of this name is the function's here: options go to using()"),
            )
        ),
    ),
    "Task.schedule": maps(
        "{it}{using}.enqueue({args})", options=OF_SCHEDULE, positions=("args", "kwargs", "eta", "delay")
    ),
    "Task.call_local": maps("{it}.func({args})", takes="function"),
    "Task.func": maps("{it}.func"),
    "Task.s": maps("{it}.step({args})", "options go to using() before the step", takes="function"),
    "Task.map": maps("{it}.enqueue_many([(each,) for each in {args}])", "wait_all(results) gives the values"),
    **each(
        "revoke is_revoked restore",
        but("`manage.py asyncq tasks pause NAME`", "and resume: no call of the task begins meanwhile"),
        "Task.",
    ),
    **each(
        "retries retry_delay settings name task_class task_base huey",
        but("{it}", "options are attributes of the task: max_attempts, backoff, name"),
        "Task.",
    ),
    **each("create_task unregister", lacks("a task is declared, and stays so"), "Task."),
    # --- steps
    "Signature.then": but("chain({it}, {args})", "the value of a step arrives by name: after={…: previous}"),
    "Signature.error": lacks(FAILED),
    **each(
        "id args kwargs name retries eta priority",
        lacks("read the row of the result that enqueue() returns"),
        "Signature.",
    ),
    "huey.group": maps("group({list})", "it is enqueued by .enqueue()"),
    "huey.chord": but("group({args})", "group([…], then=…).enqueue(); the values arrive by name, as a list"),
    "Huey.enqueue": but("{args}.enqueue()", "a step alone is written task.enqueue(…)"),
    # --- results
    "Result()": but(
        "{it}.wait({wait})",
        "read as often as you like; it raises TaskFailed for a task that failed",
        options=options(
            (
                "blocking preserve backoff max_delay revoke_on_timeout",
                differs("", "", "wait() blocks, and keeps the value"),
            ),
            ("timeout", to("wait", "timeout={value}")),
        ),
    ),
    "Result.get": but(
        "{it}.wait({wait})",
        OF_RESULT["get"],
        options=options(
            (
                "blocking preserve backoff max_delay revoke_on_timeout",
                differs("", "", "wait() blocks, and keeps the value"),
            ),
            ("timeout", to("wait", "timeout={value}")),
        ),
        positions=("blocking", "timeout"),
    ),
    "Result.id": maps("{it}.id"),
    "Result.is_ready": but("{it}.is_finished", OF_RESULT["ready"]),
    **each("revoke", maps("{it}.cancel()"), "Result."),
    **each(
        "is_revoked restore reset reschedule get_raw_result task",
        lacks("read the row: TaskRecord.objects.get(id=result.id)"),
        "Result.",
    ),
    **each(
        "Huey.result djhuey.result",
        but("task.get_result(id)", "a result is of a task; of an id alone: TaskRecord.objects.get(id=…)"),
    ),
    # --- within a run
    "huey.exceptions.RetryTask": but(
        "context.retry({retry})",
        f"no exception to raise; {CONTEXT}",
        options=options(
            ("delay", to("retry", "in_={value}")),
            ("eta", differs("retry", "in_={value} - timezone.now()", "a duration")),
            ("msg", drops("remove it")),
        ),
        positions=("msg", "eta", "delay"),
    ),
    "huey.exceptions.CancelExecution": but(
        "Discard({args})",
        "from django_asyncq: the task is over, and no failure",
        options=options(("retry=True", differs("", "", "context.retry()")), ("retry", drops("remove it"))),
        takes="function",
    ),
    "huey.exceptions.TaskException": maps("TaskFailed", "from django_asyncq, raised by result.wait()"),
    "huey.exceptions.ResultTimeout": maps("WaitTimeout", "from django_asyncq"),
    "huey.exceptions.TaskTimeout": maps(
        "TaskTimeout", "from django_asyncq; in a `def` it is raised by context.check()"
    ),
    "huey.exceptions.TaskLockedException": but(
        "DuplicateTask", "from django_asyncq; raised by enqueue() of a unique task"
    ),
    "huey.exceptions.*": lacks("no error of this kind is raised here: see the reference of errors"),
    # --- limits
    **each(
        "Huey.lock_task djhuey.lock_task",
        but(
            "@task(unique={unique})",
            LOCK,
            options=options(("lock_name", to("unique", "{value}"))),
            positions=("lock_name",),
        ),
    ),
    **each(
        "Huey.is_locked Huey.flush_locks djhuey.is_locked djhuey.flush_locks",
        lacks("a unique task holds its key as long as its row is live"),
    ),
    **each("Huey.rate_limit djhuey.rate_limit", but('@task(rate="10/m")', OPTIONS["rate_limit"])),
    # --- hooks
    **each(
        "Huey.signal djhuey.signal",
        but("@receiver(run_ended)", f"{SIGNALS}: task_failed, run_started, run_ended, task_state_changed"),
    ),
    **each("pre_execute post_execute", but("@receiver(run_started)", AROUND_RUN), "Huey."),
    **each("pre_execute post_execute", but("@receiver(run_started)", AROUND_RUN), "djhuey."),
    **each(
        "Huey.on_startup djhuey.on_startup",
        but("@receiver(worker_started)", f"in each worker process, {SIGNALS}; once for the fleet: startup_task"),
    ),
    **each(
        "Huey.on_shutdown djhuey.on_shutdown",
        but("@receiver(worker_stopping)", f"in each worker process that ends in order, {SIGNALS}"),
    ),
    **each(
        "disconnect_signal unregister_pre_execute unregister_post_execute unregister_on_startup unregister_on_shutdown",
        lacks("disconnect the receiver"),
        "Huey.",
    ),
    "djhuey.disconnect_signal": lacks("disconnect the receiver"),
    "huey.signals.SIGNAL_ERROR": but("task_failed", SIGNALS),
    "huey.signals.*": but("run_ended", f"{SIGNALS}: task_failed, run_started, run_ended, task_state_changed"),
    "huey.crontab": maps(
        "cron({cron})",
        positions=("minute", "hour", "day", "month", "day_of_week"),
        options=options(
            ("fields", to("", "minute hour day month day_of_week")),
            ("days", differs("", "day day_of_week", DAYS)),
            ("strict", drops("remove it")),
        ),
    ),
    # --- the instance
    **each(
        "huey.RedisHuey huey.Huey huey.PriorityRedisHuey huey.RedisExpireHuey "
        "huey.PriorityRedisExpireHuey huey.contrib.asyncio.AsyncRedisHuey",
        maps("", 'remove it: the place of the queues is ASYNCQ["REDIS"], their names are in TASKS'),
    ),
    **each(
        "huey.SqliteHuey huey.FileHuey huey.MemoryHuey huey.BlackHoleHuey huey.CySqliteHuey huey.PostgresHuey",
        but("", "the queues are in Redis; in tests run_tasks() needs none"),
    ),
    **each(
        "class huey.RedisHuey class huey.Huey class huey.PriorityRedisHuey",
        lacks("there is no class to derive from: see AROUND, headers and the signals"),
    ),
    **each(
        "pending scheduled pending_count scheduled_count all_results result_count get put delete name "
        "storage immediate results",
        but("Inspector().tasks.page()", "rows, with states and queues"),
        "Huey.",
    ),
    **each("flush", but("`manage.py asyncq queues purge NAME`", "one queue at a time"), "Huey."),
    **each(
        "revoke revoke_all revoke_by_id is_revoked restore restore_all restore_by_id",
        but("result.cancel()", "of one call; `manage.py asyncq tasks pause NAME` for all calls of a task"),
        "Huey.",
    ),
    **each(
        "revoke revoke_all revoke_by_id is_revoked restore restore_all restore_by_id",
        but("result.cancel()", "of one call; `manage.py asyncq tasks pause NAME` for all calls of a task"),
        "djhuey.",
    ),
    **each(
        "execute dequeue create_consumer read_schedule read_periodic add_schedule serialize_task "
        "deserialize_task get_raw put_result put_if_empty "
        "get_storage ready_to_run notify_interrupted_tasks storage_class build_error_result",
        lacks("the worker has no parts to call: in tests use run_tasks()"),
        "Huey.",
    ),
    **each(
        "djhuey.close_db djhuey.scheduled djhuey.enqueue djhuey.get_backend djhuey.backend_cls djhuey.tasks_backend",
        lacks("connections are cared for; rows are TaskRecord.objects"),
    ),
    "huey.serializer.*": lacks(
        "arguments are JSON; dates, Decimal, UUIDs and model instances travel with @task(typed_arguments=True)"
    ),
    **each(
        "huey.storage.* huey.consumer.* huey.consumer_options.* huey.registry.* huey.utils.* huey.bin.* "
        "huey.contrib.* huey.constants.* huey.api.* huey.tests.*",
        lacks("it has no counterpart here"),
    ),
    **each(
        "huey_monitor.* class huey_monitor.* django_huey_monitor.*",
        but("context.progress(done, total, message)", "the admin shows tasks, their progress and their errors"),
    ),
    **each("django_huey.* class django_huey.*", lacks("several queues are queue_name= of the tasks")),
    # --- settings
    "settings.HUEY": maps("", "remove it at the end"),
    **each(
        "name huey_class immediate immediate_use_memory results store_none utc blocking always_eager backend_class",
        maps("", "remove it; with immediate, in tests: run_tasks()"),
        "settings.HUEY.",
    ),
    **each(
        "serializer compression use_zlib store_intermediate_errors store_errors result_store events "
        "retry notify_result",
        maps("", "remove it"),
        "settings.HUEY.",
    ),
    **each(
        "connection url host port db filename",
        maps('ASYNCQ = {{"REDIS": "redis://host:6379/1"}}', "one that huey does not use"),
        "settings.HUEY.",
    ),
    **each(
        "host port db url password connection_pool read_timeout max_connections client_class ssl",
        maps("", 'it is a part of ASYNCQ["REDIS"]'),
        "settings.HUEY.connection.",
    ),
    "settings.HUEY.consumer": maps("", "the options of `manage.py runworkers`"),
    "settings.HUEY.consumer.workers": but(
        'ASYNCQ = {{"PROCESSES": {value}}}', "processes with threads: PROCESSES and CONCURRENCY"
    ),
    "settings.HUEY.consumer.worker_type": but("", "processes with threads; there are no greenlets"),
    **each(
        "initial_delay backoff max_delay scheduler_interval periodic check_worker_health "
        "health_check_interval utc simple_log logfile verbose "
        "quiet loglevel flush_locks extra_locks shutdown_timeout graceful_signal max_tasks",
        maps("", "remove it"),
        "settings.HUEY.consumer.",
    ),
    "settings.DJANGO_HUEY": but("", 'queues are names in TASKS[…]["QUEUES"], and queue_name= of the tasks'),
    "settings.HUEY_DOES_NOT_EXIST": maps("", "remove it"),
    # --- commands
    **each(
        "command run_huey command djangohuey",
        maps(
            "python manage.py runworkers {command}",
            options=options(
                (
                    "--workers -w",
                    differs(
                        "command",
                        "--processes {value} --concurrency 1",
                        "threads there unless -k says else: --processes 1 --concurrency N",
                    ),
                ),
                (
                    "--worker-type -k",
                    differs("", "", "processes with threads: --processes and --concurrency; there are no greenlets"),
                ),
                (
                    "--logfile -l --verbose -v --quiet -q --simple -S --delay -d --max-delay -m --backoff -b "
                    "--health-check-interval -c --disable-health-check -C --flush-locks -f "
                    "--extra-locks -L --scheduler-interval -s --no-periodic -n --graceful-signal -g "
                    "--shutdown-timeout -t --disable-autoload -A --queue --verbosity --utc -u -o --localtime",
                    drops(""),
                ),
                ("--max-tasks -M", to("command", "--max-tasks {value}")),
            ),
        ),
    ),
    **each("huey django-huey django-huey-monitor", maps("", "uninstall it when the old queue is empty"), "package "),
    **each(
        "huey.contrib.djhuey huey_monitor django_huey bx_django_utils.huey",
        maps("", "remove it from INSTALLED_APPS at the end"),
        "app ",
    ),
    "migration": but("", "a migration depends on this app: it must stay installed, or the migrations be squashed"),
}
del USES["settings.HUEY_DOES_NOT_EXIST"], USES["app bx_django_utils.huey"]
SAME = {
    "huey.contrib.djhuey": "djhuey",
    "django_huey.db_task": "djhuey.db_task",
    "django_huey.task": "djhuey.task",
    "django_huey.db_periodic_task": "djhuey.db_periodic_task",
    "django_huey.periodic_task": "djhuey.periodic_task",
    "django_huey.get_queue()": "Huey",
    "django_huey.on_commit_task": "djhuey.on_commit_task",
    "django_huey.lock_task": "djhuey.lock_task",
    "django_huey.signal": "djhuey.signal",
    **{
        f"huey.api.{name}": f"huey.{name}"
        for name in [
            "Huey",
            "RedisHuey",
            "SqliteHuey",
            "MemoryHuey",
            "FileHuey",
            "crontab",
            "group",
            "chord",
            "PriorityRedisHuey",
            "RedisExpireHuey",
        ]
    },
    **{f"huey.{name}": f"huey.exceptions.{name}" for name in ("RetryTask", "CancelExecution")},
    "djhuey.HUEY": "Huey",
    "huey.contrib.mini.MiniHuey()": "Huey",
    **{f"{name}()": "Huey" for name in USES if re.fullmatch(r"huey\.(?:\w+Huey|Huey|contrib\.asyncio\.\w+)", name)},
    **{
        f"{owner}.{name}@": "Task"
        for owner in ("Huey", "djhuey")
        for name in ("task", "db_task", "on_commit_task", "periodic_task", "db_periodic_task")
    },
    **{f"{owner}.{name}()()": "Task" for owner in ("Huey", "djhuey") for name in ("task", "db_task")},
    **dict.fromkeys(("Task.s()", "Signature.then()", "Signature.error()", "huey.group()", "huey.chord()"), "Signature"),
    **dict.fromkeys(("Task()", "Task.schedule()", "Huey.enqueue()", "Task.map()", "Huey.result()"), "Result"),
}
SAME["huey.api.Result"] = "Result"
SAME["huey.api.Task"] = "Signature"
SETTING = re.compile(r"HUEY|DJANGO_HUEY")


def setting_name(name: str) -> str:
    """Return the name of a setting of huey; "" for what is none."""
    return name if SETTING.fullmatch(name) else ""


HAS_VALUE = frozenset(
    [
        "--workers",
        "-w",
        "--worker-type",
        "-k",
        "--logfile",
        "-l",
        "--delay",
        "-d",
        "--max-delay",
        "-m",
        "--backoff",
        "-b",
        "--health-check-interval",
        "-c",
        "--extra-locks",
        "-L",
        "--max-tasks",
        "-M",
        "--scheduler-interval",
        "-s",
        "--shutdown-timeout",
        "-t",
        "--graceful-signal",
        "-g",
        "--queue",
        "--verbosity",
    ]
)
VOCABULARY = Vocabulary(
    name="huey",
    packages=re.compile(r"huey|django_huey|huey_monitor|django_huey_monitor"),
    uses=USES,
    same=SAME,
    words=re.compile(r"huey|HUEY"),
    setting=setting_name,
    given={
        **{f"{owner}.signal": (Given("task", "Signature"), Given(1, "Signature")) for owner in ("Huey", "djhuey")},
        **{
            f"{owner}.{name}": (Given("task", "Signature", if_option="context"),)
            for owner in ("Huey", "djhuey")
            for name in ("task", "db_task")
        },
    },
    guesses={"call_local": "Task.call_local"},
    commands=(
        Command(
            re.compile(r"(?<![\w-])(?:run_huey|run_djangohuey|huey_consumer(?:\.py)?)\b"),
            "run_huey",
            (),
            HAS_VALUE,
        ),
        Command(re.compile(r"(?<![\w-])djangohuey\b"), "djangohuey", (), HAS_VALUE),
    ),
    distributions=re.compile(r"huey|django-huey(?:-.*)?"),
)

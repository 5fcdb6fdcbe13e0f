"""Celery's command lines: the programs, and each of their options."""

from __future__ import annotations

import re

from .vocabulary import Command, Option, Use, but, differs, drops, each, has_none, lacks, maps, options, to

NO_PROCESS = "remove it: no process fires schedules, one of the workers does"
LOGGING = "Django's LOGGING holds for the workers too"
SEVERAL = "`manage.py runworkers` starts so many processes itself; a process manager starts it once for each host"
OF_ALL = options(
    ("-A --app --workdir --loader --config --skip-checks -q --quiet -C --no-color --version", drops("")),
    ("-b --broker --result-backend", drops('it is in the settings: ASYNCQ["REDIS"]')),
    ("-l --loglevel -f --logfile", drops(LOGGING)),
    ("--pidfile --uid --gid --umask --executable -D --detach", has_none("let the process manager do it")),
)
OF_WORKER: dict[str, Option] = {
    **OF_ALL,
    **options(
        (
            "-c --concurrency",
            differs(
                "command",
                "--processes {value} --concurrency 1",
                "one task in each process, as there; threads need less memory: --processes 2 --concurrency 8",
            ),
        ),
        ("-Q --queues", to("command", "--queues {value}")),
        ("-X --exclude-queues", has_none("name the queues that are served: --queues")),
        ("-n --hostname", differs("", "", "--worker-id; by default the name of the host")),
        (
            "-P --pool",
            differs(
                "", "", "processes with threads: --processes and --concurrency; there is no gevent and no eventlet"
            ),
        ),
        ("-B --beat -s --schedule --schedule-filename --scheduler", drops(NO_PROCESS)),
        ("--max-tasks-per-child --maxtasksperchild", to("command", "--max-tasks {value}")),
        (
            "--max-memory-per-child",
            to("command", "--max-memory-mb {value:kilobytes_as_megabytes}", "megabytes, not kilobytes"),
        ),
        (
            "--time-limit --soft-time-limit",
            differs("", "", 'timeout and soft_timeout of each task; for all: ASYNCQ["TIMEOUT_SECONDS"]'),
        ),
        (
            "--autoscale",
            has_none("the scale of a queue says how many slots it wants: `manage.py asyncq queues scale NAME`"),
        ),
        (
            "--prefetch-multiplier --disable-prefetch -O --optimization",
            drops("a worker takes no more than it can begin"),
        ),
        (
            "-E --task-events --events --without-gossip --without-mingle --without-heartbeat "
            "--heartbeat-interval -S --statedb",
            drops(""),
        ),
        ("--purge --discard", has_none("`manage.py asyncq queues purge NAME`")),
        ("-I --include", drops("tasks are found in the tasks.py of each installed app")),
        ("--pool-start-method", differs("", "", 'ASYNCQ["START_METHOD"]')),
    ),
}
OF_BEAT = {
    **OF_ALL,
    **options(("-s --schedule -S --scheduler --max-interval --enable-remote-control -n --hostname", drops(NO_PROCESS))),
}
# Those whose options are of no use here: none is unknown.
OF_OTHERS = {
    **OF_ALL,
    **options(
        (
            "-d --destination -t --timeout -j --json -n --hostname -Q --queues -X -F --force "
            "--exclude-queues --persistent "
            "--basic_auth --basic-auth --port --address --url_prefix --url-prefix --broker_api --broker-api "
            "--conf --db --auth "
            "--max_tasks --camera -c --camera -F --freq --frequency -r --maxrate -a --args -k --kwargs --eta "
            "--countdown --expires "
            "--serializer --queue --exchange --routing-key --purge_offline_workers --enable_events "
            "--inspect_timeout --debug "
            "--xheaders --natural_time --tasks_columns --format_task --state_save_interval --cookie_secret "
            "--logging --broker",
            drops(""),
        )
    ),
}

USES_OF_COMMANDS: dict[str, Use] = {
    "command celery-worker": maps("python manage.py runworkers {command}", options=OF_WORKER),
    "command celery-multi": lacks(SEVERAL, options={**OF_WORKER, **options(("--logfile --pidfile", drops("")))}),
    "command celery-beat": maps("", NO_PROCESS, options=OF_BEAT),
    "command celery-flower": but(
        "", "the admin shows tasks, queues and workers; metrics are for Prometheus", options=OF_OTHERS
    ),
    "command celery-inspect": but(
        "python manage.py asyncq workers list --tasks",
        "of all workers; `asyncq tasks list` has the rows",
        options=OF_OTHERS,
    ),
    "command celery-status": maps(
        "python manage.py asyncq health", "its exit code says whether tasks are being run", options=OF_OTHERS
    ),
    "command celery-purge": but("python manage.py asyncq queues purge NAME", "one queue at a time", options=OF_OTHERS),
    "command celery-call": but(
        "python manage.py asyncq tasks enqueue NAME", "arguments: --args, --kwargs as JSON", options=OF_OTHERS
    ),
    **each(
        "command celery-control",
        but("python manage.py asyncq", "its nouns are tasks, queues, workers and others", options=OF_OTHERS),
    ),
    **each(
        "events report list result migrate graph upgrade logtool amqp shell",
        lacks("it has no counterpart", options=OF_OTHERS),
        "command celery-",
    ),
    # of django-celery, before Celery 3.1
    **each("celeryd celery_worker", maps("python manage.py runworkers"), "command "),
    "command celerybeat": maps("", NO_PROCESS),
    "command celerycam": maps("", NO_PROCESS),
}
VERBS = (
    "worker",
    "multi",
    "beat",
    "flower",
    "inspect",
    "status",
    "purge",
    "call",
    "control",
    "events",
    "report",
    "list",
    "result",
    "migrate",
    "graph",
    "upgrade",
    "logtool",
    "amqp",
    "shell",
)
HAS_VALUE = frozenset(
    [
        "-A",
        "--app",
        "-b",
        "--broker",
        "--result-backend",
        "--loader",
        "--config",
        "--workdir",
        "-n",
        "--hostname",
        "-S",
        "--statedb",
        "-l",
        "--loglevel",
        "-O",
        "--optimization",
        "--prefetch-multiplier",
        "-c",
        "--concurrency",
        "-P",
        "--pool",
        "--time-limit",
        "--soft-time-limit",
        "--max-tasks-per-child",
        "--maxtasksperchild",
        "--max-memory-per-child",
        "-Q",
        "--queues",
        "-X",
        "--exclude-queues",
        "-I",
        "--include",
        "--heartbeat-interval",
        "--autoscale",
        "-s",
        "--schedule",
        "--schedule-filename",
        "--scheduler",
        "-f",
        "--logfile",
        "--pidfile",
        "--uid",
        "--gid",
        "--umask",
        "--executable",
        "--pool-start-method",
        "--max-interval",
        "-d",
        "--destination",
        "-t",
        "--timeout",
    ]
)
COMMANDS = (Command(re.compile(r"(?<![\w.\-/])(?:[\w./\-]*/)?celery(?=[\s\"',])"), "celery-{}", VERBS, HAS_VALUE),)

"""Celery's tasks, canvas and results: what each becomes here."""

from __future__ import annotations

from ..core.foreign_words import (
    ALWAYS,
    AROUND,
    ATTEMPTS,
    BACKOFF,
    CONTEXT,
    FAILED,
    KEPT,
    NAMED,
    OF_RESULT,
    OF_RETRY,
    OPTIONS,
)
from .vocabulary import Implied, Use, but, differs, drops, each, has_none, lacks, maps, options, to

ADMIN = "use the admin of this package, `manage.py asyncq` or the Inspector"
ROUTING = "exchanges and routing keys do not exist: a task has a queue_name"
SERIALIZER = OPTIONS["serializer"]
PICKLE = (
    "pickled arguments do not exist: dates, Decimal, UUIDs and model instances travel with "
    "@task(typed_arguments=True), for all else pass ids and texts"
)
PRIORITY = "−100 to 100, higher comes first; with Celery on Redis 0 came first, on RabbitMQ the highest number"
RETRIES = "max_retries counts the retries after the first attempt, max_attempts all attempts: it is one more"
LIMIT = "it is a limit for all workers together, not for each worker: multiply it by how many you have"
STOPS = "a `def` task is asked to stop, and its process replaced if it does not; with isolated=True it is killed"
NO_MESSAGES = "there is no message and no connection: a call is a row of the database"
SIGNALS = "from django_asyncq.signals"

# What `@shared_task` takes, and the attributes of a class of tasks.
OF_TASK = options(
    ("bind", to("task", "takes_context=True", "the first parameter is a TaskContext, best called context")),
    ("name", drops(NAMED)),
    ("max_retries", differs("task", "max_attempts={value:plus_one}", RETRIES)),
    ("max_retries=None", differs("task", "max_attempts=1_000_000", "None retries for ever; here a number is needed")),
    ("autoretry_for", to("task", "retry_on={value}")),
    ("dont_autoretry_for throws", to("task", "give_up_on={value}")),
    ("default_retry_delay", to("task", "backoff={value:seconds}")),
    (
        "retry_backoff",
        differs("task", "", "the default doubles too: up to 5 s · 2ⁿ, random, at most an hour; " + BACKOFF),
    ),
    ("retry_backoff_max retry_jitter", differs("", "", BACKOFF)),
    ("retry_kwargs", differs("task", "{value:retry_options}", RETRIES)),
    ("acks_late=True acks_on_failure_or_timeout reject_on_worker_lost", drops(ALWAYS)),
    ("acks_late=False", differs("", "", "a task whose worker dies runs again here: it must bear a second run")),
    ("acks_late acks_on_failure acks_on_timeout retry_on_worker_lost", drops(ALWAYS)),
    ("ignore_result=True", differs("", "", KEPT)),
    ("ignore_result store_errors_even_if_ignored result_expires", drops(KEPT)),
    ("time_limit", differs("task", "timeout={value}", STOPS)),
    ("soft_time_limit", differs("task", "soft_timeout={value}", OPTIONS["soft_time_limit"])),
    ("rate_limit", differs("task", "rate={value:rate}", LIMIT)),
    ("queue", to("task", "queue_name={value}")),
    ("exchange routing_key exchange_type", has_none(ROUTING)),
    ("priority", differs("task", "priority={value}", PRIORITY)),
    ("expires", to("task", "expires={value}")),
    ("base", has_none(AROUND)),
    ("serializer='json' compression", drops(SERIALIZER)),
    ("serializer", has_none(PICKLE)),
    ("track_started send_events trail shared lazy", drops("remove it: the row always says when the task began")),
    ("typing", drops("remove it: enqueue() always refuses arguments that the function does not take")),
    ("pydantic pydantic_strict pydantic_context pydantic_dump_kwargs", has_none("build the model in the function")),
    ("once", has_none(OPTIONS["once"])),
    ("unique_on lock_expiry raise_on_duplicate", has_none(OPTIONS["once"])),
    ("flush_every flush_interval", has_none("write @task(batch=Batch(size=100, within=timedelta(seconds=2)))")),
    ("after_return on_failure on_retry on_success before_start", has_none(FAILED)),
    ("run resultrepr_maxsize strategy Strategy Request request_stack from_config", has_none(AROUND)),
    ("ignore_result=False bind=False abstract", drops("remove it")),
)
RETRIES_BY_DEFAULT = (
    Implied(
        "autoretry_for retry_backoff",
        "max_retries retry_kwargs",
        differs(
            "task", "max_attempts=4", "3 retries are Celery's default; here a task is not retried unless it says so"
        ),
    ),
)
# What `apply_async` takes, and `set` of a signature, and "options" of a schedule.
OF_CALL = options(
    ("args", to("args", "{value:spread}")),
    ("kwargs", to("args", "{value:spread_named}")),
    ("countdown", to("using", "run_after={value:seconds}")),
    ("eta", to("using", "run_after={value}", "the datetime must be aware")),
    ("expires", to("using", "expires={value}", "it counts from the time from which the task may run")),
    (
        "expiration",
        differs("using", "expires={value}", "how long a message may wait in the broker is how long the task may"),
    ),
    ("declare content_type content_encoding timeout confirm_timeout", drops(NO_MESSAGES)),
    ("queue", to("using", "queue_name={value}")),
    ("exchange routing_key delivery_mode mandatory immediate", has_none(ROUTING)),
    ("priority", differs("using", "priority={value}", PRIORITY)),
    ("headers", to("using", "headers={value}", "texts alone, 32 of them at most")),
    ("link", has_none(OPTIONS["link"])),
    ("link_error", has_none(OPTIONS["link_error"])),
    ("task_id", has_none(OPTIONS["task_id"])),
    ("time_limit", differs("using", "timeout={value}", STOPS)),
    ("soft_time_limit", differs("using", "soft_timeout={value}", OPTIONS["soft_time_limit"])),
    ("max_retries", differs("using", "max_attempts={value:plus_one}", RETRIES)),
    ("serializer='json' compression", drops(SERIALIZER)),
    ("serializer", has_none(PICKLE)),
    ("retry retry_policy", drops("remove it: the call is a row of the database, and is pushed again by itself")),
    ("ignore_result", drops(KEPT)),
    ("producer connection publisher router reply_to add_to_parent shadow root_id parent_id", drops(NO_MESSAGES)),
    ("immutable", drops("steps have what they are given, and no more")),
    ("stamped_headers correlation_id group_id group_index chord chain time_to_run timezone", has_none(NO_MESSAGES)),
)
PLACES_OF_CALL = ("args", "kwargs", "task_id", "producer", "link", "link_error", "shadow")
CALL = maps("{it}{using}.enqueue({args})", options=OF_CALL, positions=PLACES_OF_CALL)
ONE_CALL = "write each call with task.step(…), and the options in task.using(…).step(…)"

USES_OF_TASKS: dict[str, Use] = {
    "celery.shared_task": maps("@task{task}", options=OF_TASK, implied=RETRIES_BY_DEFAULT),
    "celery.Task:": but("TaskContext", "of a bound task: the type of its first parameter, from django_asyncq"),
    "class celery.Task": lacks(
        f"a class for tasks does not exist: a task is a function with @task. Code around every task: {AROUND}"
    ),
    "celery.Task": lacks(f"a class for tasks does not exist: a task is a function with @task. {AROUND}"),
    "class celery.Task.on_failure": but("", FAILED),
    "class celery.Task.on_retry": but(
        "", "write a receiver of run_ended, from django_asyncq.signals; its exception says why"
    ),
    "class celery.Task.on_success": but(
        "", "write a receiver of run_ended, from django_asyncq.signals, without exception"
    ),
    "class celery.Task.after_return": but("", AROUND),
    "class celery.Task.before_start": but("", AROUND),
    "class celery.Task.__call__": but("", AROUND),
    "class celery.Task.run": maps("@task", "the body becomes a function; what was self.… becomes arguments or context"),
    "class celery.Task.apply_async": lacks(
        'a call cannot be changed on its way: ASYNCQ["HEADER_SOURCES"] adds headers, task_state_changing can refuse it'
    ),
    "class celery.Task.delay": lacks(
        "a call cannot be changed on its way: write a function that calls task.enqueue(…)"
    ),
    **each(
        "name max_retries autoretry_for default_retry_delay retry_backoff retry_backoff_max retry_jitter retry_kwargs "
        "acks_late ignore_result time_limit soft_time_limit rate_limit queue priority expires serializer track_started "
        "throws dont_autoretry_for reject_on_worker_lost abstract typing store_errors_even_if_ignored",
        but(
            "", "an attribute of the class is an option of each task: write it in @task(…) as the doctor says it there"
        ),
        "class celery.Task.",
    ),
    **each(
        "on_failure on_success on_retry after_return before_start __call__ throws autoretry_for expires priority",
        but("", f"it goes with the class of tasks: {AROUND}"),
        "Task.",
    ),
    "Task()": but("{it}.func({args})", "a task is not callable: .func is the plain function", takes="function"),
    "Task.delay": maps("{it}.enqueue({args})", takes="function"),
    "Task.delay_on_commit": maps("{it}.enqueue({args})", OPTIONS["on_commit"], takes="function"),
    "Task.apply_async": CALL,
    "Task.apply_async_on_commit": maps(
        "{it}{using}.enqueue({args})", OPTIONS["on_commit"], options=OF_CALL, positions=PLACES_OF_CALL
    ),
    "Task.apply": but(
        "{it}.func({args})",
        "the function is called here and now, and returns its value or raises; in tests use run_tasks()",
        options=options(
            ("args", to("args", "{value:spread}")),
            ("kwargs", to("args", "{value:spread_named}")),
            ("throw", drops("remove it: func raises")),
            ("link link_error task_id retries logfile loglevel headers", drops("remove it")),
        ),
        positions=("args", "kwargs"),
    ),
    "Task.s": maps("{it}.step({args})", takes="function"),
    "Task.s>": but(
        '{it}.using(after={{"{first}": previous}}).step({args})',
        "the value of the step before arrives by name, not as the first argument",
        takes="function",
    ),
    "Task.si": maps("{it}.step({args})", takes="function"),
    "Task.signature": but("{it}{using}.step({args})", ONE_CALL, options=OF_CALL, positions=("args", "kwargs")),
    "Task.chunks": but(
        "{it}.enqueue_many({args})", "one task for each call, not for each chunk; wait_all(results) gives the values"
    ),
    "Task.map": but("{it}.enqueue_many([(each,) for each in {args}])", "one task for each call, not one for all"),
    "Task.starmap": but("{it}.enqueue_many({args})", "one task for each call, not one for all"),
    "Task.run": maps("{it}.func({args})", takes="function"),
    "Task.AsyncResult": maps("{it}.get_result({args})"),
    "Task.name": maps("{it}.module_path", "it is the path of the function, also where Celery was given a name"),
    "Task.retry": but(
        "context.retry({retry})",
        "it needs max_attempts in @task, 4 for Celery's default of 3 retries; it leaves the function by "
        "an exception, as there",
        options=options(
            ("countdown", to("retry", "in_={value}")),
            ("eta", differs("retry", "in_={value} - timezone.now()", OF_RETRY["countdown"])),
            ("exc", drops(OF_RETRY["exc"])),
            ("max_retries", differs("", "", ATTEMPTS)),
            ("throw", has_none("context.retry always leaves the function")),
            ("args kwargs", has_none("a retry has the arguments of the task: enqueue another call instead")),
            ("queue priority", has_none("a retry stays in the queue of the task")),
        ),
        positions=("args", "kwargs", "exc"),
    ),
    "Task.update_state": but(
        "context.progress(done, total, message)",
        "a state of your own does not exist: progress is two numbers and a text",
        options=options(("state meta task_id", differs("", "", "write it as done, total and message"))),
        positions=("task_id", "state", "meta"),
    ),
    "Task.replace": lacks("enqueue the other task, and let what follows wait for it with after="),
    "Task.add_to_chord": lacks("a function may enqueue more, with after= its own calls: see Workflows"),
    "Task.max_retries": maps("context.task_result.task.max_attempts - 1"),
    "Task.backend": lacks("results are rows: write task.get_result(id)"),
    "Task.request_stack": lacks(CONTEXT),
    "Task.send_event": lacks("send a signal of your own, or a metric"),
    "Task.MaxRetriesExceededError": but("", "the last error of the function is that of the task: no other is raised"),
    "Task.request": but("context", CONTEXT),
    "Task.subtask": but("{it}{using}.step({args})", ONE_CALL, options=OF_CALL, positions=("args", "kwargs")),
    "Task.request.retries": maps("context.attempt - 1"),
    **each("id root_id correlation_id", maps("context.task_result.id"), "Task.request."),
    "Task.request.args": maps("context.task_result.args"),
    "Task.request.kwargs": maps("context.task_result.kwargs"),
    "Task.request.headers": maps("context.headers"),
    "Task.request.get": but("context", "read the attribute of the context: attempt, headers, task_result.id, …"),
    "Task.request.hostname": but(
        "context.record.worker_ids[-1]", "the id of the worker process, which begins with the name of its host"
    ),
    "Task.request.timelimit": maps("context.deadline", "an aware datetime: when the run must have finished"),
    **each(
        "is_eager called_directly",
        lacks("a task under test runs as any other: decide by an argument or a setting"),
        "Task.request.",
    ),
    **each(
        "delivery_info eta expires chain chord group group_index callbacks errbacks parent_id children reply_to origin "
        "properties shadow stamps stamped_headers ignore_result logfile loglevel taskset utc",
        lacks("the row of the run has what is known of it: context.record"),
        "Task.request.",
    ),
}

USES_OF_CANVAS: dict[str, Use] = {
    "celery.chain": but(
        "chain({steps})",
        "the value of a step arrives by name, as after={…: previous} says; it is enqueued by .enqueue()",
    ),
    "Signature|": but("chain({steps})", "the value of a step arrives by name, as after={…: previous} says"),
    "celery.group": maps("group({list})", "it is enqueued by .enqueue(), which returns a list of results"),
    "celery.chord": but(
        "group({list})",
        "write group([…], then=…).enqueue(); the values arrive by name, as a list: after={…: previous}",
        options=options(("header body", differs("", "", "group(header, then=body)"))),
    ),
    "Chord()": but(
        "group({inner}, then={body}).enqueue()",
        "the values of the group arrive by name, as a list: after={…: previous}",
        options=options(("body", to("body", "{value}"))),
        positions=("body",),
    ),
    **each(
        "Chord.apply_async Chord.delay",
        but(
            "{it}.enqueue()",
            "group([…], then=…).enqueue(); options go to using() of the steps",
            options=OF_CALL,
            positions=PLACES_OF_CALL,
        ),
    ),
    "celery.chunks": but("task.enqueue_many([…])", "one task for each call, not for each chunk"),
    **each("celery.xmap celery.xstarmap", but("task.enqueue_many([…])", "one task for each call, not one for all")),
    "celery.signature": but(
        "{task_name}{using}.step({args})",
        f"a task is imported, not named by a text; {ONE_CALL}",
        options={**OF_CALL, "task": to("task_name", "{value:function}")},
        positions=("task", "args", "kwargs"),
    ),
    "celery.maybe_signature": lacks("pass steps, as task.step(…) returns them"),
    "celery.Signature": but("Step", f"steps are not sent: pass ids, or enqueue what follows; {ONE_CALL}"),
    "Signature()": but("{it}.enqueue()", "in a chain or group of its own: .enqueue() of the whole"),
    **each(
        "apply_async delay",
        but(
            "{it}.enqueue()",
            "a step alone is written task.using(…).enqueue(…), with the options and arguments",
            options=OF_CALL,
            positions=PLACES_OF_CALL,
        ),
        "Signature.",
    ),
    "Signature.apply": lacks("in tests use run_tasks()"),
    "Signature.set": but("{it}", "options go to using() before the step: task.using(…).step(…)", options=OF_CALL),
    **each("link then", lacks(OPTIONS["link"]), "Signature."),
    **each("link_error on_error", lacks(OPTIONS["link_error"]), "Signature."),
    **each(
        "clone freeze stamp replace set_immutable reprcall",
        lacks("a step does not change; write another one"),
        "Signature.",
    ),
    **each(
        "id args kwargs options name task tasks type immutable",
        lacks("read task, args and kwargs of the step before it is enqueued"),
        "Signature.",
    ),
}

USES_OF_RESULTS: dict[str, Use] = {
    "celery.result.AsyncResult:": maps("AsyncqResult", "from django_asyncq"),
    "celery.result.AsyncResult": but(
        "task.get_result({args})",
        "a result is of a task; of an id alone: TaskRecord.objects.get(id=…)",
        options=options(("id", to("args", "{value}")), ("app backend task_name", drops("remove it"))),
        positions=("id",),
    ),
    "celery.result.GroupResult": but("wait_all(results)", "keep the ids of the results; a group has no row of its own"),
    "celery.result.ResultSet": but("wait_all(results)", "a list of results serves"),
    "celery.result.EagerResult": lacks("in tests use run_tasks(), which returns results"),
    "celery.result.allow_join_result": lacks("a task must not wait for another: see Workflows"),
    "celery.result.denied_join_result": lacks("a task must not wait for another: see Workflows"),
    "celery.result.result_from_tuple": lacks("keep the ids, and write task.get_result(id)"),
    **each(
        "get wait",
        but(
            "{it}.wait({wait})",
            OF_RESULT["get"],
            options=options(
                ("timeout", to("wait", "timeout={value}")),
                ("propagate=False", differs("", "", "wait() raises TaskFailed: read result.status instead")),
                (
                    "propagate interval no_ack follow_parents callback on_message on_interval EXCEPTION_STATES",
                    drops("remove it"),
                ),
                ("PROPAGATE_STATES disable_sync_subtasks", differs("", "", "a task must not wait for another")),
            ),
            positions=("timeout",),
        ),
        "AsyncResult.",
    ),
    "AsyncResult.ready": but("{it}.is_finished", OF_RESULT["ready"]),
    "AsyncResult.successful": but('{it}.status == "SUCCESSFUL"', OF_RESULT["state"]),
    "AsyncResult.failed": but('{it}.status == "FAILED"', OF_RESULT["state"]),
    **each(
        "state status",
        but("{it}.status", OF_RESULT["state"] + "; its values are those of TaskResultStatus"),
        "AsyncResult.",
    ),
    "AsyncResult.result": but("{it}.return_value", OF_RESULT["result"]),
    "AsyncResult.info": but("{it}.progress", OF_RESULT["info"]),
    "AsyncResult.traceback": maps("{it}.errors[-1].traceback"),
    "AsyncResult.revoke": but(
        "{it}.cancel()",
        "a task that runs is asked to stop",
        options=options(
            ("terminate signal", differs("", "", STOPS)),
            ("wait timeout connection", drops("remove it")),
        ),
    ),
    "AsyncResult.forget": lacks(KEPT),
    **each("id task_id", maps("{it}.id"), "AsyncResult."),
    **each(
        "children graph collect get_leaf iterdeps as_tuple as_list build_graph",
        lacks("tasks that belong together have one workflow_id, and are shown by `manage.py asyncq workflows show ID`"),
        "AsyncResult.",
    ),
    **each(
        "results completed_count waiting join join_native iter_native",
        but("wait_all(results)", OF_RESULT["join"]),
        "AsyncResult.",
    ),
    **each(
        "save restore delete add remove clear discard",
        lacks("keep the ids of the results, and get each by its id"),
        "AsyncResult.",
    ),
    **each("args kwargs", maps("{it}.args and {it}.kwargs"), "AsyncResult."),
    "AsyncResult.date_done": maps("{it}.finished_at"),
    "AsyncResult.name": maps("{it}.task.name"),
    **each("maybe_throw maybe_reraise", but("{it}.wait()", "it raises TaskFailed"), "AsyncResult."),
    **each(
        "queue retries worker backend then throw ignored exists",
        lacks("read the row: TaskRecord.objects.get(id=result.id)"),
        "AsyncResult.",
    ),
    **each(
        "PENDING RECEIVED STARTED SUCCESS FAILURE REVOKED RETRY REJECTED IGNORED",
        but("TaskResultStatus", "READY, RUNNING, SUCCESSFUL and FAILED, of Django's tasks framework"),
        "celery.states.",
    ),
    **each(
        "READY_STATES UNREADY_STATES EXCEPTION_STATES PROPAGATE_STATES ALL_STATES state precedence",
        but("TaskResultStatus", "write result.is_finished, or compare result.status"),
        "celery.states.",
    ),
}

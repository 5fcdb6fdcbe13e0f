"""Celery: the tables of it together, where its names may be imported from, and what values are."""

from __future__ import annotations

import re

from .celery_app import USES_AROUND, USES_OF_APP, USES_OF_ERRORS, USES_OF_SIGNALS
from .celery_commands import COMMANDS, USES_OF_COMMANDS
from .celery_settings import USES_OF_SETTINGS, setting_name
from .celery_tasks import USES_OF_CANVAS, USES_OF_RESULTS, USES_OF_TASKS
from .vocabulary import Given, Vocabulary

USES = {
    **USES_OF_TASKS,
    **USES_OF_CANVAS,
    **USES_OF_RESULTS,
    **USES_OF_APP,
    **USES_OF_ERRORS,
    **USES_OF_SIGNALS,
    **USES_AROUND,
    **USES_OF_SETTINGS,
    **USES_OF_COMMANDS,
}
SAME = {
    # where a name may be imported from
    **dict.fromkeys(
        ("celery.app.shared_task", "celery.task.task", "celery.decorators.task", "App.task", "celery.app.task"),
        "celery.shared_task",
    ),
    **dict.fromkeys(("celery.app.task.Task", "celery.task.Task", "celery.task.base.Task", "App.Task"), "celery.Task"),
    "class App.Task": "class celery.Task",
    **dict.fromkeys(("celery.app.Celery", "celery.app.base.Celery", "celery.Celery.Celery"), "celery.Celery"),
    **{
        f"celery.canvas.{name}": f"celery.{name}"
        for name in [
            "chain",
            "group",
            "chord",
            "chunks",
            "xmap",
            "xstarmap",
            "signature",
            "maybe_signature",
            "Signature",
        ]
    },
    **{f"celery.{name}": "celery.signature" for name in ("subtask", "canvas.subtask", "task.subtask")},
    **{f"celery.app.control.{name}": f"App.control.{name}" for name in ("Inspect", "Control")},
    "celery._state.current_app": "App",
    "celery._state.current_task": "celery.current_task",
    "celery.task.schedules.crontab": "celery.schedules.crontab",
    "celery.app.control.inspect": "App.control.inspect",
    "celery.task.control.inspect": "App.control.inspect",
    "celery.task.control.revoke": "App.control.revoke",
    "celery.utils.uuid": "celery.uuid",
    "celery.utils.gen_unique_id": "celery.uuid",
    "celery.TimeoutError": "celery.exceptions.TimeoutError",
    "celery.contrib.abortable.AbortableTask()": "Task",
    # what values are
    **dict.fromkeys(
        (
            "celery.Celery()",
            "celery.current_app",
            "celery.app.app_or_default()",
            "celery.current_app()",
            "celery.app.default_app",
        ),
        "App",
    ),
    **dict.fromkeys(
        (
            "celery.shared_task@",
            "celery.Task()",
            "celery.shared_task()()",
            "App.register_task()",
            "App.tasks[]",
            "celery.contrib.abortable.AbortableTask()",
        ),
        "Task",
    ),
    "celery.shared_task()": "Declared",
    "Declared()": "Task",
    **dict.fromkeys(
        (
            "Task.s()",
            "Task.si()",
            "Task.signature()",
            "Task.subtask()",
            "celery.signature()",
            "celery.chain()",
            "celery.group()",
            "Signature|",
            "celery.Signature()",
            "App.signature()",
            "Task.chunks()",
            "Task.map()",
            "Task.starmap()",
            "celery.maybe_signature()",
            "Signature.set()",
            "Signature.clone()",
            "Signature.on_error()",
            "Signature.then()",
            "Signature.stamp()",
            "celery.chunks()",
            "celery.xmap()",
            "celery.xstarmap()",
        ),
        "Signature",
    ),
    "celery.chord()": "Chord",
    **dict.fromkeys(
        (
            "Task.delay()",
            "Task.apply_async()",
            "Task.apply()",
            "celery.result.AsyncResult()",
            "Task.AsyncResult()",
            "Signature()",
            "Signature.apply_async()",
            "Signature.delay()",
            "Signature.apply()",
            "App.send_task()",
            "celery.result.GroupResult()",
            "Chord()",
            "Chord.apply_async()",
            "Chord.delay()",
            "App.GroupResult()",
            "celery.result.GroupResult.restore()",
            "celery.result.ResultSet()",
            "App.ResultSet()",
            "Task.delay_on_commit()",
            "Task.apply_async_on_commit()",
            "AsyncResult.parent",
            "celery.contrib.abortable.AbortableAsyncResult()",
            "celery.result.EagerResult()",
            "AsyncResult.children[]",
        ),
        "AsyncResult",
    ),
    "App.AsyncResult": "celery.result.AsyncResult",
    "celery.AsyncResult": "celery.result.AsyncResult",
    "celery.task.AsyncResult": "celery.result.AsyncResult",
    "App.control.inspect()": "Inspect",
    "App.control.Inspect()": "Inspect",
    **dict.fromkeys(
        (
            "App.connection()",
            "App.connection_or_acquire()",
            "App.connection_for_read()",
            "App.connection_for_write()",
            "App.broker_connection()",
        ),
        "Connection",
    ),
    **dict.fromkeys(("Task.app", "Signature.app", "AsyncResult.app"), "App"),
    "App.conf": "settings",
    "celery.conf": "settings",
    "Task.app.conf": "settings",
}

WORDS = re.compile(
    r"celery|kombu|billiard|amqp|vine|djcelery|flower|redbeat|CELERY|BROKER_|\.(?:delay|apply_async|si|AsyncResult)\b|"
    r"(?:delay|apply_async)_on_commit"
)
VOCABULARY = Vocabulary(
    name="celery",
    packages=re.compile(
        r"celery|(?:django_|dj|tenant_schemas_|pytest_)?celery(?:_\w+)?|kombu|billiard|amqp|vine|flower|redbeat"
    ),
    uses=USES,
    same=SAME,
    words=WORDS,
    setting=setting_name,
    inherits={"Declared": "Task", "Chord": "Signature", "celery.current_task": "Task", "App.current_task": "Task"},
    given={
        "celery.shared_task": (Given(0, "Task", if_option="bind"),),
        **{
            f"App.{name}.connect": (Given(0, "App"),)
            for name in ("on_after_configure", "on_after_finalize", "on_configure")
        },
    },
    guesses={
        "delay": "Task.delay",
        "apply_async": "Task.apply_async",
        "delay_on_commit": "Task.delay_on_commit",
        "apply_async_on_commit": "Task.apply_async_on_commit",
        "AsyncResult": "Task.AsyncResult",
        "si": "Task.si",
    },
    signs={"autodiscover_tasks": "App", "config_from_object": "App", "add_periodic_task": "App"},
    commands=COMMANDS,
    distributions=re.compile(r"celery|(?:.*-)?celery(?:-.*)?|kombu|billiard|amqp|vine|flower"),
)

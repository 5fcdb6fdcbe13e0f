"""A name that nothing has is refused by the commands, with those that are close; the Inspector takes any."""

from __future__ import annotations

import io
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from django_asyncq import lifecycle
from django_asyncq.broker import Broker
from django_asyncq.broker.keys import queues_key
from django_asyncq.core.names import did_you_mean, did_you_mean_path
from django_asyncq.models import Pause, TaskRecord, TaskState
from django_asyncq.observe.inspector import Inspector
from django_asyncq.storage import database_clock
from django_asyncq.testing import EmbeddedRedis

from .. import tasks

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_keys")]

BACKEND = "django_asyncq.backend.AsyncqBackend"
TOKEN = "0123456789abcdef"


def run(*arguments: str) -> str:
    """Run the command and return what it prints."""
    out = io.StringIO()
    call_command("asyncq", *arguments, stdout=out, stderr=io.StringIO())
    return out.getvalue()


@pytest.fixture
def closed(settings: Any) -> None:
    """An alias whose QUEUES name two queues."""
    settings.TASKS = {"default": {"BACKEND": BACKEND, "QUEUES": ["default", "mails"]}}


@pytest.mark.usefixtures("closed")
@pytest.mark.parametrize("verb", ["show", "history", "scale", "pause", "resume", "purge"])
def test_a_queue_that_the_alias_does_not_have_is_refused(own_redis: EmbeddedRedis, verb: str) -> None:
    """Nothing is paused; one that the settings name needs no task, and one with tasks need not be named."""
    with pytest.raises(CommandError) as caught:
        run("queues", verb, "mail")
    assert str(caught.value) == (
        "no queue of TASKS['default'] is called 'mail'. Did you mean 'mails'? Its QUEUES are 'default', 'mails'"
    )
    assert not Pause.objects.exists() and not Inspector().queues.get("mail").is_paused
    run("queues", verb, "mails", *["--yes"] * (verb == "purge"))
    lifecycle.dispatch([TaskRecord.objects.create(name="tests.tasks.add", queue_name="mail")])
    run("queues", verb, "mail", *["--yes"] * (verb == "purge"))


def test_queues_of_an_alias_that_is_not_ours_are_not_looked_at(own_redis: EmbeddedRedis, settings: Any) -> None:
    """Its backend may be one that cannot be imported; each of the others has QUEUES of its own."""
    settings.TASKS = {
        "default": {"BACKEND": "not.there.Backend", "QUEUES": ["x"]},
        "second": {"BACKEND": BACKEND, "QUEUES": ["mails"]},
    }
    assert "mail" in run("queues", "show", "mail")
    assert run("tasks", "list", "--queue", "mails") == "no tasks\n"
    with pytest.raises(CommandError, match=r"no queue of TASKS\['second'\] is called 'mail'"):
        run("tasks", "list", "--queue", "mail")


@pytest.mark.usefixtures("closed")
def test_a_queue_of_another_program_is_known(own_redis: EmbeddedRedis) -> None:
    """It stands in asynq's own set alone."""
    Broker().client.sadd(queues_key(), b"of-go")
    assert run("queues", "pause", "of-go") == "queue of-go: paused.\n"


def test_a_pause_of_an_unused_queue_says_so(own_redis: EmbeddedRedis) -> None:
    """Where QUEUES allows every name, it may be used later; the JSON stays as it is."""
    yet = "No task has been in this queue yet."
    assert run("queues", "pause", "nope") == f"queue nope: paused. {yet}\n"
    assert run("queues", "pause", "nope") == "queue nope: already paused.\n"
    assert run("queues", "resume", "nope") == "queue nope: running.\n"
    tasks.add.using(queue_name="used").enqueue(1)
    assert run("queues", "pause", "used") == "queue used: paused.\n"
    assert yet not in run("queues", "pause", "new", "--json")


@pytest.mark.usefixtures("closed")
def test_a_list_of_an_unknown_queue_is_refused(own_redis: EmbeddedRedis) -> None:
    """Unless it has tasks, finished ones too. A queue that the settings name has none."""
    for verb in (["list"], ["retry", "--yes"], ["delete", "--yes"]):
        with pytest.raises(CommandError, match="Did you mean 'mails'"):
            run("tasks", *verb, "--queue", "mail")
    assert run("tasks", "list", "--queue", "mails") == "no tasks\n"
    now = database_clock.now()
    TaskRecord.objects.create(name="a.b", queue_name="mail", state=TaskState.SUCCEEDED, finished_at=now)
    assert "a.b" in run("tasks", "list", "--queue", "mail")


@pytest.mark.urls("tests.urls")
@pytest.mark.usefixtures("closed")
def test_the_scale_of_an_unknown_queue_is_refused(own_redis: EmbeddedRedis, settings: Any) -> None:
    """An autoscaler with a typing error would keep no worker, and see no error."""
    settings.ASYNCQ = {**settings.ASYNCQ, "MONITOR_TOKEN": TOKEN}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = Client().get("/scale?queue=mail", headers=headers)
    assert answer.status_code == 400 and "Did you mean 'mails'" in answer.json()["error"]
    assert Client().get("/scale?queue=mails", headers=headers).status_code == 200


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_a_task_that_nothing_has_is_refused(own_redis: EmbeddedRedis, verb: str) -> None:
    """One with rows was declared before, and one that is paused can be resumed."""
    for name, close in (("tests.tasks.ad", "'tests.tasks.add'"), ("add", "'tests.tasks.add'")):
        with pytest.raises(CommandError, match=f"^no task is called '{name}', and .+ Did you mean .*{close}"):
            run("tasks", verb, name)
    assert not Pause.objects.exists()
    TaskRecord.objects.create(name="old.tasks.gone")
    run("tasks", verb, "old.tasks.gone")
    Inspector().tasks.pause("never.declared")
    run("tasks", verb, "never.declared")


def test_close_names_are_found() -> None:
    """In any case; of a name without dots, by the last part of a path."""
    assert did_you_mean("Queue", ["QUEUES", "OPTIONS"]) == "Did you mean 'QUEUES'? "
    assert did_you_mean("nope", ["mails"]) == did_you_mean("nope", []) == ""
    paths = ["shop.tasks.add", "blog.tasks.add", "shop.tasks.charge"]
    assert did_you_mean_path("add", paths) == "Did you mean 'blog.tasks.add' or 'shop.tasks.add'? "
    assert did_you_mean_path("chargge", paths) == "Did you mean 'shop.tasks.charge'? "
    assert did_you_mean_path("shop.tasks.chrge", paths).startswith("Did you mean 'shop.tasks.charge'")
    assert did_you_mean_path("nothing", paths) == ""

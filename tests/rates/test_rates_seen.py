"""What people and monitors see of rates: the admin, the command line, metrics, the scale."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.test import Client
from prometheus_client import CollectorRegistry, generate_latest

from django_asyncq import rates
from django_asyncq.broker.keys import rate_key, rate_looks_key, waiting_rates_key
from django_asyncq.broker.reading import read
from django_asyncq.contrib.prometheus import AsyncqCollector
from django_asyncq.fleet.rates import RateLook
from django_asyncq.models import Rate, TaskRecord
from django_asyncq.observe.inspector import Inspector
from django_asyncq.observe.of_rates import names_that_wait
from django_asyncq.observe.scale import read_scale
from django_asyncq.testing import EmbeddedRedis
from django_asyncq.worker.rates import declared_rate, waiter_of

from ..rate_tasks import call_api, hourly
from .test_rates import HOUR_US, HOURLY, NAME, claim, keeper, state

pytestmark = pytest.mark.django_db(transaction=True)

LIST = "/admin/django_asyncq/rate/"


@pytest.fixture
def waiting() -> list[TaskRecord]:
    """Two tasks have started, three wait; in the order in which they were enqueued."""
    ids = [hourly.enqueue().id for _ in range(5)]
    of = keeper()
    for job in claim(of):
        assert of.may_start(job)
    return [TaskRecord.objects.get(pk=id) for id in ids]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has the code and takes the queue."""
    from django_asyncq.observe.fleet import Fleet

    class Worker:
        def knows(self, *key: Any) -> bool:
            return True

    monkeypatch.setattr(Fleet, "serving", lambda self, alias, queue: [Worker()])


def asyncq(*words: str) -> str:
    """What a command prints."""
    out = StringIO()
    call_command("asyncq", *words, stdout=out)
    return out.getvalue()


def operator() -> Client:
    """A superuser."""
    client = Client()
    client.force_login(User.objects.create_superuser("boss"))
    return client


def test_the_command_line_says_for_what_a_task_waits(waiting: list[TaskRecord], served: None) -> None:
    """With about when, as text and as JSON; one that has started waits for nothing of the kind."""
    shown = json.loads(asyncq("tasks", "show", str(waiting[2].pk), "--json"))
    assert shown["limited_by"] == f"rate:{NAME}"
    assert shown["why_not_running"].startswith(f"it waits for the rate {NAME}: looked at in about 3,")
    assert json.loads(asyncq("tasks", "show", str(waiting[0].pk), "--json"))["limited_by"] == "slots"


def test_the_command_line_lists_and_shows_rates(waiting: list[TaskRecord]) -> None:
    """Those with a row, of this code, and for which tasks wait."""
    call_api.enqueue("a")
    Rate.objects.create(name="mine", starts=3, seconds=1, burst=4)
    found = {each["rate"]: each for each in json.loads(asyncq("rates", "list", "--json"))["rates"]}
    assert {"mine", NAME, "fast"} <= set(found)
    assert declared_rate(NAME) == HOURLY
    assert (found[NAME]["waiting"], found[NAME]["refused"], found[NAME]["interval_seconds"]) == (3, 3, 3600)
    assert (found["mine"]["has_row"], found["mine"]["burst"], found["fast"]["has_row"]) == (True, 4, False)
    assert NAME in asyncq("rates", "list")
    shown = json.loads(asyncq("rates", "show", NAME, "--json"))
    assert shown["next_start_at"] is not None
    with pytest.raises(CommandError, match=r"no rate is called 'hourl'\. .*hourly"):
        asyncq("rates", "show", "hourl")


def test_the_admin_says_for_what_a_task_waits(waiting: list[TaskRecord], served: None) -> None:
    """In the list and on its page."""
    client = operator()
    page = client.get(f"/admin/django_asyncq/taskrecord/{waiting[3].pk}/change/").content.decode()
    assert f"waits for the rate <bdi>{NAME}</bdi>, looked at" in page
    listed = client.get("/admin/django_asyncq/taskrecord/").content.decode()
    assert listed.count(f"waits for the rate <bdi>{NAME}</bdi>") == 3


def test_rates_are_added_changed_and_deleted_in_the_admin(waiting: list[TaskRecord]) -> None:
    """The list says how many wait; the name stays; each change has what waits placed anew."""
    client = operator()
    values = {"name": NAME, "starts": "20", "seconds": "60", "burst": "5"}
    assert client.post(LIST + "add/", values).status_code == 302
    row = Rate.objects.get()
    assert rates.changed_names() == {NAME}
    text = client.get(LIST).content.decode()
    assert "20 starts in 60 seconds" in text and 'class="field-waiting">3<' in text
    page = f"{LIST}{row.pk}/change/"
    assert client.post(page, {**values, "name": "other", "starts": "1"}).status_code == 302
    assert Rate.objects.values_list("name", "starts").get() == (NAME, 1)
    assert client.post(f"{LIST}{row.pk}/delete/", {"post": "yes"}).status_code == 302
    assert not Rate.objects.exists()


def test_the_list_shows_declared_rates_for_which_tasks_wait(waiting: list[TaskRecord]) -> None:
    """With a link that adds a row of this name, for those who may; none where a row exists or nothing waits."""
    client = operator()
    assert f'<a href="{LIST}add/?name={NAME}"><bdi>{NAME}</bdi></a>: 3 waiting' in client.get(LIST).content.decode()
    ann = User.objects.create_user("ann", is_staff=True)
    ann.user_permissions.add(Permission.objects.get(codename="view_rate"))
    looking = Client()
    looking.force_login(ann)
    text = looking.get(LIST).content.decode()
    assert f"<bdi>{NAME}</bdi>: 3 waiting" in text and "add/?name=" not in text
    Rate.objects.create(name=NAME, starts=1)
    assert f"<bdi>{NAME}</bdi>: " not in client.get(LIST).content.decode()


@pytest.mark.parametrize(
    "values",
    [{"name": "a {b}"}, {"starts": "0"}, {"seconds": "0"}, {"burst": "0"}, {"seconds": "86400", "burst": "4000"}],
)
def test_the_form_refuses_what_cannot_be_a_rate(values: dict[str, Any]) -> None:
    """The error is at the field."""
    given = {"name": "x", "starts": 1, "seconds": 1, "burst": 1, **values}
    response = operator().post(LIST + "add/", given)
    assert response.status_code == 200 and "errorlist" in response.content.decode()
    with pytest.raises(ValidationError):
        Rate(**given).full_clean()


@pytest.mark.parametrize(("right", "status"), [("view_rate", 403), ("add_rate", 302)])
def test_a_rate_needs_its_permission(right: str, status: int) -> None:
    """Those of Django, as for gates."""
    user = User.objects.create_user("ann", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename=right, content_type__app_label="django_asyncq"))
    client = Client()
    client.force_login(user)
    values = {"name": "x", "starts": "1", "seconds": "1", "burst": "1"}
    assert client.post(LIST + "add/", values).status_code == status
    assert Rate.objects.exists() is (status == 302)


def test_rates_without_redis_say_why(own_redis: EmbeddedRedis) -> None:
    """In the list, and on the page of one."""
    row = Rate.objects.create(name="a", starts=1)
    own_redis.kill()
    client = operator()
    for page in (LIST, f"{LIST}{row.pk}/change/"):
        assert "unknown: " in client.get(page).content.decode()


def test_metrics_say_what_waits_and_how_often_it_had_to(waiting: list[TaskRecord]) -> None:
    """For rates with a row, and those for which tasks wait."""
    Rate.objects.create(name="idle", starts=1)
    registry = CollectorRegistry()
    registry.register(AsyncqCollector())
    text = generate_latest(registry).decode()
    assert f'asyncq_rate_waiting{{rate="{NAME}"}} 3.0' in text
    assert f'asyncq_rate_refused_total{{rate="{NAME}"}} 3.0' in text
    assert 'asyncq_rate_waiting{rate="idle"} 0.0' in text


def test_the_scale_says_that_more_workers_would_not_help(waiting: list[TaskRecord]) -> None:
    """Nothing else waits in the queue."""
    scale = read_scale("default")
    assert (scale.limited_by, scale.waiting) == (f"rate:{NAME}", 5)
    assert scale.wanted_slots <= 1
    assert Inspector().rates.limited(1)[0].rate == NAME


def test_the_leader_places_anew_what_those_before_it_have_left(waiting: list[TaskRecord]) -> None:
    """Those that were next were cancelled, so starts are free long before the look of the last one."""
    for record in waiting[2:4]:
        TaskRecord.objects.filter(pk=record.pk).cancel()
    last = waiter_of(waiting[4])
    look = RateLook()
    look.tick()
    before = read("producer", rates.reading_look_at(NAME, last))
    # Nobody has started for some hours, so two could; and the last one waits for another three.
    broker = keeper().broker
    broker.client.hset(rate_key(NAME), "until", str(state().until_us - 4 * HOUR_US))
    client = broker.client
    for member in client.zrange(rate_looks_key(NAME), 0, 1):
        client.zrem(rate_looks_key(NAME), member)
    look.tick()
    after = read("producer", rates.reading_look_at(NAME, last))
    assert before is not None and after is not None
    assert after < before - 2 * 3600
    broker.forward("default", "scheduled")
    (job,) = claim(keeper())
    assert job.run.record == waiting[4]


def test_the_leader_forgets_rates_for_which_nobody_waits(waiting: list[TaskRecord]) -> None:
    """Their names are added again with the next task that waits."""
    assert rates.waiting_names() == [NAME]
    keeper().broker.client.delete(rate_looks_key(NAME))
    RateLook().tick()
    assert rates.waiting_names() == []


def test_what_waits_for_a_rate_is_no_alert(waiting: list[TaskRecord]) -> None:
    """It may wait, as what is paused may; another task of the same queue may not."""
    assert hourly.module_path in names_that_wait()
    assert call_api.module_path in names_that_wait()
    assert "tests.tasks.add" not in names_that_wait()
    keeper().broker.client.delete(waiting_rates_key())
    assert names_that_wait() == []

"""What the pages ask of Redis: how often, and for how long while it gives no answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.test import Client
from redis.connection import AbstractConnection

from django_asyncq.admin import fleet as fleet_module
from django_asyncq.broker import Broker, redis_clock, servers
from django_asyncq.control import start_bulk
from django_asyncq.models import Gate, TaskState

from .. import acl, tasks
from ..admin_cases import LIST, client_with, make
from ..broker.test_servers import SHOWN
from ..proxy import Proxy
from ..workflow_cases import make_large

pytestmark = pytest.mark.django_db(transaction=True)

APP = "/admin/django_asyncq/"
WORKERS, QUEUES, GATES, MOST_TRIPS = 8, 10, 3, 3


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was sent to Redis; each element is one round trip."""
    found: list[Any] = []
    send = AbstractConnection.send_packed_command

    def note(connection: Any, command: Any, check_health: bool = True) -> None:
        found.append(command)
        send(connection, command, check_health=check_health)

    monkeypatch.setattr(AbstractConnection, "send_packed_command", note)
    return found


@pytest.fixture
def pages() -> list[str]:
    """A project with some of everything, and the addresses of its pages."""
    for number in range(QUEUES):
        Broker().register_queue(f"q{number}")
    servers.show("default", [shown(number) for number in range(WORKERS)], 60)
    gates = [Gate.objects.create(name=f"gate-{number}", limit=2) for number in range(GATES)]
    tasks.gated.using(gate=gates[0].name).enqueue(gates[0].name)
    failed, running = make(), make(TaskState.RUNNING, queue_name="q1", worker_ids=["host:1:7:x"])
    action = start_bulk("retry", {"state": "failed"}, by="ann")
    workflow_id = make_large(70)
    return [
        APP,
        f"{APP}?span=7d",
        LIST,
        f"{LIST}?state=stuck",
        *(f"{LIST}{row.pk}/change/" for row in (failed, running)),
        f"{LIST}workflow/?id={workflow_id}",
        *(f"{LIST}{name}/" for name in ("workflows", "queues", "workers", "failures", "enqueue")),
        f"{LIST}rejected/?queue=q1",
        f"{LIST}queue/?queue=q1",
        f"{LIST}task/?name=tests.tasks.add",
        f"{LIST}worker/?id=h:1:1:x",
        f"{APP}gate/",
        f"{APP}gate/{gates[0].pk}/change/",
        f"{APP}gate/add/",
        f"{APP}schedule/",
        f"{APP}bulkaction/",
        f"{APP}bulkaction/{action.pk}/change/",
        f"{APP}pause/",
    ]


def shown(number: int) -> Any:
    """A worker process of its own."""
    id = servers.server_id_of(f"h:1:{number}:x")
    info = replace(SHOWN.info, pid=number, server_id=id)
    return SHOWN._replace(info=info, details=replace(SHOWN.details, worker_id=f"h:1:{number}:x"))


@pytest.fixture
def boss() -> Client:
    """Somebody who sees everything."""
    return client_with(is_superuser=True)


def test_every_page_needs_three_round_trips_at_most(pages: list[str], boss: Client, sent: list[Any]) -> None:
    """With 8 workers, 10 queues and some gates, also when the clock of Redis must be read again."""
    for page in pages:
        boss.get(page)
    for page in pages:
        redis_clock._clocks.clear()
        sent.clear()
        text = boss.get(page).content.decode()
        assert 1 <= len(sent) <= MOST_TRIPS, page
        assert "unreachable" not in text, page
    assert f"{WORKERS} workers are alive." in boss.get(APP).content.decode()
    assert boss.get(f"{LIST}queues/").content.decode().count('class="asyncq-code" dir="ltr">q') == QUEUES


@pytest.fixture
def relayed(redis_proxy: Proxy, settings: Any) -> Iterator[Proxy]:
    """The Redis of this process behind a relay that can hold it."""
    number = settings.CACHES["default"]["LOCATION"].rpartition("/")[2]
    location = acl.package_url(redis_proxy.url(int(number)))
    settings.CACHES = {"default": {**django_settings.CACHES["default"], "LOCATION": location}}
    yield redis_proxy
    redis_proxy.resume()


def test_a_silent_redis_is_waited_for_once(
    pages: list[str], boss: Client, relayed: Proxy, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One attempt of half a second; the pages of the next seconds say so at once, and show what the database knows."""
    monkeypatch.setattr(fleet_module, "REMEMBERED_SECONDS", 600.0)
    boss.get(APP)
    relayed.hold()
    sent.clear()
    assert "Timeout" in boss.get(APP).content.decode() and len(sent) == 1
    for page in pages:
        text = boss.get(page).content.decode()
        assert "Redis is unreachable" in text and "s ago)" in text, page
    assert len(sent) == 1
    relayed.resume()
    monkeypatch.setattr(fleet_module, "REMEMBERED_SECONDS", 0.0)
    assert "Redis is unreachable" not in boss.get(APP).content.decode()

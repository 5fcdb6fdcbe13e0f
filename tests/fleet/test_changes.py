"""The leader learns with one statement what has changed, and each loop that is concerned is woken."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from django_asyncq.broker import Broker
from django_asyncq.control import start_bulk
from django_asyncq.fleet.changes import ChangeLook, Changes
from django_asyncq.models import Pause, PauseKind, Schedule
from django_asyncq.storage import identity

pytestmark = pytest.mark.django_db(transaction=True)

NOTHING = Changes(identity=False, schedules=False, pauses=False, actions=False)


@pytest.fixture
def look() -> ChangeLook:
    """A look that has seen a schedule and a pause, and that the database has an identity."""
    identity.ensure()
    now = timezone.now()
    Schedule.objects.create(name="hourly", task="tests.tasks.add", interval_seconds=3600, next_occurrence_at=now)
    Pause.objects.create(kind=PauseKind.QUEUE, backend="default", name="mails", paused_at=now)
    found = ChangeLook()
    assert found.tick() == Changes(), "at first everything may have changed"
    assert found.tick() == NOTHING
    return found


def pause_again() -> None:
    """Another pause of the same queue, by a statement that tells nobody."""
    Pause.objects.update(paused_at=timezone.now() + timedelta(seconds=1))


CHANGES: dict[str, tuple[Callable[[], Any], Changes]] = {
    "identity": (identity.renew, NOTHING._replace(identity=True, schedules=True)),
    "earlier": (
        lambda: Schedule.objects.update(next_occurrence_at=timezone.now() - timedelta(days=1)),
        NOTHING._replace(schedules=True),
    ),
    "disabled": (lambda: Schedule.objects.update(enabled=False), NOTHING._replace(schedules=True)),
    "paused again": (pause_again, NOTHING._replace(pauses=True)),
    "resumed": (lambda: Pause.objects.all().delete(), NOTHING._replace(pauses=True)),
    "task paused": (
        lambda: Pause.objects.create(kind=PauseKind.TASK, name="tests.tasks.add", paused_at=timezone.now()),
        NOTHING._replace(pauses=True),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_once(name: str, look: ChangeLook, django_assert_num_queries: Any) -> None:
    """Whoever makes it, and in whatever way."""
    act, expected = CHANGES[name]
    act()
    with django_assert_num_queries(1):
        assert look.tick() == expected
    assert look.tick() == NOTHING


def test_an_action_is_seen_as_long_as_it_runs(look: ChangeLook, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the leader is told of a new one, once it is committed."""
    told: list[str] = []
    monkeypatch.setattr(Broker, "notify_due", lambda self: told.append(self.alias))
    start_bulk("retry", {"name": "tests.tasks.add"})
    assert told == ["default"]
    assert look.tick() == look.tick() == NOTHING._replace(actions=True)


def test_a_database_without_an_identity_may_have_changed(look: ChangeLook) -> None:
    """After a flush, for instance."""
    identity.row().delete()
    assert look.tick() == look.tick() == Changes()

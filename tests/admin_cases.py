"""Tasks in any state, people with any permission, and what the admin has said to them: for the tests of the admin."""

from __future__ import annotations

import re
from datetime import timedelta
from html import unescape
from typing import Any

from django.contrib.auth.models import Permission, User
from django.contrib.messages import get_messages
from django.test import Client
from django.utils import timezone

from django_asyncq.models import FailureReason, TaskRecord, TaskState

from .clock import uuid7_at

LIST = "/admin/django_asyncq/taskrecord/"


def client_with(*codenames: str, name: str = "ann", is_superuser: bool = False, **options: Any) -> Client:
    """Return a client logged in as a member of staff with these permissions."""
    user = User.objects.create_user(name, is_staff=True, is_superuser=is_superuser)
    found = Permission.objects.filter(codename__in=codenames)
    assert {each.codename for each in found} == set(codenames), "a permission is missing or written wrongly"
    user.user_permissions.set(found)
    client = Client(**options)
    client.force_login(user)
    return client


def make(state: TaskState = TaskState.FAILED, *, name: str = "tests.tasks.add", **values: Any) -> TaskRecord:
    """Create a task in any state, with the values that state requires."""
    now = timezone.now()
    if state == TaskState.SUCCEEDED or (state == TaskState.FAILED and not values.get("retry_at")):
        values.setdefault("finished_at", now)
    if state == TaskState.FAILED:
        values.setdefault("attempt", 1)
        values.setdefault("errors", [error()])
        values.setdefault("reason", FailureReason.EXCEPTION)
        values.setdefault("last_exception", "tests.tasks.Glitch")
    if enqueued_at := values.get("enqueued_at"):
        values.setdefault("id", uuid7_at(enqueued_at))
    return TaskRecord.objects.create(state=state, name=name, **values)


def error(message: str = "no luck", **values: Any) -> dict[str, Any]:
    """An error entry of a failed attempt, as `lifecycle` writes it."""
    now = timezone.now()
    return {
        "exception": "tests.tasks.Glitch",
        "message": message,
        "traceback": f'Traceback (most recent call last):\n  File "x.py", line 1\ntests.tasks.Glitch: {message}',
        "attempt": 1,
        "worker": "host-1",
        "started_at": (now - timedelta(seconds=3)).isoformat(),
        "failed_at": now.isoformat(),
        **values,
    }


def said(response: Any) -> list[tuple[str, str]]:
    """The level and plain text of each message."""
    return [
        (message.level_tag, unescape(re.sub(r"<[^>]*>", "", str(message))))
        for message in get_messages(response.wsgi_request)
    ]

"""The admin's history: written in English, shown in the language of its reader."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.utils.translation import gettext, override

from django_asyncq.admin.history import PATTERNS, Did, in_readers_language
from django_asyncq.models import TaskState

from ..admin_cases import LIST, client_with, make

VALUES = {
    "filter": "queue: a; state: failed",
    "reason": "100 % of them\nfail: %(task)s",
    "task": "01J.x",
    "count": "1,000",
}
VALUES |= {"seconds": "3", "priority": "-5", "added": "1", "removed": "0"}


@pytest.mark.parametrize("did", Did)
def test_each_sentence_is_known_again(did: Did) -> None:
    """With values that look like a sentence; it is translated, and has its values."""
    entry = LogEntry(change_message=did % VALUES)
    assert in_readers_language(entry) == did % VALUES
    with override("de"):
        assert gettext(did) != did
        assert in_readers_language(entry) == gettext(did) % VALUES


def test_what_others_wrote_stays() -> None:
    """Django's own entries, and those of another program."""
    with override("de"):
        assert in_readers_language(LogEntry(change_message="Retried by the night job.")) == "Retried by the night job."
        added = LogEntry(change_message='[{"added": {}}]')
        assert in_readers_language(added) == gettext("Added.")
    assert len(PATTERNS) == len(Did)


@pytest.mark.django_db(transaction=True)
def test_the_history_page_is_in_the_readers_language(settings: Any) -> None:
    """Somebody cancels in German; the row is in English, the page is not."""
    settings.LANGUAGE_CODE = "de"
    record = make(TaskState.QUEUED)
    client = client_with("view_taskrecord", "cancel_task")
    client.post(f"{LIST}{record.pk}/cancel/", {"confirmed": "yes", "reason": "zu teuer"})
    assert LogEntry.objects.get().change_message == "Cancelled: zu teuer"
    page = client.get(f"{LIST}{record.pk}/history/").content.decode()
    assert "Abgebrochen: zu teuer" in page
    assert "Cancelled" not in page

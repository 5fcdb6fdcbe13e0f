"""`manage.py asyncq` in the hands of a person: odd input, hostile texts, a terminal, and what the lists leave out."""

from __future__ import annotations

import io
import json
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from django_asyncq.broker import Broker
from django_asyncq.broker.keys import keys_of
from django_asyncq.models import BulkAction, FailureReason, TaskRecord, TaskState
from django_asyncq.observe.inspector import Inspector
from django_asyncq.testing import EmbeddedRedis

from .. import go_client, tasks

pytestmark = pytest.mark.django_db(transaction=True)

# Clears a screen, sets a title, reorders what follows, ends a line; a C1 control, and half of a character.
HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202e\r\x9b31m\x7f"


def run(*arguments: str) -> str:
    """Run the command and return what it prints."""
    out = io.StringIO()
    call_command("asyncq", *arguments, stdout=out, stderr=io.StringIO())
    return out.getvalue()


def failed(**values: Any) -> TaskRecord:
    """A task that has failed for good."""
    return TaskRecord.objects.create(
        name="tests.tasks.add", state=TaskState.FAILED, reason=FailureReason.EXCEPTION, finished_at=timezone.now(),
        **values,
    )  # fmt: skip


def test_a_terminal_obeys_no_text_of_a_task(own_redis: EmbeddedRedis, own_keys: None) -> None:
    """Not on one line, nor as JSON, nor in the text of an error."""
    error = {"exception": "x.Y", "message": HOSTILE, "traceback": f"a\n{HOSTILE}", "attempt": 1}
    row = failed(last_exception=f"x.{HOSTILE}", args=[HOSTILE], headers={"a": HOSTILE}, errors=[error])
    for arguments in (("list",), ("show", str(row.id)), ("failures",)):
        for more in ((), ("--json",)):
            text = run("tasks", *arguments, *more)
            assert all(each.isprintable() or each == "\n" for each in text), text
            if more and arguments[0] == "show":
                assert json.loads(text)["args"] == [HOSTILE]
    with pytest.raises(CommandError) as caught:
        run("gates", "show", HOSTILE)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "line",
    [
        "queues history q --days 100000",
        "queues history q --minutes 999999999999",
        "tasks failures --limit 99999999999999999999",
        "tasks enqueue tests.tasks.add --backend nope",
        "prune --older-than 999999 --yes",
        "bulk start retry --enqueued-since 0001-01-01T00:00:00+14:00 --yes",
        "tasks list --task \udcff",
        "workers resume \udcff",
        "tasks pause tests.tasks.add --note \udcff",
        f"tasks enqueue tests.tasks.add --args {'[' * 100_000}",
    ],
)
def test_a_value_that_is_none_is_an_error(own_redis: EmbeddedRedis, own_keys: None, line: str) -> None:
    """It says so in a sentence; nothing is done."""
    with pytest.raises(CommandError) as caught:
        run(*line.split())
    assert str(caught.value).isprintable()
    assert not TaskRecord.objects.exists() | BulkAction.objects.exists()


@pytest.mark.parametrize("since", ["0001-01-01T00:00", "999999999d", "100000d"])
def test_since_a_time_before_all_tasks_means_all(own_redis: EmbeddedRedis, own_keys: None, since: str) -> None:
    """As far back as one likes."""
    failed()
    assert len(json.loads(run("tasks", "list", "--since", since, "--json"))["tasks"]) == 1


@pytest.mark.parametrize(
    "line",
    ["queues purge {} --yes", "tasks cancel --state queued --task {} --yes", "tasks retry --all --error {} --yes"],
)
def test_an_empty_name_chooses_nothing(own_redis: EmbeddedRedis, own_keys: None, line: str) -> None:
    """Such as of a shell's variable that is not set: it was taken for "every queue"."""
    tasks.add.enqueue(1)
    failed()
    with pytest.raises(CommandError, match="is empty") as caught:
        run(*(word.format("") for word in line.split()))
    assert caught.value.returncode == 2
    assert sorted(TaskRecord.objects.values_list("state", flat=True)) == [TaskState.QUEUED, TaskState.FAILED]


def test_purge_takes_the_queue_of_one_alias(own_redis: EmbeddedRedis, own_keys: None) -> None:
    """Not those of the same name that other aliases have."""
    failed(queue_name="mail")
    other = failed(queue_name="mail", backend="other")
    assert json.loads(run("queues", "purge", "mail", "--state", "failed", "--yes", "--json"))["deleted"] == 1
    assert TaskRecord.objects.get() == other


def test_the_question_is_no_part_of_the_document(
    own_redis: EmbeddedRedis, own_keys: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is asked on stderr. The end of the input is a no, and Ctrl-C an exit code of its own."""
    row = failed()

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal(""))
    with pytest.raises(CommandError, match="Nothing was deleted"):
        call_command("asyncq", "tasks", "delete", str(row.id), "--json")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Delete 1 task?" in printed.err

    def interrupt(question: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    with pytest.raises(CommandError, match="Interrupted") as caught:
        run("tasks", "delete", str(row.id))
    assert caught.value.returncode == 130
    assert TaskRecord.objects.exists()


def test_entries_are_listed_one_by_one(own_redis: EmbeddedRedis, own_keys: None) -> None:
    """With a priority, alone next, delayed, and of other programs without a row; secrets are masked."""
    plain, urgent = tasks.add.enqueue(1).id, tasks.add.using(priority=5).enqueue(2).id
    later = tasks.add.using(run_after=timedelta(hours=1)).enqueue(3).id
    client, keys = Broker().client, keys_of("default")
    go_client.enqueue(client, "default", "go:mail", b'{"token": "s3cret"}', id="from go \x1b[2J")
    client.zadd(keys.suspects, {"gone": 5})
    shown = json.loads(run("queues", "show", "default", "--entries", "--json"))["entries"]
    assert [(each["state"], each["id"], each["row"]) for each in shown] == [
        ("pending", plain, plain),
        ("pending", "from go \x1b[2J", None),
        ("priority", urgent, urgent),
        ("suspects", "gone", None),
        ("scheduled", later, later),
    ]
    assert [each["type"] for each in shown] == [
        "tests.tasks.add",
        "go:mail",
        "tests.tasks.add",
        None,
        "tests.tasks.add",
    ]
    assert "s3cret" not in json.dumps(shown)
    text = run("queues", "show", "default", "--entries", "--state", "priority", "--state", "suspects")
    assert urgent in text
    assert "gone" in text
    assert plain not in text
    assert "\x1b" not in run("queues", "show", "default", "--entries")
    assert "s3cret" in run("queues", "show", "default", "--entries", "--unmasked", "--json")
    with pytest.raises(CommandError, match="--entries"):
        run("queues", "show", "default", "--state", "priority")


def test_history_by_the_minute(own_redis: EmbeddedRedis, own_keys: None) -> None:
    """The newest first; nothing is known of the time before Redis was emptied."""
    at = timezone.now()
    Broker().client.hset(keys_of("default").minutes(f"{at:%Y-%m-%dT%H}"), f"p{at:%M}", 7)
    found = json.loads(run("queues", "history", "default", "--minutes", "3", "--json"))["minutes"]
    assert len(found) == 3
    assert found[0]["at"] > found[2]["at"]
    assert 7 in [each["processed"] for each in found]
    assert "processed" in run("queues", "history", "default", "--minutes", "3")
    assert len(Inspector().queues.minutes("default", minutes=1)) == 1

"""What a task declares as sensitive is masked on its page, wherever it occurs."""

from __future__ import annotations

import logging
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.core.management import call_command
from django.utils import timezone

from django_asyncq import task
from django_asyncq.core import logs, run_log
from django_asyncq.core.masking import MaskingFormatter, masker_of
from django_asyncq.core.redaction import MASK, Masker
from django_asyncq.exceptions import InvalidOption
from django_asyncq.lifecycle.base import log_failed
from django_asyncq.models import Occurrence, OccurrenceOutcome, Schedule, TaskLogLine, TaskState

from ..admin_cases import LIST, client_with, error, make
from ..tasks import takes_anything

pytestmark = pytest.mark.django_db

IBAN = "DE02120300000000202051"


@task(sensitive=("iban", "return"))
def pay_out(iban: str, amount: int, *, account: dict[str, Any] | None = None) -> str:
    """Stand in for a task with a secret that no word gives away."""
    return iban


NAME = "tests.admin.test_admin_secrets.pay_out"


def test_a_sensitive_argument_is_masked_wherever_it_occurs() -> None:
    """In arguments, the error, the traceback, the log and progress; by position and by name."""
    text = f"no account {IBAN} at the bank"
    progress = {"done": 1, "message": text, "data": {"k": [text]}}
    for values in ({"args": [IBAN, 5]}, {"kwargs": {"iban": IBAN, "amount": 5}}):
        record = make(name=NAME, errors=[error(text, traceback=text)], progress=progress, cancelled_by=IBAN, **values)
        TaskLogLine.objects.create(
            task_id=record.pk, fence=1, attempt=1, number=1, logged_at=timezone.now(), level=20, logger="x", text=text
        )
        client = client_with("view_taskrecord", name=f"viewer{record.short_id}")
        for address in (f"{LIST}{record.pk}/change/", f"{LIST}{record.pk}/change/?full", LIST):
            page = client.get(address).content.decode()
            assert IBAN not in page, address
        assert MASK in client.get(f"{LIST}{record.pk}/change/").content.decode()


def test_the_command_masks_them_too() -> None:
    """`asyncq tasks show`, as text and as JSON; with --unmasked they are there."""
    text = f"no account {IBAN}"
    record = make(name=NAME, args=[IBAN, 5], errors=[error(text, traceback=text)])
    for more in ((), ("--json",)):
        out = StringIO()
        call_command("asyncq", "tasks", "show", str(record.pk), *more, stdout=out)
        assert IBAN not in out.getvalue() and MASK in out.getvalue()
    out = StringIO()
    call_command("asyncq", "tasks", "show", str(record.pk), "--unmasked", stdout=out)
    assert IBAN in out.getvalue()


def test_schedules_mask_what_their_task_declares() -> None:
    """In the list and on the page: the arguments, and why an occurrence was refused."""
    row = Schedule.objects.create(
        name="pay", task=NAME, args=[IBAN, 5], kwargs={"account": {"k": 1}}, cron="0 1 * * *", is_declared=True
    )
    Occurrence.objects.create(
        schedule=row, occurs_at=timezone.now(), outcome=OccurrenceOutcome.REFUSED, note=f"no {IBAN}"
    )
    client = client_with("view_schedule")
    for address in ("", f"{row.pk}/change/"):
        page = client.get(f"/admin/django_asyncq/schedule/{address}").content.decode()
        assert IBAN not in page and MASK in page


def test_lines_of_a_run_are_masked_before_they_are_cut() -> None:
    """Half a secret at the end of a stored line would be one too."""
    record = make(name=NAME, args=[IBAN, 5])
    log = run_log.RunLog(record.id, 1, 1, 5, masker_of(record).text)
    beginning = "." * (run_log.MOST_LINE_BYTES - 15)
    log.add(logging.LogRecord("x", logging.INFO, "x", 1, beginning + IBAN + "." * 4_000, (), None))
    log.close()
    (line,) = log.lines
    assert IBAN[:8] not in line.text and "\N{BULLET}" in line.text


def test_a_formatter_masks_the_lines_about_a_task() -> None:
    """Those of its body and of its failure, with the traceback; of others the secrets of the setting."""
    record = make(name=NAME, args=[IBAN, 5], errors=[error(f"no {IBAN}")])
    out = StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(MaskingFormatter("%(message)s"))
    loggers = [logging.getLogger(name) for name in ("django_asyncq.runs", "own")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        try:
            raise ValueError(f"no {IBAN}")
        except ValueError as raised:
            log_failed(record, raised)
        logs.enter_run(record)
        loggers[1].error("pays to %s", IBAN)
        logs.leave_run()
        loggers[1].error("password=hunter22 and %s", "others")
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    text = out.getvalue()
    assert IBAN not in text and "hunter22" not in text and text.count(MASK) >= 4
    assert "ValueError" in text and "Traceback" in text and "others" in text


def test_a_formatter_shows_lines_about_a_task_whose_path_looks_like_a_key() -> None:
    """Even of a task that the code does not have any more; a line of the project's own is not believed."""
    formatter, path = MaskingFormatter("%(message)s"), "gone.tasks.reset_password"
    record = make(name=path, errors=[error("no")], max_attempts=2)

    def shown(name: str, text: str, **more: Any) -> str:
        line = logging.LogRecord(name, logging.INFO, "x", 1, text, (), None)
        vars(line).update(more)
        return formatter.format(line)

    started = f"task 1 {path}: attempt 1 of 2 started"
    assert shown("django_asyncq.runs", started, **logs.log_extra(record)) == started
    assert shown("own", started, task=path) == f"task 1 {path}: {MASK} 1 of 2 started"
    with logs.about(record):
        assert shown("django_asyncq.runs", f"{started}, token=hunter22") == f"{started}, token={MASK}"


def test_a_person_with_the_permission_sees_them_by_a_post_that_is_noted() -> None:
    """Never by a link, never kept by the browser; the page of the task offers it to nobody else."""
    record = make(name=NAME, args=[IBAN, 5], errors=[error(f"no {IBAN}")], kwargs={"account": {"password": "hunter22"}})
    page, secrets = f"{LIST}{record.pk}/change/", f"{LIST}{record.pk}/secrets/"
    other = client_with("view_taskrecord", name="other")
    assert other.post(secrets).status_code == 403 and "Show secret values" not in other.get(page).content.decode()
    client = client_with("view_taskrecord", "view_payload")
    assert "Show secret values" in client.get(page).content.decode()
    assert client.get(secrets).status_code == 405 and not LogEntry.objects.exists()
    response = client.post(secrets)
    shown = response.content.decode()
    assert "no-store" in response["Cache-Control"] and IBAN in shown and "hunter22" in shown and f"no {IBAN}" in shown
    assert LogEntry.objects.get().change_message == "Secret values shown."
    assert IBAN not in client.get(page).content.decode()


def test_the_form_of_new_arguments_asks_before_it_shows_them() -> None:
    """A look is noted; what the form shows is not kept by the browser."""
    record = make(name=NAME, args=[IBAN, 5])
    client = client_with("view_taskrecord", "retry_task", "view_payload")
    again = f"{LIST}{record.pk}/again/"
    assert IBAN not in client.get(again).content.decode() and not LogEntry.objects.exists()
    response = client.post(again, {"confirmed": "yes"})
    assert IBAN in response.content.decode() and "no-store" in response["Cache-Control"]
    assert LogEntry.objects.get().change_message == "Secret values shown."


def test_a_sensitive_result_is_masked_whole() -> None:
    """Whatever it is."""
    record = make(TaskState.SUCCEEDED, name=NAME, return_value={"a": IBAN, "b": [1, 2]})
    page = client_with("view_taskrecord").get(f"{LIST}{record.pk}/change/").content.decode()
    assert IBAN not in page and MASK in page


def test_short_values_are_masked_in_arguments_only() -> None:
    """Otherwise half of a text would be masked."""
    masker = Masker(("a",), ("a", "b"), ["to", "x"], {})
    assert masker.positional(["to", "x"]) == [MASK, "x"] and masker.text("to be or not to be") == "to be or not to be"


def test_values_within_others_are_masked() -> None:
    """Texts and numbers of nested values; the longest first."""
    masker = Masker(("a",), (), [], {"a": {"k": ["secret", "secret words", 123456]}})
    assert masker.text("secret words, secret 123456") == f"{MASK}, {MASK} {MASK}"
    assert masker.data({"x": ["the secret words"]}) == {"x": [f"the {MASK}"]}
    assert masker.keyword({"a": 1, "b": 2}) == {"a": MASK, "b": 2}


@pytest.mark.parametrize("value", [("nothing",), 5, (5,), {"a": 1}, ("a.b",)])
def test_a_name_that_is_no_parameter_is_refused(value: Any) -> None:
    """A typing error would show what is to be hidden."""
    with pytest.raises(InvalidOption, match="sensitive"):
        replace(pay_out, sensitive=value)


def test_any_name_is_taken_where_the_function_takes_any() -> None:
    """One name, or a list of them, is a tuple afterwards; a call keeps what the declaration says."""
    assert replace(takes_anything, sensitive="whatever").sensitive == ("whatever",)
    assert replace(pay_out, sensitive=["iban"]).sensitive == ("iban",)
    assert pay_out.using(priority=3).sensitive == ("iban", "return")

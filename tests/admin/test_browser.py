"""The admin in a real browser: a person logs in, makes a schedule, corrects errors, runs it, disables and enables it.

The tests need chromium and chromedriver. Without them they are skipped, unless ASYNCQ_REQUIRE_BROWSER is 1.
"""

from __future__ import annotations

import pytest

from django_asyncq.models import Schedule, TaskRecord

from .. import tasks  # noqa: F401 - registers them
from ..browsing import DESKTOP, PHONE, Person, in_browser

NEXT = "table[aria-labelledby=asyncq-upcoming] tbody tr"
LATEST = "table[aria-labelledby=asyncq-runs] tbody tr"

pytestmark = in_browser


def test_person_reads_what_two_fields_for_days_mean(person: Person) -> None:
    """Before the schedule is saved at the field, afterwards on its page; a step that has no effect is refused."""
    person.open("schedule/add/")
    assert "0 0 13 * 5 means every 13th and every Friday" in person.text("#id_cron_helptext")
    person.type("name", "Thirteenth or Friday")
    person.choose("task", "tests.tasks.tidy")
    person.type("cron", "*/90 * * * *")
    assert "the step 90 is longer than the field, which has 60 values" in person.refused()["cron"]
    person.type("cron", "0 0 13 * 5")
    person.press("[name=_save]")
    page = person.text(".asyncq-schedule")
    assert "At 00:00 on the 13th day of month or on Friday" in page
    assert "each day that matches the day of month or the day of week; one is enough" in page
    days = [each[:14] for each in person.texts(NEXT)]
    assert len(days) == 10 and all(day.startswith("Fri ") or day.endswith("-13") for day in days)


def test_person_makes_runs_disables_and_enables_a_schedule(person: Person) -> None:
    """A valid schedule is saved, its page shows the next occurrences, and each button shows a message."""
    person.open("schedule/add/")
    person.type("name", "Nightly statement")
    person.choose("task", "tests.tasks.statement")
    person.type("args", '["north"]')
    person.type("kwargs", '{"to": "ops@example.org"}')
    person.type("cron", "30 4 * * *")
    person.choose("zone", "Europe/Berlin")
    person.press("[name=_save]")
    assert person.messages() == ["The schedule “Nightly statement” was added successfully."]
    row = Schedule.objects.get()
    assert person.browser.current_url.endswith(f"/schedule/{row.pk}/change/")
    occurrences = person.texts(NEXT)
    assert len(occurrences) == 10 and all(" 04:30 CE" in occurrence for occurrence in occurrences)

    person.press("button[form=asyncq-run]")
    record = TaskRecord.objects.get()
    assert person.messages() == [f"Queued: {record}."]
    (latest,) = person.texts(LATEST)
    assert "manual" in latest and f"{record} Queued" in " ".join(latest.split())

    person.press("button[form=asyncq-switch]")
    assert person.messages() == ["Disabled: Nightly statement."]
    row.refresh_from_db()
    assert not row.enabled and person.all(NEXT) == []
    person.open("schedule/")
    person.press("button[role=switch][aria-checked=false]")
    assert person.messages() == ["Enabled: Nightly statement."]
    row.refresh_from_db()
    assert row.enabled and person.one("button[role=switch]").get_attribute("aria-checked") == "true"


def test_each_error_is_shown_at_its_field(person: Person) -> None:
    """An invalid expression, wrong arguments, invalid JSON and a task that is not schedulable are refused in turn."""
    person.open("schedule/add/")
    person.type("name", "Nightly statement")
    person.choose("task", "tests.tasks.statement")
    person.type("args", '["north"]')
    person.type("kwargs", '{"to": "ops@example.org"}')
    person.type("cron", "61 2 * * *")
    found = person.refused()
    assert list(found) == ["cron"] and "minute '61' is wrong" in found["cron"]

    person.type("cron", "30 2 * * *")
    person.type("kwargs", '{"days": 7}')
    found = person.refused()
    assert list(found) == ["kwargs"] and "missing a required" in found["kwargs"]

    person.type("kwargs", '{"to": "ops@example.org"}')
    person.type("args", '["north", 7')
    found = person.refused()
    assert list(found) == ["args"] and "This is not valid JSON: line 1, column 12" in found["args"]

    person.type("args", '["north", 7]')
    option = person.one("[name=task] option[value='tests.tasks.tidy']")
    person.browser.execute_script("arguments[0].value = 'os.system'", option)
    person.choose("task", "os.system")
    found = person.refused()
    assert list(found) == ["task"] and "os.system cannot be scheduled here" in found["task"]
    assert not Schedule.objects.exists()

    person.choose("task", "tests.tasks.statement")
    person.press("[name=_save]")
    assert Schedule.objects.get().args == ["north", 7]


def test_run_now_on_an_outdated_page_queues_nothing(person: Person) -> None:
    """With the page open in two tabs, the button of the second tab only reports what the first did."""
    row = Schedule.objects.create(name="tidy", task="tests.tasks.tidy", cron="0 4 * * *", zone="UTC")
    person.open(f"schedule/{row.pk}/change/")
    first = person.browser.current_window_handle
    person.browser.switch_to.new_window("tab")
    person.open(f"schedule/{row.pk}/change/")
    person.press("button[form=asyncq-run]")
    record = TaskRecord.objects.get()
    person.browser.switch_to.window(first)
    person.press("button[form=asyncq-run]")
    (message,) = person.messages()
    assert message.startswith(f"Somebody has run it since this page was opened: {record}, ")
    assert len(person.all(LATEST)) == TaskRecord.objects.count() == 1


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_pages_fit_the_window_and_load_nothing_from_other_sites(person: Person, width: int) -> None:
    """No page scrolls sideways, buttons are large enough for touch, and the browser logs no error."""
    row = Schedule.objects.create(
        name="A name that is long enough to need a second line on a phone",
        task="tests.tasks.statement",
        args=["north"],
        kwargs={"to": "x" * 300},
        cron="*/5 * * * *",
        zone="America/Argentina/ComodRivadavia",
    )
    person.width(width)
    page_of_row = f"schedule/{row.pk}/"
    for page in ("schedule/", "schedule/add/", f"{page_of_row}change/", f"{page_of_row}delete/", "startuprun/"):
        person.open(page)
        assert person.browser.execute_script("return document.documentElement.scrollWidth") <= width, page
        for each in person.all(".asyncq-button, .asyncq-switch"):
            assert min(each.size["height"], each.size["width"]) >= 24
        loaded = person.browser.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
        assert loaded and all(each.startswith(person.site) for each in loaded)
    assert [entry for entry in person.browser.get_log("browser") if "favicon" not in entry["message"]] == []

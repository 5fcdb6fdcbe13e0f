"""The admin in a real browser: a person logs in, makes a schedule, corrects errors, runs it, disables and enables it.

The tests need chromium and chromedriver. Without them they are skipped, unless ASYNCQ_REQUIRE_BROWSER is 1.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone
from selenium.common.exceptions import WebDriverException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

from django_asyncq.admin import retry_all
from django_asyncq.models import FailureReason, Gate, Schedule, TaskRecord, TaskState

from . import tasks  # noqa: F401 - registers them

PAGE_SECONDS = 30
DESKTOP, PHONE = 1440, 390
NEXT = "table[aria-labelledby=asyncq-upcoming] tbody tr"
LATEST = "table[aria-labelledby=asyncq-runs] tbody tr"
NEXT_PAGE_HAS_LOADED = "return !window.isPressed && document.readyState === 'complete'"


def find(*names: str) -> str | None:
    """The path of the first of these programs that is installed."""
    return next((path for name in names if (path := shutil.which(name))), None)


BROWSER, DRIVER = find("chromium", "chromium-browser", "google-chrome"), find("chromedriver")
pytestmark = [
    pytest.mark.skipif(
        not (BROWSER and DRIVER) and os.environ.get("ASYNCQ_REQUIRE_BROWSER") != "1",
        reason="no chromium and chromedriver found",
    ),
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(180),
]


@pytest.fixture
def browser() -> Iterator[Chrome]:
    """A headless browser for one test."""
    assert BROWSER and DRIVER, "ASYNCQ_REQUIRE_BROWSER is 1, but chromium or chromedriver is missing"
    options = ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(DRIVER))
    driver.set_page_load_timeout(PAGE_SECONDS)
    driver.set_script_timeout(PAGE_SECONDS)
    yield driver
    driver.quit()


class Person:
    """A person who uses the browser."""

    def __init__(self, browser: Chrome, site: str) -> None:
        self.browser = browser
        self.site = site
        self.wait = WebDriverWait(browser, PAGE_SECONDS)

    def log_in(self, name: str, password: str) -> None:
        """Log in with the form."""
        self.browser.get(f"{self.site}/admin/login/")
        self.type("username", name)
        self.type("password", password)
        self.press("input[type=submit]")

    def width(self, pixels: int) -> None:
        """Set the width of the window in pixels."""
        metrics = {"width": pixels, "height": 900, "deviceScaleFactor": 1, "mobile": pixels == PHONE}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def open(self, path: str) -> None:
        """Open a page of the app."""
        self.browser.get(f"{self.site}/admin/django_asyncq/{path}")

    def one(self, selector: str) -> WebElement:
        """The element, as soon as it exists."""
        return self.wait.until(lambda browser: browser.find_element(By.CSS_SELECTOR, selector))

    def all(self, selector: str) -> list[WebElement]:
        """Every such element that exists now."""
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def type(self, name: str, text: str) -> None:
        """Replace the text of a field."""
        field = self.one(f"[name={name}]")
        field.clear()
        field.send_keys(text)

    def choose(self, name: str, value: str) -> None:
        """Choose an option of a select."""
        Select(self.one(f"[name={name}]")).select_by_value(value)

    def press(self, selector: str) -> None:
        """Click, and wait until the next page has loaded: a complete document without the mark of this one."""
        self.browser.execute_script("window.isPressed = true")
        self.one(selector).click()
        # Between two documents the driver has errors of many kinds for whatever it is asked; later it answers.
        wait = WebDriverWait(self.browser, PAGE_SECONDS, ignored_exceptions=[WebDriverException])
        wait.until(lambda browser: browser.execute_script(NEXT_PAGE_HAS_LOADED))

    def refused(self) -> dict[str, str]:
        """Save, and return the errors that the page shows by field."""
        self.press("[name=_save]")
        assert self.one(".errornote").is_displayed()
        found = {each.get_attribute("id") or "": each for each in self.all("ul.errorlist")}
        assert all(each.is_displayed() for each in found.values())
        return {re.sub(r"^id_|_error$", "", id): each.text for id, each in found.items()}

    def messages(self) -> list[str]:
        """The messages that the page shows."""
        return [each.text for each in self.all("ul.messagelist li")]


@pytest.fixture
def person(browser: Chrome, live_server: Any) -> Person:
    """A superuser who has logged in."""
    User.objects.create_superuser("ann", password="secret words")
    person = Person(browser, live_server.url)
    person.width(DESKTOP)
    person.log_in("ann", "secret words")
    return person


def test_person_reads_what_two_fields_for_days_mean(person: Person) -> None:
    """Before the schedule is saved at the field, afterwards on its page; a step that has no effect is refused."""
    person.open("schedule/add/")
    assert "0 0 13 * 5 means every 13th and every Friday" in person.one("#id_cron_helptext").text
    person.type("name", "Thirteenth or Friday")
    person.choose("task", "tests.tasks.tidy")
    person.type("cron", "*/90 * * * *")
    assert "the step 90 is longer than the field, which has 60 values" in person.refused()["cron"]
    person.type("cron", "0 0 13 * 5")
    person.press("[name=_save]")
    page = person.one(".asyncq-schedule").text
    assert "At 00:00 on the 13th day of month or on Friday" in page
    assert "each day that matches the day of month or the day of week; one is enough" in page
    days = [each.text[:14] for each in person.all(NEXT)]
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
    occurrences = [each.text for each in person.all(NEXT)]
    assert len(occurrences) == 10 and all(" 04:30 CE" in occurrence for occurrence in occurrences)

    person.press("button[form=asyncq-run]")
    record = TaskRecord.objects.get()
    assert person.messages() == [f"Queued: {record}."]
    (latest,) = [each.text for each in person.all(LATEST)]
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


def test_person_retries_all_that_match_in_rounds(person: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question counts all, the next page says what is left, and the messages say what stays failed."""
    monkeypatch.setattr(retry_all, "IDS_PER_RETRY", 80)
    monkeypatch.setattr(retry_all, "ROUND_SECONDS", 0.0)
    Gate.objects.create(name="narrow", limit=1)
    values = {"state": TaskState.FAILED, "finished_at": timezone.now(), "reason": FailureReason.EXCEPTION}
    names = [("tests.tasks.gated", "narrow") if number % 4 == 1 else ("tests.tasks.add", "") for number in range(120)]
    TaskRecord.objects.bulk_create([TaskRecord(name=name, gate=gate, **values) for name, gate in names])
    person.open("taskrecord/?state=failed")
    person.one("#action-toggle").click()
    person.one(".actions .question a").click()
    person.choose("action", "retry_selected")
    person.press("button[name=index]")
    assert person.one("#content h1").text == "Retry 120 failed tasks?"
    person.press("form.asyncq-section button")
    # Of the newest 80 tasks 20 are at the gate, which admits one.
    assert person.one("#content h1").text == "30 failed tasks are left"
    assert person.one(".asyncq-queued").text == "61 tasks queued again."
    assert person.one(".asyncq-set-aside").text.startswith("Gate narrow is full (limit 1): 29 tasks stay failed.")
    for width in (DESKTOP, PHONE):
        person.width(width)
        assert person.browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
        person.browser.save_screenshot(f"/tmp/d_{width}.png")
    person.press("form.asyncq-section button")
    assert person.messages() == [
        "91 tasks queued again.",
        "Gate narrow is full (limit 1): 29 tasks stay failed. Retry them when the gate has free slots.",
    ]
    assert TaskRecord.objects.filter(state=TaskState.FAILED, gate="").count() == 0

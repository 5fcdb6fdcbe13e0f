"""A person who uses the admin in a real browser, for tests.

They need chromium and chromedriver. Without them they are skipped, unless ASYNCQ_REQUIRE_BROWSER is 1.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException, WebDriverException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

PAGE_SECONDS = 30
DESKTOP, PHONE = 1440, 390
NEXT_PAGE_HAS_LOADED = "return !window.isPressed && document.readyState === 'complete'"


def find(*names: str) -> str | None:
    """The path of the first of these programs that is installed."""
    return next((path for name in names if (path := shutil.which(name))), None)


BROWSER, DRIVER = find("chromium", "chromium-browser", "google-chrome"), find("chromedriver")
in_browser = [
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
        # A live page may replace an element between the finding and the look at it: then it is found again.
        self.wait = WebDriverWait(
            browser, PAGE_SECONDS, ignored_exceptions=[NoSuchElementException, StaleElementReferenceException]
        )

    def log_in(self, name: str, password: str) -> None:
        """Log in with the form."""
        self.browser.get(f"{self.site}/admin/login/")
        self.type("username", name)
        self.type("password", password)
        self.press("[type=submit]")

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

    def text(self, selector: str) -> str:
        """The text of the element as it stands when it is looked at: a live page may replace it at any time."""
        return self.wait.until(lambda browser: [browser.find_element(By.CSS_SELECTOR, selector).text])[0]

    def texts(self, selector: str) -> list[str]:
        """The texts of all such elements, as they stand at one moment."""
        script = "return Array.from(document.querySelectorAll(arguments[0]), (each) => each.innerText.trim())"
        return self.browser.execute_script(script, selector)

    def places(self, selector: str) -> list[dict[str, Any]]:
        """Where all such elements that can be seen stand at one moment: text; left, right and height in pixels."""
        script = """
            const found = Array.from(document.querySelectorAll(arguments[0]));
            return found.filter((each) => each.checkVisibility()).map((each) => {
                const place = each.getBoundingClientRect();
                return {text: each.innerText, left: place.left, right: place.right, height: place.height};
            })
        """
        return self.browser.execute_script(script, selector)

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
        self._press(By.CSS_SELECTOR, selector)

    def press_button(self, text: str, within: str = "body") -> None:
        """Click the first button of this text, or with this name for screen readers, and wait for the next page."""
        buttons = f"(self::button or self::a) and (normalize-space()={text!r} or @aria-label={text!r})"
        self._press(By.XPATH, f"//{within}//*[{buttons} or (self::input and @value={text!r})]")

    def _press(self, by: str, selector: str) -> None:
        self.browser.execute_script("window.isPressed = true")
        # Live numbers may replace an element between the two looks at it.
        wait = WebDriverWait(self.browser, PAGE_SECONDS, ignored_exceptions=[WebDriverException])
        wait.until(lambda browser: browser.find_element(by, selector).click() or True)
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

    def picture(self, name: str) -> None:
        """Save what the window shows, whole, in the folder ASYNCQ_TEST_PICTURES; nothing without it."""
        if folder := os.environ.get("ASYNCQ_TEST_PICTURES"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            height = self.browser.execute_script("return document.documentElement.scrollHeight")
            width = self.browser.execute_script("return window.innerWidth")
            metrics = {"width": width, "height": min(height, 8000), "deviceScaleFactor": 1, "mobile": width == PHONE}
            self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            self.browser.save_screenshot(str(Path(folder) / f"{name}.png"))
            self.width(width)

    def theme(self, name: str) -> None:
        """Choose the admin's theme: "light", "dark" or "auto"; the open page is loaded again."""
        self.browser.execute_script("localStorage.setItem('theme', arguments[0])", name)
        self.browser.refresh()

    def messages(self) -> list[str]:
        """The messages that the page shows."""
        return self.texts("ul.messagelist li")


@pytest.fixture
def person(browser: Chrome, live_server: Any) -> Person:
    """A superuser who has logged in."""
    User.objects.create_superuser("ann", password="secret words")
    person = Person(browser, live_server.url)
    person.width(DESKTOP)
    person.log_in("ann", "secret words")
    return person

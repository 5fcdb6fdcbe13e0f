"""Render Studio in a real browser, with its own site and workers: a visitor orders more than the gates admit.

With ASYNCQ_TEST_PICTURES, the path of a folder, the pictures of the docs' first page are saved there.
"""

from __future__ import annotations

import base64
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
from PIL import Image
from selenium.webdriver import Chrome

from ..browsing import DESKTOP, Person, in_browser
from ..project.test_example import MANAGE, environment, manage
from ..workers import wait_until

__all__ = ["environment"]
pytestmark = in_browser

# Of each model as many as its gate admits at once, and the one that cannot be painted: four rows of cards.
ADMITTED = {"reaction": 2, "attractor": 3, "newton": 3, "fern": 3, "mandelbrot": 4}
IMPOSSIBLE = "staircase"
GALLERY = """
const cards = (state) => [...document.querySelectorAll(`.card[data-state=${state}]`)];
const pictures = [...document.querySelectorAll(".card img:not([hidden])")];
"""
# Renders of every kind are seen, and a gate that is full; no picture is half loaded.
IS_BUSY = f"""{GALLERY}
const begun = cards("running").filter((card) => card.querySelector("progress:not([hidden])")?.value > 0.1);
return begun.length >= 2 && cards("queued").length >= 4 && cards("succeeded").length >= 3
    && cards("failed").length === 1 && pictures.every((each) => each.complete)
    && document.querySelector(".gate[data-full]") !== null;
"""
IS_DONE = f"""{GALLERY}
return cards("succeeded").length === arguments[0] && cards("failed").length === 1
    && pictures.length === arguments[0] && pictures.every((each) => each.complete && each.naturalWidth > 0);
"""
# At one moment, for the page changes it.
BAR = """
const bar = [...document.querySelectorAll("#visitors li")].find((each) => each.dataset.visitor === arguments[0]);
const progress = bar?.querySelector("progress");
return bar ? [progress.value, progress.max, bar.querySelector(".done").textContent] : [0, 0, ""];
"""
# The end of the first model that is as low as the cards: neither is cut. With many cards, that of the last one.
LOWEST = """
const end = (element) => element.getBoundingClientRect().bottom + window.scrollY;
const cards = end(document.getElementById("cards"));
const models = [...document.querySelectorAll("form[data-model]")].map(end);
return models.slice(arguments[0] - 1).find((each) => each >= cards) ?? models.at(-1);
"""
MARGIN = 12
# Ten on a machine with nothing else to do.
RENDERING_SECONDS = 100


@pytest.fixture
def studio(environment: dict[str, str], tmp_path: Path, browser: Chrome) -> Iterator[Person]:
    """A visitor of a new studio, whose site and workers run."""
    for command in ("migrate", "ensure_gates"):
        done = manage(environment, command, seconds=60)
        assert done.returncode == 0, done.stderr
    address = tmp_path / "address"
    with ExitStack() as stack:
        stack.enter_context(running(environment, tmp_path, "serve_site", "--address-file", str(address)))
        stack.enter_context(running(environment, tmp_path, "runworkers", "--processes", "2", "--concurrency", "2"))
        wait_until(address.exists, "site")
        visitor = Person(browser, address.read_text())
        visitor.width(DESKTOP)
        # Else a meter may be on its way to its value.
        wanted = {"prefers-reduced-motion": "reduce", "prefers-color-scheme": "light"}
        features = [{"name": name, "value": value} for name, value in wanted.items()]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        yield visitor


@contextmanager
def running(environment: dict[str, str], folder: Path, *command: str) -> Iterator[None]:
    """A management command of the studio in a process of its own, with its output in a file."""
    with (folder / f"{command[0]}.log").open("w") as log:
        process = subprocess.Popen([sys.executable, str(MANAGE), *command], env=environment, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise


def order(studio: Person, model: str, copies: int = 1) -> str:
    """Press a model's button, and return what the page answers."""
    form = f"form[data-model={model}]"
    studio.one(f"{form} button[value='{copies}']").click()
    studio.wait.until(lambda browser: studio.text(f"{form} .answer"))
    return studio.text(f"{form} .answer")


def become(studio: Person, name: str) -> None:
    """Be another visitor, as the field above the models says."""
    field = studio.one("#visitor-name")
    field.clear()
    field.send_keys(name)


def done_of(studio: Person, name: str) -> tuple[int, int]:
    """Return how many renders of a visitor are done, and how many there are, as the bar says. It may not be there."""
    done, total, text = studio.browser.execute_script(BAR, name)
    assert text == (f"{done} of {total} done" if total else "")
    return done, total


def hold_a_busy_moment(studio: Person) -> bool:
    """Pause the page's updates while it shows a busy moment; False if it shows none, or was faster."""
    if not studio.browser.execute_script(IS_BUSY):
        return False
    button = studio.one("#pause")
    button.click()
    # An answer that was on its way may still change the page.
    studio.wait.until(lambda browser: browser.execute_script("return !fetching"))
    if studio.browser.execute_script(IS_BUSY):
        return True
    button.click()
    return False


def picture(studio: Person, name: str, models: int) -> None:
    """Save the page with so many models at least, down to the end of a model and of the gallery.

    Renders have many colours, so that a picture of them is kept in 256, dithered: a third of the size.
    """
    folder = os.environ.get("ASYNCQ_TEST_PICTURES")
    if not folder:
        return
    studio.browser.execute_script("window.scrollTo(0, 0)")
    height = studio.browser.execute_script(LOWEST, models) + MARGIN
    clip = {"x": 0, "y": 0, "width": DESKTOP, "height": height, "scale": 1}
    options = {"format": "png", "captureBeyondViewport": True, "clip": clip}
    answer = studio.browser.execute_cdp_cmd("Page.captureScreenshot", options)
    image = Image.open(io.BytesIO(base64.b64decode(answer["data"]))).convert("RGB")
    if studio.all(".card img:not([hidden])"):
        image = image.quantize(256, palette=image.quantize(256), dither=Image.Dither.FLOYDSTEINBERG)
    Path(folder).mkdir(parents=True, exist_ok=True)
    image.save(Path(folder) / f"{name}.png", optimize=True)


# Keeps what the card of the render that waits last says of its place, each text once.
NOTE_PLACES = """
const card = [...document.querySelectorAll(".card")].find((each) => each.textContent.includes(arguments[0]));
const note = card.querySelector(".note");
window.places = [note.textContent];
new MutationObserver(() => window.places.push(note.textContent)).observe(note, { childList: true, subtree: true });
"""


@pytest.mark.timeout(300)
def test_two_visitors_share_the_workers_though_one_floods(studio: Person) -> None:
    """One orders forty, the other one: both bars move, and the one is done long before. What waits says its place."""
    studio.browser.get(f"{studio.site}/?visitor=ann&wait=1")
    assert studio.one("#visitor-wait").is_selected() and studio.one("#visitor-name").get_property("value") == "ann"
    assert order(studio, "reaction", 5) == "5 accepted."
    wait_until(lambda: "3rd in line" in studio.text("#cards"), "place in line", RENDERING_SECONDS)
    assert studio.text("form[data-model=reaction] .gate-text") == "2 of 2 slots, full, 3 waiting"
    studio.browser.execute_script(NOTE_PLACES, "3rd in line")

    become(studio, "bob")
    assert order(studio, "sketch", 40) == "40 accepted."
    become(studio, "cid")
    assert order(studio, "julia") == "1 accepted."
    assert studio.browser.current_url == f"{studio.site}/?visitor=cid&wait=1"
    wait_until(lambda: done_of(studio, "cid") == (1, 1), "render of the one", RENDERING_SECONDS)
    done, total = done_of(studio, "bob")
    assert total == 40 and done <= 30
    picture(studio, "studio-fair", 6)
    wait_until(lambda: 10 < done_of(studio, "bob")[0] < 40, "bar that moves", RENDERING_SECONDS)
    is_done = partial(studio.browser.execute_script, f"{GALLERY} return cards('succeeded').length === 46")
    wait_until(is_done, "last picture", RENDERING_SECONDS)
    assert [done_of(studio, name) for name in ("ann", "bob", "cid")] == [(5, 5), (40, 40), (1, 1)]
    places = re.findall(r"slot · (\d)", " ".join(studio.browser.execute_script("return window.places")))
    assert places[0] == "3" and len(set(places)) > 1 and places == sorted(places, reverse=True)


@pytest.mark.timeout(300)
def test_a_visitor_orders_more_than_the_gates_admit(studio: Person) -> None:
    """Each full gate refuses the fifth of five at the latest; the page shows what waits, runs and is done."""
    studio.browser.get(studio.site)
    assert studio.one("#empty").is_displayed() and studio.all(".card") == []
    picture(studio, "studio-empty", 3)

    answers = {model: order(studio, model, 5) for model in ("reaction", "attractor")}
    assert order(studio, IMPOSSIBLE) == "1 accepted."
    answers |= {model: order(studio, model, 5) for model in ADMITTED if model not in answers}
    for model, admitted in ADMITTED.items():
        assert f"{admitted} accepted. The gate {model} is full. Try again in about " in answers[model]
    wait_until(lambda: hold_a_busy_moment(studio), "busy moment", RENDERING_SECONDS)
    assert len(studio.all(".card")) == sum(ADMITTED.values()) + 1
    picture(studio, "studio-busy", 6)

    studio.one("#pause").click()
    is_done = partial(studio.browser.execute_script, IS_DONE, sum(ADMITTED.values()))
    wait_until(is_done, "last picture", RENDERING_SECONDS)
    # Without the answers to the orders, which are over.
    studio.browser.refresh()
    wait_until(is_done, "page with all pictures")
    assert {each.partition(" ")[0] for each in studio.texts(".gate-text")} == {"0"}
    assert "ValueError" in studio.text(".card[data-state=failed]")
    picture(studio, "studio-done", 6)
    severe = [each["message"] for each in studio.browser.get_log("browser") if each["level"] == "SEVERE"]
    assert severe and all("429" in message for message in severe)

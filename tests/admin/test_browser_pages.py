"""Every page of the admin in a real browser: it fits the window, reads well for screen readers, and asks no other site.

With ASYNCQ_TEST_AXE, the path of `axe.min.js`, each page is also checked for violations of WCAG A and AA; without it
those tests are skipped. With ASYNCQ_TEST_PICTURES, the path of a folder, a picture of each page is saved there.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import django
import pytest
from django.http import HttpRequest
from django.utils import timezone
from selenium.webdriver import Chrome

from django_asyncq import control
from django_asyncq.admin.fleet import fleet_of
from django_asyncq.broker import Broker
from django_asyncq.broker.foreign import rejected_document
from django_asyncq.broker.keys import QueueKeys, alive_key
from django_asyncq.broker.run_counts import RunCounting, RunCounts
from django_asyncq.control import start_bulk, stop_bulk
from django_asyncq.models import (
    BulkAction,
    FailureReason,
    Gate,
    Occurrence,
    OccurrenceOutcome,
    PauseKind,
    Schedule,
    StartupRun,
    TaskRecord,
    TaskState,
)
from django_asyncq.observe.inspector import Inspector

from .. import tasks
from ..admin_cases import error, make
from ..browsing import DESKTOP, PHONE, Person, in_browser
from ..workers import kill_all, wait_until, workers

pytestmark = in_browser

AXE = os.environ.get("ASYNCQ_TEST_AXE", "")
with_axe = pytest.mark.skipif(
    not AXE, reason="ASYNCQ_TEST_AXE names no axe.min.js, so nothing looks for violations of WCAG"
)
# The widths of the window, in pixels, that show the pages in each theme: of a desktop, a laptop, a tablet, a phone.
LOOKS = {"dark": (DESKTOP,), "light": (DESKTOP, 1280, 768, PHONE)}
# Of the list of tasks, in pixels.
HIGHEST_ROW = 48
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]
# Django 5.2 breaks rules in its own templates, which 6.1 has mended: links told by colour alone, fields without labels.
OF_DJANGO = [[".breadcrumbs"], [".vDateField"], [".vTimeField"]] if django.VERSION < (6, 1) else []
RUN_AXE = """
const done = arguments[arguments.length - 1];
axe.run({exclude: arguments[1]}, {runOnly: arguments[0], resultTypes: ["violations"]}).then(
    (found) => done(found.violations.map((each) => [each.id, each.nodes.map((node) => node.html).slice(0, 3)])),
    (error) => done([["axe failed", [String(error)]]])
);
"""
LENGTHEN = """
document.querySelectorAll(".asyncq-numbers tbody tr :is(th, td:not(:has(button)))").forEach((cell) => {
    (cell.querySelector("bdi, .asyncq-state") ?? cell).append("-" + "x".repeat(60));
});
"""
# Texts of ours that a box cuts. On a phone nothing is cut, and only code scrolls. Elsewhere the whole of what
# is cut is a title, and enough of it is seen to tell it from others.
FIND_CUT = """
const isPhone = arguments[0], ours = "[class*=asyncq-]:not(body), #result_list", found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
    const node = walker.currentNode, text = node.data.trim(), parent = node.parentElement;
    if (!text || !parent.closest(ours) || parent.closest("select, textarea")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const place = range.getBoundingClientRect();
    if (!place.width || !parent.checkVisibility()) continue;
    const boxes = [];
    for (let box = parent; box !== document.body; box = box.parentElement) boxes.push([box, getComputedStyle(box)]);
    // For screen readers only.
    if (boxes.some(([, style]) => style.clipPath === "inset(50%)")) continue;
    if (place.height < 10) found.push([text, "too small to read"]);
    if (place.width < 30 && place.height > 60) found.push([text, "a letter in each line"]);
    if (boxes.some(([box]) => box.matches("pre, .asyncq-graph"))) continue;
    if (isPhone && (place.left < -1 || place.right > window.innerWidth + 1)) found.push([text, "beyond the window"]);
    for (const [box, style] of boxes) {
        const edges = box.getBoundingClientRect();
        const isBeyond = place.left < edges.left - 1 || place.right > edges.right + 1;
        if (!isBeyond || style.overflowX === "visible" || style.display === "inline") continue;
        if (!isPhone && ["auto", "scroll"].includes(style.overflowX)) break;
        const title = (box.matches("[title]") ? box : box.querySelector("[title]") ?? box).title;
        const seen = text.length * edges.width / place.width, least = box.matches(".asyncq-error-line") ? 40 : 18;
        if (isPhone || !title.includes(text.replace(/…$/, "")) || seen < least) {
            found.push([text, `only ${Math.floor(seen)} characters are seen`]);
            break;
        }
    }
}
return found;
"""
# Links and buttons of ours that a finger misses, except inside a sentence, and in the chart, which is a table too.
FIND_SMALL = """
const ours = ":is([class*=asyncq-]:not(body), #result_list)", targets = ":is(a, button, select, summary, input)";
return [...document.querySelectorAll(`${ours} ${targets}`)].filter((each) => {
    const place = each.getBoundingClientRect();
    const isInSentence = getComputedStyle(each).display === "inline" && each.parentElement.matches("p, dd, li");
    return each.checkVisibility() && !isInSentence && !each.closest("svg") && Math.min(place.width, place.height) < 24;
}).map((each) => ["too small to touch", each.outerHTML.slice(0, 200)]);
"""
# Links that look like text where the styles of the theme say nothing of links, as those of unfold.
FIND_PLAIN = """
const ours = "/static/django_asyncq/";
document.querySelectorAll("link[rel=stylesheet]").forEach((each) => { each.disabled = !each.href.includes(ours); });
document.adoptedStyleSheets = [new CSSStyleSheet()];
document.adoptedStyleSheets[0].replaceSync("a { color: inherit; text-decoration: inherit; }");
const all = ":is([class*=asyncq-]:not(body), #result_list) a:not(.asyncq-button, svg a, thead a)";
const links = document.querySelectorAll(all);
const plain = [...links].filter((each) => getComputedStyle(each).textDecorationLine !== "underline");
return plain.map((each) => ["looks like text", each.outerHTML.slice(0, 200)]);
"""
LONG = "a very long message that does not fit into the width of any column of the list " * 3


@pytest.fixture
def site(tmp_path: Path, person: Person) -> Iterator[Person]:
    """A site with tasks in all states, gates, pauses, schedules and a worker."""
    now = timezone.now()
    fill_history(now)
    Gate.objects.create(name="narrow", limit=2)
    for _ in range(2):
        tasks.gated.using(gate="narrow", queue_name="reports").enqueue("narrow")
    full = {"reason": FailureReason.GATE_FULL, "gate": "narrow", "retry_at": now + timedelta(seconds=20)}
    make(name="tests.tasks.gated", args=["narrow"], attempt=0, last_exception="", errors=[], **full)
    Gate.objects.create(name="a-gate-with-a-long-name-for-a-customer-in-germany", limit=20)
    for number in range(12):
        at = now - timedelta(minutes=7 * number)
        make(TaskState.SUCCEEDED, name="shop.tasks.send_receipt", finished_at=at, last_attempted_at=at, started_at=at)
    for number in range(3):
        last = now - timedelta(minutes=50 * number)
        make(name="shop.tasks.sync_stock", last_exception="builtins.TimeoutError", finished_at=last)
    for number in range(5):
        make(last_exception="shop.errors.CardDeclined", finished_at=now - timedelta(hours=number), errors=[error(LONG)])
    make(last_exception="builtins.KeyError", retry_at=now + timedelta(minutes=4), max_attempts=3)
    make(TaskState.QUEUED, run_after=now + timedelta(hours=3), queue_name="reports")
    make(TaskState.RUNNING, timeout_seconds=10, last_attempted_at=now - timedelta(hours=1), worker_ids=["lost:1:2:3"])
    for _ in range(3):
        tasks.stamp.using(queue_name="mail").enqueue()
    control.pause(PauseKind.QUEUE, "mail", by="bob", note="the provider is down")
    control.pause(PauseKind.TASK, "tests.tasks.add", by="bob")
    stop_bulk(start_bulk("retry", {"last_exception": "shop.errors.CardDeclined"}, by="ann"))
    document = rejected_document("inbox", "order-17", b'{"name": "shop.tasks.unknown"}', "no such task", time.time())
    Broker().client.lpush(QueueKeys("mail").rejected, document)
    schedule = Schedule(name="tidy", task="tests.tasks.tidy", cron="0 4 * * *", zone="Europe/Berlin")
    schedule.plan_next(now)
    schedule.save()
    done = make(TaskState.SUCCEEDED, name="tests.tasks.tidy", last_attempted_at=now - timedelta(seconds=90))
    Occurrence.objects.create(
        schedule=schedule, occurs_at=now - timedelta(hours=6), outcome=OccurrenceOutcome.QUEUED, task_id=done.pk
    )
    StartupRun.objects.create(name="warm", holder="host:1", term=3, begun_at=now, finished_at=now)
    with workers(tmp_path, "--processes", "2", "--queues", "default,mail"):
        wait_until(lambda: len(Inspector().workers.all()) == 2, "the heartbeats")
        task = tasks.nap_async.enqueue(60)
        wait_until(lambda: TaskRecord.objects.get(pk=task.id).state == TaskState.RUNNING, "a run")
        yield person
        # The workers would wait for it.
        task.cancel()


def fill_history(now: datetime) -> None:
    """Let Redis have counted for two hours."""
    broker = Broker()
    broker.register_queue("default")
    broker.client.set(alive_key(), int(now.timestamp()) - 90_000)
    for ago in range(120):
        moment = now - timedelta(minutes=ago)
        processed = 40 + round(25 * math.sin(ago / 9)) + ago % 7
        counted = {f"p{moment.minute}": processed, f"f{moment.minute}": processed // 6 if 30 < ago < 55 else ago % 3}
        broker.client.hset(QueueKeys("default").minutes(f"{moment.astimezone(UTC):%Y-%m-%dT%H}"), mapping=counted)
    runs = {
        "shop.tasks.send_receipt": (812, 0, 4),
        "shop.tasks.charge": (95, 7, 21),
        "shop.tasks.sync_stock": (12, 3, 0),
    }
    for place, (name, (succeeded, failed, retried)) in enumerate(runs.items()):
        counts = RunCounts({**RunCounts().outcomes, "succeeded": succeeded, "failed": failed, "retried": retried})
        for times, bucket in ((counts.took, 3 + 3 * place), (counts.waited, 1)):
            times.buckets[bucket : bucket + 2] = [succeeded, failed + retried]
        RunCounting().add("default", {name: counts})


def addresses() -> dict[str, str]:
    """The pages, by the names of their pictures."""
    failed = TaskRecord.objects.filter(last_exception="shop.errors.CardDeclined").first()
    bulk, schedule, startup = (
        f"{model._meta.model_name}/{model._default_manager.get_queryset()[0].pk}/change/"
        for model in (BulkAction, Schedule, StartupRun)
    )
    gate = f"gate/{Gate.objects.get(name='narrow').pk}/change/"
    assert failed is not None
    return {
        "overview": "",
        "tasks": "taskrecord/",
        "tasks-failed": "taskrecord/?state=failed",
        "tasks-stuck": "taskrecord/?state=stuck",
        "task": f"taskrecord/{failed.pk}/change/",
        "failures": "taskrecord/failures/?span=7d",
        "failures-by-error": "taskrecord/failures/?span=all&by=error",
        "queues": "taskrecord/queues/",
        "queue": "taskrecord/queue/?queue=default",
        "task-of-code": f"taskrecord/task/?name={failed.name}",
        "worker": f"taskrecord/worker/?id={failed.errors[-1]['worker']}",
        "rejected": "taskrecord/rejected/?queue=mail",
        "workers": "taskrecord/workers/",
        "enqueue": "taskrecord/enqueue/",
        "reschedule": f"taskrecord/{TaskRecord.objects.queued().filter(group='')[0].pk}/reschedule/",
        "bulk-question": "taskrecord/bulk/?kind=delete&state=failed",
        "bulk-list": "bulkaction/",
        "bulk": bulk,
        "gates": "gate/",
        "gate": gate,
        "pauses": "pause/",
        "schedules": "schedule/",
        "schedule": schedule,
        "startup-runs": "startuprun/",
        "startup-run": startup,
    }


def faults(person: Person) -> list[Any]:
    """What is wrong with the page that is shown."""
    found: list[Any] = []
    wide = person.browser.execute_script(
        "return document.documentElement.scrollWidth > document.documentElement.clientWidth + 1"
    )
    if wide:
        found.append("scrolls sideways")
    if not person.browser.execute_script("return document.querySelectorAll('h1').length"):
        found.append("has no heading")
    found += [
        entry["message"]
        for entry in person.browser.get_log("browser")
        if entry["level"] == "SEVERE" and "favicon" not in entry["message"]
    ]
    hosts = person.browser.execute_script(
        "return [...new Set(performance.getEntriesByType('resource').map((each) => new URL(each.name).host))]"
    )
    return found + [f"asks {host}" for host in hosts if host and host not in person.site]


def violations(browser: Chrome, not_ours: list[list[str]]) -> list[Any]:
    """What axe finds on the page that is shown, except in the elements that are not ours."""
    browser.execute_script(Path(AXE).read_text())
    return list(browser.execute_async_script(RUN_AXE, TAGS, not_ours))


def of_width(person: Person, width: int) -> list[Any]:
    """What is wrong with texts, a list of tasks, or the buttons of a table, in a window of this width."""
    if width == PHONE:
        person.browser.execute_script("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    found: list[Any] = person.browser.execute_script(FIND_CUT, width == PHONE)
    if width == PHONE:
        found += person.browser.execute_script(FIND_SMALL)
    heights = [row["height"] for row in person.places(".model-taskrecord #result_list tbody tr")]
    if width == DESKTOP and heights and max(heights) > HIGHEST_ROW:
        found.append(f"a row of {max(heights)} px")
    if width == PHONE:
        # Names, states and numbers of any length push no button out of reach.
        person.browser.execute_script(LENGTHEN)
        found += [f"out of reach: {each}" for each in person.places(".asyncq-numbers button") if each["right"] > width]
        found += person.browser.execute_script(FIND_PLAIN)
    return found


def looks(site: Person) -> Iterator[tuple[str, int]]:
    """Open every page in each theme, and yield the name of its picture and the width, from wide to narrow."""
    for theme, widths in LOOKS.items():
        for name, address in addresses().items():
            site.width(widths[0])
            site.open(address)
            if name == "overview":
                site.theme(theme)
            for width in widths:
                site.width(width)
                yield f"{name}-{theme}-{width}", width


@pytest.mark.timeout(900)  # each page in several widths, on a machine that may be slow
def test_every_page_is_sound_in_light_and_dark_and_on_a_phone(site: Person) -> None:
    """No text is cut, no page scrolls sideways, the browser has no error and asks no other site."""
    wrong = {}
    for look, width in looks(site):
        site.picture(look)
        if found := [*faults(site), *of_width(site, width)]:
            wrong[look] = found
    assert not wrong, "\n".join(f"{look}: {each}" for look, each in wrong.items())


def test_names_of_any_length_leave_an_error_its_width(person: Person) -> None:
    """On the list of tasks, where each column competes with it."""
    names = {"queue_name": "letters-of-a-customer-in-germany", "gate": "a-gate-with-a-long-name-for-a-customer"}
    names["name"] = "shop.tasks.recalculate_the_prices_of_all_articles_of_a_warehouse"
    retry = {"attempt": 1, "max_attempts": 3, "retry_at": timezone.now() + timedelta(minutes=4)}
    make(**names, **retry, errors=[error(LONG)])
    make(**names, attempt=0, reason=FailureReason.GATE_FULL, retry_at=timezone.now(), last_exception="", errors=[])
    person.open("taskrecord/")
    for width in LOOKS["light"]:
        person.width(width)
        person.picture(f"long-names-{width}")
        assert [*faults(person), *of_width(person, width)] == [], width


@with_axe
@pytest.mark.timeout(900)  # each page in several widths, on a machine that may be slow
def test_every_page_can_be_used_by_everybody(site: Person) -> None:
    """No violation that axe finds."""
    wrong = {}
    for look, width in looks(site):
        if width in (DESKTOP, PHONE) and (found := violations(site.browser, OF_DJANGO)):
            wrong[look] = found
    assert not wrong, "\n".join(f"{look}: {each}" for look, each in wrong.items())


@pytest.fixture
def lost_fleet(person: Person, tmp_path: Path) -> Person:
    """A person whose workers were all killed while one ran a task."""
    with workers(tmp_path, "--processes", "1") as fleet:
        wait_until(lambda: Inspector().workers.all(), "the heartbeat")
        task = tasks.nap_async.enqueue(120)
        # The row says so a moment after the worker does.
        wait_until(lambda: TaskRecord.objects.get(pk=task.id).state == TaskState.RUNNING, "the run")
        wait_until(lambda: Inspector().workers.all()[0].running, "what it runs")
        kill_all([fleet.process.pid, *fleet.children()])
    wait_until(lambda: not Inspector().workers.all(), "the end of the heartbeat")
    wait_until(lambda: fleet_of(HttpRequest()).stuck(), "the mark", 30)
    return person


def looks_of_lost(person: Person) -> Iterator[str]:
    """Open the page of the workers in each look, and yield the name of its picture."""
    for theme, widths in LOOKS.items():
        person.open("taskrecord/workers/")
        person.theme(theme)
        for width in widths:
            person.width(width)
            yield f"workers-lost-{theme}-{width}"


def test_a_killed_fleet_is_seen(lost_fleet: Person) -> None:
    """Its processes are listed as lost with what they ran; the banner says that no worker reports."""
    for look in looks_of_lost(lost_fleet):
        assert "nap_async" in lost_fleet.text("section[aria-labelledby=asyncq-lost]")
        assert "No worker" in lost_fleet.text(".asyncq-banner")
        lost_fleet.picture(look)
        assert faults(lost_fleet) == []


@with_axe
def test_a_killed_fleet_is_seen_by_everybody(lost_fleet: Person) -> None:
    """No violation that axe finds."""
    for look in looks_of_lost(lost_fleet):
        assert violations(lost_fleet.browser, OF_DJANGO) == [], look


FIND_GAPS = """
const all = document.querySelector(".asyncq-panels").getBoundingClientRect(), ends = new Map();
for (const each of document.querySelectorAll(".asyncq-panel, .asyncq-chart-plot")) {
    const place = each.getBoundingClientRect();
    ends.set(place.top, Math.max(place.right, ends.get(place.top) ?? 0));
}
return [...ends.values()].filter((end) => Math.abs(end - all.right) > 1);
"""


def test_the_overview_leaves_no_gap(person: Person) -> None:
    """Its panels fill each of their rows, which is one on a desktop, and the chart is as wide as they are."""
    person.open("?span=7d")
    for width in LOOKS["light"]:
        person.width(width)
        assert person.browser.execute_script(FIND_GAPS) == [], width
        panels = person.places(".asyncq-panel:not(.asyncq-panel-wide)")
        assert width < 1280 or len({each["height"] for each in panels}) == 1


NUMBER = "#asyncq-queues tbody td.asyncq-number a"
# Have the page ask now, and not after five seconds.
EXPECT_SOON = "const now = Date.now; Date.now = () => now() + 6000;"


def test_numbers_stay_alive_until_they_are_paused(person: Person) -> None:
    """The page is not loaded again, what has the focus keeps it, and it says when it was updated."""
    tasks.stamp.using(queue_name="mail").enqueue()
    person.open("taskrecord/queues/")
    assert person.text(NUMBER) == "1"
    person.browser.execute_script("window.isTheSame = true; document.querySelector('.asyncq-navigation a').focus()")
    tasks.stamp.using(queue_name="mail").enqueue()
    person.browser.execute_script(EXPECT_SOON)
    person.wait.until(lambda browser: person.text(NUMBER) == "2")
    assert person.browser.execute_script("return window.isTheSame && document.activeElement.closest('nav') !== null")
    assert "Updated" in person.text(".asyncq-live-text")
    button = person.one(".asyncq-live button")
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    person.wait.until(lambda browser: person.text(".asyncq-live-text") == "Paused")
    tasks.stamp.using(queue_name="mail").enqueue()
    # The page counts what it has asked for; two rounds of its clock pass without another request.
    asked = "return performance.getEntriesByType('resource').filter((each) => each.initiatorType === 'fetch').length"
    before = person.browser.execute_script(asked)
    person.browser.execute_script(EXPECT_SOON)
    person.browser.execute_async_script("setTimeout(arguments[0], 2500)")
    assert person.browser.execute_script(asked) == before and person.text(NUMBER) == "2"
    button.click()
    person.wait.until(lambda browser: person.text(NUMBER) == "3")


def test_the_list_keeps_what_is_ticked_while_its_numbers_change(person: Person) -> None:
    """And the focus in it."""
    make(TaskState.QUEUED)
    person.open("taskrecord/")
    number = "#asyncq-tabs li:nth-child(2) b"
    assert person.text(number) == "1"
    person.one("input.action-select").click()
    make(TaskState.QUEUED)
    person.browser.execute_script(EXPECT_SOON)
    person.wait.until(lambda browser: person.text(number) == "2")
    assert person.one("input.action-select").is_selected() and len(person.all("input.action-select")) == 1
    assert person.browser.execute_script("return document.activeElement.className") == "action-select"


def test_the_page_of_a_task_is_live_until_it_has_finished(person: Person) -> None:
    """What a person has opened stays open; the buttons of the new parts work."""
    record = make(TaskState.RUNNING, worker_ids=["x"], last_attempted_at=timezone.now(), errors=[error()], attempt=2)
    person.open(f"taskrecord/{record.pk}/change/")
    assert "Running" in person.text("#asyncq-state-part")
    person.one("#asyncq-attempts-part summary").click()
    record.progress = {"done": 1, "total": 2, "message": "", "data": {}}
    record.save()
    person.browser.execute_script(EXPECT_SOON)
    person.browser.execute_async_script("setTimeout(arguments[0], 2500)")
    assert person.one("#asyncq-attempts-part details").get_attribute("open") is not None
    person.one("#asyncq-attempts-part summary").click()
    person.browser.execute_script("document.activeElement.blur()")
    record.state, record.finished_at, record.return_value = TaskState.SUCCEEDED, timezone.now(), "all well"
    record.save()
    person.browser.execute_script(EXPECT_SOON)
    person.wait.until(lambda browser: "all well" in person.text("#asyncq-task"))
    assert "Succeeded" in person.text("#asyncq-state-part")
    assert not person.one(".asyncq-live").is_displayed()
    assert all(each.is_displayed() for each in person.all("#asyncq-attempts-part details[open] .asyncq-copy"))


def test_an_operator_stops_the_bleeding_without_javascript(site: Person) -> None:
    """Pause a queue with a note, see it on each page, cancel what waits, retry a group, and resume."""
    site.browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    site.open("")
    assert "Who is working?" in site.text("#content")
    site.open("taskrecord/queues/")
    row = "#asyncq-queues tbody tr:first-child"
    site.press(f"{row} button")
    site.one("#asyncq-reason").send_keys("looking into it")
    site.press("form.asyncq-section button")
    assert "looking into it" in site.text("#asyncq-queues")
    site.open("taskrecord/failures/?span=7d")
    # The first that has failed for good: the latest may be retried by itself.
    count = site.text("#asyncq-failures tr:has(a.asyncq-button) .asyncq-number")
    site.press("#asyncq-failures a.asyncq-button")
    assert f"Retry {count} failed tasks?" in site.text("h1")
    site.press("form.asyncq-section button")
    assert "Retry of many tasks" in site.text("h1")
    site.open("taskrecord/queues/")
    site.press(f"{row} button")
    assert "Resumed" in site.messages()[0]

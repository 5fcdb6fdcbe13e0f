"""The pages of workflows in a real browser: sound in light and dark and on a phone, live, and with their buttons.

Pictures and axe: as in `test_browser_pages`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest

from django_asyncq import chain, group, previous
from django_asyncq.models import TaskRecord, TaskState

from .. import workflow_tasks as tasks
from ..browsing import DESKTOP, PHONE, Person, in_browser
from ..workflow_cases import make_large, work
from .test_browser_pages import LOOKS, OF_DJANGO, faults, of_width, violations, with_axe

pytestmark = [*in_browser, pytest.mark.usefixtures("long_leases")]

# Whether a text in a box of the graph is wider than the box.
FIND_WIDE = """
return [...document.querySelectorAll(".asyncq-box text")].filter(
    (each) => each.getBBox().x + each.getBBox().width > 184
).map((each) => each.textContent);
"""


def workflow_of(result: Any) -> UUID:
    found = TaskRecord.objects.get(id=result.id).workflow_id
    assert found is not None
    return found


@pytest.fixture
def pages() -> dict[str, str]:
    """Workflows in all states, and their pages by the names of their pictures."""
    sums = tasks.total.using(after={"rows": previous}).step()
    doubled = tasks.double.using(after={"value": previous}).step()
    chain(group([tasks.load.step(number) for number in (1, 2)]), sums).enqueue()
    work()
    stages = group([chain(tasks.load.step(number), tasks.double.step(number)) for number in (1, 2, -1, 4)])
    end: Any = chain(stages, tasks.note.using(after_failure="run").step("all"), doubled).enqueue()
    mixed = workflow_of(end)
    work()
    more = tasks.note.using(after=[end]).enqueue("later")
    tasks.note.using(after=[more]).enqueue("at the end")
    TaskRecord.objects.filter(id=more.id).update(state=TaskState.RUNNING, worker_ids=["host:1:2:3"])
    large = make_large(300)
    done = TaskRecord.objects.filter(workflow_id=large).order_by("id").values_list("id", flat=True)[:180]
    for row in TaskRecord.objects.filter(id__in=list(done)):
        row.state, row.finished_at, row.attempt = TaskState.SUCCEEDED, row.enqueued_at, 1
        row.save()
    note = TaskRecord.objects.filter(workflow_id=mixed, name__endswith="note").earliest("id")
    return {
        "workflows": "taskrecord/workflows/",
        "workflow": f"taskrecord/workflow/?id={mixed}",
        "workflow-large": f"taskrecord/workflow/?id={large}",
        "workflow-task": f"taskrecord/{note.pk}/change/",
    }


def in_boxes(person: Person) -> list[str]:
    """The texts in the boxes of the graph."""
    script = "return [...document.querySelectorAll('.asyncq-box text')].map((each) => each.textContent)"
    return list(person.browser.execute_script(script))


def looks(person: Person, pages: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Open every page in each theme, and yield the name of its picture and the width."""
    for theme, widths in LOOKS.items():
        for number, (name, address) in enumerate(pages.items()):
            person.width(widths[0])
            person.open(address)
            if not number:
                person.theme(theme)
            for width in (*widths, *([PHONE] if theme == "dark" else [])):
                person.width(width)
                yield f"{name}-{theme}-{width}", width


@pytest.mark.slow
def test_every_page_of_workflows_is_sound(person: Person, pages: dict[str, str]) -> None:
    """No text is cut, no page scrolls sideways, the graph scrolls in its own box, and its texts fit into theirs."""
    wrong = {}
    for look, width in looks(person, pages):
        person.picture(look)
        found = [*faults(person), *of_width(person, width), *person.browser.execute_script(FIND_WIDE)]
        if found:
            wrong[look] = found
    assert not wrong, "\n".join(f"{look}: {each}" for look, each in wrong.items())


@with_axe
@pytest.mark.slow
def test_every_page_of_workflows_can_be_used_by_everybody(person: Person, pages: dict[str, str]) -> None:
    """No violation that axe finds."""
    wrong = {}
    for look, width in looks(person, pages):
        if width in (DESKTOP, PHONE) and (found := violations(person.browser, OF_DJANGO)):
            wrong[look] = found
    assert not wrong, "\n".join(f"{look}: {each}" for look, each in wrong.items())


def test_a_workflow_is_live_and_is_operated(person: Person) -> None:
    """The graph changes by itself; the rest is cancelled, and comes back."""
    id = workflow_of(chain(tasks.load.step(1), tasks.note.step("x"), tasks.note.step("y")).enqueue())
    person.open(f"taskrecord/workflow/?id={id}")
    assert in_boxes(person)[::2] == ["load", "note", "note"]
    TaskRecord.objects.filter(id=id).update(state=TaskState.RUNNING)
    person.wait.until(lambda _: "Running" in in_boxes(person))
    TaskRecord.objects.filter(id=id).update(state=TaskState.QUEUED)
    person.press_button("Cancel the rest")
    person.type("reason", "enough")
    person.press_button("Cancel 3 tasks")
    assert person.messages() == ["3 tasks were cancelled."]
    person.press_button("Retry what failed")
    person.press_button("Retry 3 failed tasks")
    assert len(person.messages()) == 1 and person.messages()[0].startswith("3 tasks queued again")
    assert TaskRecord.objects.filter(state=TaskState.QUEUED).count() == 3

"""Convert tasks and gates to plain values for the JSON API and the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db.models import Count, Max, Q, QuerySet, TextField, Value, Window
from django.db.models.fields.json import KT
from django.db.models.functions import Coalesce
from django.urls import reverse
from django.utils import timezone

from django_asyncq.exceptions import BrokerUnavailable
from django_asyncq.models import FailureReason, TaskRecord, TaskState
from django_asyncq.observe.inspector import Inspector

from .catalogue import MODELS
from .gates import Meter
from .orders import NOBODY
from .tasks import make_film, render

STATES = {
    "queued": "Queued",
    "running": "Running",
    "succeeded": "Succeeded",
    "retrying": "Retrying",
    "failed": "Failed",
    "cancelled": "Cancelled",
}
# What a person may cancel.
LIVE = ("queued", "running", "retrying")
# How many visitors and films the page shows, and how far back it counts renders.
MOST_VISITORS = 6
MOST_FILMS = 3
LATELY = timedelta(minutes=10)


def renders() -> QuerySet[TaskRecord]:
    """Return the studio's tasks, newest first. Ids sort by time of creation."""
    return TaskRecord.objects.filter(name=render.module_path).order_by("-id")


def state_of(record: TaskRecord) -> str:
    """Return the state as a key of STATES; FAILED with `retry_at` is `retrying`, or it may be `cancelled`."""
    if record.state == TaskState.FAILED and record.retry_at is not None:
        return "retrying"
    if record.state == TaskState.FAILED and record.reason == FailureReason.CANCELLED:
        return "cancelled"
    return TaskState(record.state).name.lower()


def gallery(most: int) -> tuple[list[TaskRecord], dict[str, int]]:
    """Return the newest renders, and how many there are in each state.

    One statement sees one moment: each of its rows has the counts of all renders. With two statements the cards and
    the counts above them would contradict each other while renders run.
    """
    failed, cancelled = Q(state=TaskState.FAILED), Q(reason=FailureReason.CANCELLED, retry_at=None)
    conditions = {
        "queued": Q(state=TaskState.QUEUED),
        "running": Q(state=TaskState.RUNNING),
        "succeeded": Q(state=TaskState.SUCCEEDED),
        "retrying": failed & Q(retry_at__isnull=False),
        "failed": failed & Q(retry_at=None) & ~cancelled,
        "cancelled": failed & cancelled,
    }
    counts = {f"count_{state}": Window(Count("id", filter=condition)) for state, condition in conditions.items()}
    found = list(renders().annotate(**counts)[:most])
    return found, {state: getattr(found[0], f"count_{state}") if found else 0 for state in conditions}


@dataclass(frozen=True, slots=True)
class Visitor:
    """What has become of what a visitor has ordered lately. done: succeeded, failed or cancelled, of all."""

    name: str
    done: int
    total: int

    @property
    def text(self) -> str:
        """Describe it in words."""
        return f"{self.done} of {self.total} done"


def visitors() -> list[Visitor]:
    """Return the visitors of the last minutes, the one who ordered last in front."""
    lately = TaskRecord.objects.enqueued_since(timezone.now() - LATELY).filter(name=render.module_path)
    named = lately.order_by().annotate(visitor=Coalesce(KT("kwargs__visitor"), Value(NOBODY), output_field=TextField()))
    is_done = Q(state=TaskState.SUCCEEDED) | Q(state=TaskState.FAILED, retry_at=None)
    counts = {"done": Count("id", filter=is_done), "total": Count("id"), "latest": Max("enqueued_at")}
    found = named.values("visitor").annotate(**counts).order_by("-latest")[:MOST_VISITORS]
    return [Visitor(each["visitor"], each["done"], each["total"]) for each in found]


def describe_visitor(visitor: Visitor) -> dict[str, Any]:
    """Return a visitor as JSON."""
    return {"name": visitor.name, "done": visitor.done, "total": visitor.total, "text": visitor.text}


@dataclass(frozen=True, slots=True)
class Film:
    """A film and how far its steps are. failed: steps that have failed; those behind them do not run."""

    id: UUID
    done: int
    failed: int
    total: int

    @property
    def name(self) -> str:
        """A short name: the beginning of the id is the time, and its end is random."""
        return f"Film {str(self.id)[-4:]}"

    @property
    def is_over(self) -> bool:
        """Whether the film can be seen."""
        return self.done == self.total

    @property
    def text(self) -> str:
        """Describe it in words."""
        return f"{self.done} of {self.total} steps" + (f", {self.failed} failed" if self.failed else "")

    @property
    def url(self) -> str:
        """Return where the film is; "" until it is there."""
        return reverse("film", args=[self.id]) if self.is_over else ""


def films() -> list[Film]:
    """Return the newest films. All steps of one have its workflow."""
    newest = list(TaskRecord.objects.filter(name=make_film.module_path).order_by("-id")[:MOST_FILMS])
    steps = TaskRecord.objects.filter(workflow_id__in=[each.workflow_id for each in newest]).order_by()
    is_done, has_failed = Q(state=TaskState.SUCCEEDED), Q(state=TaskState.FAILED, retry_at=None)
    counts = {"done": Count("id", filter=is_done), "failed": Count("id", filter=has_failed), "total": Count("id")}
    found = {each.pop("workflow_id"): each for each in steps.values("workflow_id").annotate(**counts)}
    return [Film(each.id, **found[each.workflow_id]) for each in newest if each.workflow_id in found]


def describe_film(film: Film) -> dict[str, Any]:
    """Return a film as JSON. url: "" until it can be seen."""
    counted = {"done": film.done, "failed": film.failed, "total": film.total}
    return {"id": str(film.id), "name": film.name, "text": film.text, "url": film.url, **counted}


def places(records: Iterable[TaskRecord]) -> dict[UUID, int]:
    """Return the places in line of those that wait; none while Redis is unreachable, since only it knows the order."""
    waiting = [record.id for record in records if state_of(record) in ("queued", "retrying")]
    try:
        return Inspector().tasks.places_in_line(waiting) if waiting else {}
    except BrokerUnavailable:
        return {}


def ordinal(number: int) -> str:
    """Return a number as in "3rd in line"."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{ending}"


def describe_all(records: Sequence[TaskRecord]) -> list[dict[str, Any]]:
    """Return renders as JSON, those that wait with their places in line."""
    found = places(records)
    return [describe(record, found.get(record.id)) for record in records]


def state_counts() -> dict[str, int]:
    """Return how many renders there are in each state."""
    return gallery(1)[1]


def describe(record: TaskRecord, place: int | None = None) -> dict[str, Any]:
    """Return a render as JSON. `image_url` is None until the picture exists. place: in line, of one that waits."""
    model_name = record.args[0] if record.args else ""
    model = MODELS.get(model_name)
    state = state_of(record)
    result = record.return_value if isinstance(record.return_value, dict) else {}
    return {
        "id": str(record.id),
        "model": model_name,
        "title": model.title if model else model_name,
        "state": state,
        "state_text": STATES[state],
        "note": note_of(record, state, result.get("seconds"), place),
        "visitor": record.kwargs.get("visitor") or NOBODY,
        "place": place,
        "attempt": record.attempt,
        "max_attempts": record.max_attempts,
        "lost_workers": lost_workers(record),
        "progress": progress_of(record, state),
        "cancel_url": reverse("cancel", args=[record.id]) if state in LIVE else None,
        **{name: record.kwargs.get(name) for name in ("seed", "size", "palette")},
        "seconds": result.get("seconds"),
        "error": error_of(record),
        "enqueued_at": record.enqueued_at.isoformat(),
        "finished_at": record.finished_at.isoformat() if record.finished_at else None,
        "status_url": reverse("render", args=[record.id]),
        "image_url": reverse("image", args=[record.id]) if state == "succeeded" else None,
    }


def progress_of(record: TaskRecord, state: str) -> float | None:
    """Return how far a running render is, from 0 to 1; None when that is not known."""
    if state != "running":
        return None
    # The result knows a newer value than the row, which is written every few seconds only.
    found = render.get_result(str(record.id)).progress
    return found["done"] / found["total"] if found and found["total"] else None


def error_of(record: TaskRecord) -> str:
    """Return the error of the last attempt in one line, or an empty text."""
    if not record.errors:
        return ""
    last = record.errors[-1]
    return f"{last['exception'].rpartition('.')[2]}: {last['message']}".split("\n", 1)[0][:200]


def lost_workers(record: TaskRecord) -> int:
    """Return how many worker processes died while they ran the task, whether or not it was to blame."""
    return sum(error["exception"].endswith(".WorkerLost") for error in record.errors)


def note_of(record: TaskRecord, state: str, seconds: float | None, place: int | None = None) -> str:
    """Describe the state in a few words: whose it is, place in line, error, attempts, worker crashes, duration."""
    parts = []
    if (visitor := record.kwargs.get("visitor") or NOBODY) != NOBODY:
        parts.append(f"for {visitor}")
    if record.waits_for_slot:
        parts.append("waits for a slot")
    if place is not None:
        parts.append(f"{ordinal(place)} in line")
    if record.cancel_requested_at is not None and state == "running":
        parts.append("asked to stop")
    if state == "failed" or (state == "retrying" and record.errors):
        parts.append(error_of(record))
    if state == "retrying" and record.retry_at is not None:
        wait = max(0, round((record.retry_at - timezone.now()).total_seconds()))
        parts.append(f"attempt {record.attempt + 1} of {record.max_attempts} {f'in {wait} s' if wait else 'now'}")
    elif record.attempt > 1:
        parts.append(f"attempt {record.attempt} of {record.max_attempts}")
    if lost_workers(record):
        parts.append("its worker crashed" + ("; recovered" if state == "succeeded" else ""))
    if seconds is not None:
        parts.append(f"{seconds:.1f} s")
    return " · ".join(parts)


def describe_meter(meter: Meter) -> dict[str, Any]:
    """Return a model and the occupancy of its gate as JSON. scale: length of the drawn meter, 0 without a limit."""
    return {
        "name": meter.model.name,
        "title": meter.model.title,
        "about": meter.model.about,
        "limit": meter.limit,
        "occupancy": meter.occupancy,
        "waiting": meter.waiting,
        "text": meter.text,
        "is_full": meter.is_full,
        "scale": max(meter.limit, 0),
        "expected_seconds": meter.model.expected_seconds,
    }

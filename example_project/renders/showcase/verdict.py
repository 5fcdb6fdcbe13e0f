"""Check the results of a demo against rows, files and samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, UnidentifiedImageError

from django_asyncq.models import Gate, TaskRecord, TaskState

from ..catalogue import MODELS
from ..presentation import error_of, lost_workers, renders, state_of
from ..tasks import MAX_ATTEMPTS, glitches, image_path
from .observation import Observer
from .traffic import Tally
from .visitor import CANCELLED_SEED, TWICE_SEED, Visit


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. failures: reasons why it failed; empty when it passed."""

    statement: str
    failures: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the statement is true."""
        return not self.failures


@dataclass(frozen=True, slots=True)
class Outcome:
    """The tasks of a finished demo. records: of accepted orders. strays: of refused orders."""

    records: tuple[TaskRecord, ...]
    strays: tuple[TaskRecord, ...]

    @property
    def retried(self) -> list[TaskRecord]:
        """The tasks that took more than one attempt."""
        return [record for record in self.records if record.attempt > 1]

    @property
    def recovered(self) -> list[TaskRecord]:
        """The tasks that succeeded after their worker crashed."""
        return [r for r in self.records if lost_workers(r) and r.state == TaskState.SUCCEEDED]


def outcome(tally: Tally) -> Outcome:
    """Read the tasks, oldest first, without those that somebody ordered on the page in the meantime."""
    rows = list(renders().order_by("id"))
    ours = tuple(row for row in rows if str(row.id) in tally.accepted)
    others = [row for row in rows if str(row.id) not in tally.accepted]
    return Outcome(ours, tuple(row for row in others if row.kwargs.get("seed") in tally.seeds))


def check_all(tally: Tally, observer: Observer, outcome: Outcome, visit: Visit) -> list[Finding]:
    """Run every check."""
    return [
        *_about_tasks(tally, outcome),
        *_about_gates(tally, observer, visit),
        *_about_the_kill(observer, outcome),
        *_about_the_visit(visit),
    ]


def _about_tasks(tally: Tally, outcome: Outcome) -> list[Finding]:
    rows = {str(record.id) for record in outcome.records}
    possible = [record for record in outcome.records if not MODELS[record.args[0]].is_impossible]
    flaky = [record for record in possible if MODELS[record.args[0]].is_flaky]
    impossible = [record for record in outcome.records if MODELS[record.args[0]].is_impossible]
    return [
        Finding("every accepted order has a task", tuple(id for id in tally.accepted if id not in rows)),
        Finding("no refused order has a task", tuple(str(record.id) for record in outcome.strays)),
        Finding("every possible render succeeded and left a picture", _each(possible, _not_painted)),
        Finding("the endless staircase failed and was not retried", _each(impossible, _not_refused)),
        Finding("every flaky render took one attempt more than it lost", _each(flaky, _wrong_attempts)),
    ]


def _about_gates(tally: Tally, observer: Observer, visit: Visit) -> list[Finding]:
    limits = dict(Gate.objects.values_list("name", "limit"))
    without_header, unavailable = tally.retry_after_missing, tally.unavailable
    held = observer.slots_still_held({*tally.accepted, visit.twice, visit.cancelled})
    return [
        Finding("no gate had more tasks queued or running than its limit", _over(observer.max_rows, limits)),
        Finding("no gate held more slots in Redis than its limit", _over(observer.max_slots, limits)),
        Finding("every slot was released", tuple(f"{gate}: {ids}" for gate, ids in held.items())),
        Finding("full gates refused orders", () if tally.refused else ("no order was refused",)),
        Finding("every refusal had Retry-After", (f"{without_header} had none",) if without_header else ()),
        Finding(
            "the site answered only 202 or 429",
            (*tally.unexpected, *([f"503: {unavailable}"] if unavailable else [])),
        ),
    ]


def _about_the_kill(observer: Observer, outcome: Outcome) -> list[Finding]:
    kill = observer.kill
    if kill is None:
        return [Finding("a worker was killed during a render", ("no slow render was seen running",))]
    recovered = {str(record.id) for record in outcome.recovered}
    # A body that had just ended leaves no error: its outcome died unwritten with the process, and it ran once more.
    records = [record for record in outcome.records if str(record.id) in kill.task_ids]
    recovered.update(str(each.id) for each in records if each.worker_ids and each.worker_ids[-1] != kill.worker_id)
    return [
        Finding("a worker was killed during a render"),
        Finding(
            "another worker ran the renders of the killed one",
            tuple(f"{id} has no lost worker in its row" for id in kill.task_ids if id not in recovered),
        ),
    ]


def _about_the_visit(visit: Visit) -> list[Finding]:
    status, answer = visit.second_answer
    once, cancelled = (list(renders().filter(kwargs__seed=seed)) for seed in (TWICE_SEED, CANCELLED_SEED))
    named = status == 409 and answer.get("id") == visit.twice
    return [
        Finding(
            "the second order of a picture got 409 and the first one's id", () if named else (f"{status} {answer}",)
        ),
        Finding("a picture that was ordered twice was rendered once", _each(once, _not_painted) + _count(once)),
        Finding(
            "a render that was cancelled stopped and left no picture",
            _each(cancelled, _not_cancelled) + _count(cancelled),
        ),
    ]


def _count(records: list[TaskRecord]) -> tuple[str, ...]:
    return () if len(records) == 1 else (f"{len(records)} renders",)


def _not_cancelled(record: TaskRecord) -> str:
    if state_of(record) != "cancelled" or record.attempt != 1:
        return f"{state_of(record)}, {record.attempt} attempts"
    return "it left a picture" if image_path(record.id).exists() else ""


def _each(records: list[TaskRecord], look: Callable[[TaskRecord], str]) -> tuple[str, ...]:
    found = ((record, look(record)) for record in records)
    return tuple(f"{record.args[0]} {record.id!s}: {what}" for record, what in found if what)


def _not_painted(record: TaskRecord) -> str:
    if record.state != TaskState.SUCCEEDED:
        return f"{state_of(record)} {error_of(record)}"
    try:
        with Image.open(image_path(record.id)) as image:
            image.load()
            size = record.kwargs["size"]
            return "" if image.size == (size, size) else f"the picture is {image.size}"
    except (OSError, UnidentifiedImageError) as error:
        return f"no picture: {error}"


def _not_refused(record: TaskRecord) -> str:
    if state_of(record) != "failed" or not error_of(record).startswith("ValueError"):
        return f"{state_of(record)} {error_of(record)}"
    return "" if record.attempt == 1 else f"{record.attempt} attempts"


def _wrong_attempts(record: TaskRecord) -> str:
    id = str(record.id)
    expected = next(n for n in range(1, MAX_ATTEMPTS + 1) if not glitches(id, n))
    return "" if record.attempt == expected else f"{record.attempt} attempts, not {expected}"


def _over(most: dict[str, int], limits: dict[str, int]) -> tuple[str, ...]:
    return tuple(f"{gate}: {held} of {limits[gate]}" for gate, held in most.items() if held > limits[gate])

"""What must have come true, each statement checked against rows, files and samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, UnidentifiedImageError

from django_asyncq.models import Gate, TaskRecord, TaskState

from ..catalogue import MODELS
from ..showing import error_of, renders, state_of
from ..tasks import MAX_ATTEMPTS, glitches, image_path
from .traffic import Tally
from .watching import Watch


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement. against: what speaks against it; none, and it held."""

    statement: str
    against: tuple[str, ...] = ()

    @property
    def held(self) -> bool:
        """Whether the statement is true."""
        return not self.against


@dataclass(frozen=True, slots=True)
class Outcome:
    """The rows of a finished demo. records: of its accepted orders. strays: of orders that were refused."""

    records: tuple[TaskRecord, ...]
    strays: tuple[TaskRecord, ...]

    @property
    def retried(self) -> list[TaskRecord]:
        """Tasks that took more than one attempt."""
        return [record for record in self.records if record.attempt > 1]

    @property
    def recovered(self) -> list[TaskRecord]:
        """Tasks that lost a worker and succeeded all the same."""
        return [r for r in self.records if r.crash_count > 0 and r.state == TaskState.SUCCEEDED]


def outcome(tally: Tally) -> Outcome:
    """Read the rows, the oldest first. What somebody ordered on the page meanwhile is left out."""
    rows = list(renders().order_by("id"))
    ours = tuple(row for row in rows if str(row.id) in tally.accepted)
    others = [row for row in rows if str(row.id) not in tally.accepted]
    return Outcome(ours, tuple(row for row in others if row.kwargs.get("seed") in tally.seeds))


def judge(tally: Tally, watch: Watch, outcome: Outcome) -> list[Finding]:
    """Return every statement with what speaks against it."""
    return [*_about_tasks(tally, outcome), *_about_gates(tally, watch), *_about_the_kill(watch, outcome)]


def _about_tasks(tally: Tally, outcome: Outcome) -> list[Finding]:
    rows = {str(record.id) for record in outcome.records}
    possible = [record for record in outcome.records if not MODELS[record.args[0]].is_impossible]
    flaky = [record for record in possible if MODELS[record.args[0]].is_flaky]
    impossible = [record for record in outcome.records if MODELS[record.args[0]].is_impossible]
    return [
        Finding("every accepted order has a row", tuple(id for id in tally.accepted if id not in rows)),
        Finding("no refused order has one", tuple(str(record.id) for record in outcome.strays)),
        Finding("every possible render succeeded and left a picture", _each(possible, _not_painted)),
        Finding("the endless staircase failed for good, without a retry", _each(impossible, _not_refused)),
        Finding("a flaky render took exactly the attempts it lost, and one", _each(flaky, _wrong_attempts)),
    ]


def _about_gates(tally: Tally, watch: Watch) -> list[Finding]:
    limits = dict(Gate.objects.values_list("name", "limit"))
    silent, away = tally.retry_after_missing, tally.unavailable
    left = watch.slots_left_over(tally.accepted)
    return [
        Finding("no gate held more rows than its limit", _over(watch.most_rows, limits)),
        Finding("no gate held more slots in Redis than its limit", _over(watch.most_slots, limits)),
        Finding("every slot was given back", tuple(f"{gate}: {ids}" for gate, ids in left.items())),
        Finding("the gates refused what they could not hold", () if tally.refused else ("nothing was refused",)),
        Finding("every refusal said when to come back", (f"{silent} without Retry-After",) if silent else ()),
        Finding(
            "the site answered 202 or 429 and nothing else",
            (*tally.strange, *([f"{away} times 503"] if away else [])),
        ),
    ]


def _about_the_kill(watch: Watch, outcome: Outcome) -> list[Finding]:
    kill = watch.kill
    if kill is None:
        return [Finding("a worker was killed in mid-render", ("no slow render was seen running",))]
    recovered = {str(record.id) for record in outcome.recovered}
    return [
        Finding("a worker was killed in mid-render"),
        Finding(
            "what it was painting was painted again",
            tuple(f"{id} has no lost worker on its row" for id in kill.task_ids if id not in recovered),
        ),
    ]


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

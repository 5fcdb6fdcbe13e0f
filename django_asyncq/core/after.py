"""What a call waits for: the results in `using(after=…)`, as the tasks that must finish before it.

Decides from the values alone, and reads no store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from uuid import UUID

from ..exceptions import InvalidOption
from . import compat

AfterFailure = Literal["fail", "run"]
AFTER_FAILURE = ("fail", "run")
# Of one task. Each is a row that is read, and in part locked, when the task is enqueued.
MOST_PARENTS = 10_000
# The position of a value that is not one of a list.
ALONE = -1
GIVE = "give a list of results, or a dict of names of parameters and results"


class Previous:
    """The step before in a chain, whose value a step wants: `after={"rows": previous}`."""

    def __repr__(self) -> str:
        return "previous"


previous = Previous()


class Parent(NamedTuple):
    """A task that must finish first. backend: its alias in TASKS."""

    id: UUID
    backend: str


class After(NamedTuple):
    """Tasks that a call waits for. name: of the parameter that gets their values; "" for none.

    parents: `previous` stands alone. is_list: whether the parameter gets a list.
    """

    name: str
    parents: tuple[Parent | Previous, ...]
    is_list: bool


class Edge(NamedTuple):
    """The same for one parent and one parameter, as a row of `TaskEdge` has it."""

    parent: Parent
    name: str
    position: int
    runs_anyway: bool


def checked_after(after: Any) -> tuple[After, ...]:
    """Return what `using(after=…)` asks for. Raises: InvalidOption, which says what to give."""
    if isinstance(after, tuple) and after and all(isinstance(each, After) for each in after):
        return after
    if isinstance(after, Mapping):
        found = tuple(_named(name, value) for name, value in after.items())
    elif isinstance(after, list | tuple):
        found = (After("", tuple(_parent(each, "after") for each in after), is_list=False),) if after else ()
    else:
        raise InvalidOption(f"after={after!r} is not valid: {GIVE}")
    count = sum(len(each.parents) for each in found)
    if count > MOST_PARENTS:
        raise InvalidOption(
            f"after=… has {count:,} results, more than {MOST_PARENTS:,}: have tasks between collect some of them each"
        )
    return found


def _named(name: Any, value: Any) -> After:
    if not isinstance(name, str) or not name.isidentifier():
        raise InvalidOption(f"after={{{name!r}: …}} is not valid: the name is that of a parameter of the function")
    if isinstance(value, Previous):
        return After(name, (value,), is_list=False)
    if isinstance(value, list | tuple):
        return After(name, tuple(_parent(each, f"after[{name!r}]") for each in value), is_list=True)
    return After(name, (_parent(value, f"after[{name!r}]"),), is_list=False)


def _parent(result: Any, where: str) -> Parent:
    if isinstance(result, Previous):
        raise InvalidOption(f"{where} holds `previous` in a list: give it alone, as after={{'rows': previous}}")
    if not isinstance(result, compat.TaskResult):
        raise InvalidOption(f"{where} holds {result!r}, which is no result: give what enqueue() has returned")
    try:
        return Parent(UUID(result.id), result.backend)
    except (ValueError, TypeError, AttributeError):
        raise InvalidOption(
            f"{where} holds the result {result.id!r} of the backend {result.backend!r}, which has no rows: only a "
            f"task of django_asyncq can be waited for"
        ) from None


def placeholders(after: Sequence[After]) -> dict[str, Any]:
    """Return what stands for the values of parents until these are known, by the names of the parameters."""
    return {each.name: [] if each.is_list else None for each in after if each.name}


def edges_of(task: Any, after: Sequence[After]) -> tuple[Edge, ...]:
    """Return the edges of a call of a task. Raises: InvalidOption for `previous`, which only a chain knows."""
    return tuple(_edges(task, after))


def _edges(task: Any, after: Sequence[After]) -> Iterator[Edge]:
    runs_anyway = task.after_failure == "run"
    for each in after:
        # One task may stand several times in a list without names; it is waited for once.
        for position, parent in enumerate(each.parents if each.name else dict.fromkeys(each.parents)):
            if isinstance(parent, Previous):
                raise InvalidOption(
                    f"task {task.module_path}: after={{{each.name!r}: previous}} stands for the step before: use it "
                    f"in chain(…), and not in its first step"
                )
            yield Edge(parent, each.name, position if each.is_list else ALONE, runs_anyway)


def check_after(task: Any, alias: str, after: Sequence[After]) -> None:
    """Refuse what a call of a task cannot wait for. alias: that of the call. Raises: InvalidOption."""
    where = f"task {task.module_path}"
    if not after:
        if task.after_failure != "fail":
            raise InvalidOption(
                f"{where}: after_failure={task.after_failure!r} needs after=…, which says what may fail"
            )
        return
    for each in after:
        for parent in each.parents:
            if isinstance(parent, Parent) and parent.backend != alias:
                raise InvalidOption(
                    f"{where}: after=… holds task {parent.id} of the backend {parent.backend!r}, and this one is of "
                    f"{alias!r}: tasks wait for those of their own alias in TASKS"
                )
        if each.name and task.is_remote:
            raise InvalidOption(
                f"{where}: after={{{each.name!r}: …}} gives values to a task of another program, whose message is "
                f"written now: write after=[…]"
            )
    if task.unique and task.on_duplicate in ("replace", "follow"):
        raise InvalidOption(
            f"{where}: on_duplicate={task.on_duplicate!r} does not go with after=…: an existing task has its own "
            f'order; give "reject" or "return"'
        )

"""Enqueue calls that wait for each other: `chain` and `group`, which are a few lines over `using(after=…)`.

All of it is one transaction, in a few statements: each step has its row at once, and those that wait for no other one
begin after the commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, overload
from uuid import UUID

from asgiref.sync import sync_to_async

from .core import compat
from .core.after import MOST_PARENTS, After, Parent, Previous
from .core.calls import blocking
from .core.names import uuid7
from .exceptions import InvalidOption
from .tasks import Step

if TYPE_CHECKING:
    from .results import AsyncqResult

R = TypeVar("R")
# What `enqueue` returns.
Results = TypeVar("Results")
# Of one workflow: each is a row in a table, and a group behind a group has one for each pair.
MOST_EDGES = 100_000


@dataclass(frozen=True, slots=True)
class Workflow(Generic[Results]):
    """Steps that wait for each other; made by `chain` and `group`, and enqueued once or several times.

    parts: of a chain: one after the other; of a group: at the same time. then: the part behind a group.
    """

    parts: tuple[Part, ...]
    is_group: bool
    then: Part | None = None

    @blocking("workflow.aenqueue")
    def enqueue(self) -> Results:
        """Enqueue all steps, or none; return the result of the last one, and for a group without `then` a list.

        Raises: as `task.enqueue`; InvalidOption for steps that cannot wait for each other.
        """
        nodes: list[_Node] = []
        last = _place(self, None, nodes)
        _check(nodes)
        backend: Any = compat.task_backends[nodes[0].task.backend]
        if not hasattr(backend, "enqueue_steps"):
            raise InvalidOption(
                f"chain() and group() need rows, and the backend of {nodes[0].task.backend!r} has none: use a backend "
                f"of django_asyncq; in tests django_asyncq.testing.TestBackend"
            )
        results = {result.id: result for result in backend.enqueue_steps(nodes)}
        found: Any = [results[str(id)] for id in last.ids]
        return found if last.is_list else found[0]  # type: ignore[no-any-return]

    async def aenqueue(self) -> Results:
        """Do what `enqueue` does, in the thread that holds the caller's database connection."""
        return await sync_to_async(self.enqueue, thread_sensitive=True)()


Part = Step[Any] | Workflow[Any]


@overload
def chain(first: Part, last: Step[R], /) -> Workflow[AsyncqResult[..., R]]: ...


@overload
def chain(first: Part, second: Part, last: Step[R], /) -> Workflow[AsyncqResult[..., R]]: ...


@overload
def chain(*parts: Part) -> Workflow[Any]: ...


def chain(*parts: Part) -> Workflow[Any]:
    """Return a workflow in which each part begins when the part before has finished.

    parts: `task.step(…)`, chains and groups. The value of the part before is what `after={"name": previous}` stands
    for in the options of a step: for a group the list of its values. Raises: InvalidOption.
    """
    return Workflow(_checked("chain", parts), is_group=False)


@overload
def group(parts: Sequence[Part], *, then: Step[R]) -> Workflow[AsyncqResult[..., R]]: ...


@overload
def group(parts: Sequence[Step[R]], *, then: None = None) -> Workflow[list[AsyncqResult[..., R]]]: ...


@overload
def group(parts: Sequence[Part], *, then: Part | None = None) -> Workflow[Any]: ...


def group(parts: Sequence[Part], *, then: Part | None = None) -> Workflow[Any]:
    """Return a workflow whose parts run at the same time. then: what begins when all of them have finished.

    parts: `task.step(…)`, chains and groups. Raises: InvalidOption.
    """
    if then is not None:
        _checked("group", (then,))
    return Workflow(_checked("group", tuple(parts)), is_group=True, then=then)


def _checked(name: str, parts: tuple[Any, ...]) -> tuple[Part, ...]:
    if not parts:
        raise InvalidOption(f"{name}() of nothing: give at least one step, such as task.step(1)")
    for part in parts:
        if not isinstance(part, Step | Workflow):
            raise InvalidOption(f"{name}() takes task.step(…), chain(…) and group(…), not {part!r}")
    return parts


class _Node(NamedTuple):
    id: UUID
    task: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    after: tuple[After, ...]


class _Last(NamedTuple):
    """The steps with which a part ends. is_list: whether their values are a list, as those of a group."""

    ids: list[UUID]
    is_list: bool


def _place(part: Part, before: _Last | None, nodes: list[_Node]) -> _Last:
    """Add the steps of a part behind those before it; return with which it ends."""
    if isinstance(part, Step):
        id = uuid7()
        nodes.append(_Node(id, part.task, part.args, part.kwargs, tuple(_afters(part.task, before))))
        return _Last([id], is_list=False)
    if not part.is_group:
        last = before
        for each in part.parts:
            last = _place(each, last, nodes)
        assert last is not None  # noqa: S101 - it has at least one part
        return last
    ids = [id for each in part.parts for id in _place(each, before, nodes).ids]
    last = _Last(ids, is_list=True)
    return last if part.then is None else _place(part.then, last, nodes)


def _afters(task: Any, before: _Last | None) -> Iterator[After]:
    """Yield what a step waits for: what its task says, and the steps before it."""
    is_named = False
    own = () if before is None else tuple(Parent(id, task.backend) for id in before.ids)
    for each in task.after:
        if before is not None and any(isinstance(parent, Previous) for parent in each.parents):
            is_named = True
            yield After(each.name, own, before.is_list)
        else:
            yield each
    if own and not is_named:
        yield After("", own, is_list=False)


def _check(nodes: Sequence[_Node]) -> None:
    """Refuse a workflow that is of several aliases, or too large. Raises: InvalidOption."""
    alias = nodes[0].task.backend
    edges = 0
    for node in nodes:
        if node.task.backend != alias:
            raise InvalidOption(
                f"task {node.task.module_path} is of the backend {node.task.backend!r}, and the first step of "
                f"{alias!r}: tasks wait for those of their own alias in TASKS"
            )
        if node.task.unique and node.task.on_duplicate != "reject":
            raise InvalidOption(
                f"task {node.task.module_path}: on_duplicate={node.task.on_duplicate!r} does not go with chain() and "
                f'group(), whose steps are all new: give "reject"'
            )
        count = sum(len(each.parents) for each in node.after)
        edges += count
        if count > MOST_PARENTS:
            raise InvalidOption(
                f"task {node.task.module_path} waits for {count:,} tasks, more than {MOST_PARENTS:,}: have steps "
                f"between collect some of them each"
            )
    if edges > MOST_EDGES:
        raise InvalidOption(
            f"the steps wait for each other {edges:,} times, more than {MOST_EDGES:,}: put a step between two groups"
        )

"""Draw the graph of a workflow: where each box stands, and each line between two. The template makes the SVG of it.

Layers by depth, from left to right. Few tasks are drawn one by one; more are grouped by name and depth, and if these
are too many too, by name. What is still too much is not drawn. The same is in tables, so a screen reader skips it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from django.utils.functional import Promise
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..models import TaskState
from ..observe.inspector import WorkflowEdge, WorkflowGraph, WorkflowNode
from .navigation import as_count

MOST_BOXES = 60
# Of text in a box, in characters of 12 px; its `title` has all of it.
MOST_CHARACTERS = 24
WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 184, 46, 56, 12, 6
# The bar of a group, in its box.
BAR_WIDTH = WIDTH - 20
FINAL = ("succeeded", "failed")
STATES: dict[str, str | Promise] = {
    "queued": TaskState.QUEUED.label,
    "running": TaskState.RUNNING.label,
    "retrying": gettext_lazy("Retrying"),
    "failed": TaskState.FAILED.label,
    "succeeded": TaskState.SUCCEEDED.label,
}
# The class of a state; RETRYING looks like what will run.
CLASSES = {"retrying": "running"}


@dataclass
class Box:
    """A task, or several of one name. id: of the only one. counts: by `WorkflowNode.state`.

    has_not_run: none of them has run, because they wait for others, or have failed for another one.
    """

    name: str
    depth: int
    id: UUID | None = None
    counts: Counter[str] = field(default_factory=Counter)
    waits_for: int = 0
    has_not_run: bool = True
    x: int = 0
    y: int = 0
    url: str = ""

    def add(self, node: WorkflowNode) -> None:
        """Count a task."""
        self.id = None if self.counts else node.id
        self.counts[node.state] += 1
        self.depth = min(self.depth, node.depth)
        self.waits_for += node.waits_for
        self.has_not_run &= bool(node.waits_for and node.state == "queued") or node.reason == "parent_failed"

    @property
    def state(self) -> str:
        """What is said of it: the worst, and of those that are under way the furthest."""
        done = self.counts["succeeded"]
        for state in ("failed", "retrying", "running"):
            if self.counts[state]:
                return state
        return "succeeded" if done == self.total else "running" if done else "queued"

    @property
    def total(self) -> int:
        """How many tasks it stands for."""
        return self.counts.total()

    @property
    def finished(self) -> int:
        """How many of them have finished."""
        return sum(self.counts[state] for state in FINAL)

    @property
    def state_class(self) -> str:
        """The end of the class of its colour."""
        return CLASSES.get(self.state, self.state)

    @property
    def title(self) -> str:
        """All that can be said of it."""
        parts = [f"{STATES[state]}: {as_count(count)}" for state, count in self.counts.items() if count]
        return f"{self.name} – {self.text if self.id else ', '.join(parts)}"

    @property
    def label(self) -> str:
        """The name of the function, and how many there are."""
        name = self.name.rpartition(".")[2]
        count = f" × {as_count(self.total)}" if self.total > 1 else ""
        return f"{Truncator(name).chars(MOST_CHARACTERS - len(count))}{count}"

    @property
    def text(self) -> str:
        """The state in words."""
        if self.total > 1:
            done = _("%(done)s of %(total)s") % {"done": as_count(self.finished), "total": as_count(self.total)}
            failed = self.counts["failed"]
            return f"{done}, {STATES['failed']}: {as_count(failed)}" if failed else done
        if self.waits_for and self.state == "queued":
            count = self.waits_for
            return ngettext("waits for %(count)d task", "waits for %(count)d tasks", count) % {"count": count}
        return str(STATES[self.state])

    @property
    def bar(self) -> int | None:
        """The width of the part of a bar that stands for what has finished; None for a task alone."""
        return BAR_WIDTH * self.finished // self.total if self.total > 1 else None


class Line(NamedTuple):
    """A line between two boxes. path: of SVG. is_failed: what it begins at has failed."""

    path: str
    is_failed: bool
    runs_anyway: bool


class Drawing(NamedTuple):
    """What the template draws. is_grouped: a box may stand for several tasks."""

    boxes: list[Box]
    lines: list[Line]
    width: int
    height: int
    is_grouped: bool


def draw(graph: WorkflowGraph | None, url_of: Callable[[Box], str]) -> Drawing | None:
    """Return the drawing of a graph; None for one that is too large. url_of: where a box leads."""
    if graph is None:
        return None
    keys: list[Callable[[WorkflowNode], Hashable]] = [
        lambda node: node.id,
        lambda node: (node.name, node.depth),
        lambda node: node.name,
    ]
    for number, key in enumerate(keys):
        keys_of = {node.id: key(node) for node in graph.nodes}
        if len(set(keys_of.values())) <= MOST_BOXES:
            drawing = _placed(graph, keys_of, is_grouped=number > 0)
            for box in drawing.boxes:
                box.url = url_of(box)
            return drawing
    return None


def _placed(graph: WorkflowGraph, keys: Mapping[UUID, Hashable], *, is_grouped: bool) -> Drawing:
    boxes: dict[Hashable, Box] = {}
    for node in graph.nodes:
        key = keys[node.id]
        box = boxes.get(key)
        if box is None:
            box = boxes[key] = Box(node.name, node.depth)
        box.add(node)
    pairs = _pairs(graph.edges, keys)
    layers = _layers(boxes, pairs)
    highest = max(map(len, layers), default=0)
    for column, layer in enumerate(layers):
        # In the middle.
        top = MARGIN + (highest - len(layer)) * (HEIGHT + GAP_Y) // 2
        for row, key in enumerate(layer):
            boxes[key].x, boxes[key].y = MARGIN + column * (WIDTH + GAP_X), top + row * (HEIGHT + GAP_Y)
    lines = [_line(boxes[parent], boxes[child], runs) for (parent, child), runs in pairs.items()]
    width = 2 * MARGIN + len(layers) * (WIDTH + GAP_X) - GAP_X
    height = 2 * MARGIN + highest * (HEIGHT + GAP_Y) - GAP_Y
    return Drawing(list(boxes.values()), lines, width, height, is_grouped)


def _pairs(edges: Iterable[WorkflowEdge], keys: Mapping[UUID, Hashable]) -> dict[tuple[Hashable, Hashable], bool]:
    """Return which boxes have a line between them, and whether the second one runs also after a failure."""
    found: dict[tuple[Hashable, Hashable], bool] = {}
    for edge in edges:
        pair = keys[edge.parent], keys[edge.child]
        if pair[0] != pair[1]:
            found[pair] = found.get(pair, True) and edge.runs_anyway
    return found


def _layers(boxes: Mapping[Hashable, Box], pairs: Iterable[tuple[Hashable, Hashable]]) -> list[Sequence[Hashable]]:
    """Return the boxes from left to right, in each layer from top to bottom: near those that they wait for."""
    parents: dict[Hashable, list[Hashable]] = defaultdict(list)
    for parent, child in pairs:
        parents[child].append(parent)
    by_depth: dict[int, list[Hashable]] = defaultdict(list)
    for key, box in boxes.items():
        by_depth[box.depth].append(key)
    places: dict[Hashable, float] = {}
    layers: list[Sequence[Hashable]] = []
    for depth in sorted(by_depth):
        layer = by_depth[depth]
        wanted = {}
        for key in layer:
            known = [places[parent] for parent in parents[key] if parent in places]
            wanted[key] = sum(known) / len(known) if known else 0.5
        # Those that want the same place stay in the order of their ids.
        layer.sort(key=lambda key: wanted[key])
        places.update((key, (row + 0.5) / len(layer)) for row, key in enumerate(layer))
        layers.append(layer)
    return layers


def _line(parent: Box, child: Box, runs_anyway: bool) -> Line:
    """Return a curve from the end of a box to the beginning of another; back where a name stands at two depths."""
    x1, y1, x2, y2 = parent.x + WIDTH, parent.y + HEIGHT // 2, child.x, child.y + HEIGHT // 2
    bend = GAP_X // 2 if x2 > x1 else 2 * GAP_X
    path = f"M{x1} {y1}C{x1 + bend} {y1} {x2 - bend} {y2} {x2} {y2}"
    return Line(path, parent.state == "failed", runs_anyway)

"""Judge one use: which entry of the tables it is, what there is to say about its options, and the line to write.

All decisions are those of the tables. What is not in them is unknown, and said to be.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .findings import Note, Verdict, worst
from .names import Foreign, Names, Scope, first_parameter
from .vocabulary import Option, Use
from .writing import Slots, Text, cron_text, in_double_quotes, literal, quoted

# What is shown of a source.
MOST_CHARACTERS = 110
TYPED = (
    "this value is no JSON: dates, Decimal, UUIDs and model instances travel with @task(typed_arguments=True); "
    "otherwise pass an id or a text"
)
# What makes such a value, by the last name of what is called.
MAKES_TYPED = frozenset(
    (
        "Decimal",
        "UUID",
        "uuid1",
        "uuid4",
        "uuid7",
        "datetime",
        "date",
        "time",
        "timedelta",
        "now",
        "utcnow",
        "today",
        "localtime",
    )
)
UNSEEN_OPTIONS = "it is given by a dictionary that cannot be seen here: look at each of its keys"


class Judged(NamedTuple):
    """What becomes of a use, without its place."""

    use: str
    verdict: Verdict
    write: str
    notes: tuple[Note, ...]


class Argument(NamedTuple):
    """An argument of a call, or an item of a dictionary that stands for one. name: "" for one by its place."""

    name: str
    node: ast.expr


class Judge:
    """Judges the uses of one project."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.vocabulary = names.vocabulary
        self._judged: dict[tuple[ast.AST, str], Judged] = {}
        # Steps that follow another one in a chain, with their paths.
        self._behind: dict[ast.AST, str] = {}

    # --- what is used

    def call(self, node: ast.Call, scope: Scope, path: str = "") -> Judged | None:
        """Judge a call of something of the other queue; None for a call of anything else."""
        called = path or self._behind.get(node) or self.names.path(node.func, scope)
        if not called:
            return None
        key = (node, called)
        if key not in self._judged:
            name, use = self.vocabulary.use_of_call(called)
            self._judged[key] = self._applied(name, use, node, scope)
        return self._judged[key]

    def mention(self, node: ast.expr, scope: Scope, path: str) -> Judged:
        """Judge a name or an attribute that is not called."""
        name, use = self.vocabulary.use_of(path)
        if use is None:
            return _unknown(name)
        slots = Slots(args=["…"], value=ast.unparse(node))
        if isinstance(node, ast.Constant):
            slots["it"] = str(node.value).rpartition(".")[0]
        if isinstance(node, ast.Attribute):
            slots["it"] = self.text(node.value, scope)
        elif isinstance(node, ast.BinOp):
            slots["steps"] = ", ".join(self._steps(_operands(node), scope))
        return _judged(name, use, slots.fill(use.write), [])

    def decorator(self, node: ast.expr, scope: Scope, path: str) -> Judged:
        """Judge a decorator, with or without options."""
        if isinstance(node, ast.Call):
            return self.call(node, scope, path) or _unknown(path)
        name, use = self.vocabulary.use_of(path)
        if use is None:
            return _unknown(name)
        slots = Slots()
        return _judged(name, use, *self._filled(name, use, [], slots, scope))

    def setting(self, name: str, value: ast.expr | None, scope: Scope) -> Judged:
        """Judge a setting, by its name within "settings", and its value; None when it is only read."""
        found, use = self.vocabulary.use_of(f"settings.{name}")
        if use is None:
            return _unknown(found)
        if value is None:
            return _judged(found, use, "", [])
        option = _option_for(use, "", value)
        notes = [Note("", option.verdict, option.says)] if option else []
        slots = Slots(value=Text(value, self.text(value, scope)))
        return _judged(found, use, slots.fill(option.text if option else use.write), notes)

    def dictionary(self, path: str, node: ast.Dict, scope: Scope, name: ast.expr | None) -> Judged:
        """Judge a dictionary whose keys are options, such as an entry of a table of schedules. name: its own key."""
        found, use = self.vocabulary.use_of(path)
        if use is None:
            return _unknown(found)
        slots = Slots()
        if name is not None:
            slots["name"] = Text(name, self.text(name, scope))
        notes = self._options(found, use, list(_items(node)), slots, scope)
        return _judged(found, use, slots.fill(use.write), notes)

    # --- options

    def _applied(self, name: str, use: Use | None, node: ast.Call, scope: Scope) -> Judged:
        if use is None:
            return _unknown(name)
        slots = Slots()
        # The object of a method, or what is called itself.
        owner: ast.expr = node.func
        if isinstance(owner, ast.Attribute) and not name.endswith("()"):
            owner = owner.value
        slots["it"] = self.text(owner, scope)
        if "{inner}" in use.write and isinstance(node.func, ast.Call):
            slots["inner"] = ", ".join(self._arguments(node.func, scope))
        if "{steps}" in use.write:
            slots["steps"] = ", ".join(self._steps(node.args, scope))
        if "{list}" in use.write:
            slots["list"] = self._list(node.args, scope)
        if "{cron}" in use.write:
            return self._cron(name, use, node, slots)
        if "{first}" in use.write:
            slots["first"] = self._first_parameter(node, scope)
        arguments = [Argument("", each) for each in node.args]
        arguments += [Argument(each.arg or "**", each.value) for each in node.keywords]
        return _judged(name, use, *self._filled(name, use, arguments, slots, scope))

    def _filled(
        self, name: str, use: Use, arguments: Sequence[Argument], slots: Slots, scope: Scope
    ) -> tuple[str, list[Note]]:
        notes = self._options(name, use, arguments, slots, scope)
        return slots.fill(use.write), notes

    def _options(self, name: str, use: Use, arguments: Sequence[Argument], slots: Slots, scope: Scope) -> list[Note]:
        """Add what the arguments say to the slots, and return what there is to say about each."""
        notes: list[Note] = []
        given: set[str] = set()
        is_call = "enqueue" in use.write or ".step(" in use.write
        for argument in self._named(use, arguments, scope):
            text = self.text(argument.node, scope)
            option = _option_for(use, argument.name, argument.node)
            if option is not None:
                given.add(argument.name)
                if option is use.options.get(argument.name) and _is_off(option, argument.node):
                    continue
                if option.slot == "args" and is_call:
                    notes += _about_value(argument.name, argument.node)
                if option.text:
                    slots.add(option.slot, option.text.format(value=Text(argument.node, text)))
                if option.says or option.verdict != Verdict.MAPS:
                    notes.append(Note(argument.name, option.verdict, option.says))
            elif argument.name == "**":
                if use.takes == "function":
                    slots.add("args", f"**{text}")
                elif use.options and use.write:
                    notes.append(Note(text, Verdict.UNKNOWN, UNSEEN_OPTIONS))
            elif use.takes == "function" or (not argument.name and not use.options):
                notes += _about_value(argument.name, argument.node) if is_call else []
                slots.add("args", f"{argument.name}={text}" if argument.name else text)
            elif use.takes == "settings" or argument.name in ("", "*"):
                # A setting is a use of its own; an argument by its place that no table names is of the function.
                continue
            elif literal(argument.node) is not None and use.write and (use.options or not name.endswith(".*")):
                # Where nothing is written, as for what has no counterpart, no option matters; nor where one entry
                # stands for all names of a module.
                notes.append(Note(argument.name, Verdict.UNKNOWN, "this option is not in the tables"))
        for implied in use.implied:
            if (not implied.given or given.intersection(implied.given.split())) and not given.intersection(
                implied.without.split()
            ):
                slots.add(implied.option.slot, implied.option.text)
                notes.append(
                    Note((implied.given or implied.without).split()[0], implied.option.verdict, implied.option.says)
                )
        return notes

    def _named(self, use: Use, arguments: Sequence[Argument], scope: Scope) -> Iterator[Argument]:
        """Yield the arguments with their names, those by their place too, and what dictionaries in sight hold."""
        place = 0
        for argument in arguments:
            if argument.name == "**":
                items = self._dictionary_in_sight(argument.node, scope)
                yield from (argument,) if items is None else _items(items)
            elif argument.name:
                yield argument
            elif isinstance(argument.node, ast.Starred):
                place = len(use.positions)
                yield argument
            else:
                yield Argument(use.positions[place], argument.node) if place < len(use.positions) else argument
                place += 1

    def _dictionary_in_sight(self, node: ast.expr, scope: Scope) -> ast.Dict | None:
        """Return the only dictionary that a name is given, if all its keys are texts."""
        found: ast.expr | None = node
        if isinstance(node, ast.Name):
            here: Scope | None = scope
            while here is not None and node.id not in here.names:
                here = here.parent
            bindings = here.names[node.id] if here else []
            found = getattr(bindings[0], "node", None) if len(bindings) == 1 else None
        if isinstance(found, ast.Dict) and all(isinstance(literal(key), str) for key in found.keys):
            return found
        return None

    # --- texts

    def text(self, node: ast.expr, scope: Scope) -> str:
        """Return the source of an expression, in which uses of the other queue are written as they are here."""
        if not any(isinstance(each, ast.Call | ast.Attribute) for each in ast.walk(node)):
            return ast.unparse(node)
        if isinstance(node, ast.Call) and (judged := self.call(node, scope)) and judged.write:
            return judged.write
        return ast.unparse(self._rewritten(node, scope))

    def _rewritten(self, node: ast.AST, scope: Scope) -> ast.AST:
        scope = scope.module.scopes.get(node, scope)
        judged: Judged | None = None
        if isinstance(node, ast.Call):
            judged = self.call(node, scope)
        elif (isinstance(node, ast.BinOp) and (path := self.names.pipe_path(node, scope))) or (
            isinstance(node, ast.Attribute) and (path := self.names.path(node, scope))
        ):
            judged = self.mention(node, scope, path)
        if judged and judged.write and (written := _as_expression(judged.write)):
            return written
        new = copy.copy(node)
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.AST):
                setattr(new, name, self._rewritten(value, scope))
            elif isinstance(value, list):
                rewritten = [self._rewritten(each, scope) if isinstance(each, ast.AST) else each for each in value]
                setattr(new, name, rewritten)
        return new

    def _arguments(self, node: ast.Call, scope: Scope) -> Iterator[str]:
        if len(node.args) == 1 and not node.keywords:
            yield self._list(node.args, scope)
            return
        yield from (self.text(each, scope) for each in node.args)
        yield from (f"{each.arg}={self.text(each.value, scope)}" for each in node.keywords if each.arg)

    def _steps(self, nodes: Sequence[ast.expr], scope: Scope) -> Iterator[str]:
        """Yield the steps of a chain; those behind the first get the value of the one before."""
        if len(nodes) == 1:
            if not isinstance(nodes[0], ast.List | ast.Tuple):
                yield f"*{self._list(nodes, scope)}"
                return
            nodes = nodes[0].elts
        for place, node in enumerate(nodes):
            path = self.names.path(node.func, scope) if isinstance(node, ast.Call) else ""
            behind = f"{self.vocabulary.canonical(path)}>"
            if place and behind in self.vocabulary.uses:
                self._behind[node] = behind
            yield self.text(node, scope)

    def _list(self, nodes: Sequence[ast.expr], scope: Scope) -> str:
        if len(nodes) == 1:
            (node,) = nodes
            if isinstance(node, ast.GeneratorExp):
                return self.text(ast.copy_location(ast.ListComp(node.elt, node.generators), node), scope)
            if not self.names.path(node, scope):
                return self.text(node.value if isinstance(node, ast.Starred) else node, scope)
        return f"[{', '.join(self.text(each, scope) for each in nodes)}]"

    def _first_parameter(self, node: ast.Call, scope: Scope) -> str:
        """Return the parameter that the value of the step before arrives as."""
        owner = self.names.meaning(node.func.value, scope) if isinstance(node.func, ast.Attribute) else None
        if isinstance(owner, Foreign) and owner.function is not None:
            first = first_parameter(owner.function)
            return first_parameter(owner.function, 1) or "value" if first in ("self", "context") else first or "value"
        return "value"

    def _cron(self, name: str, use: Use, node: ast.Call, slots: Slots) -> Judged:
        """Judge a call that makes a cron expression of five fields, which are the positions of its use."""
        given: dict[str, ast.expr | None] = dict(zip(use.positions, node.args, strict=False))
        given |= {each.arg: each.value for each in node.keywords if each.arg}
        fields = use.options["fields"].text.split()
        text = cron_text(given.pop(each, None) for each in fields)
        notes = []
        both = use.options["days"]
        used = {each.arg for each in node.keywords} | set(use.positions[: len(node.args)])
        if set(both.text.split()) <= used:
            notes.append(Note("days", both.verdict, both.says))
        for each in given:
            option = use.options.get(each)
            notes.append(
                Note(each, option.verdict, option.says)
                if option
                else Note(each, Verdict.UNKNOWN, "this option is not in the tables")
            )
        if not text:
            notes.append(Note("", Verdict.BUT, "a field of it cannot be seen: write it into the expression"))
        slots["cron"] = quoted(text or "… … … … …")
        return _judged(name, use, slots.fill(use.write), notes)


def _judged(name: str, use: Use, write: str, notes: Iterable[Note]) -> Judged:
    """Return what becomes of a use; it is as hard as the hardest of its options."""
    own = [Note("", use.verdict, use.says)] if use.says else []
    found = (*own, *notes)
    return Judged(name, worst([use.verdict, *(note.verdict for note in found)]), write, found)


def _unknown(name: str) -> Judged:
    return Judged(name, Verdict.UNKNOWN, "", ())


def _option_for(use: Use, name: str, node: ast.expr) -> Option | None:
    """Return the option of a keyword, first that of this very value."""
    return use.options.get(f"{name}={ast.unparse(node)}") or use.options.get(name)


def _is_off(option: Option, node: ast.expr) -> bool:
    """Return whether an option is given the value that means nothing: None, or False for one that is only on."""
    value = literal(node)
    return value is None or (value is False and "{value" not in option.text)


def _about_value(name: str, node: ast.expr) -> list[Note]:
    """Return a note if an argument of a task, or one in a list of them, is visibly no JSON."""
    match node:
        case ast.Tuple() | ast.List():
            values = node.elts
        case ast.Dict():
            values = node.values
        case _:
            values = [node]
    for value in values:
        if isinstance(value, ast.Call):
            called = getattr(value.func, "attr", getattr(value.func, "id", ""))
            is_row = called in ("get", "first", "last", "create") and ".objects." in ast.unparse(value.func)
            if called in MAKES_TYPED or is_row or called == "get_object_or_404":
                return [Note(name or shown(value), Verdict.BUT, TYPED)]
    return []


def _items(node: ast.Dict) -> Iterator[Argument]:
    """Yield the items of a dictionary as arguments; what is not a text is unseen."""
    for key, value in zip(node.keys, node.values, strict=True):
        name = literal(key)
        yield Argument(name, value) if isinstance(name, str) else Argument("**", value)


def _operands(node: ast.expr) -> list[ast.expr]:
    """Return a, b and c of `a | b | c`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_operands(node.left), *_operands(node.right)]
    return [node]


def _as_expression(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return None


def shown(node: ast.AST, mark: str = "") -> str:
    """Return a source in one line, cut where it is long."""
    return shortened(mark + in_double_quotes(ast.unparse(node)))


def shortened(text: str) -> str:
    """Return a text in one line, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= MOST_CHARACTERS else f"{line[: MOST_CHARACTERS - 1]}…"

"""What the names of a project mean: which expression is a task, an app or a result of the other queue.

An expression means something of the other queue (`Foreign`, with its path in the tables), something of the project, or
nothing that is known. Names are followed through aliases, assignments and imports, also from module to module, and are
looked up only when somebody asks. Nothing is imported or run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .vocabulary import Vocabulary

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scoped = ast.Module | ast.ClassDef | Function | ast.Lambda
# Sources that name each other in long chains are generated, or a circle.
MOST_STEPS = 80


class Foreign(NamedTuple):
    """Something of the other queue. function: of the project, which a decorator made a task."""

    path: str
    function: Function | None = None


class OwnModule(NamedTuple):
    """A module of the project, or a folder of some, by its dotted name."""

    name: str


class OwnFunction(NamedTuple):
    """A function of the project that is none of the other queue's tasks."""

    node: Function
    scope: Scope


class OwnClass(NamedTuple):
    """A class of the project, or an instance of it. base: the path of the other queue's class that it derives from."""

    node: ast.ClassDef
    scope: Scope
    base: str
    is_instance: bool = False


Meaning = Foreign | OwnModule | OwnFunction | OwnClass


class Imported(NamedTuple):
    """A name that an import binds. name: what is taken out of the module; "" for the module itself."""

    node: ast.Import | ast.ImportFrom
    module: str
    name: str


class Value(NamedTuple):
    """A name that an expression is assigned to. is_entered: by a `with`, so it is what the expression gives."""

    node: ast.expr
    is_entered: bool = False


class Parameter(NamedTuple):
    """A parameter. place: its number; keywords have None."""

    node: Function | ast.Lambda
    name: str
    place: int | None
    annotation: ast.expr | None


Binding = Imported | Value | Parameter | Function | ast.ClassDef


@dataclass(eq=False, slots=True)
class Scope:
    """The names of a module, a class or a function. fields: what methods of a class assign to `self`.

    stars: the modules of which all names are imported. by_sign: the kinds of names that only an attribute gives away.
    """

    module: Module
    node: Scoped
    parent: Scope | None = None
    names: dict[str, list[Binding]] = field(default_factory=dict)
    fields: dict[str, list[tuple[Value, Scope]]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    by_sign: dict[str, str] = field(default_factory=dict)

    def bind(self, name: str, binding: Binding) -> None:
        """Add what a name is bound to; it may be bound several times."""
        self.names.setdefault(name, []).append(binding)


@dataclass(eq=False, slots=True)
class Module:
    """A module of the project. scopes: of each module, class and function in it."""

    file: str
    name: str
    tree: ast.Module
    is_package: bool
    scopes: dict[ast.AST, Scope] = field(default_factory=dict)

    @property
    def scope(self) -> Scope:
        """The names of the module itself."""
        return self.scopes[self.tree]


def bind_names(module: Module, signs: Mapping[str, str]) -> None:
    """Fill the scopes of a module. signs: attributes that only one kind of value has."""
    module.scopes[module.tree] = Scope(module, module.tree)
    _Binder(module, signs).visit_all(module.tree.body, module.scope)


class _Binder:
    def __init__(self, module: Module, signs: Mapping[str, str]) -> None:
        self.module = module
        self.signs = signs

    def visit_all(self, nodes: Iterable[ast.AST], scope: Scope) -> None:
        for node in nodes:
            self.visit(node, scope)

    def visit(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, Function | ast.Lambda):
            inner = self._new_scope(node, scope)
            if not isinstance(node, ast.Lambda):
                scope.bind(node.name, node)
                self.visit_all(node.decorator_list, scope)
            self._bind_parameters(node, inner)
            self.visit_all(ast.iter_child_nodes(node.args), scope)
            self.visit_all(node.body if isinstance(node.body, list) else [node.body], inner)
            return
        if isinstance(node, ast.ClassDef):
            scope.bind(node.name, node)
            inner = self._new_scope(node, scope)
            self.visit_all([*node.decorator_list, *node.bases, *node.keywords], scope)
            self.visit_all(node.body, inner)
            return
        if isinstance(node, ast.Import):
            for each in node.names:
                name = each.asname or each.name.split(".")[0]
                scope.bind(name, Imported(node, each.name if each.asname else name, ""))
        elif isinstance(node, ast.ImportFrom):
            source = absolute(self.module, node)
            for each in node.names:
                if each.name == "*":
                    scope.stars.append(source)
                else:
                    scope.bind(each.asname or each.name, Imported(node, source, each.name))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind_target(target, node.value, scope)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            self._bind_target(node.target, node.value, scope)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                if isinstance(item.optional_vars, ast.Name):
                    scope.bind(item.optional_vars.id, Value(item.context_expr, is_entered=True))
        elif isinstance(node, ast.Attribute) and node.attr in self.signs and isinstance(node.value, ast.Name):
            scope.by_sign[node.value.id] = self.signs[node.attr]
        self.visit_all(ast.iter_child_nodes(node), scope)

    def _new_scope(self, node: Scoped, parent: Scope) -> Scope:
        self.module.scopes[node] = scope = Scope(self.module, node, parent)
        return scope

    def _bind_target(self, target: ast.expr, value: ast.expr, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            scope.bind(target.id, Value(value))
        elif isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
            for one, its_value in zip(target.elts, value.elts, strict=False):
                self._bind_target(one, its_value, scope)
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            owner = scope.parent
            if target.value.id == first_parameter(scope.node) and owner and isinstance(owner.node, ast.ClassDef):
                owner.fields.setdefault(target.attr, []).append((Value(value), scope))

    def _bind_parameters(self, node: Function | ast.Lambda, scope: Scope) -> None:
        for place, each in enumerate([*node.args.posonlyargs, *node.args.args]):
            scope.bind(each.arg, Parameter(node, each.arg, place, each.annotation))
        for each in node.args.kwonlyargs:
            scope.bind(each.arg, Parameter(node, each.arg, None, each.annotation))


def absolute(module: Module, node: ast.ImportFrom) -> str:
    """Return the dotted name of the module that a `from … import` names."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".") if module.name else []
    folder = parts if module.is_package else parts[:-1]
    base = folder[: len(folder) - node.level + 1] if node.level > 1 else folder
    return ".".join([*base, *([node.module] if node.module else [])])


def first_parameter(node: Scoped, skipped: int = 0) -> str:
    """Return the name of the first parameter of a function, or of one behind it; "" when it has none."""
    if not isinstance(node, Function):
        return ""
    names = [each.arg for each in [*node.args.posonlyargs, *node.args.args]]
    return names[skipped] if len(names) > skipped else ""


class Names:
    """The modules of a project that have been read, and what expressions in them mean."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.modules: dict[str, Module] = {}
        # Dotted names that a module may be asked for by, also those that were not read.
        self.known: set[str] = set()
        self._meanings: dict[tuple[ast.AST, Scope], Meaning | None] = {}
        self._asked: set[tuple[ast.AST, Scope]] = set()
        self._of_names: dict[tuple[str, str], Meaning | None] = {}

    def add(self, module: Module, names: Iterable[str]) -> None:
        """Add a module by the names that it may be imported by; what was unknown before is asked again."""
        bind_names(module, self.vocabulary.signs)
        for name in names:
            self.modules.setdefault(name, module)
        self._meanings.clear()
        self._of_names.clear()

    # --- expressions

    def meaning(self, node: ast.AST, scope: Scope) -> Meaning | None:
        """Return what an expression means; None when that cannot be seen."""
        key = (node, scope)
        if key in self._meanings:
            return self._meanings[key]
        if key in self._asked or len(self._asked) > MOST_STEPS:
            return None
        self._asked.add(key)
        try:
            found = self._of_expression(node, scope)
        finally:
            self._asked.discard(key)
        # Within a circle of names this may be one step too poor; without it, a large one would never end.
        self._meanings[key] = found
        return found

    def path(self, node: ast.AST, scope: Scope) -> str:
        """Return the path of an expression in the tables; "" when it is nothing of the other queue."""
        found = self.meaning(node, scope)
        return found.path if isinstance(found, Foreign) else ""

    def _of_expression(self, node: ast.AST, scope: Scope) -> Meaning | None:
        match node:
            case ast.Name():
                return self.of_name(node.id, scope)
            case ast.Attribute():
                owner = self.meaning(node.value, scope)
                return self.attribute(owner, node.attr) if owner else None
            case ast.Call(func=ast.Name(id="super")):
                return self._super(scope)
            case ast.Call():
                return self._called(self.meaning(node.func, scope))
            case ast.Subscript():
                owner = self.meaning(node.value, scope)
                if isinstance(owner, Foreign) and is_class(owner.path):
                    return owner
                if isinstance(owner, Foreign):
                    return self._reached(owner.path, item_path(owner.path, node.slice))
            case ast.BinOp():
                path = self.pipe_path(node, scope)
                return self._foreign(path) if path else None
            case ast.Await() | ast.NamedExpr() | ast.Starred():
                return self.meaning(node.value, scope)
            case ast.IfExp():
                return self.meaning(node.body, scope) or self.meaning(node.orelse, scope)
            case ast.BoolOp():
                for each in node.values:
                    if (meant := self.meaning(each, scope)) is not None:
                        return meant
        return None

    def pipe_path(self, node: ast.BinOp, scope: Scope) -> str:
        """Return the path of `a | b` in the tables; "" when it is nothing of the other queue."""
        for side in (node.left, node.right) if isinstance(node.op, ast.BitOr) else ():
            if (path := self.path(side, scope)) and f"{path}|" in self.vocabulary.same:
                return f"{path}|"
        return ""

    def _foreign(self, path: str, function: Function | None = None) -> Foreign:
        return Foreign(self.vocabulary.canonical(path), function)

    def _reached(self, owner: str, path: str) -> Foreign | None:
        """Return what an attribute or an item means; of a use without further ones in the tables it is plain data."""
        found = self._foreign(path)
        is_data = owner in self.vocabulary.uses and not self.vocabulary.has_more(owner)
        return None if is_data and found.path not in self.vocabulary.uses else found

    def attribute(self, owner: Meaning, name: str) -> Meaning | None:
        """Return what an attribute of something means."""
        if isinstance(owner, Foreign):
            return self._reached(owner.path, f"{owner.path}.{name}")
        if isinstance(owner, OwnModule):
            return self.of_module(owner.name, name)
        if isinstance(owner, OwnClass):
            for value, scope in owner.scope.fields.get(name, ()):
                if found := self.meaning(value.node, scope):
                    return found
            if name in owner.scope.names or not owner.base:
                return self._own_name(name, owner.scope)
            base = self.vocabulary.canonical(f"{owner.base}()") if owner.is_instance else owner.base
            return self._reached(base, f"{base}.{name}")
        return None

    def _super(self, scope: Scope) -> Meaning | None:
        """Return what `super()` is: an instance of the other queue's class that the class around derives from."""
        here: Scope | None = scope
        while here is not None and not isinstance(here.node, ast.ClassDef):
            here = here.parent
        if here is None or here.parent is None or not isinstance(here.node, ast.ClassDef):
            return None
        base = self.base_of(here.node, here.parent)
        return self._foreign(f"{base}()") if base else None

    def _called(self, called: Meaning | None) -> Meaning | None:
        if isinstance(called, Foreign):
            value = self._foreign(f"{called.path}()")
            # What a function returns is its own matter, unless the tables say what it is; an object stays one.
            return value if is_class(called.path) or self.vocabulary.has_more(value.path) else None
        if isinstance(called, OwnClass) and not called.is_instance:
            return called._replace(is_instance=True)
        if isinstance(called, OwnFunction):
            scope = called.scope.module.scopes[called.node]
            returned = (each.value for each in ast.walk(called.node) if isinstance(each, ast.Return) and each.value)
            return next((found for each in returned if isinstance(found := self.meaning(each, scope), Foreign)), None)
        return None

    # --- names

    def of_name(self, name: str, scope: Scope) -> Meaning | None:
        """Return what a name means in a scope."""
        here: Scope | None = scope
        while here is not None:
            is_seen = here is scope or not isinstance(here.node, ast.ClassDef)
            if is_seen and (name in here.names or (here.parent is None and here.stars)):
                return self._own_name(name, here)
            here = here.parent
        return None

    def _own_name(self, name: str, scope: Scope) -> Meaning | None:
        for binding in scope.names.get(name, ()):
            if found := self._bound(binding, scope):
                return found
        if name in scope.by_sign:
            return Foreign(scope.by_sign[name])
        for source in scope.stars:
            if self.is_foreign(source):
                path = self.vocabulary.dotted(f"{source}.{name}")
                if self.vocabulary.use_of(path)[1] or self.vocabulary.has_more(path):
                    return Foreign(path)
            elif found := self.of_module(source, name):
                return found
        return None

    def _bound(self, binding: Binding, scope: Scope) -> Meaning | None:
        if isinstance(binding, Imported):
            return self.imported(binding)
        if isinstance(binding, Value):
            found = self.meaning(binding.node, scope)
            if binding.is_entered and isinstance(found, Foreign):
                entered = self.vocabulary.canonical(f"{found.path}.__enter__()")
                return found if entered.endswith("__enter__()") else Foreign(entered)
            return found
        if isinstance(binding, Parameter):
            return self._parameter(binding, scope)
        inner = scope.module.scopes[binding]
        if isinstance(binding, ast.ClassDef):
            return OwnClass(binding, inner, self.base_of(binding, scope))
        for decorator in binding.decorator_list:
            if path := self.path(called_of(decorator), scope):
                decorated = self.vocabulary.canonical(f"{path}@")
                if not decorated.endswith("@"):
                    return Foreign(decorated, binding)
        return OwnFunction(binding, scope)

    def base_of(self, node: ast.ClassDef, scope: Scope) -> str:
        """Return the path of the first class of the other queue that a class derives from, also by others; or ""."""
        for base in node.bases:
            found = self.meaning(base, scope)
            if isinstance(found, Foreign):
                return found.path
            if isinstance(found, OwnClass) and found.base:
                return found.base
        return ""

    def _parameter(self, parameter: Parameter, scope: Scope) -> Meaning | None:
        outer = scope.parent
        if outer is None:
            return None
        if parameter.annotation is not None and (found := self._annotated(parameter.annotation, outer)):
            return found
        if isinstance(parameter.node, ast.Lambda):
            return None
        for decorator in parameter.node.decorator_list:
            for given in self.vocabulary.given.get(self.path(called_of(decorator), outer), ()):
                is_it = given.at in (parameter.place, parameter.name)
                if is_it and (not given.if_option or has_option(decorator, given.if_option)):
                    return Foreign(given.kind)
        if isinstance(outer.node, ast.ClassDef) and parameter.place == 0 and outer.parent:
            return OwnClass(outer.node, outer, self.base_of(outer.node, outer.parent), is_instance=True)
        return None

    def _annotated(self, annotation: ast.expr, scope: Scope) -> Meaning | None:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            try:
                annotation = ast.parse(annotation.value, mode="eval").body
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                return None
        if isinstance(annotation, ast.BinOp):
            return self._annotated(annotation.left, scope) or self._annotated(annotation.right, scope)
        if isinstance(annotation, ast.Subscript):
            return self._annotated(annotation.value, scope) or self._annotated(annotation.slice, scope)
        found = self.meaning(annotation, scope)
        if isinstance(found, Foreign):
            kind = self.vocabulary.canonical(f"{found.path}()")
            return None if kind.endswith("()") else Foreign(kind)
        return None

    # --- modules

    def is_foreign(self, module: str) -> bool:
        """Return whether a module is one of the other queue."""
        top = module.split(".")[0]
        return bool(self.vocabulary.packages.fullmatch(top)) and (top not in self.known or top == self.vocabulary.name)

    def imported(self, binding: Imported) -> Meaning | None:
        """Return what an import binds."""
        is_relative = isinstance(binding.node, ast.ImportFrom) and binding.node.level
        if not is_relative and self.is_foreign(binding.module):
            return Foreign(self.vocabulary.dotted(".".join(filter(None, (binding.module, binding.name)))))
        return self.of_module(binding.module, binding.name) if binding.name else OwnModule(binding.module)

    def of_module(self, module: str, name: str) -> Meaning | None:
        """Return what a name in a module of the project means; a module below it, if it has no such name."""
        key = (module, name)
        if key not in self._of_names:
            self._of_names[key] = None  # for a circle of imports
            found = self._own_name(name, self.modules[module].scope) if module in self.modules else None
            dotted = f"{module}.{name}" if module else name
            self._of_names[key] = found or (OwnModule(dotted) if dotted in self.known else None)
        return self._of_names[key]

    def has_foreign(self, module: str) -> bool:
        """Return whether some name of a module means something of the other queue."""
        if module not in self.modules:
            return False
        scope = self.modules[module].scope
        names = [*scope.names, *(name for star in scope.stars for name in self._names_of(star))]
        return any(self.is_of_queue(self.of_module(module, name)) for name in names)

    def _names_of(self, module: str) -> Iterator[str]:
        if module in self.modules:
            yield from self.modules[module].scope.names

    def is_of_queue(self, found: Meaning | None) -> bool:
        """Return whether something is of the other queue, or a class that derives from one of its."""
        return isinstance(found, Foreign) or (isinstance(found, OwnClass) and bool(found.base))


def is_class(path: str) -> bool:
    """Return whether a path is that of a class of the other queue, by its spelling; a kind of value is none."""
    owner, _, name = path.rpartition(".")
    return bool(owner) and name[:1].isupper() and name.isidentifier()


def called_of(node: ast.expr) -> ast.expr:
    """Return what a decorator names, without the call of it."""
    return node.func if isinstance(node, ast.Call) else node


def has_option(decorator: ast.expr, name: str) -> bool:
    """Return whether a decorator is given an option that is not False."""
    return isinstance(decorator, ast.Call) and any(
        each.arg == name and not (isinstance(each.value, ast.Constant) and not each.value.value)
        for each in decorator.keywords
    )


def item_path(path: str, key: ast.expr) -> str:
    """Return the path of an item: of the settings it is a name, of all else one for every item."""
    if path == "settings" and isinstance(key, ast.Constant) and isinstance(key.value, str):
        return f"{path}.{key.value}"
    return f"{path}[]"

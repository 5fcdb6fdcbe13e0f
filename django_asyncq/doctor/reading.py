"""Read a module: walk through its tree, and have each use of the other queue judged.

What is reported: an attribute, a call, a decorator, a base class with what its body defines, a setting with the keys
of its dictionary, a text that names something of the other queue, and an import of what is then not used.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from typing import NamedTuple

from ..core.foreign_words import OPTIONS
from .findings import Finding, Note, Verdict
from .judging import Judge, Judged, shortened, shown
from .names import Foreign, Function, Imported, Module, Names, OwnClass, Scope, called_of
from .writing import literal

DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+(?::\w+)?")
WORD = re.compile(r"[A-Za-z_]\w*")
# Calls that run what they are given after the commit.
AFTER_COMMIT = "on_commit"


class Place(NamedTuple):
    """Where a use stands. mark: what is written before its source."""

    node: ast.expr | ast.stmt | ast.keyword | ast.arg
    mark: str = ""


class Reader:
    """Reads one module of a project. Its findings are in the order of the source."""

    def __init__(self, names: Names, judge: Judge, module: Module) -> None:
        self.names = names
        self.judge = judge
        self.module = module
        self.vocabulary = names.vocabulary
        self.findings: list[Finding] = []
        self._settings_seen: set[tuple[int, str]] = set()
        self._names_used: set[str] = set()
        self._depth_of_on_commit = 0

    def read(self) -> list[Finding]:
        """Return all uses in the module."""
        self._visit_all(self.module.tree.body, self.module.scope)
        self._imports()
        return sorted(self.findings, key=lambda each: each.line)

    # --- findings

    def _report(self, place: Place, judged: Judged) -> None:
        notes = judged.notes
        verdict = judged.verdict
        if self._depth_of_on_commit and judged.write.endswith(")") and "enqueue" in judged.write:
            notes = (*notes, Note(AFTER_COMMIT, Verdict.MAPS, OPTIONS[AFTER_COMMIT]))
        node = place.node
        source = shown(node, place.mark) if not isinstance(node, ast.stmt) else _head(node)
        self.findings.append(Finding(self.module.file, node.lineno, judged.use, source, verdict, judged.write, notes))

    # --- the tree

    def _visit_all(self, nodes: Iterable[ast.AST], scope: Scope) -> None:
        for node in nodes:
            self._visit(node, scope)

    def _visit(self, node: ast.AST, scope: Scope) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(node, scope)
            case ast.Lambda():
                self._visit(node.args, scope)
                self._visit(node.body, self.module.scopes[node])
            case ast.ClassDef():
                self._class(node, scope)
            case ast.Import() | ast.ImportFrom():
                pass
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                self._assignment(node, scope)
            case ast.Call():
                self._call(node, scope)
            case ast.Attribute():
                self._attribute(node, scope)
            case ast.Name():
                self._name(node, scope)
            case ast.BinOp() if path := self.names.pipe_path(node, scope):
                self._report(Place(node), self.judge.mention(node, scope, path))
                self._visit_operands(node, scope)
            case ast.Subscript():
                self._subscript(node, scope)
            case ast.Constant():
                self._text(node)
            case _:
                self._visit_all(ast.iter_child_nodes(node), scope)

    def _visit_operands(self, node: ast.expr, scope: Scope) -> None:
        """Visit a, b and c of `a | b | c`, which is one use."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            self._visit_operands(node.left, scope)
            self._visit_operands(node.right, scope)
        else:
            self._visit(node, scope)

    def _function(self, node: Function, scope: Scope) -> None:
        for decorator in node.decorator_list:
            path = self.names.path(called_of(decorator), scope)
            if path:
                self._report(Place(decorator, "@"), self.judge.decorator(decorator, scope, path))
                self._inside(called_of(decorator), scope)
                if isinstance(decorator, ast.Call):
                    self._arguments(decorator, scope, path)
            else:
                self._visit(decorator, scope)
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        for each in named:
            # pytest gives a test what its parameters are called.
            if each and node.name.startswith("test") and self._is_known(path := f"fixture {each.arg}"):
                name = ast.copy_location(ast.Name(each.arg), each)
                self._report(Place(each), self.judge.mention(name, scope, path))
        for annotation in [*(each.annotation for each in named if each), node.returns]:
            if annotation is not None:
                self._annotation(annotation, scope)
        self._visit_all([*arguments.defaults, *filter(None, arguments.kw_defaults)], scope)
        self._visit_all(node.body, self.module.scopes[node])

    def _annotation(self, node: ast.expr, scope: Scope) -> None:
        """Report the type of a parameter, where the tables say what it becomes as a type; otherwise as any name."""
        path = f"{self.names.path(node, scope)}:"
        if path in self.vocabulary.uses:
            self._report(Place(node), self.judge.mention(node, scope, path))
            self._inside(node, scope)
        else:
            self._visit(node, scope)

    def _class(self, node: ast.ClassDef, scope: Scope) -> None:
        inner = self.module.scopes[node]
        base = ""
        for each in node.bases:
            found = self.names.meaning(each, scope)
            if isinstance(found, Foreign):
                base = found.path
                name, use = self.vocabulary.use_of(f"class {base}")
                if use is None:
                    name, use = self.vocabulary.use_of(base)
                notes = (Note("", use.verdict, use.says),) if use and use.says else ()
                judged = Judged(name, use.verdict if use else Verdict.UNKNOWN, use.write if use else "", notes)
                self._report(Place(node), judged)
                self._inside(each, scope)
            else:
                if isinstance(found, OwnClass):
                    base = base or found.base
                self._visit(each, scope)
        if base:
            for statement in node.body:
                self._member(statement, base)
        self._visit_all([*node.decorator_list, *node.keywords], scope)
        self._visit_all(node.body, inner)

    def _member(self, node: ast.stmt, base: str) -> None:
        """Report what the body of a derived class defines, when it means something to the other queue."""
        if isinstance(node, Function):
            members = [node.name]
        elif isinstance(node, ast.Assign):
            members = [each.id for each in node.targets if isinstance(each, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            members = [node.target.id]
        else:
            return
        for member in members:
            name, use = self.vocabulary.use_of(f"class {base}.{member}")
            if use is not None:
                notes = (Note("", use.verdict, use.says),) if use.says else ()
                self._report(Place(node), Judged(name, use.verdict, use.write, notes))

    # --- expressions

    def _call(self, node: ast.Call, scope: Scope) -> None:
        is_on_commit = AFTER_COMMIT in (getattr(node.func, "attr", ""), getattr(node.func, "id", ""))
        self._depth_of_on_commit += is_on_commit
        self._command(node, scope)
        path = self.names.path(node.func, scope)
        if path and (judged := self.judge.call(node, scope)) and not self._is_quiet_call(path, judged):
            self._report(Place(node), judged)
            self._inside(node.func, scope)
        elif not self._guess(node, node.func, scope):
            self._visit(node.func, scope)
        self._arguments(node, scope, path)
        self._depth_of_on_commit -= is_on_commit

    def _command(self, node: ast.Call, scope: Scope) -> None:
        """Report a command of the other queue that `call_command` runs."""
        is_command = "call_command" in (getattr(node.func, "attr", ""), getattr(node.func, "id", ""))
        if is_command and node.args and self._is_known(path := f"command {literal(node.args[0])}"):
            self._report(Place(node), self.judge.mention(node.args[0], scope, path))

    def _is_quiet_call(self, path: str, judged: Judged) -> bool:
        """Return whether a call is of a value of which the tables say nothing, and whose source is reported anyway."""
        return judged.verdict == Verdict.UNKNOWN and not judged.notes and _is_kind(path)

    def _arguments(self, node: ast.Call, scope: Scope, path: str) -> None:
        _, use = self.vocabulary.use_of(path) if path else ("", None)
        for argument in node.args:
            self._visit(argument, scope)
        for keyword in node.keywords:
            name = keyword.arg or ""
            setting = self.vocabulary.setting(name)
            if use and use.takes == "settings" and name and name not in use.options:
                setting = name
            if setting:
                self._setting(setting, Place(keyword), keyword.value, scope)
            else:
                self._visit(keyword.value, scope)

    def _guess(self, node: ast.expr, owner: ast.expr, scope: Scope) -> bool:
        """Report an attribute that tells by its name alone, of something that cannot be seen."""
        if not isinstance(owner, ast.Attribute) or owner.attr not in self.vocabulary.guesses:
            return False
        if self.names.meaning(owner, scope) is not None or isinstance(self.names.meaning(owner.value, scope), OwnClass):
            return False
        path = self.vocabulary.guesses[owner.attr]
        judged = self.judge.call(node, scope, path) if isinstance(node, ast.Call) else None
        if judged is None:
            judged = self.judge.mention(owner, scope, path)
        what = f"what {shown(owner.value)} is cannot be seen in the source; the line holds if it is one of the tasks"
        notes = (Note("", Verdict.UNKNOWN, what), *judged.notes)
        self._report(Place(node), judged._replace(verdict=Verdict.UNKNOWN, notes=notes))
        self._visit(owner.value, scope)
        return True

    def _attribute(self, node: ast.Attribute, scope: Scope) -> None:
        path = self.names.path(node, scope)
        if setting := self.vocabulary.setting(node.attr):
            self._setting(setting, Place(node), None, scope)
            self._inside(node, scope)
        elif path.startswith("settings."):
            self._setting(path.removeprefix("settings."), Place(node), None, scope)
            self._inside(node, scope)
        elif path and not _is_kind(path) and not self._is_own_variable(node, scope):
            self._report(Place(node), self.judge.mention(node, scope, path))
            self._inside(node, scope)
        elif path or not self._guess(node, node, scope):
            self._inside(node, scope)

    def _is_own_variable(self, node: ast.Attribute, scope: Scope) -> bool:
        """Return whether an attribute is one that the project sets; its value was reported where it was made."""
        owner = self.names.meaning(node.value, scope)
        return isinstance(owner, OwnClass) and node.attr in (*owner.scope.fields, *owner.scope.names)

    def _inside(self, node: ast.expr, scope: Scope) -> None:
        """Visit what a chain of attributes begins with: its own names are part of the use that has been reported."""
        while isinstance(node, ast.Attribute):
            node = node.value
        if isinstance(node, ast.Name):
            self._names_used.add(node.id)
        elif not isinstance(node, ast.Constant):
            self._visit(node, scope)

    def _name(self, node: ast.Name, scope: Scope) -> None:
        setting = self.vocabulary.setting(node.id)
        if setting and isinstance(node.ctx, ast.Load):
            self._setting(setting, Place(node), None, scope)
            return
        path = self.names.path(node, scope)
        self._names_used.add(node.id)
        # What a variable holds was reported where it was made; what an import binds is used here.
        if path and not _is_kind(path) and self._is_imported(node.id, scope) and self._is_known(path):
            self._report(Place(node), self.judge.mention(node, scope, path))

    def _is_imported(self, name: str, scope: Scope) -> bool:
        here: Scope | None = scope
        while here is not None:
            if name in here.names:
                return any(isinstance(each, Imported) for each in here.names[name])
            here = here.parent
        return False

    def _is_known(self, path: str) -> bool:
        """Return whether the tables have a path; a module is none, and is reported by what is taken out of it."""
        return self.vocabulary.use_of(path)[1] is not None

    def _subscript(self, node: ast.Subscript, scope: Scope) -> None:
        path = self.names.path(node, scope)
        if path.startswith("settings."):
            self._setting(path.removeprefix("settings."), Place(node), None, scope)
            self._inside(node.value, scope)
        elif path and self._is_known(path):
            self._report(Place(node), self.judge.mention(node, scope, path))
            self._inside(node.value, scope)
        else:
            self._visit(node.value, scope)
        self._visit(node.slice, scope)

    # --- settings

    def _assignment(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign, scope: Scope) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        is_setting = False
        for target in targets:
            name = ""
            if isinstance(target, ast.Name) and not isinstance(scope.node, Function):
                name = self.vocabulary.setting(target.id)
            elif isinstance(target, ast.Attribute | ast.Subscript):
                path = self.names.path(target, scope)
                name = path.removeprefix("settings.") if path.startswith("settings.") else ""
                if not name and isinstance(target, ast.Attribute):
                    name = self.vocabulary.setting(target.attr)
                if not name:
                    self._visit(target, scope)
            if name and node.value is not None:
                is_setting = True
                self._setting(name, Place(node), node.value, scope)
        if isinstance(node, ast.AnnAssign):
            self._annotation(node.annotation, scope)
        if node.value is not None and not is_setting:
            self._visit(node.value, scope)

    def _setting(self, name: str, place: Place, value: ast.expr | None, scope: Scope) -> None:
        """Report a setting once for a line, and what its dictionary holds."""
        key = (place.node.lineno, name)
        if key not in self._settings_seen:
            self._settings_seen.add(key)
            self._report(place, self.judge.setting(name, value, scope))
        if value is not None:
            self._setting_value(f"settings.{name}", value, scope)

    def _setting_value(self, path: str, value: ast.expr, scope: Scope) -> None:
        if f"{path}.*" in self.vocabulary.uses and isinstance(value, ast.Dict):
            for key, item in zip(value.keys, value.values, strict=True):
                self._setting_item(path, key, item, scope)
        elif f"{path}.*" in self.vocabulary.uses and isinstance(value, ast.List | ast.Tuple):
            for each in value.elts:
                pair = each.elts if isinstance(each, ast.Tuple) else []
                if len(pair) == 2 and isinstance(pair[1], ast.Dict):
                    self._setting_item(path, pair[0], pair[1], scope)
                else:
                    self._setting_value(path, each, scope)
        elif isinstance(value, ast.Dict) and self.vocabulary.has_keys(path):
            for key, item in zip(value.keys, value.values, strict=True):
                name = literal(key)
                if isinstance(name, str) and key is not None:
                    self._setting(f"{path.removeprefix('settings.')}.{name}", Place(key), item, scope)
                else:
                    self._visit(item, scope)
        elif isinstance(value, ast.Call) and getattr(value.func, "id", "") == "dict" and not value.args:
            keys = [ast.copy_location(ast.Constant(each.arg), each.value) for each in value.keywords]
            as_dictionary = ast.Dict([*keys], [each.value for each in value.keywords])
            self._setting_value(path, ast.copy_location(as_dictionary, value), scope)
        else:
            self._visit(value, scope)

    def _setting_item(self, path: str, key: ast.expr | None, item: ast.expr, scope: Scope) -> None:
        if isinstance(item, ast.Dict):
            place = Place(key or item)
            self._report(place, self.judge.dictionary(f"{path}.*", item, scope, key))
            self._visit_all(item.values, scope)
        else:
            self._visit(item, scope)

    # --- texts

    def _text(self, node: ast.Constant) -> None:
        """Report a text that names a setting, a package, or something of the other queue by its dotted path."""
        text = node.value
        if not isinstance(text, str) or len(text) > 200:
            return
        if DOTTED.fullmatch(text):
            self._dotted_text(node, text.replace(":", "."))
        elif WORD.fullmatch(text):
            if setting := self.vocabulary.setting(text):
                self._setting(setting, Place(node), None, self.module.scope)
            else:
                if self._is_known(f"app {text}"):
                    self._report(Place(node), self.judge.mention(node, self.module.scope, f"app {text}"))

    def _dotted_text(self, node: ast.Constant, text: str) -> None:
        module, _, name = text.rpartition(".")
        if self.names.is_foreign(text):
            path = self.vocabulary.dotted(text)
            if self._is_known(f"app {text}"):
                path = f"app {text}"
            self._report(Place(node), self.judge.mention(node, self.module.scope, path))
            return
        parts = module.split(".")
        for count in range(len(parts), 0, -1):
            if ".".join(parts[:count]) not in self.names.modules:
                continue
            found = self.names.of_module(".".join(parts[:count]), (*parts[count:], name)[0])
            for part in (*parts[count:], name)[1:]:
                found = self.names.attribute(found, part) if found else None
            if isinstance(found, Foreign) and not _is_kind(found.path):
                self._report(Place(node), self.judge.mention(node, self.module.scope, found.path))
            return

    # --- imports

    def _imports(self) -> None:
        """Report each import of what is then not used, or not known."""
        reported = {each.line for each in self.findings}
        for scope in self.module.scopes.values():
            for name, bindings in scope.names.items():
                for binding in bindings:
                    if isinstance(binding, Imported):
                        self._import(name, binding, reported)
            for source in scope.stars:
                if self.names.is_foreign(source):
                    star = next(
                        each for each in ast.walk(scope.node) if isinstance(each, ast.ImportFrom) and _is_star(each)
                    )
                    text = "an import of all names: which of them are used cannot be seen"
                    judged = Judged(source, Verdict.UNKNOWN, "", (Note("", Verdict.UNKNOWN, text),))
                    self._report(Place(star), judged)

    def _import(self, name: str, binding: Imported, reported: set[int]) -> None:
        is_relative = isinstance(binding.node, ast.ImportFrom) and binding.node.level
        if is_relative or not self.names.is_foreign(binding.module):
            return
        path = self.vocabulary.dotted(".".join(filter(None, (binding.module, binding.name))))
        if name in self._names_used and (self._is_known(path) or _is_kind(path) or not binding.name):
            return
        if name in self._names_used and self._has_uses(name):
            return
        _, use = self.vocabulary.use_of(path)
        if use is None:
            judged = Judged(path, Verdict.MAPS if _is_kind(path) else Verdict.UNKNOWN, "", ())
        else:
            text = use.says or "what is imported here is used elsewhere, or not at all"
            judged = Judged(path, use.verdict, "", (Note("", use.verdict, text),))
        if judged.verdict == Verdict.MAPS and not judged.notes:
            judged = judged._replace(notes=(Note("", Verdict.MAPS, "remove the import with its last use"),))
        self._report(Place(binding.node), judged)

    def _has_uses(self, name: str) -> bool:
        """Return whether a finding's source begins with a name, such as that of a module."""
        begins = re.compile(rf"@?{re.escape(name)}\b")
        return any(begins.match(each.source) for each in self.findings)


def _is_star(node: ast.ImportFrom) -> bool:
    return node.names[0].name == "*"


def _is_kind(path: str) -> bool:
    """Return whether a path is that of a kind of value, such as "Task", and not of a name."""
    return bool(re.fullmatch(r"[A-Z]\w*", path)) or path == "settings"


def _head(node: ast.stmt) -> str:
    """Return the first line of a statement."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, [*node.bases, *node.keywords]))
        return shortened(f"class {node.name}({bases})")
    if isinstance(node, Function):
        return f"def {node.name}(…)"
    return shown(node)

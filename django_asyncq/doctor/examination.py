"""Examine a project: read its files, find out which of them can use the other queue, and report each use."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .commands import uses_of_text
from .files import Files, find_files, module_names, one_line, parse, read_text
from .findings import Finding, Note, Report, Unreadable
from .judging import Judge, shortened
from .names import Module, Names, absolute
from .reading import Reader
from .vocabulary import Vocabulary

# Told how many files of how many have been read.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Source:
    """A file of Python: by which names it may be imported, and what it imports: modules, and names in them."""

    file: str
    names: tuple[str, ...]
    imports: frozenset[tuple[str, str]]


def examine(vocabulary: Vocabulary, path: Path, progress: Progress = lambda done, total: None) -> Report:
    """Read all files at a path, and return what they use of the other queue."""
    files = find_files(path)
    names = Names(vocabulary)
    names.known = set(_known_modules(files))
    unreadable: list[Unreadable] = []
    findings: list[Finding] = []
    others: list[_Source] = []
    for done, file in enumerate(files.python):
        progress(done, len(files))
        text = read_text(files.root, file)
        tree = parse(file, text) if isinstance(text, str) else text
        if isinstance(tree, Unreadable) or isinstance(text, Unreadable):
            unreadable.append(tree if isinstance(tree, Unreadable) else text)  # type: ignore[arg-type]  # one of the two
            continue
        if not _add(names, files, file, tree, unreadable, is_wanted=bool(vocabulary.words.search(text))):
            others.append(_source(files, file, tree))
    _add_importers(names, files, others, unreadable)
    judge = Judge(names)
    for module in dict.fromkeys(names.modules.values()):
        try:
            findings += Reader(names, judge, module).read()
        except RecursionError as error:
            unreadable.append(Unreadable(module.file, 0, one_line(error)))
    for done, file in enumerate([*files.texts, *files.migrations], len(files.python)):
        progress(done, len(files))
        text = read_text(files.root, file)
        if isinstance(text, Unreadable):
            unreadable.append(text)
        elif file in files.texts:
            findings += uses_of_text(vocabulary, file, text)
        else:
            findings += _uses_of_migration(vocabulary, file, text)
    progress(len(files), len(files))
    order = sorted(findings, key=lambda each: (each.file, each.line))
    return Report(vocabulary.name, str(path), len(files), order, sorted(unreadable, key=_file_of), files.skipped)


def _file_of(each: Unreadable) -> str:
    return each.file


def _known_modules(files: Files) -> Iterator[str]:
    """Yield the dotted names of all modules of the project, and of the folders that they are in."""
    for file in files.python:
        for name in module_names(files.root, file):
            parts = name.split(".")
            yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _add(
    names: Names, files: Files, file: str, tree: ast.Module, unreadable: list[Unreadable], *, is_wanted: bool
) -> bool:
    """Add a module, if it is wanted; return whether no further look at it is needed."""
    if not is_wanted:
        return False
    dotted = tuple(dict.fromkeys(module_names(files.root, file)))
    try:
        names.add(Module(file, dotted[0], tree, Path(file).stem == "__init__"), dotted)
    except RecursionError as error:
        unreadable.append(Unreadable(file, 0, one_line(error)))
    return True


def _source(files: Files, file: str, tree: ast.Module) -> _Source:
    dotted = tuple(dict.fromkeys(module_names(files.root, file)))
    module = Module(file, dotted[0], tree, Path(file).stem == "__init__")
    imports: set[tuple[str, str]] = set()
    for node in _statements(tree.body):
        if isinstance(node, ast.Import):
            imports |= {(each.name, "") for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            imports |= {(absolute(module, node), each.name) for each in node.names}
    return _Source(file, dotted, frozenset(imports))


def _statements(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield all statements, also those within others; expressions, of which there are many more, are not looked at."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, name, ())


def _add_importers(names: Names, files: Files, others: list[_Source], unreadable: list[Unreadable]) -> None:
    """Add the modules that import something of the other queue from those that were added, and so on.

    Their trees were dropped, since most files of a large project have nothing to do with its queue.
    """
    while True:
        wanted = [source for source in others if any(_is_of_queue(names, *each) for each in source.imports)]
        if not wanted:
            return
        for source in wanted:
            text = read_text(files.root, source.file)
            tree = parse(source.file, text) if isinstance(text, str) else text
            if isinstance(tree, ast.Module):
                _add(names, files, source.file, tree, unreadable, is_wanted=True)
        added = {source.file for source in wanted}
        others[:] = [source for source in others if source.file not in added]


def _is_of_queue(names: Names, module: str, name: str) -> bool:
    """Return whether an import brings something of the other queue."""
    if name == "*" or not name:
        return names.has_foreign(module)
    if f"{module}.{name}" in names.modules:
        return names.has_foreign(f"{module}.{name}")
    return module in names.modules and names.is_of_queue(names.of_module(module, name))


def _uses_of_migration(vocabulary: Vocabulary, file: str, text: str) -> Iterator[Finding]:
    """Yield the lines of a migration that name an app of the other queue."""
    name, use = vocabulary.use_of("migration")
    if use is None:
        return
    for number, line in enumerate(text.split("\n"), 1):
        imported = re.match(r"\s*(?:from|import)\s+(\w+)", line)
        apps = [f"app {word}" for word in re.findall(r"""["'](\w+)["'.]""", line)]
        if (imported and vocabulary.packages.fullmatch(imported[1])) or vocabulary.uses.keys() & apps:
            yield Finding(file, number, name, shortened(line), use.verdict, "", (Note("", use.verdict, use.says),))

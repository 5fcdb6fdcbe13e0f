"""Names that the package had before, or that the field has other words for: none comes back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch

from ..shape import ROOT, Function

# Parts of names, between underscores or capitals → what to say instead.
INSTEAD = {
    "task": "job jobs",
    "message": "envelope envelopes",
    "attempt": "try tries",
    "occurrence (of a schedule), round (of a loop)": "tick ticks",
    "capacity": "room rooms",
    "prefetch": "ahead",
    "pacing": "turns",
    "pause": "rest rests rested resting",
    "slot_table": "board boards",
    "listener": "watch",
    "notify, acknowledge, wake": "hear hears heard hearing tell tells told telling ring rings rang rung ringing",
    "batch": "gather gathers gathered gathering",
    "maintenance": "upkeep",
    "retention_policy": "keeping",
    "enqueueing, dispatching, deletion": "entering pushing leaving",
    "release_uncommitted": "withdraw withdraws withdrew withdrawn",
}
WORDS = {word: instead for instead, words in INSTEAD.items() for word in words.split()}
TOGETHER = re.compile(
    r"put_back|hand(?:ed|ing)?_back|take_back|g[ai]ven?_on|put_off|t(?:ake|akes|ook)_(?:over|up)"
    r"|hand(?:ed|ing)?_over|is_gone|left_out|look_after"
)
# The method that does one round of a loop; what remains of a list; it watches files, as each reloader does.
ALLOWED = {"tick", "TICK_SECONDS", "rest", "CodeWatch"}
# The in-memory item of a slot is a Job; the test kit takes the Jobs of the worker through their runs.
HAVE_JOBS = ("django_asyncq/worker/*", "django_asyncq/testing/running.py")


def names_of(source: str) -> Iterator[str]:
    """Yield the names that others use: classes, functions, parameters, and what stands in a module or class."""
    scopes: list[ast.Module | ast.ClassDef] = [ast.parse(source)]
    while scopes:
        for node in scopes.pop().body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                scopes.append(node)
                yield node.name
            elif isinstance(node, Function) and (not node.name.startswith("_") or node.name == "__init__"):
                yield node.name
                yield from (each.arg for each in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (each.id for each in targets if isinstance(each, ast.Name) and not each.id.startswith("_"))


def old_names(path: str, source: str) -> list[str]:
    """Return a complaint for each old word in the names of a module or script, and in its own."""
    found, stem = [], path.removesuffix("/__init__.py").rpartition("/")[2].rpartition(".")[0]
    for name in {stem, *(names_of(source) if path.endswith(".py") else ())} - ALLOWED:
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
        parts = set(snake.split("_")) & WORDS.keys()
        if any(fnmatch(path, each) for each in HAVE_JOBS):
            parts -= {"job", "jobs"}
        found += [f"{path}: {name}: say {WORDS[part]}" for part in sorted(parts)]
        found += [f"{path}: {name}: say requeue, postpone, recover"] if TOGETHER.search(snake) else []
    return found


def test_names_are_the_fields_words() -> None:
    """No module, script, class, function, parameter or constant that others use has an old name."""
    paths = [path for top in ("django_asyncq", "example_project") for path in sorted((ROOT / top).rglob("*.*"))]
    paths = [path for path in paths if path.suffix in (".py", ".lua") and "migrations" not in path.parts]
    assert [each for path in paths for each in old_names(path.relative_to(ROOT).as_posix(), path.read_text())] == []


def test_an_old_name_is_found() -> None:
    """In classes, functions, parameters, constants, fields, modules and scripts."""
    sources = "class Upkeep: ...", "def put_back(): ...", "def f(*, room): ...", "JOB = 1", "class A:\n    next_try = 1"
    assert all(old_names("django_asyncq/a.py", source) for source in sources)
    assert old_names("django_asyncq/leaving.py", "") and old_names("django_asyncq/broker/lua/put_back.lua", "")
    assert not old_names("django_asyncq/worker/x.py", "class Job: ...")

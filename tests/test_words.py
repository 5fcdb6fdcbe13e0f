"""The project says things in plain English and in the field's words; this refuses the words it used before.

One list of old words, each with what to say instead. Each source is searched for the texts that people read: names that
others use, docstrings, log lines, errors, help texts, templates, the headers of scripts, the docs. Comments are not
searched, and neither is what stands between backticks: that is code, and is searched where it is defined.
`python -m tests.test_words` lists all that is found.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

from .log_source import read_lines

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "django_asyncq"
EXAMPLE = ROOT / "example_project"
MODULES = sorted(
    path for folder in (PACKAGE, EXAMPLE) for path in folder.rglob("*.py") if "migrations" not in path.parts
)
SCRIPTS = sorted(PACKAGE.rglob("*.lua"))
TEMPLATES = sorted(path for folder in (PACKAGE, EXAMPLE, ROOT / "docs") for path in folder.rglob("*.html"))
PAGE_SCRIPTS = sorted(path for folder in (PACKAGE, EXAMPLE, ROOT / "docs") for path in folder.rglob("*.js"))
YAML = sorted([*(ROOT / ".github").rglob("*.yml"), *(ROOT / "docs").rglob("*.yml")])
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


class OldWord(NamedTuple):
    """A pattern of an old word in prose, and what to say instead."""

    pattern: str
    instead: str


IRREGULAR = {
    "come": ("comes", "came", "coming"),
    "give": ("gives", "gave", "given", "giving"),
    "go": ("goes", "went", "gone", "going"),
    "hear": ("hears", "heard", "hearing"),
    "leave": ("leaves", "left", "leaving"),
    "put": ("puts", "putting"),
    "ring": ("rings", "rang", "rung", "ringing"),
    "stand": ("stands", "stood", "standing"),
    "take": ("takes", "took", "taken", "taking"),
    "tell": ("tells", "told", "telling"),
    "withdraw": ("withdraws", "withdrew", "withdrawn", "withdrawing"),
}


def forms(*verbs: str) -> str:
    """Return a pattern of all forms of verbs; a regular one takes s, ed and ing."""
    each = [form for verb in verbs for form in (verb, *IRREGULAR.get(verb, (f"{verb}s", f"{verb}ed", f"{verb}ing")))]
    return rf"\b(?:{'|'.join(each)})\b"


def up_to(count: int) -> str:
    """Return a pattern of what may stand between a verb and its particle: "take the task up"."""
    return rf"(?:[\w'-]+ ){{0,{count}}}"


RUN = r"(?:tasks?|runs?|attempts?|jobs?|body|bodies|functions?)"
SOME = r"(?:a|an|the|each|every|this|that|one|no|its|their|another|more|free)"
MANY = r"(?:all|any|both|few|many|most|some|such|these|those|other|old|new|finished|two|three|\d+)"
NTH = r"(?:first|second|third|last|next|further|new|other|single|later|earlier|failed|counted|uncounted)"
HOLDER = r"(?:workers?|process(?:es)?|gates?|limits?)"
# What another program or a call "from any thread" ends is something else: a pause, a sleep.
PROGRAM = (
    r"(?:commands?|(?<!another )programs?|process(?:es)?|workers?|supervisors?|leaders?|(?<!from any )threads?"
    r"|servers?)"
)
AUXILIARY = (
    r"(?: (?:that|which|has|have|had|is|are|was|were|not|yet|already|then|whose|itself|will|may|must|would)){0,3}"
)

IN_PROSE = [
    # The parts.
    OldWord(r"\bjobs?\b", "task (only the in-memory item of a slot is a job)"),
    OldWord(
        rf"\b(?:{SOME}|{MANY}) records?\b(?! (?:its|their|the|an?|what|that)\b)|\brecords (?:of|in|are|were|have)\b",
        "the row",
    ),
    OldWord(
        r"\brows? (?:is|are|was|were|becomes?) (?:(?:an?|the|no) )?(?:message|entry|record|job)s?\b"
        r"|\bentr(?:y|ies) (?:in|of) (?:the|a) (?:database|table)\b",
        "the row, which is in the database",
    ),
    OldWord(
        r"\bentr(?:y|ies) (?:is|are|was|were|becomes?) (?:(?:an?|the|no) )?(?:message|row|record|job)s?\b"
        r"|\b(?<!deletion of )rows? (?:in|of) redis\b",
        "the entry, which is in Redis",
    ),
    OldWord(r"\benvelopes?\b", "message"),
    OldWord(
        rf"\b(?:{SOME}|{NTH}|of|{MANY}) (?:try|tries)\b"
        rf"|\b(?:an?|the|no|every|each|its) {NTH} (?:try|tries)\b",
        "attempt",
    ),
    OldWord(r"\bTries\b", "attempts"),
    OldWord(
        rf"\bfree places?\b|\bplaces? (?:in|of|at) (?:an?|the|each|every|this|its) {HOLDER}\b"
        rf"|\b{HOLDER} (?:has|have|had|with|without|gets?|needs?|offers?) {up_to(2)}places?\b"
        rf"|\b(?:its|their) places\b(?! in the list\b)|\b(?:gate|worker) places?\b",
        "slot",
    ),
    OldWord(r"\bonly one may\b|\bmay do what only\b|\bone that may\b", "the leader"),
    OldWord(r"\bterms? (?:(?:that|which) )?(?:is|are|was|were|has been) over\b", "an earlier term, leadership lost"),
    OldWord(r"\bticks?\b(?!\()", "occurrence (of a schedule), round (of a loop)"),
    OldWord(r"\brooms?\b", "capacity; a gate has a free slot, or is full"),
    OldWord(r"\bahead\b", "prefetch"),
    OldWord(r"\b(?:its|their|whose|his|my|the) turns?\b|\bturns (?:have|of)\b|\btakes? turns\b", "pacing, order"),
    OldWord(
        r"\b(?:rests|rested|resting)\b|\b(?:a|no|longer|shorter|its|short) rest\b|\brest (?:is over|for \d)", "pause"
    ),
    OldWord(rf"\bin line\b|\bline ahead\b|\b{SOME} line (?:of (?:jobs|tasks)|for)\b", "job queue"),
    OldWord(r"\bboards?\b", "slot table"),
    OldWord(rf"\b{SOME} watch\b|{forms('hear')}", "listener, be notified"),
    OldWord(rf"(?<!can )(?<!cannot ){forms('tell')}(?![^.]{{0,40}}\bapart\b)", "notify, wake, acknowledge, say"),
    OldWord(rf"{forms('stand')} by\b|\bstandby\b", "handoff"),
    OldWord(forms("gather"), "batch, collect"),
    OldWord(r"\bupkeep\b", "maintenance"),
    OldWord(rf"\b{SOME} keeping\b|\bkeeping polic", "retention policy"),
    # The verbs.
    OldWord(
        rf"\bpushing\b|{forms('enter', 'leave')} (?:an?|the|its|their|this|that|each|every|which|any) queues?\b"
        rf"|\bentering (?:an? |the |its |their )?{RUN}\b",
        "enqueue, dispatch (push); dequeue",
    ),
    OldWord(
        rf"\b{RUN}{AUXILIARY} end(?:s|ed|ing)?\b"
        rf"|{forms('end')} (?:of )?(?:an? |the |its |this |each |their |that )?{RUN}\b(?!-)",
        "finish (succeed, fail)",
    ),
    OldWord(
        rf"\b{PROGRAM}{AUXILIARY} end(?:s|ed|ing)?\b(?! in …)"
        r"|\bends at once\b|… ends? (?:by itself|because|with|when)\b",
        "exit, stop",
    ),
    OldWord(rf"{forms('come')} to (?:an|its|their) end\b", "finish, stop"),
    OldWord(rf"{forms('hand', 'put')} {up_to(4)}back\b", "requeue"),
    OldWord(rf"{forms('give')} {up_to(3)}back\b", "release (a gate slot), requeue, restore"),
    OldWord(rf"{forms('give')} (?:it |them |tasks? )?on(?: to| without)?\b(?! the)", "requeue"),
    OldWord(rf"{forms('put')} {up_to(3)}off\b", "postpone"),
    OldWord(rf"{forms('hand')} {up_to(3)}over\b", "spill (outcomes), pass"),
    OldWord(rf"{forms('take')} {up_to(3)}up\b(?! to\b)", "replay (outcomes), begin"),
    OldWord(rf"{forms('take')} {up_to(3)}over\b", "recover, succeed"),
    OldWord(
        rf"{forms('go')} for good\b|\b(?:is|are|was|were|be|been|has|have|had) gone\b|\bgone from\b"
        rf"|\brows?(?: (?:that|which|has|have))? {forms('leave')} (?:the|its|a) (?:database|table)\b",
        "deleted, pruned, missing",
    ),
    OldWord(rf"{forms('leave')} {up_to(3)}out\b", "skip"),
    OldWord(forms("ring"), "notify, wake"),
    OldWord(rf"{forms('withdraw')}|\bwithdrawals?\b", "release_uncommitted"),
    # The states.
    OldWord(
        r"\b(?:rows?|tasks?|those|runs?|what (?:is|are)|be|is|are|stands?) in [0-3]\b|\bin [0-3] (?:and|or) [0-3]\b"
        r"|\bstates?(?: (?:is|are|was|were|be|becomes?|not|either|=|==)){0,2} ?\(?[0-3]\b"
        r"|\b[0-3] ?(?:→|->) ?(?:[0-3]|gone)\b|→ [0-3]\b|\b(?:stays|said|to) [0-3] (?:again|with)\b"
        r"|\bsays? [0-3]\b|\bstate=[0-3]\b",
        "QUEUED, RUNNING, SUCCEEDED, FAILED, RETRYING",
    ),
    # The manner.
    OldWord(r"\bbut for\b", "except"),
    OldWord(r"\bfor so long\b|\bso long as\b|\bso long\b", "that long, while, as long as"),
    OldWord(r"\bwhoever\b|\bwhosoever\b", "name the process or the person"),
    OldWord(r"(?:^|(?<=[.;:] ))Who (?:\w+s|has|is) (?![^.]*\?)", "name the process or the person"),
    OldWord(r", for (?:it|they|there|nobody|who|else) ", "because"),
    OldWord(r"\b(?:its|their) own affair\b|\b(?:be|was|were|is) rested\b", "say it plainly"),
    OldWord(
        r"\b(?:is|are|was|were|be|been) away\b|\b(?:redis|database|server|stores?) away\b|\baway (?:while|at|now)\b"
        rf"|\b(?:redis|databases?|servers?|stores?|brokers?|hosts?|it|that|which) {forms('go', 'stay')} away\b",
        "unreachable",
    ),
]

# Parts of names, between underscores or capitals.
IN_NAMES = {
    "job": "task",
    "jobs": "tasks",
    "envelope": "message",
    "envelopes": "messages",
    "try": "attempt",
    "tries": "attempts",
    "tick": "occurrence",
    "ticks": "occurrences",
    "room": "capacity",
    "rooms": "capacity",
    "ahead": "prefetch",
    "turns": "pacing",
    "rest": "pause",
    "rests": "pauses",
    "rested": "paused",
    "resting": "pausing",
    "board": "slot_table",
    "boards": "slot_tables",
    "watch": "listener",
    "hear": "notify",
    "hears": "notify",
    "heard": "notified",
    "hearing": "notified",
    "tell": "notify, acknowledge",
    "tells": "notify, acknowledge",
    "told": "notified",
    "telling": "notify, acknowledge",
    "standby": "handoff",
    "gather": "batch",
    "gathers": "batches",
    "gathered": "batched",
    "gathering": "batcher",
    "upkeep": "maintenance",
    "keeping": "retention_policy",
    "entering": "enqueueing",
    "pushing": "dispatching, push",
    "leaving": "deletion",
    "ring": "wake",
    "rings": "wakes",
    "rang": "woke",
    "rung": "woken",
    "ringing": "waking",
    "withdraw": "release_uncommitted",
    "withdraws": "releases_uncommitted",
    "withdrew": "released",
    "withdrawn": "released",
}
NAMES_TOGETHER = re.compile(
    r"put_back|hand(?:ed|ing)?_back|take_back|g[ai]ven?_on|put_off|t(?:ake|akes|ook)_(?:over|up)"
    r"|hand(?:ed|ing)?_over|stands?_by|stood_by|is_gone|left_out|look_after"
)
MODULES_NOT_TO_BE = {"pushing", "entering", "leaving", "returning", "taking", "waiting", "keeping", "room", "line"}


class Allowed(NamedTuple):
    """What an old word may still mean, and where. files: a pattern of the path within the repository."""

    files: str
    words: str
    reason: str


ALLOWED = [
    Allowed("django_asyncq/worker/*", r"\bjobs?\b", "the in-memory item of a slot is a Job"),
    Allowed("*", r"\bjob queues?\b", "the part that passes Jobs to slots is called so in the field"),
    Allowed("docs/deployment/kubernetes.yml", r"\bjob\b", "a kind of object in Kubernetes"),
    Allowed("*", r"\bbackground jobs?\b", "what the field calls it, for readers who come from there"),
]
NAMES_ALLOWED = {
    "tick": "the method that does one round of a loop",
    "TICK_SECONDS": "the seconds between two rounds of a loop",
    "rest": "what remains of a list",
    "CodeWatch": "it watches files, as each reloader does; it is no listener",
}
# The test kit takes the Jobs of the worker through their runs.
JOBS_ALLOWED = ("django_asyncq/worker/*", "django_asyncq/testing/running.py")


class Text(NamedTuple):
    """A text that people read: what kind of text it is, and in which line it begins."""

    kind: str
    line: int
    text: str


# --- what people read in each kind of source

LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
VISIBLE_CALLS = {
    "_",
    "gettext",
    "gettext_lazy",
    "ngettext",
    "ngettext_lazy",
    "pgettext",
    "write",
    "message_user",
    "refuse",
    "warn",
}
VISIBLE_KEYWORDS = {
    "help",
    "hint",
    "help_text",
    "description",
    "short_description",
    "verbose_name",
    "empty_value_display",
}
ERROR_CALL = re.compile(r"(?:Error|Exception|Unavailable|Lost|Timeout|Full|Refused|Warning|CannotStart|^Invalid\w+)$")


def literals(node: ast.AST) -> str:
    """Return the literal text of an expression; what is filled in is left as `{}`."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(literals(part) or "{}" for part in node.values)
    if isinstance(node, ast.BinOp):
        return literals(node.left) + literals(node.right)
    if isinstance(node, ast.IfExp):
        return f"{literals(node.body)} {literals(node.orelse)}"
    return ""


def callee(node: ast.Call) -> str:
    """Return the last name of what is called."""
    function = node.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def calls_of(node: ast.Call) -> Iterator[Text]:
    """Yield the texts of one call that people read: log lines, errors, visible texts."""
    name = callee(node)
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    if name in LOG_METHODS and isinstance(owner, ast.Name) and owner.id == "logger":
        yield Text("log line", node.lineno, literals(node.args[1 if name == "log" else 0]))
    elif ERROR_CALL.search(name):
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            yield Text("error", node.lineno, literals(argument))
    elif name in VISIBLE_CALLS:
        for argument in node.args:
            yield Text("visible text", node.lineno, literals(argument))
    for keyword in node.keywords:
        if keyword.arg in VISIBLE_KEYWORDS:
            yield Text("visible text", node.lineno, literals(keyword.value))


def prose_of_module(source: str) -> Iterator[Text]:
    """Yield docstrings, log lines, errors and visible texts of a module."""
    for node in ast.walk(ast.parse(source)):
        for statement in getattr(node, "body", []) if isinstance(getattr(node, "body", None), list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield Text("docstring", statement.lineno, literals(statement.value))
        if isinstance(node, ast.Call):
            yield from calls_of(node)
        if isinstance(node, ast.Assign):
            targets = {target.id for target in node.targets if isinstance(target, ast.Name)}
            if targets & VISIBLE_KEYWORDS:
                yield Text("visible text", node.lineno, literals(node.value))


def names_of_module(source: str) -> Iterator[tuple[int, str]]:
    """Yield the names that others use: classes, functions, parameters, and what stands in a module or class."""
    tree = ast.parse(source)
    scopes: list[ast.Module | ast.ClassDef] = [tree]
    while scopes:
        for node in scopes.pop().body:
            if isinstance(node, ast.ClassDef):
                if not node.name.startswith("_"):
                    scopes.append(node)
                    yield node.lineno, node.name
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if not node.name.startswith("_") or node.name == "__init__":
                    yield node.lineno, node.name
                    arguments = node.args
                    for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
                        yield node.lineno, each.arg
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name) and not target.id.startswith("_"):
                        yield node.lineno, target.id


def prose_of_script(source: str) -> Iterator[Text]:
    """Yield the header of a script; its reply words stand in quotes, and are code."""
    header = []
    for line in source.splitlines():
        if not line.startswith("--"):
            break
        header.append(line.removeprefix("--").strip())
    yield Text("header", 1, re.sub(r'"[\w ]*"', "…", " ".join(header)))


def prose_of_template(source: str) -> Iterator[Text]:
    """Yield the visible text of a template, line by line."""
    for number, line in enumerate(source.splitlines(), 1):
        # The translated strings stand in tags; all else of tags, and what is filled in, is code.
        text = re.sub(r'\{%\s*(?:translate|trans)\s+"([^"]*)".*?%\}', r"\1", line)
        text = re.sub(r"\{%.*?%\}|\{\{.*?\}\}|\{#.*?#\}", " ", text)
        shown = " ".join(re.findall(r'(?:title|aria-label|alt)="([^"]*)"', text))
        yield Text("template", number, f"{re.sub(r'<[^>]*>', ' ', text)} {shown}")


def prose_of_page_script(source: str) -> Iterator[Text]:
    """Yield the comments of JavaScript that begin in the first column, and its strings of several words."""
    for found in re.finditer(r"^(?:(?://.*\n)+|/\*[\s\S]*?\*/)", source, re.MULTILINE):
        line = source.count("\n", 0, found.start()) + 1
        yield Text("header", line, re.sub(r"^[ *]*//|^/\*|^ ?\*", "", found[0], flags=re.MULTILINE))
    for number, line in enumerate(source.splitlines(), 1):
        for string in re.finditer(r"""(["'`])([^"'`]* [^"'`]*)\1""", line):
            yield Text("visible text", number, string[2])


def prose_of_yaml(source: str) -> Iterator[Text]:
    """Yield each value of a file, across its lines, and the comments before it."""
    begin, lines = 1, []  # type: int, list[str]
    for number, line in enumerate(source.splitlines(), 1):
        if key := re.match(r"\s*(?:- )?[\w.-]+:(?: [|>]-?)?(?= |$)|\s*- |\s*# ?", line):
            is_comment = key[0].strip() == "#"
            if not (is_comment and lines and lines[-1].startswith("#")):
                yield Text("value", begin, " ".join(each.removeprefix("#") for each in lines))
                begin, lines = number, []
            line = f"{'#' if is_comment else ''}{line[key.end() :]}"
        lines.append(line.strip())
    yield Text("value", begin, " ".join(each.removeprefix("#") for each in lines))


def prose_of_page(source: str) -> Iterator[Text]:
    """Yield the paragraphs of a page of the docs, and the comments of its code blocks; headings may ask "Who …"."""
    in_code, begin, lines = False, 1, []  # type: bool, int, list[str]
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if line.strip().startswith("```"):
            in_code, line = not in_code, ""
        elif in_code:
            line = found[1] if (found := re.search(r"(?:^|\s)# (.*)", line)) else ""
        if line.startswith(("#", "|", "- ")) or not line.strip():
            yield Text("page", begin, " ".join(lines))
            begin, lines = number, []
        if line.startswith("#"):
            yield Text("heading", number, re.sub(r"^#+ (?:Who )?", "", line))
        else:
            lines.append(re.sub(r"\]\([^)]*\)|<!--|-->", "]", line.strip()))
    yield Text("page", begin, " ".join(lines))


# --- the search


def allowed_in(path: str, text: str) -> str:
    """Return a text without what is allowed there, and without code."""
    text = re.sub(r"``?[^`]*``?", "…", text)
    for each in ALLOWED:
        if fnmatch(path, each.files):
            text = re.sub(each.words, "…", text, flags=re.IGNORECASE)
    return " ".join(text.split())


def old_words(path: str, texts: Iterator[Text]) -> list[str]:
    """Return a complaint for each old word in texts of one file."""
    found = []
    for kind, line, text in texts:
        cleaned = allowed_in(path, text)
        for word in IN_PROSE:
            # Sentences begin with capitals, and so do the patterns that need one.
            flags = 0 if re.search(r"[A-Z]", re.sub(r"\\[A-Z]", "", word.pattern)) else re.IGNORECASE
            for match in re.finditer(word.pattern, cleaned, flags):
                around = cleaned[max(match.start() - 40, 0) : match.end() + 40]
                found.append(f"{path}:{line}: {kind}: “{match[0].strip()}” in “…{around}…”: say {word.instead}")
    return found


def old_names(path: str, names: Iterator[tuple[int, str]]) -> list[str]:
    """Return a complaint for each old word in names of one file."""
    found = []
    for line, name in names:
        if name in NAMES_ALLOWED:
            continue
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
        for part in snake.split("_"):
            if part in IN_NAMES and not (part in ("job", "jobs") and any(fnmatch(path, each) for each in JOBS_ALLOWED)):
                found.append(f"{path}:{line}: name {name}: say {IN_NAMES[part]}")
        if NAMES_TOGETHER.search(snake):
            found.append(f"{path}:{line}: name {name}: say requeue, postpone, recover, handoff")
    return found


def place_of(path: Path) -> str:
    """Return a path within the repository."""
    return path.relative_to(ROOT).as_posix()


def name_of(path: Path) -> str:
    """Return the name of a module or package."""
    return path.parent.name if path.stem == "__init__" else path.stem


def refuse(found: list[str]) -> None:
    """Fail with all that was found."""
    if found:
        pytest.fail("\n".join(found), pytrace=False)


@pytest.mark.parametrize("path", MODULES, ids=place_of)
def test_modules_speak_plainly(path: Path) -> None:
    """Docstrings, log lines, errors and visible texts use the field's words."""
    refuse(old_words(place_of(path), prose_of_module(path.read_text())))


@pytest.mark.parametrize("path", MODULES, ids=place_of)
def test_names_are_the_fields_words(path: Path) -> None:
    """No module, class, function, parameter or constant that others use has an old name."""
    names = [(1, name_of(path)), *names_of_module(path.read_text())]
    refuse(old_names(place_of(path), iter(names)))
    assert path.stem not in MODULES_NOT_TO_BE, f"{path.stem} is no noun of a part"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_speak_plainly(path: Path) -> None:
    """Names and headers of scripts use the field's words."""
    refuse(old_words(place_of(path), prose_of_script(path.read_text())))
    refuse(old_names(place_of(path), iter([(1, path.stem)])))


@pytest.mark.parametrize("path", TEMPLATES, ids=place_of)
def test_templates_speak_plainly(path: Path) -> None:
    """What a person sees in the admin uses the field's words."""
    refuse(old_words(place_of(path), prose_of_template(path.read_text())))


@pytest.mark.parametrize("path", PAGE_SCRIPTS, ids=place_of)
def test_scripts_of_pages_speak_plainly(path: Path) -> None:
    """What JavaScript shows and says of itself uses the field's words."""
    refuse(old_words(place_of(path), prose_of_page_script(path.read_text())))


@pytest.mark.parametrize("path", YAML, ids=place_of)
def test_forms_and_configurations_speak_plainly(path: Path) -> None:
    """The forms for issues, and the files of the docs that people copy, use the field's words."""
    refuse(old_words(place_of(path), prose_of_yaml(path.read_text())))


def test_log_lines_that_helpers_write_speak_plainly() -> None:
    """Also those that a module gives to `Faults`, to `outlives` and to helpers of its own."""
    for line in read_lines():
        refuse(old_words(f"django_asyncq/{line.place}", iter([Text("log line", 0, line.text)])))


@pytest.mark.parametrize("path", PAGES, ids=place_of)
def test_pages_speak_plainly(path: Path) -> None:
    """The docs, the README and the changelog use the field's words."""
    refuse(old_words(place_of(path), prose_of_page(path.read_text())))


MOST_WORDS = 22
GUIDES = sorted((ROOT / "docs" / "guides").rglob("*.md"))


def sentence_lengths(page: str) -> list[int]:
    """Return the words of each sentence; code, tables and headings are none, and a span of code is one word."""
    page = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"^(?:\||#).*$", "", page, flags=re.MULTILINE)
    page = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", page))
    paragraphs = re.split(r"\n\s*\n|^\s*(?:-|\d+\.) ", page, flags=re.MULTILINE)
    sentences = [each for part in paragraphs for each in re.split(r"(?<=[.!?])\s", " ".join(part.split()))]
    return [count for each in sentences if (count := len(re.findall(r"[\w'’-]+", each)))]


@pytest.mark.parametrize("path", GUIDES, ids=place_of)
def test_guides_have_short_sentences(path: Path) -> None:
    """At most MOST_WORDS words in the mean."""
    lengths = sentence_lengths(path.read_text())
    assert sum(lengths) / len(lengths) <= MOST_WORDS, lengths


def test_a_long_sentence_is_found() -> None:
    """Across lines, in lists and with links; what is no sentence does not make the mean smaller."""
    long = "word " * 30 + "end."
    page = f"# A heading\n\n{long[:50]}\n{long[50:]} Short one.\n\n- {long}\n\n| a | b |\n\n```sh\nls\n```\n"
    assert sentence_lengths(page + "[Two words](x.md) `a b c`.\n") == [31, 2, 31, 3]


# --- the search can fail

PLANTED_IN_MODULES = {
    "docstring": '"""Keep the place of the standby."""',
    "docstring of a function": 'def f():\n    """Hand the task back."""',
    "docstring of a field": 'class A:\n    x: int = 1\n    """How long a task is put off."""',
    "log line": 'logger.info("%d tasks handed " "back", 1)',
    "log line with a level": 'logger.log(20, "Redis is away: %s", 1)',
    "error": 'raise InvalidOption(f"task {name} has used its last try")',
    "error that is kept": 'error = TaskTimeout(f"the task has ended after {s} s")',
    "visible text": 'label = _("Tries")',
    "help text": 'parser.add_argument("--x", help="leave them out")',
    "hint of a check": 'checks.Error("x", hint="say who may tell Redis", id="e")',
    "state in numbers": '"""Change rows in 0 and 1."""',
    "state in a table": '"""| row | 0 → 3 with retry_at |"""',
    "bare who": '"""Read it. Who waits is next."""',
    "because": '"""Wait, for nobody knows."""',
}


@pytest.mark.parametrize("source", PLANTED_IN_MODULES.values(), ids=list(PLANTED_IN_MODULES))
def test_an_old_word_in_a_module_is_found(source: str) -> None:
    """The search can fail for each kind of text of a module."""
    assert old_words("django_asyncq/planted.py", prose_of_module(source))


@pytest.mark.parametrize(
    "source",
    ["class Upkeep: ...", "def put_back(): ...", "def f(*, room): ...", "JOB = 1", "class A:\n    next_try = 1"],
)
def test_an_old_word_in_a_name_is_found(source: str) -> None:
    """The search can fail for classes, functions, parameters, constants and fields."""
    assert old_names("django_asyncq/planted.py", names_of_module(source))


def test_an_old_word_in_other_sources_is_found() -> None:
    """The search can fail for scripts, templates, and pages: paragraphs across lines, tables, comments in code."""
    assert old_words("planted.lua", prose_of_script("-- Give the slot back.\nlocal x = 1"))
    assert old_words("planted.html", prose_of_template('<p title="x">{% translate "Tries" %}</p>'))
    assert old_words("planted.html", prose_of_template('<button aria-label="Leave it out">x</button>'))
    assert old_words("planted.html", prose_of_template("<p>The worker ends.</p>"))
    for script in (
        "// Shows the board.\n// More.\nlet a;",
        "/* What is\n * left out. */",
        'x.title = "Redis is away";',
    ):
        assert old_words("planted.js", prose_of_page_script(script)), script
    for yaml in (
        "description: Tasks are handed back.",
        "value: |\n  All tries\n  and tells",
        "# It is\n# away.",
        "- the upkeep",
    ):
        assert old_words("planted.yml", prose_of_yaml(yaml)), yaml
    for page in ("The task is handed\nback.", "| a | the board |", "```sh\nls  # Redis is away\n```", "## The upkeep"):
        assert old_words("planted.md", prose_of_page(page)), page


@pytest.mark.parametrize(
    "text",
    [
        "The task waits before entering the queue.",
        "Pushing the task failed.",
        "It is counted on leaving the queue.",
        "All records are kept.",
        "These records go to the archive.",
        "The row is a message.",
        "The row in Redis is older.",
        "The entry is a row.",
        "An entry of the table.",
        "It sleeps before every second try.",
        "The server went away.",
        "Redis goes away for a while.",
        "Another worker takes the task up.",
        "The leader took all of them over.",
        "The worker has two places.",
        "A gate with three free places.",
        "The tasks have lost their places.",
        "The command ends at once.",
        "`runworkers` ends because a table is missing.",
        "The process of the task will then end, and the worker has ended too.",
        "The worker ends its run.",
        "It writes in a term that is over.",
        "Rows whose state is 1.",
        "Where `state` is kept, the state is not 2.",
        "Lines ring in the terminal, ringing it twice.",
        "It puts all the tasks off.",
        "The row leaves the database.",
        "It puts the members of sets back.",
        "Processes take turns.",
    ],
)
def test_the_glossarys_refusals_are_found(text: str) -> None:
    """In every form of a verb, and with words between it and its particle."""
    assert old_words("docs/planted.md", prose_of_page(text))


@pytest.mark.parametrize(
    "text",
    [
        "An entry in Redis, and the headline of an online deadline.",
        "Call `tick()` to do one round; `put_back` is code.",
        "He tries again; the fence tells two runs apart.",
        "The rest of the tasks run in turn.",
        "It turns the handoff off, in place of the other.",
        "A row is recorded before its entry is removed.",
        "The transaction ends; the lease runs out at the end of the day.",
        "Redis sends 2 commands in 3 calls, to 1 server.",
        "Enter a cron expression; the pushed task leaves no trace in the queue.",
        "The leader records outcomes; a worker may record its own, and each process records them once.",
        "A wait ends when another program has ended the pause; the id of the process ends in `.q`.",
        "The place of an id in the list, and their places in the list.",
        "The state of 3 tasks; the state in 2 rows; a row has a message, and an entry has one too.",
        "It takes a day up to the last one; a slot that is over its limit.",
    ],
)
def test_plain_english_passes(text: str) -> None:
    """Words that only look like old ones, or mean something else, are not refused."""
    assert old_words("docs/planted.md", prose_of_page(text)) == []


def test_every_exception_has_a_reason() -> None:
    """What is allowed says why, and a job is allowed in the worker alone."""
    assert all(each.reason for each in ALLOWED)
    assert all(NAMES_ALLOWED.values())
    assert old_words("django_asyncq/admin/x.py", prose_of_module('"""Run a job."""'))
    assert not old_words("django_asyncq/worker/x.py", prose_of_module('"""Run a job."""'))


def everything() -> Iterator[str]:
    """Yield every complaint, file by file."""
    readers = [
        (MODULES, prose_of_module),
        (SCRIPTS, prose_of_script),
        (TEMPLATES, prose_of_template),
        (PAGE_SCRIPTS, prose_of_page_script),
        (YAML, prose_of_yaml),
        (PAGES, prose_of_page),
    ]
    for paths, prose_of in readers:
        for path in paths:
            yield from old_words(place_of(path), prose_of(path.read_text()))
    for path in MODULES:
        names = [(1, name_of(path)), *names_of_module(path.read_text())]
        yield from old_names(place_of(path), iter(names))


if __name__ == "__main__":
    for complaint in everything():
        print(complaint)

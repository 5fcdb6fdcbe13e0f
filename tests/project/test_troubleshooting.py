"""Troubleshooting: each symptom has a command, what the guide quotes is said, each error has its entry."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

from .test_docs import ASYNCQ

PACKAGE = Path(__file__).parent.parent.parent / "django_asyncq"
BANNERS = PACKAGE / "admin" / "banner.py"
SOURCES = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
DOCS = Path(__file__).parent.parent.parent / "docs"
GUIDE = DOCS / "guides" / "troubleshooting.md"
SYMPTOMS = (
    "Nothing runs",
    "Tasks stay Queued",
    "Tasks stay Running",
    "Everything answers 429",
    "A task ran twice",
    "Workers restart all the time",
    "Memory grows",
    "Schedules do not fire",
    "Redis was emptied",
    "The database was unreachable",
    "Tasks wait for code that no worker has",
    "The admin shows a banner",
    "runworkers exits at once",
    "check reports an error",
    "The log has a warning or an error",
)


# --- the guide


def symptoms() -> dict[str, str]:
    """Return the chapters of the guide by heading."""
    _, *chapters = re.split(r"^## ", GUIDE.read_text(), flags=re.MULTILINE)
    return {chapter.splitlines()[0].replace("`", ""): chapter for chapter in chapters}


def test_each_symptom_has_a_command_and_causes() -> None:
    """How to see it, by a command that `test_docs` finds to exist, and then the causes in a table."""
    assert tuple(symptoms()) == SYMPTOMS
    for heading, chapter in symptoms().items():
        assert re.search(r"^python manage\.py \w+", chapter, re.MULTILINE), heading
        assert len(re.findall(r"^\| (?!cause|---)", chapter, re.MULTILINE)) >= 2, heading


def test_the_guide_is_short() -> None:
    """It is read while something is broken."""
    assert len(GUIDE.read_text().splitlines()) < 300


def is_said(quoted: str, strings: set[str]) -> bool:
    """Return whether strings of the package have all parts of a quoted text, where "…" stands for a value."""
    # What ends an outage is logged with its time by `Faults`.
    parts = [part.strip(" :;,") for part in quoted.removesuffix(", after … s").split("…")]
    return all(any(part in one or part in one.replace("%s", "s") for one in strings) for part in parts)


def spans(text: str) -> list[str]:
    """Return what stands between backticks."""
    return re.findall(r"`([^`]+)`", text)


def test_each_line_that_the_guide_quotes_exists() -> None:
    """A quoted line is one of the package; it stands in a block of text or in the last table, with "…" for values."""
    blocks = re.findall(r"^```text\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    quoted = [line for block in blocks for line in block.splitlines()]
    quoted += [span for cell in re.findall(r"^\| (`.+?) \|", symptoms()[SYMPTOMS[-1]], re.M) for span in spans(cell)]
    said = strings_of_package()
    assert len(quoted) >= 8
    assert [line for line in quoted if not is_said(line, said)] == []
    assert not is_said("worker … did not stop in tyme", said)


# Texts of others that the guide quotes.
OTHERS_TEXTS = {"unable to open database file": "an error of SQLite"}
# Words between backticks that are in no module of ours: of Django, of Redis, of the system.
OTHERS_WORDS = {"FLUSHALL", "DATABASES", "maxmemory-policy", "noeviction", "-v"}


def prose() -> str:
    """Return the guide without its blocks."""
    return re.sub(r"^```.*?^```", "", GUIDE.read_text(), flags=re.MULTILINE | re.DOTALL)


def strings_of_package() -> set[str]:
    """Return every string of the package that is no docstring, with "…" for values."""
    found: set[str] = set()
    for source in SOURCES.values():
        tree = ast.parse(source)
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                found.add(node.value)
    return found


def missing_quotes(text: str) -> list[str]:
    """Return what a text quotes, between quotation marks, that is said by nothing in the package."""
    said = strings_of_package()
    quoted = re.findall(r'"([^"]+)"', re.sub(r'`"[^`"]*"`', "", text))
    assert len(quoted) >= 1
    return [each for each in quoted if each not in OTHERS_TEXTS and not is_said(each.strip("`"), said)]


def missing_words(text: str) -> list[str]:
    """Return the words between backticks that are in no module of the package; names in capitals are a reader's."""
    known = set(re.findall(r"--[\w-]+|[\w.]+", "\n".join(SOURCES.values()))) | OTHERS_WORDS
    known |= {part for word in known for part in word.split(".")} | {path.name for path in SOURCES} | {"manage.py"}
    found = []
    for span in spans(text):
        for word in re.findall(r"--[\w-]+|[\w.-]*[A-Za-z][\w.-]*", re.sub(r"\b(?:NAME|ID|N)\b", "", span)):
            if word not in known and f"--{word.strip('-')}" not in known:
                found.append(f"{word} in {span}")
    return found


def test_what_the_guide_quotes_in_a_line_is_said() -> None:
    """A text between quotation marks is of a log line, an error or an output of ours."""
    assert missing_quotes(prose()) == []
    assert missing_quotes('It says "did not stop in time and is killd".') == ["did not stop in time and is killd"]
    assert all(OTHERS_TEXTS.values())


def test_what_the_guide_names_is_in_the_source() -> None:
    """Errors, settings, options and commands between backticks."""
    assert missing_words(prose()) == []
    assert missing_words("See `BrokerGone`, `--no-such` and `queues show NAME`.") == [
        "BrokerGone in BrokerGone",
        "--no-such in --no-such",
    ]


def wrong_commands(text: str) -> list[str]:
    """Return the spans that begin with a noun of `manage.py asyncq`, and whose verb or option does not exist."""
    nouns = {name.split()[0] for name in ASYNCQ if " " in name}
    found = [words for span in spans(text) if (words := span.split())[0] in nouns and words[1:]]
    assert len(found) >= 1
    return [
        " ".join(words)
        for words in found
        if (command := " ".join(words[:2])) not in ASYNCQ
        or not {each for each in words if each.startswith("--")} <= ASYNCQ[command]
    ]


def test_each_short_command_that_the_guide_names_exists() -> None:
    """`queues list` stands for `manage.py asyncq queues list`."""
    assert wrong_commands(prose()) == []
    assert wrong_commands("`queues lists`, `tasks show ID`, `gates audit NAME --no-such`") == [
        "queues lists",
        "gates audit NAME --no-such",
    ]


def banners_of(source: str) -> set[str]:
    """Return the first sentence of each banner, in the plural, with "…" for values."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("_", "ngettext"):
            text = node.args[1 if node.func.id == "ngettext" else 0]
            assert isinstance(text, ast.Constant) and isinstance(text.value, str)
            found.add(re.sub(r"%\(\w+\)[sd]", "…", text.value).split(". ")[0].rstrip("."))
    return found


def test_each_banner_has_its_row_and_each_row_its_banner() -> None:
    """As the head of each page of the admin shows them."""
    chapter = symptoms()["The admin shows a banner"]
    rows = re.findall(r"^\| (?!banner|---)(.+?) \|", chapter, re.MULTILINE)
    # It follows the banner about single queues, and needs no row of its own.
    shown = banners_of(BANNERS.read_text()) - {"And … more queues"}
    assert len(shown) >= 6
    assert sorted(rows) == sorted(shown)


# --- errors

# Errors that no user meets: where they are defined, and why.
INTERNAL_ERRORS = {
    "UndecodableMessage": (
        "broker/message.py",
        "what Redis holds is read in blocks that catch it; the message of a row was decoded before it was stored",
    ),
    "InterruptedBySoftTimeout": (
        "worker/call.py",
        "it has the name and the module of SoftTimeout, and is caught as such",
    ),
}


def errors_of(sources: Mapping[str, str]) -> dict[str, str]:
    """Return the modules of the classes below `AsyncqError`, by name, from the source: also of what is not imported."""
    bases: dict[str, tuple[str, set[str]]] = {}
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                parents = {
                    each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in node.bases
                }
                bases[node.name] = name, parents
    below = {"AsyncqError"}
    while more := {name for name, (_, parents) in bases.items() if parents & below} - below:
        below |= more
    return {name: bases[name][0] for name in below - {"AsyncqError"}}


def missing_errors(errors: Mapping[str, str], page: str) -> list[str]:
    """Return the errors that have no entry: a row that begins with the name."""
    entries = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    return sorted(name for name in errors if name not in entries and name not in INTERNAL_ERRORS)


def test_each_error_that_is_raised_to_users_has_its_entry() -> None:
    """Each class that derives from `AsyncqError`, also those that are defined elsewhere than in `exceptions`."""
    errors = errors_of({path.relative_to(PACKAGE).as_posix(): source for path, source in SOURCES.items()})
    page = (DOCS / "reference" / "errors.md").read_text()
    assert len(errors) > 20
    assert missing_errors(errors, page) == []
    for name, (module, reason) in INTERNAL_ERRORS.items():
        assert errors[name] == module and reason
        # What is listed in the docs is not internal.
        assert f"`{name}`" not in page


def test_a_new_error_is_found() -> None:
    """In any module, and below a class that is below `AsyncqError`."""
    sources = {"exceptions.py": "class A(AsyncqError): ...", "x/y.py": "class B(exceptions.A, ValueError): ..."}
    assert errors_of(sources) == {"A": "exceptions.py", "B": "x/y.py"}
    assert missing_errors(errors_of(sources), "| `A` | when | |\nSee `B`.") == ["B"]

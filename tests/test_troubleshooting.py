"""Troubleshooting: each log line has its row in the docs, each row its line, and each symptom a command."""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from django_asyncq.exceptions import AsyncqError

from .log_source import LogLine, Unreadable, lines_of, read_lines

DOCS = Path(__file__).parent.parent / "docs"
LINES_PAGE = DOCS / "reference" / "log-lines.md"
GUIDE = DOCS / "guides" / "troubleshooting.md"
# What a person must be able to look up; DEBUG and the rest of INFO explain themselves.
LOUD = {"WARNING", "ERROR", "CRITICAL"}
# The test kit logs to the developer who runs the test.
NOT_FOR_OPERATORS = "django_asyncq.testing"
ROW = re.compile(r"^\| ([A-Z, ]+) \| `(.+?)` \| (.+) \|$", re.MULTILINE)
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
    "Tasks fail as unregistered after a deploy",
    "The admin shows a banner",
    "runworkers exits at once",
    "check reports an error",
)

# Text to levels, by the heading under which it stands.
Found = dict[str, dict[str, set[str]]]


def heading_of(logger: str) -> str:
    """Return under which heading of the page the lines of a logger stand."""
    part = ".".join(logger.split(".")[:2])
    headings = re.findall(r"^## (django_asyncq\.\w+)$", LINES_PAGE.read_text(), re.MULTILINE)
    return part if part in headings else "Other loggers"


def in_source(lines: Iterable[LogLine]) -> Found:
    """Return the lines of the source by heading."""
    found: Found = defaultdict(lambda: defaultdict(set))
    for line in lines:
        if line.logger != NOT_FOR_OPERATORS:
            found[heading_of(line.logger)][line.text].add(line.level)
    return found


def in_docs() -> Found:
    """Return the rows of the page by heading."""
    _, *chapters = re.split(r"^## ", LINES_PAGE.read_text(), flags=re.MULTILINE)
    return {
        chapter.splitlines()[0]: {text: set(levels.split(", ")) for levels, text, _ in ROW.findall(chapter)}
        for chapter in chapters
    }


def missing_rows(source: Found, docs: Mapping[str, Mapping[str, set[str]]]) -> list[str]:
    """Return the loud lines of the source that have no row under their heading."""
    return [
        text
        for heading, lines in source.items()
        for text, levels in lines.items()
        if levels & LOUD and text not in docs.get(heading, {})
    ]


def test_each_loud_line_has_its_row() -> None:
    """Under the heading of its logger."""
    assert missing_rows(in_source(read_lines()), in_docs()) == []


def test_each_row_has_its_line_with_its_levels() -> None:
    """No row is about a line that the package does not log."""
    source = in_source(read_lines())
    wrong = [
        f"{text}: {sorted(levels)}, in the source {sorted(source[heading][text])}"
        for heading, rows in in_docs().items()
        for text, levels in rows.items()
        if source[heading][text] != levels
    ]
    assert wrong == []


def test_each_row_is_read() -> None:
    """A row that the pattern cannot read would be checked by nothing; each stands once and says something."""
    rows = [line for line in LINES_PAGE.read_text().splitlines() if re.match(r"\| [A-Z]", line)]
    assert len(rows) == len(ROW.findall(LINES_PAGE.read_text())) > 100
    assert all(len(meaning) > 10 for _, _, meaning in ROW.findall(LINES_PAGE.read_text()))
    assert sum(len(found) for found in in_docs().values()) == len(rows)


def test_end_of_each_outage_has_its_row() -> None:
    """Whoever saw the warning looks for it."""
    over = {line.text for line in read_lines() if line.text.endswith(", after … s") and line.level == "INFO"}
    assert len(over) >= 10
    assert over <= {text for rows in in_docs().values() for text in rows}


PLANTED = """
logger = get_logger("django_asyncq.worker")
def beat(self):
    logger.warning("a new line: %s", 1)
    count, text = 2, "%d new task%s lost"
    logger.error(text, count)
    level = logging.ERROR if count else logging.INFO
    logger.log(level, "either %.1f")
    with outlives(logger, "the %s broke"): ...
    self._faults = Faults(logger, "no beat", over="beats again", failed="a beat failed")
def warn(level, text):
    logger.warning(text)
def use():
    warn(1, "given to %s")
"""


def test_a_new_line_is_found() -> None:
    """In each way in which the package logs; without a row, the test above fails for it."""
    lines = list(lines_of("planted.py", PLANTED))
    assert {line.logger for line in lines} == {"django_asyncq.worker"}
    assert {(line.level, line.text) for line in lines} == {
        ("WARNING", "a new line: …"),
        ("ERROR", "… new tasks lost"),
        ("ERROR", "either …"),
        ("INFO", "either …"),
        ("ERROR", "the … broke"),
        ("WARNING", "no beat: …"),
        ("ERROR", "no beat: …"),
        ("ERROR", "a beat failed: …"),
        ("INFO", "beats again, after … s"),
        ("WARNING", "given to …"),
    }
    missing = missing_rows(in_source(lines), in_docs())
    assert sorted(missing) == sorted({line.text for line in lines if line.level in LOUD})


@pytest.mark.parametrize("call", ["logger.error(text_of(error))", 'logger.log(level_of(error), "x")'])
def test_a_line_that_cannot_be_read_is_an_error(call: str) -> None:
    """It would be in no page, and nobody would notice."""
    with pytest.raises(Unreadable):
        list(lines_of("planted.py", textwrap.dedent(call)))


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
    assert len(LINES_PAGE.read_text().splitlines()) < 300


def test_each_line_that_the_guide_quotes_exists() -> None:
    """A quoted line is one of the package; it stands in a block of text, with "…" for values."""
    blocks = re.findall(r"^```text\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    quoted = [line for block in blocks for line in block.splitlines()]
    texts = {line.text for line in read_lines()}
    assert len(quoted) >= 8
    assert [line for line in quoted if line not in texts] == []


def test_each_error_that_is_raised_to_users_has_its_entry() -> None:
    """Each class that derives from `AsyncqError`, also those that are defined elsewhere than in `exceptions`."""
    entries = (DOCS / "reference" / "errors.md").read_text()
    classes = set(subclasses(AsyncqError))
    public = {each.__name__ for each in classes if each.__module__ == "django_asyncq.exceptions"}
    assert len(public) > 20
    assert [name for name in public if f"`{name}`" not in entries] == []


def subclasses(base: type) -> Iterable[type]:
    """Yield all classes below one."""
    for each in base.__subclasses__():
        yield each
        yield from subclasses(each)

"""Read texts that are no Python: command lines that start the other queue, and lists of packages."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator

from .files import is_requirements
from .findings import Finding, Note, Verdict, worst
from .judging import shortened
from .vocabulary import Command, Vocabulary
from .writing import Slots, Text

COMMENT = re.compile(r"^\s*(?:#|//|;|REM\b)")
# The first part of a requirement, also as a text in TOML or a list.
REQUIREMENT = re.compile(r"""^\s*[-"']*\s*["']?([A-Za-z][\w.-]*)\s*(?:\[[^\]]*\])?\s*(?:["',;#]|[=<>~!]=?|@|\s*$|\^)""")
ITEM = re.compile(r"^\s*-\s+(\S.*)$")
ENDS_COMMAND = frozenset(("&&", "||", ";", "|", "&", ">", ">>", "2>&1"))


def uses_of_text(vocabulary: Vocabulary, file: str, text: str) -> Iterator[Finding]:
    """Yield the commands of a text, and the packages that a list of requirements names."""
    for number, line in _joined_lines(text):
        if COMMENT.match(line):
            continue
        for command in vocabulary.commands:
            for found in command.words.finditer(line):
                if finding := _command(vocabulary, command, file, number, found[0].strip(), line[found.start() :]):
                    yield finding
        if is_requirements(file) and (named := REQUIREMENT.match(line)):
            yield from _requirement(vocabulary, file, number, line, named[1])
        yield from _setting_names(vocabulary, file, number, line)


def _joined_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines with the number of each, those that go on and the items of a list of words joined."""
    lines = text.split("\n")
    place = 0
    while place < len(lines):
        number, line = place + 1, lines[place]
        place += 1
        while line.rstrip().endswith("\\") and place < len(lines):
            line = f"{line.rstrip()[:-1]} {lines[place].strip()}"
            place += 1
        is_word = (item := ITEM.match(line)) and " " not in item[1].strip()
        while is_word and place < len(lines) and (following := ITEM.match(lines[place])):
            if lines[place].index("-") != lines[number - 1].index("-"):
                break
            line = f"{line} {following[1]}"
            place += 1
        yield number, line


def _command(
    vocabulary: Vocabulary, command: Command, file: str, number: int, program: str, line: str
) -> Finding | None:
    words = _words(line)
    options, verb = [], ""
    place = 1
    while place < len(words):
        word = words[place]
        place += 1
        if word in ENDS_COMMAND:
            break
        name, sign, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if not word.startswith("-") or word == "-":
            verb = verb or (word if word in command.verbs else "")
            continue
        if not sign and not word.startswith("--") and len(word) > 2 and word[:2] in command.has_value:
            name, value = word[:2], word[2:]
        elif not sign and name in command.has_value and place < len(words):
            value = words[place]
            place += 1
        options.append((name, value))
    if command.verbs and not verb:
        return None
    name, use = vocabulary.use_of(f"command {command.use.format(verb or program)}")
    source = shortened(" ".join(words))
    if use is None:
        return Finding(file, number, name, source, Verdict.UNKNOWN)
    slots, notes = Slots(), [Note("", use.verdict, use.says)] if use.says else []
    for option_name, value in options:
        option = use.options.get(option_name)
        if option is None:
            notes.append(Note(option_name, Verdict.UNKNOWN, "this option is not in the tables"))
            continue
        if option.text:
            node = ast.Constant(int(value) if value.isdecimal() else value)
            slots.add(option.slot, option.text.format(value=Text(node, value)))
        if option.says or option.verdict != Verdict.MAPS:
            notes.append(Note(option_name, option.verdict, option.says))
    write = " ".join(slots.fill(use.write).replace(", --", " --").split())
    return Finding(file, number, name, source, worst([use.verdict, *(n.verdict for n in notes)]), write, tuple(notes))


def _words(line: str) -> list[str]:
    """Return the words of a command, also of one in a list of texts, as containers have it."""
    if re.match(r"""[\w./-]+["'],""", line):
        line = re.sub(r"""["',\]]+""", " ", line)
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return re.sub(r"""["']""", " ", line).split()


def _requirement(vocabulary: Vocabulary, file: str, number: int, line: str, name: str) -> Iterator[Finding]:
    normal = re.sub(r"[-_.]+", "-", name).lower()
    if vocabulary.distributions.fullmatch(normal):
        found, use = vocabulary.use_of(f"package {normal}")
        verdict = use.verdict if use else Verdict.UNKNOWN
        notes = (Note("", verdict, use.says),) if use else ()
        yield Finding(file, number, found, shortened(line), verdict, "", notes)


def _setting_names(vocabulary: Vocabulary, file: str, number: int, line: str) -> Iterator[Finding]:
    """Yield the settings that an environment names."""
    for word in dict.fromkeys(re.findall(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b", line)):
        if name := vocabulary.setting(word):
            found, use = vocabulary.use_of(f"settings.{name}")
            verdict = use.verdict if use else Verdict.UNKNOWN
            notes = (Note("", verdict, use.says),) if use and use.says else ()
            yield Finding(
                file, number, found, shortened(line), verdict, use.write if use and "{" not in use.write else "", notes
            )

"""Docstrings as Sphinx reads them. The source explains options in running lines; a page has a list of them."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from itertools import groupby

# "timeout: …", "args, kwargs: …", "Raises: …", at the start of a paragraph or behind a sentence. "null: …" is what the
# absence of a value means.
OPTION = re.compile(r"(?:^|(?<=[.;] ))(?!null: )([a-z_]\w*(?:, [a-z_]\w*)*|Raises|Returns): ")


def mark_up(lines: list[str]) -> list[str]:
    """Return a docstring's lines as reStructuredText: options as a list, a star as a star.

    An indented line continues the one before.
    """
    found: list[str] = []
    for is_text, block in groupby(lines, key=lambda line: bool(line.strip())):
        if is_text:
            stripped = [line.strip() for line in block]
            if stripped[0].startswith("|"):
                found += [*table_of(stripped), ""]
                continue
            for text in paragraphs_of(stripped):
                found += [*items_of(text), ""]
    return found


def paragraphs_of(lines: list[str]) -> list[str]:
    """Return lines as texts; behind options, a sentence that begins a line begins a text."""
    found = [lines[0]]
    for line in lines[1:]:
        if found[-1].endswith(".") and line[0].isupper() and OPTION.search(found[-1]):
            found.append(line)
        else:
            found[-1] += f" {line}"
    return found


def items_of(text: str) -> list[str]:
    """Return what stands before the options of a text, and an item of a list for each of them."""
    before, *rest = OPTION.split(text.replace("*", "\\*"))
    items = [f"- **{name}**: {meaning.strip()}" for name, meaning in zip(rest[::2], rest[1::2], strict=True)]
    if not before:
        return items
    return [before.strip(), "", *items] if items else [before]


def table_of(lines: list[str]) -> list[str]:
    """Return a table of Markdown, whose second line is a rule, as one of reStructuredText."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found = [".. list-table::", "   :header-rows: 1", ""]
    for row in (rows[0], *rows[2:]):
        found += [f"   {'  ' if place else '* '}- {cell}" for place, cell in enumerate(row)]
    return found


# Its overloads return private classes, which only a type checker needs to know.
SIGNATURES = {"task": "(function=None, /, **options)"}
# Its methods are Django's.
WITHOUT_MEMBERS = {"AsyncqBackend": "\n   :no-members:"}


def names_of(chapter: str) -> list[str]:
    """Return the public names of a module, which stand in the first column of its chapter's table."""
    return re.findall(r"`(\w+)`", ", ".join(re.findall(r"^\| (`.+?`) \| \S.* \|$", chapter, re.MULTILINE)))


def with_docstrings(page: str) -> str:
    """Return the page of the public names with signature and docstring of each class and function below its table.

    Once, in the chapter that lists it first. A heading of a chapter is the name of a module.
    """
    first, *chapters = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    seen: set[int] = set()
    for chapter in chapters:
        module, directives = chapter.split()[1], []
        for name in names_of(chapter):
            thing = getattr(import_module(module), name)
            if (inspect.isclass(thing) or inspect.isfunction(thing)) and id(thing) not in seen:
                seen.add(id(thing))
                kind = "class" if inspect.isclass(thing) else "function"
                options = SIGNATURES.get(name, "") + WITHOUT_MEMBERS.get(name, "")
                directives.append(f".. auto{kind}:: {module}.{name}{options}\n")
        first += chapter + ("\n```{eval-rst}\n" + "".join(directives) + "```\n\n" if directives else "")
    return first

"""Show what a terminal, or a mail program, would obey instead of showing it. Names come from other programs too."""

from __future__ import annotations

from unicodedata import category


def visible(text: str) -> str:
    """Return a text that a terminal shows and does not obey: escapes for all that moves, colours or reorders.

    Names, arguments and errors come from other programs too. Ends of lines and tabs stay.
    """
    return "".join(each if each in "\n\t" or each.isprintable() else _escape(each) for each in text)


def visible_line(text: str) -> str:
    """Return a text as `visible` does, on one line."""
    return "".join(each if each.isprintable() else _escape(each) for each in text)


def _escape(character: str) -> str:
    # Wide and unbreakable spaces are ordinary text.
    return character if category(character) == "Zs" else character.encode("unicode_escape").decode()

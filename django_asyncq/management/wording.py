"""Say numbers with their nouns."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun in the singular or plural: "1 task", "2 tasks". plural: default: with an "s"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural or f'{noun}s'}"

"""Say which name a person may have meant by one that does not exist. Uses no store."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

# A sentence with more of them is no hint.
MOST_NAMES = 3


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question to put before the next sentence: "Did you mean 'QUEUES'? "; "" when nothing known is close.

    Case does not matter.
    """
    by_lower: dict[str, str] = {}
    for each in known:
        by_lower.setdefault(each.lower(), each)
    found = get_close_matches(name.lower(), by_lower, n=MOST_NAMES)
    return f"Did you mean {' or '.join(repr(by_lower[each]) for each in found)}? " if found else ""


def did_you_mean_path(name: str, known: Iterable[str]) -> str:
    """Return the same question for the dotted path of a task. Of a name without dots, the last parts are compared."""
    paths = sorted(known)
    if "." in name:
        return did_you_mean(name, paths)
    by_last: dict[str, list[str]] = {}
    for path in paths:
        by_last.setdefault(path.rpartition(".")[2], []).append(path)
    found = [path for last in get_close_matches(name, by_last, n=MOST_NAMES) for path in by_last[last]]
    shown = by_last.get(name, found)[:MOST_NAMES]
    return f"Did you mean {' or '.join(map(repr, shown))}? " if shown else ""

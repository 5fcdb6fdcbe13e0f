"""What was found: each use of the other queue with its place, its verdict and the line to write here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Verdict(StrEnum):
    """What becomes of a use, from the easiest to the hardest; its text is what is printed."""

    MAPS = "maps"
    BUT = "maps, but"
    NOT = "does not map"
    UNKNOWN = "unknown"


VERDICTS = tuple(Verdict)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the hardest of some verdicts; of none, that it maps."""
    return max(verdicts, key=VERDICTS.index, default=Verdict.MAPS)


@dataclass(frozen=True, slots=True)
class Note:
    """What there is to say about a use, or about one option of it. about: "" for the use itself."""

    about: str
    verdict: Verdict
    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One use. file: its path within what was read; use: its name in the tables; source: as it is written there.

    write: the line to write here, or "" when there is none.
    """

    file: str
    line: int
    use: str
    source: str
    verdict: Verdict
    write: str = ""
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A file that could not be read, with the reason. line: where, or 0."""

    file: str
    line: int
    error: str


@dataclass(frozen=True, slots=True)
class Report:
    """All that was found. files: how many were read; skipped: folders that were not, with how many files they have."""

    queue: str
    path: str
    files: int
    findings: Sequence[Finding]
    unreadable: Sequence[Unreadable] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)

    def by_verdict(self) -> dict[Verdict, int]:
        """Return how many uses have each verdict, those without any included."""
        found = Counter(each.verdict for each in self.findings)
        return {verdict: found[verdict] for verdict in VERDICTS}

    def by_use(self) -> list[tuple[str, Verdict, int]]:
        """Return how often each use was found with each verdict, the hardest first, then the most frequent."""
        found = Counter((each.use, each.verdict) for each in self.findings)
        rows = [(use, verdict, count) for (use, verdict), count in found.items()]
        return sorted(rows, key=lambda row: (-VERDICTS.index(row[1]), -row[2], row[0]))

"""Print a report: for people, or as what one JSON document holds. It needs no Django."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from . import celery, dramatiq, huey, q2, rq
from .examination import Progress, examine
from .findings import Finding, Note, Report, Verdict
from .vocabulary import Vocabulary

VOCABULARIES: dict[str, Vocabulary] = {
    each.VOCABULARY.name: each.VOCABULARY for each in (celery, rq, huey, dramatiq, q2)
}
# The hardest first: this is what decides about a move.
ORDER = (Verdict.NOT, Verdict.UNKNOWN, Verdict.BUT, Verdict.MAPS)
MEANINGS = {
    Verdict.MAPS: "write the line that is given",
    Verdict.BUT: "the line behaves differently, as it is said",
    Verdict.NOT: "it is said what to do instead",
    Verdict.UNKNOWN: "not in the tables, or not to be seen in the source: look yourself",
}


def report_on(queue: str, path: Path, stderr: TextIO) -> Report:
    """Examine a project; on a terminal, say on stderr how far it has come. path: a folder or a file that exists."""
    return examine(VOCABULARIES[queue], path, progress_on(stderr))


def progress_on(stream: TextIO) -> Progress:
    """Return what shows progress in one line that changes, on a terminal, and nothing elsewhere."""
    if not stream.isatty():
        return lambda done, total: None

    def show(done: int, total: int) -> None:
        if done % 50 == 0 or done == total:
            stream.write(f"\r{done:,} of {total:,} files" + ("\n" if done == total else ""))
            stream.flush()

    return show


def as_document(report: Report) -> dict[str, Any]:
    """Return the report as JSON has it."""
    return {
        "queue": report.queue,
        "path": report.path,
        "files": report.files,
        "verdicts": {str(verdict): count for verdict, count in report.by_verdict().items()},
        "uses": [{"use": use, "verdict": str(verdict), "count": count} for use, verdict, count in report.by_use()],
        "findings": [asdict(each) for each in report.findings],
        "unreadable": [asdict(each) for each in report.unreadable],
        "skipped": dict(report.skipped),
    }


def lines_of(report: Report) -> Iterator[str]:
    """Yield the report as people read it: sums, then each use, the hardest first."""
    with_uses = len({each.file for each in report.findings})
    yield f"{report.queue} in {report.path}: {_counted(report.files, 'file')} read, {with_uses:,} of them use it."
    yield ""
    counts = report.by_verdict()
    width = max(len(f"{count:,}") for count in counts.values())
    for verdict in ORDER:
        yield f"  {verdict:<12}  {counts[verdict]:>{width},}  {MEANINGS[verdict]}"
    yield f"  {'unreadable':<12}  {len(report.unreadable):>{width},}  files that could not be read, with the reason"
    if report.skipped:
        folders = ", ".join(f"{name} ({_counted(count, 'file')})" for name, count in report.skipped.items())
        yield f"  not read: {folders}"
    yield from _sums(report)
    for unreadable in report.unreadable:
        yield from ("", f"{unreadable.file}:{unreadable.line}: could not be read: {unreadable.error}")
    for verdict in ORDER:
        findings = [each for each in report.findings if each.verdict == verdict]
        if findings:
            yield from ("", f"{verdict}: {len(findings):,}", "")
            said: set[Note] = set()
            for finding in findings:
                yield from _lines_of_finding(finding, said)


def _sums(report: Report) -> Iterator[str]:
    rows = report.by_use()
    if not rows:
        return
    yield ""
    width = max(len(f"{count:,}") for _, _, count in rows)
    for use, verdict, count in rows:
        yield f"  {count:>{width},}  {verdict:<12}  {use}"


def _lines_of_finding(finding: Finding, said: set[Note]) -> Iterator[str]:
    """Yield a finding; what has been said of another one under the same heading is only named."""
    yield f"{finding.file}:{finding.line}: {finding.source}"
    if finding.write:
        yield f"    -> {finding.write}"
    for note in finding.notes:
        if note not in said:
            yield f"    {note.about}: {note.text}" if note.about else f"    {note.text}"
    if above := [note.about or finding.use for note in finding.notes if note in said]:
        yield f"    as above: {', '.join(dict.fromkeys(above))}"
    said.update(finding.notes)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"

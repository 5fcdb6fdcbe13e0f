"""Every entry of the tables is reached by a source that uses it, and so is each of its options."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from django_asyncq.doctor.findings import Finding, Verdict, worst
from django_asyncq.doctor.vocabulary import Vocabulary

from .projects import VOCABULARIES, report_on, snippet, with_option

EACH_QUEUE = pytest.mark.parametrize("queue", VOCABULARIES)
# Of a call that makes a cron expression: its fields, and what two of them mean together.
OF_CRON = {"fields", "days"}


@cache
def findings_by_case(queue: str) -> dict[str, list[Finding]]:
    """Return what was found in the file of each entry, and of each option as "entry option"."""
    vocabulary = VOCABULARIES[queue]
    files: dict[str, str] = {}
    cases: dict[str, str] = {}
    for number, (case, (file, text)) in enumerate(sources(vocabulary).items()):
        place = f"case{number}/{file}"
        files[place], cases[place] = text, case
    found: dict[str, list[Finding]] = defaultdict(list)
    with TemporaryDirectory() as folder:
        report = report_on(queue, Path(folder), files)
    assert not report.unreadable, [cases[each.file] for each in report.unreadable][:5]
    for finding in report.findings:
        found[cases[finding.file]].append(finding)
    return found


def sources(vocabulary: Vocabulary) -> dict[str, tuple[str, str]]:
    """Return a file and its text for each entry, and for each option."""
    found = {path: snippet(vocabulary, path) for path in vocabulary.uses}
    for path, use in vocabulary.uses.items():
        for option in use.options.keys() - OF_CRON:
            found[f"{path} {option}"] = with_option(vocabulary, path, use, option)
    return found


@EACH_QUEUE
def test_every_entry_is_reached_by_a_source_that_uses_it(queue: str) -> None:
    """It is found on its line, with its verdict, and with what the table says."""
    vocabulary, found, missing = VOCABULARIES[queue], findings_by_case(queue), []
    for path, use in vocabulary.uses.items():
        named = [each for each in found[path] if each.use == path]
        _, text = snippet(vocabulary, path)
        last = len(text.rstrip().split("\n"))
        if not named:
            missing.append(f"{path}: {[each.use for each in found[path]]}")
            continue
        for each in named:
            assert use.verdict in (each.verdict, *(note.verdict for note in each.notes)), (path, each)
            assert not use.says or use.says in {note.text for note in each.notes} or use.options, (path, each)
        # The lines before it may use it too.
        assert named[-1].line in (last, last - 1), (path, named, text)
    assert missing == []


@EACH_QUEUE
def test_every_option_is_reached_by_a_source_that_gives_it(queue: str) -> None:
    """It is not unknown; the use is as hard as the harder of the two; what the table says of it is said."""
    vocabulary, found, missing = VOCABULARIES[queue], findings_by_case(queue), []
    for path, use in vocabulary.uses.items():
        for name, option in use.options.items():
            if name in OF_CRON:
                continue
            named = [each for each in found[f"{path} {name}"] if each.use == path]
            if not named:
                missing.append(f"{path} {name}: {[each.use for each in found[f'{path} {name}']]}")
                continue
            finding = named[-1]
            implied = [each.option.verdict for each in use.implied]
            expected = worst([use.verdict, option.verdict])
            assert finding.verdict in (expected, worst([expected, *implied])), (path, name, finding)
            if option.says:
                assert option.says in {note.text for note in finding.notes}, (path, name, finding)
    assert missing == []


@EACH_QUEUE
def test_what_maps_has_a_line_or_a_sentence(queue: str) -> None:
    """Nothing maps in silence, and what does not map says what to do instead."""
    for path, use in VOCABULARIES[queue].uses.items():
        assert use.write or use.says, path
        assert use.says or use.verdict == Verdict.MAPS, path
        assert use.verdict != Verdict.UNKNOWN, path


@EACH_QUEUE
def test_other_names_lead_to_entries(queue: str) -> None:
    """A path that is another one is of an entry, or of a kind of which there are entries."""
    vocabulary = VOCABULARIES[queue]
    for path in vocabulary.same:
        canonical = vocabulary.canonical(path)
        assert vocabulary.use_of(canonical)[1] or vocabulary.has_more(canonical), (path, canonical)

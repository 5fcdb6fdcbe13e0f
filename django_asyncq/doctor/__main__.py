"""`python -m django_asyncq.doctor celery PATH`: the doctor without Django, settings, tables or Redis."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser
from pathlib import Path

from ..core.names import visible_line
from .printing import VOCABULARIES, as_document, lines_of, report_on


def main(arguments: list[str] | None = None) -> int:
    """Do what `python -m django_asyncq.doctor` does; return its exit code."""
    parser = ArgumentParser(
        prog="python -m django_asyncq.doctor",
        description="Read the source of a project that has another task queue, and say what each use becomes here.",
    )
    parser.add_argument("queue", choices=sorted(VOCABULARIES), help="the other queue")
    parser.add_argument("path", type=Path, help="the folder of the project, or one file")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    if not options.path.exists():
        parser.error(f"there is no {options.path}")
    try:
        report = report_on(options.queue, options.path, sys.stderr)
        # In ASCII, or made visible: a terminal obeys nothing of it.
        lines = [json.dumps(as_document(report))] if options.json else map(visible_line, lines_of(report))
        for line in lines:
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. Python would complain of it at its last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())

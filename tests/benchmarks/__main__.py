"""Run `python -m tests.benchmarks compare`, `… beside`, `… waiters` or `… workflows`; see README.md in this folder."""

from __future__ import annotations

import sys

from . import beside, compare, waiters, workflows

COMMANDS = {"compare": compare, "beside": beside, "waiters": waiters, "workflows": workflows}

if __name__ == "__main__":
    if sys.argv[1:2] == [] or sys.argv[1] not in COMMANDS:
        about = "\n\n".join(
            f"python -m tests.benchmarks {name}\n{command.__doc__}" for name, command in COMMANDS.items()
        )
        sys.exit(f"usage: python -m tests.benchmarks {{{','.join(COMMANDS)}}} [options]\n\n{about}")
    COMMANDS[sys.argv[1]].main(sys.argv[2:])

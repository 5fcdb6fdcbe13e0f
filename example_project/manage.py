#!/usr/bin/env python
"""Django's command line for Render Studio. `python example_project/manage.py demo` shows all of it."""

from __future__ import annotations

import os
import sys

INSTALL_HINT = 'Render Studio needs more than is installed ({missing} is missing). Run: pip install -e ".[demo]"'
INTERRUPTED = 130


def main() -> None:
    """Run one management command."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "studio_site.settings")
    try:
        from django.core.management import execute_from_command_line

        import django_asyncq  # noqa: F401 - only checks that it is installed
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except ModuleNotFoundError as error:
        sys.exit(INSTALL_HINT.format(missing=error.name))
    try:
        execute_from_command_line(sys.argv)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


# Worker processes import this file again under another name and must not run the command again.
if __name__ == "__main__":
    main()

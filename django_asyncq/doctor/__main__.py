"""`python -m django_asyncq.doctor celery PATH`: the doctor without Django, settings, tables or Redis."""

from __future__ import annotations

import sys

from .printing import main

if __name__ == "__main__":
    sys.exit(main())

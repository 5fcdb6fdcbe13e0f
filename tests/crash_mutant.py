"""`runworkers` with a reconciler that repairs nothing: `test_crash` must find the difference."""

from __future__ import annotations

from typing import Any

import django

if __name__ == "__main__":
    django.setup()

    from django.core.management import call_command

    from django_asyncq.fleet.reconciler import Reconciler
    from django_asyncq.fleet.repairs import Repairs

    def repair_nothing(self: Any, now: float) -> Repairs:
        """Replace `tick`."""
        return Repairs()

    Reconciler.tick = repair_nothing  # type: ignore[method-assign]
    call_command("runworkers")

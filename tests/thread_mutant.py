"""`runworkers` whose forwarder dies: the supervisor must not go on without it."""

from __future__ import annotations

import sys

import django

if __name__ == "__main__":
    django.setup()

    from django.core.management import execute_from_command_line

    from django_asyncq.fleet.leader import MaintenanceService

    def no_pause(self: MaintenanceService) -> str:
        """Replace `forward`: return what no loop can sleep for."""
        return "soon"

    MaintenanceService.forward = no_pause  # type: ignore[assignment, method-assign]
    execute_from_command_line(["manage.py", "runworkers", *sys.argv[1:]])

"""`manage.py ensure_gates`: add the gates of the catalogue that are missing."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from ...gates import ensure_gates


class Command(BaseCommand):
    """Add the missing Gate rows; a limit set in the admin stays as it is."""

    help = "Add the gates of the studio's models that are missing; limits set by hand stay as they are."

    def handle(self, *args: Any, **options: Any) -> None:
        """Add them and say how many."""
        self.stdout.write(f"{ensure_gates()} gates added")

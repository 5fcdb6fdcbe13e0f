"""`manage.py ensure_gates`: create the missing gates of the catalogue."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from ...gates import ensure_gates


class Command(BaseCommand):
    """Create the missing Gate rows. Limits set in the admin do not change."""

    help = "Create the missing gates of the studio's models. Limits set in the admin do not change."

    def handle(self, *args: Any, **options: Any) -> None:
        """Create the rows and print how many."""
        count = ensure_gates()
        self.stdout.write("1 gate created" if count == 1 else f"{count} gates created")

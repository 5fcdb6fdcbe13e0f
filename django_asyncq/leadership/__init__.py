"""The startup lock coordinator: it decides which process of the fleet leads and which one runs a start-up task."""

from __future__ import annotations

from .coordinator import StartupTaskCoordinator
from .lock_files import Owner

__all__ = ["Owner", "StartupTaskCoordinator"]

"""The startup lock coordinator: which one process of the fleet leads, and which runs a start-up task."""

from __future__ import annotations

from .coordinator import StartupTaskCoordinator
from .owner import Owner

__all__ = ["Owner", "StartupTaskCoordinator"]

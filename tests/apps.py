"""The app of the suite: it shortens, in every process of a test, times of the package that are no settings."""

from __future__ import annotations

from importlib import import_module

from django.apps import AppConfig
from django.conf import settings


class TestsConfig(AppConfig):
    """Sets the constants that `TEST_CONSTANTS` in the settings names, once all models are loaded."""

    name = "tests"

    def ready(self) -> None:
        """Set them. A test that needs another value of its own process patches the constant."""
        for path, value in settings.TEST_CONSTANTS.items():
            module, _, constant = path.rpartition(".")
            found = import_module(module)
            getattr(found, constant)  # a name that is gone must not pass unnoticed
            setattr(found, constant, value)

"""Settings of every process of the chaos suite: the tests' own, and the tasks of this package."""

from __future__ import annotations

import os

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS, TEST_CONSTANTS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.chaos"]
# Longer than the reconciler needs to confirm a slot whose producer died: 3 s of grace, 1 s between passes.
TEST_CONSTANTS = {
    **TEST_CONSTANTS,
    "django_asyncq.conf.PROVISIONAL_SECONDS": int(os.environ.get("ASYNCQ_CHAOS_PROVISIONAL", "15")),
    "django_asyncq.conf.SWEEP_SECONDS": int(os.environ.get("ASYNCQ_CHAOS_SWEEP", "5")),
}
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {"django_asyncq": {"handlers": ["stderr"], "level": "INFO", "propagate": False}},
}

"""What a page asks of Redis: the fleet, and what else it needs in the same round trips, with a short patience."""

from __future__ import annotations

import time
from typing import Any

from django.http import HttpRequest

from .. import conf
from ..broker.reading import Reader, T, read
from ..exceptions import BrokerUnavailable
from ..observe.fleet import Fleet, read_fleet
from ..storage.errors import one_line
from . import base

ATTRIBUTE = "_asyncq_fleet"
# After a failure no page asks Redis for so long: a person who looks at one page after the other waits once.
REMEMBERED_SECONDS = 5.0

# The settings in force at the latest failure, when it was, and its text.
_failure: tuple[conf.Settings, float, str] | None = None


def fleet_of(request: HttpRequest) -> Fleet:
    """Return what is known of the fleet, read at the first call for a request."""
    return fleet_and(request)[0]


def fleet_and(request: HttpRequest, *readers: Reader[Any]) -> tuple[Fleet, list[Any]]:
    """Return the fleet, and what some readers find; None for each when the fleet's `error` says why.

    Called by a page before anything else asks for the fleet, so that all is read together. Raises: django.db.Error.
    """
    fleet: Fleet | None = getattr(request, ATTRIBUTE, None)
    if fleet is not None and not readers:
        return fleet, []
    fleet, found = read_fleet(*readers, ask=ask)
    setattr(request, ATTRIBUTE, fleet)
    return fleet, found


def ask(reader: Reader[T]) -> T:
    """Return what a reader finds, with the short patience of a producer.

    Raises: BrokerUnavailable; at once when it was raised in the last seconds, with how long ago that was.
    """
    global _failure
    failure, now = _failure, time.monotonic()
    if failure is not None and failure[0] is conf.current() and now - failure[1] < REMEMBERED_SECONDS:
        ago = base.ago(now - failure[1])
        raise BrokerUnavailable(f"{failure[2]} ({ago})")
    try:
        return read("producer", reader)
    except BrokerUnavailable as error:
        _failure = (conf.current(), time.monotonic(), one_line(error))
        raise

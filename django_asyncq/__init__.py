"""Tasks outside the request for Django: a row for every task, strict queue limits, asynq on the wire."""

from __future__ import annotations

from .exceptions import AsyncqError, BrokerUnavailable, GateUnavailable, InvalidArguments, QueueFull

__version__ = "0.1.0"

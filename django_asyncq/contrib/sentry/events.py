"""Sentry events of a run: they name the task, and its secrets are masked in everything that is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import sentry_sdk
from sentry_sdk.scope import Scope, should_send_default_pii
from sentry_sdk.utils import event_from_exception

from ...core.masking import masker_of_call
from ...core.redaction import MASK, Masker

if TYPE_CHECKING:
    from sentry_sdk.types import Event, Hint

    from ...models import TaskRecord

TRACEBACK_CHARACTERS = 8_000
# The parts of an event that come from the project's code. The others hold ids, which must stay what they are.
MASKED_PARTS = ("exception", "logentry", "message", "breadcrumbs", "extra", "threads")
MASKED_PARTS_OF_SPAN = ("description", "data")
OWN_MODULES = "django_asyncq."
MECHANISM = {"type": "django_asyncq", "handled": False}


def describe(scope: Scope, record: TaskRecord) -> None:
    """Name the task in all events of a scope, and mask its secrets in them."""
    scope.clear_breadcrumbs()
    scope.set_transaction_name(record.name, source="task")
    for key, value in (("task_id", record.id), ("queue", record.queue_name), ("attempt", record.attempt)):
        scope.set_tag(key, str(value))
    # Not the row itself, which a scope would keep in memory.
    call = (record.name, record.args, record.kwargs, record.backend)
    about: dict[str, Any] = {"max_attempts": record.max_attempts, "backend": record.backend}
    if _may_send_arguments():
        masker = masker_of_call(*call)
        about |= {"args": masker.positional(record.args), "kwargs": masker.keyword(record.kwargs)}
    scope.set_context("asyncq", about)

    def mask(event: Event, hint: Hint) -> Event:
        return masked_event(event, masker_of_call(*call))

    scope.add_event_processor(mask)


def _may_send_arguments() -> bool:
    """Whether the options of the client allow it: `data_collection`, in older versions `send_default_pii`."""
    collected: Mapping[str, Any] | None = sentry_sdk.get_client().options.get("data_collection")
    return should_send_default_pii() if collected is None else bool(collected["queues"])


def event_of_failure(record: TaskRecord, exception: BaseException | None) -> tuple[Event, Hint]:
    """Return the event of a failure. Without an exception here, the row says what its process reported, or left."""
    if exception is not None:
        options = sentry_sdk.get_client().options
        return event_from_exception(exception, client_options=options, mechanism=dict(MECHANISM))
    error: Mapping[str, str] = record.errors[-1]
    module, _, name = error["exception"].rpartition(".")
    value = {"type": name, "module": module, "value": error["message"], "mechanism": dict(MECHANISM)}
    event: Event = {
        "level": "error",
        "exception": {"values": [value]},
        # By its text, which names a process and a time, each would be an issue of its own.
        "fingerprint": ["django_asyncq", record.name, name],
    }
    if error["traceback"]:
        event["extra"] = {"traceback": error["traceback"][-TRACEBACK_CHARACTERS:]}
    return event, {}


def masked_event(event: Event, masker: Masker) -> Event:
    """Mask the secrets of a task in an event."""
    parts: dict[str, Any] = dict(event)
    for name in MASKED_PARTS:
        if name in parts:
            parts[name] = _masked(parts[name], masker)
    for span in parts.get("spans") or ():
        for name in MASKED_PARTS_OF_SPAN:
            if isinstance(span, dict) and name in span:
                span[name] = _masked(span[name], masker)
    masked: Event = parts  # type: ignore[assignment]
    return masked


def _masked(value: Any, masker: Masker) -> Any:
    if isinstance(value, str):
        return masker.text(value)
    if isinstance(value, list | tuple):
        return [_masked(each, masker) for each in value]
    if hasattr(value, "metadata") and hasattr(value, "value"):
        # What Sentry has shortened is in an object that says so.
        value.value = _masked(value.value, masker)
        return value
    if not isinstance(value, dict):
        return value
    found = {name: _masked(item, masker) for name, item in masker.keyword(value).items()}
    if "vars" in found:
        # Those of this package hold the call and the row in many forms.
        is_own = str(found.get("module") or "").startswith(OWN_MODULES)
        found["vars"] = {} if is_own else _masked_numbers(found["vars"], masker)
    return found


def _masked_numbers(value: Any, masker: Masker) -> Any:
    """Mask the secrets among variables that are numbers."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return MASK if masker.text(str(value)) != str(value) else value
    if isinstance(value, dict):
        return {name: _masked_numbers(item, masker) for name, item in value.items()}
    return [_masked_numbers(each, masker) for each in value] if isinstance(value, list) else value

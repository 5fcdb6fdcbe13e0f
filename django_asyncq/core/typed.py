"""Arguments of types that JSON does not have, of tasks with `typed_arguments`: one form within the same JSON.

`{"$asyncq": ["date", "2026-11-30"]}` stands for a date, `{"$asyncq": ["instance", "shop.order", 7]}` for the row of a
model. Rows, entries in Redis and messages to other programs hold the form; a dict with that key is nothing else. What a
task's options are given, and `result.args`, is the value, and for an instance a `ModelReference`: only a worker, where
it is about to call the function, loads the row (`worker.instances`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.apps import apps
from django.db.models import Model
from django.utils.dateparse import parse_duration
from django.utils.duration import duration_iso_string

from .. import conf
from ..exceptions import InvalidArguments
from .guard import attempt
from .payload import MAX_DEPTH, Carry, Payload, plain

if TYPE_CHECKING:
    pass

KEY = "$asyncq"
INSTANCE = "instance"


@dataclass(frozen=True, slots=True)
class ModelReference:
    """An instance of a model among arguments, as the row of a task names it. label: "app.model", in lower case.

    It can be passed where the instance can.
    """

    label: str
    pk: Any

    def __repr__(self) -> str:
        return f"<{self.label} {self.pk!r}>"


def _duration(text: str) -> timedelta:
    found = parse_duration(text)
    if found is None:
        raise ValueError(text)
    return found


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation as error:
        raise ValueError(text) from error


# Name in the form → class, its text, and back. The first that fits: a datetime is a date too.
SCALARS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "datetime": (datetime, lambda value: value.isoformat(), datetime.fromisoformat),
    "date": (date, lambda value: value.isoformat(), date.fromisoformat),
    "time": (time, lambda value: value.isoformat(), time.fromisoformat),
    "timedelta": (timedelta, duration_iso_string, _duration),
    "decimal": (Decimal, str, _decimal),
    "uuid": (UUID, str, UUID),
}
KINDS = ", ".join([*SCALARS, INSTANCE])


def is_typed(task: Any) -> bool:
    """Return whether arguments of a task may have more types than JSON."""
    declared = task.typed_arguments
    return conf.current().typed_arguments if declared is None else bool(declared)


def carry_of(task: Any) -> Carry | None:
    """Return what `payload` asks about values that JSON does not have; None for a task without typed arguments."""
    return carried if is_typed(task) else None


def carried(value: Any, path: str) -> Any:
    """Return the form of a value; None for one that has none. path: where it is.

    A form is carried as it is, so that what was read from a row can be enqueued again.
    Raises: InvalidArguments for an instance without a row, and for a dict with the reserved key that is no form.
    """
    kind = type(value)
    if issubclass(kind, dict):
        return _checked(value, path) if KEY in value else None
    for name, (known, to_text, _) in SCALARS.items():
        if issubclass(kind, known):
            _check_scalar(value, path)
            return {KEY: [name, to_text(value)]}
    if kind is ModelReference:
        return _reference(value.label, value.pk, path)
    # Also what a lazy object wraps, such as `request.user`.
    if isinstance(value, Model):
        if value.pk is None or value._state.adding:
            raise InvalidArguments(f"{path} is a {value._meta.label} without a row: save it first", path=path)
        return _reference(value._meta.label_lower, value.pk, path)
    return None


def _check_scalar(value: Any, path: str) -> None:
    if isinstance(value, time) and value.tzinfo is not None and value.utcoffset() is None:
        raise InvalidArguments(
            f"{path} is a time in {value.tzinfo}, whose offset depends on the date: pass a datetime", path=path
        )
    if isinstance(value, datetime | time) and (offset := value.utcoffset()) and offset.microseconds:
        # Python itself does not read each of them back.
        raise InvalidArguments(f"{path} has an offset from UTC with a fraction of a second: pass it in UTC", path=path)
    if isinstance(value, datetime | time) and value.fold and value.tzinfo is None:
        raise InvalidArguments(f"{path} has fold=1 and no time zone, so its text is not it: give it one", path=path)


def _reference(label: str, pk: Any, path: str) -> dict[str, Any]:
    return {KEY: [INSTANCE, label, plain(pk, f"{path}.pk", MAX_DEPTH, carried)]}


def _checked(value: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return a copy of a form. Raises: InvalidArguments."""
    # Read back: no text that reads as a value may be stored as another one.
    found, error = attempt(_read, value)
    if error is not None or len(value) != 1:
        raise InvalidArguments(
            f"{path} has the reserved key {KEY!r} and is no value of this package: rename the key, or give "
            f'{{"{KEY}": [kind, text]}} with one of the kinds {KINDS}',
            path=path,
        )
    if isinstance(found, ModelReference) and attempt(apps.get_model, found.label).error is not None:
        raise InvalidArguments(f"{path} names the model {found.label!r}, which this project does not have", path=path)
    form: dict[str, Any] = carried(found, path)
    return form


# --- Read what a row holds.


def readable(value: Any) -> Any:
    """Return a copy of plain values with what their forms stand for; a `ModelReference` for an instance."""
    if type(value) is list:
        return [readable(item) if type(item) in (list, dict) else item for item in value]
    if type(value) is dict:
        if len(value) == 1 and KEY in value:
            # A dict that only looks like one came from another program, as the value of a task that went before.
            found, error = attempt(_read, value)
            if error is None:
                return found
        return {key: readable(item) if type(item) in (list, dict) else item for key, item in value.items()}
    return value


def readable_call(args: list[Any], kwargs: dict[str, Any]) -> Payload:
    """Return the arguments of a call so."""
    return Payload(readable(args), readable(kwargs))


def occurs_in(call: Payload) -> bool:
    """Return whether the plain arguments of a call hold a form."""
    return next(_forms([call.args, call.kwargs]), None) is not None


def names_instance(args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether the plain arguments of a call name an instance of a model."""
    return next(references_in(readable([args, kwargs])), None) is not None


def references_in(value: Any) -> Iterator[ModelReference]:
    """Yield the instances that readable values name; only lists and dicts are looked into."""
    if type(value) is ModelReference:
        yield value
    elif type(value) in (list, dict):
        for item in value.values() if type(value) is dict else value:
            yield from references_in(item)


def _forms(value: Any) -> Iterator[Mapping[str, Any]]:
    if type(value) is dict and KEY in value:
        yield value
    elif type(value) in (list, dict):
        for item in value.values() if type(value) is dict else value:
            yield from _forms(item)


def _read(form: Mapping[str, Any]) -> Any:
    """Return what a form stands for. Raises: ValueError, TypeError, KeyError for one that stands for nothing."""
    kind, *rest = form[KEY]
    if kind == INSTANCE:
        label, pk = rest
        if not isinstance(label, str):
            raise TypeError(label)
        pk = readable(pk)
        # A composite key is a tuple.
        return ModelReference(label, tuple(pk) if isinstance(pk, list) else pk)
    (text,) = rest
    if not isinstance(text, str):
        raise TypeError(text)
    return SCALARS[kind][2](text)

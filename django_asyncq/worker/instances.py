"""Load the instances of models among a task's typed arguments, right before its function is called.

So the function gets each row as it is now: in the thread and the transaction in which it runs, within what the project
has around its tasks. A row that is gone raises the model's `DoesNotExist`, as if the function had looked for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from asgiref.sync import sync_to_async
from django.apps import apps
from django.core.exceptions import ObjectDoesNotExist, ValidationError

from ..core.batches import BatchItem
from ..core.compat import batched
from ..core.typed import ModelReference, references_in
from ..exceptions import TaskNotRunnable
from ..results import as_discard
from ..storage.routing import writing_database
from .job import Job, is_coroutine_function

ROWS_PER_QUERY = 500

# (label, key as the model has it) → its instance.
Found = dict[tuple[str, Any], Any]


def called_with_instances(job: Job, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call the function of a job with instances in place of the references to them; return what it returns.

    That of an `async def` is a coroutine, which loads them where it is awaited. Raises: as `with_instances`.
    """
    if is_coroutine_function(job.task.func):
        return _awaited_with_instances(job, args, kwargs)
    args, kwargs = with_instances(job, args, kwargs)
    return job.task.func(*args, **kwargs)


async def _awaited_with_instances(job: Job, args: list[Any], kwargs: dict[str, Any]) -> Any:
    args, kwargs = await sync_to_async(with_instances)(job, args, kwargs)
    return await job.task.func(*args, **kwargs)


def with_instances(job: Job, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a function with instances in place of the references to them.

    Of a batch, a call with a row that is gone fails alone. Raises: `DoesNotExist` of a model, when there is no other
    call; TaskNotRunnable for a model that the project no longer has; django.db.Error.
    """
    if job.task.batch is None:
        found = _load(references_in([args, kwargs]))
        return _replaced(args, found), _replaced(kwargs, found)
    items: list[BatchItem] = args[-1]
    found = _load(reference for item in items for reference in references_in([item.args, item.kwargs]))
    loaded, unfit = [], dict(job.unfit or {})
    for item in items:
        try:
            loaded.append(replace(item, args=_replaced(item.args, found), kwargs=_replaced(item.kwargs, found)))
        except ObjectDoesNotExist as error:
            unfit[item.id] = as_discard(job.task, error)
    if not loaded:
        raise next(iter(unfit.values()))
    job.unfit = unfit
    return [*args[:-1], loaded], kwargs


def _load(references: Iterable[ModelReference]) -> Found:
    keys = defaultdict[str, set[Any]](set)
    for reference in references:
        keys[reference.label].add(_key(reference))
    found: Found = {}
    for label, wanted in keys.items():
        model = _model(label)
        rows = model._base_manager.using(writing_database(model))
        for part in batched([key for key in wanted if key is not None], ROWS_PER_QUERY):
            found |= {(label, row.pk): row for row in rows.filter(pk__in=part)}
    return found


def _replaced(value: Any, found: Found) -> Any:
    """Return a copy of readable values with the instances. Raises: `DoesNotExist`."""
    if type(value) is ModelReference:
        instance = found.get((value.label, _key(value)))
        if instance is None:
            raise _model(value.label).DoesNotExist(f"{value!r} does not exist any more: the task was enqueued with it")
        return instance
    if type(value) is list:
        return [_replaced(item, found) for item in value]
    if type(value) is dict:
        return {key: _replaced(item, found) for key, item in value.items()}
    return value


def _key(reference: ModelReference) -> Any:
    """Return the key as the model has it; None for one that it cannot have."""
    try:
        return _model(reference.label)._meta.pk.to_python(reference.pk)
    except ValidationError:
        return None


def _model(label: str) -> Any:
    try:
        return apps.get_model(label)
    except (LookupError, ValueError) as error:
        raise TaskNotRunnable(
            f"an argument is an instance of the model {label!r}, which this project does not have any more"
        ) from error

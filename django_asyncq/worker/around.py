"""What a project has around the body of every task: the context managers of ASYNCQ["AROUND"].

They are entered where the body runs, once it is certain that it does: in the thread of a `def`, in the event loop of
an `async def`, for a task that is atomic within its transaction. An error of theirs is the task's own. A process with
none calls the functions of `call` themselves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from typing import Any

from django.utils.module_loading import import_string

from ..exceptions import TaskNotRunnable
from .call import Awaiting, await_body, call, refuse_late
from .instances import called_with_instances
from .job import Job, is_coroutine_function


class Around:
    """Has `call` and `acall`, with the context managers around the body. paths: of their factories, outermost first."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._factories: list[tuple[str, Callable[[Any], Any]]] = [(path, import_string(path)) for path in paths]

    def call(self, job: Job, args: list[Any], kwargs: dict[str, Any], await_value: Awaiting) -> Any:
        """Do as `call.call`; what a `def` returns to be awaited is awaited within the context managers."""
        # First: nothing is entered for a body that does not run.
        if job.run.record.expires_at is not None or job.run.members:
            refuse_late(job, args)
        if is_coroutine_function(job.task.func):
            return call(job, args, kwargs, lambda job, value: await_value(job, self._await(job, value)))
        with ExitStack() as stack:
            for path, manager in self._managers(job):
                if not hasattr(manager, "__exit__"):
                    raise _refused(path, manager, "a `def` task enters only a context manager that is not asynchronous")
                stack.enter_context(manager)
            return call(job, args, kwargs, await_value)

    async def acall(self, job: Job, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Do as `call.acall`; the timeout is that of the body and the context managers together."""
        if job.run.record.expires_at is not None or job.run.members:
            refuse_late(job, args)
        called = called_with_instances(job, args, kwargs) if job.has_typed_arguments else job.task.func(*args, **kwargs)
        return await await_body(job, self._await(job, called))

    async def _await(self, job: Job, coroutine: Any) -> Any:
        body: Awaitable[Any] | None = None
        try:
            async with AsyncExitStack() as stack:
                for path, manager in self._managers(job):
                    if hasattr(manager, "__aexit__"):
                        await stack.enter_async_context(manager)
                    elif hasattr(manager, "__exit__"):
                        stack.enter_context(manager)
                    else:
                        raise _refused(path, manager, "give a context manager")
                body = coroutine
                return await coroutine
        finally:
            if body is None:
                coroutine.close()

    def _managers(self, job: Job) -> Iterator[tuple[str, Any]]:
        """Yield each with the path of its factory, which is called once the one before it was entered."""
        for path, factory in self._factories:
            yield path, factory(job.context)


def _refused(path: str, found: object, remedy: str) -> TaskNotRunnable:
    return TaskNotRunnable(f"{path} of ASYNCQ['AROUND'] returned a {type(found).__qualname__}: {remedy}")

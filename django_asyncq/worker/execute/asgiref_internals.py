"""What this package uses of asgiref beyond its documented API, in one place. Nothing else here touches it."""

from __future__ import annotations

from asgiref.sync import SyncToAsync, ThreadSensitiveContext


def has_thread(context: ThreadSensitiveContext) -> bool:
    """Whether a context has a thread, so database connections to close; can go when asgiref has a public way to ask.

    Asking a context that has none would start a thread for each coroutine.
    """
    return context in SyncToAsync.context_to_thread_executor

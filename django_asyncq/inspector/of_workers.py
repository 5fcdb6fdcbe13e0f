"""The worker processes, for an `Inspector`."""

from __future__ import annotations

from datetime import UTC, datetime

from ..broker import servers
from ..prefixes import one_alias_per_prefix
from .values import RunningTask, WorkerInfo


class Workers:
    """List worker processes, also those of other programs, and drain those of ours."""

    def __init__(self, backend: str | None) -> None:
        self._backend = backend

    def all(self) -> list[WorkerInfo]:
        """Return the living processes, by alias, host and process id; some seconds old at most."""
        return [_info(each, alias) for alias in self._aliases() for each in servers.workers(alias, "worker")]

    def serving(self, queue: str) -> list[WorkerInfo]:
        """Return the processes that take tasks from a queue, without those that are drained.

        Aliases that share a prefix share its queues.
        """
        return [each for each in self.all() if queue in each.queues and not each.is_draining]

    def drain(self, name: str) -> list[WorkerInfo]:
        """Ask processes to take no more tasks and to finish what they run, until they are resumed; return which.

        name: a worker's id, or a host, which means all of it, also processes that start later. The request holds for a
        day at most. Other programs have no such request.
        """
        return [_info(each, alias) for alias in self._aliases() for each in servers.drain(name, alias)]

    def resume(self, name: str) -> bool:
        """Let processes take tasks again; return whether a request to drain had this name."""
        found = [servers.resume(name, alias) for alias in self._aliases()]
        return any(found)

    def _aliases(self) -> list[str]:
        return one_alias_per_prefix() if self._backend is None else [self._backend]


def _info(each: servers.WorkerInfo, alias: str) -> WorkerInfo:
    details = each.details
    return WorkerInfo(
        id=details.worker_id if details else each.id,
        backend=details.alias if details else alias,
        host=each.host,
        pid=each.pid,
        queues=dict(each.queues),
        status=each.status,
        slots=each.concurrency,
        busy=each.busy,
        started_at=each.started_at,
        running=[RunningTask(task.id, task.type, task.queue, task.started_at) for task in each.running],
        is_ours=details is not None,
        version=details.version if details else "",
        rss_bytes=details.rss_bytes if details else 0,
        beat_at=_moment(details.beat_at) if details else None,
        is_draining=bool(details and details.is_draining),
        is_leader=bool(details and details.is_leader),
        is_quarantined=bool(details and details.is_quarantined),
        tasks=list(details.tasks) if details else [],
    )


def _moment(seconds: float) -> datetime | None:
    """Return a time that a process has written; None for what is none."""
    try:
        return datetime.fromtimestamp(seconds, UTC) if seconds > 0 else None
    except (ValueError, OverflowError, OSError):
        return None

"""All jobs of a worker process: those that wait for a slot, and those in one."""

from __future__ import annotations

from collections.abc import Iterable

from .job import Job


class Jobs:
    """The jobs of one process, shared by its threads without a lock.

    Removing a job from `waiting` decides who has it: a slot, or the main thread, which requeues it. A dictionary lets
    exactly one of them succeed. A slot adds a job to `busy` first, so a job on its way is counted twice, never missed.
    """

    def __init__(self) -> None:
        self.waiting: dict[Job, None] = {}
        self.busy: set[Job] = set()

    # --- called by the main thread

    def add(self, jobs: Iterable[Job]) -> None:
        """Let jobs wait for a slot."""
        self.waiting.update(dict.fromkeys(jobs))

    def take_waiting(self, arrived_before: float) -> list[Job]:
        """Remove and return the jobs that wait since a monotonic time or longer."""
        taken = []
        for job in self.waiting.copy():
            if job.arrived_at > arrived_before:
                break  # they are in the order of their arrival
            if self._take(job):
                taken.append(job)
        return taken

    @property
    def running(self) -> list[Job]:
        """The jobs in a slot."""
        return list(self.busy.copy())

    @property
    def all(self) -> list[Job]:
        """All jobs, those that wait first: one that enters a slot meanwhile may be listed twice."""
        return [*self.waiting.copy(), *self.running]

    # --- called by the slots

    @property
    def count(self) -> int:
        """How many jobs are here."""
        return len(self.waiting) + len(self.busy)

    def enter_slot(self, job: Job) -> bool:
        """Take a job into a slot; return False if the main thread has taken it back."""
        self.busy.add(job)
        if self._take(job):
            return True
        self.busy.discard(job)
        return False

    def leave_slot(self, job: Job) -> None:
        """Remove a job that has finished."""
        self.busy.discard(job)

    def _take(self, job: Job) -> bool:
        return self.waiting.pop(job, job) is None

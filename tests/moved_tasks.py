"""A task that schedules of an old project still know by its former name."""

from __future__ import annotations

from django_asyncq import task


@task(schedulable=True, aliases=("oldsite.tasks.sweep",))
def sweep(days: int = 30) -> int:
    """Stand for a task that was moved."""
    return days

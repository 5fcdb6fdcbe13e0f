"""What the death of a worker process counts against the tasks that it had begun. Uses no store.

A loss counts against a task only when no other can have caused it. All that may have caused it become suspects and run
alone next, so a task that takes processes down is soon the only one that it can take down.
"""

from __future__ import annotations

from .. import lifecycle
from ..threads import EX_SOFTWARE
from ..worker.crash_stack import crashed_thread
from .memory import MemorySampler
from .processes import Child


def blame(child: Child) -> lifecycle.Blame:
    """Return whom to blame for the death of a process.

    Nobody when it stopped by itself or was killed by its supervisor: then it was no task that took it down.
    """
    running = child.slot_table.running()
    begun = frozenset(each.id for each in running)
    if child.exit_code == 0 or (child.was_killed and not child.is_stalled):
        return lifecycle.Blame()
    if child.is_stalled:
        # One of them may hold what the process waited for; alone, it keeps no other task waiting.
        return lifecycle.Blame(suspects=begun)
    thread = crashed_thread(child.stack)
    # Coroutines share a thread, so several may be named.
    named = frozenset(each.id for each in running if thread is not None and each.thread == thread)
    accused = named or begun
    # EX_SOFTWARE: the process found itself unable to go on, and no task needs to be the cause.
    if len(accused) == 1 and (child.exit_code != EX_SOFTWARE or child.is_alone):
        return lifecycle.Blame(counted=accused)
    return lifecycle.Blame(suspects=accused)


def describe_death(child: Child, memory: MemorySampler) -> str:
    """Describe how a process died, for the errors of the tasks that it may have died of."""
    others = len(child.slot_table.running()) - 1
    company = "lost alone" if others < 1 else f"lost together with {others} other{'s' if others > 1 else ''}"
    return "; ".join(filter(None, [lifecycle.describe_exit(child.exit_code), company, *memory.describe(child)]))

"""Pause and resume queues, tasks and gates. The row is the truth; Redis follows it after the commit.

| kind  | while the row exists                                                    | what follows it in Redis     |
|-------|-------------------------------------------------------------------------|------------------------------|
| queue | no task of the queue begins; tasks are enqueued and become due as before | asynq's `paused` key, a mark |
| task  | our workers postpone its calls, which use no attempt                    | the set of paused tasks      |
| gate  | the gate admits no new task; the tasks that hold a slot go on           | a field of the gate          |

What a worker has begun goes on in all three. `keeper` runs in the leader and repairs what a crash or an outage of
Redis has left.
"""

from __future__ import annotations

from .rows import pause, pauses, resume

__all__ = ["pause", "pauses", "resume"]

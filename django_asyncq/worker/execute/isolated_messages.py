"""What a worker and the process of an isolated run send to each other.

The worker sends `Work`, which is pickled, before the function is called. Everything after it is JSON, in both
directions, since the function may have put another file in place of the pipe. The worker sends the name of a
`StopReason`, or whether the process may write the row (the answer to LEAVE_ROW). The process sends objects whose
`kind` is one of the first six constants.
"""

from __future__ import annotations

from typing import NamedTuple

from ...broker import Lease
from ...models import TaskRecord

READY = "ready"  # its code is loaded, and it waits for `Work`
LEAVE_ROW = "leave row"  # it is about to write the row in its own transaction
COMPLETED = "completed"  # that transaction is committed; the function goes on
PROGRESS = "progress"  # what the function has reported last
LOG_LINE = "log line"  # that the row keeps
FINISHED = "finished"  # the function has returned or raised; without an outcome if it has completed itself

# The values of `outcome` in FINISHED.
PLAIN, CUT, UNCONNECTED = "plain", "cut", "unconnected"

# "An error occurred while doing I/O on some file", as in `sysexits.h`.
EX_NO_PIPE = 74


class Work(NamedTuple):
    """The run that the process must do. The others are those of the `Job`.

    begun_at: monotonic seconds, which all processes of a host share.
    """

    record: TaskRecord
    lease: Lease
    written: bool
    begun_at: float
    seconds_to_deadline: float | None

"""Other programs on the same queues: from an entry in Redis to a verdict, and from that to a row.

| what another program has done        | verbs                                                  | module          |
|--------------------------------------|--------------------------------------------------------|-----------------|
| enqueued a message: new → QUEUED     | `claim`, `claim_suspect`, `classify`                   | `adopt`         |
| the same, in a group                 | `form_batches`                                         | `adopt`         |
| pushed a document: new → QUEUED      | `InboxService.tick`                                    | `inbox`         |
| taken one of our tasks, or settled it: any but final → what Redis shows | `settle_evidence`   | `evidence`      |
| run a task that is its own: the same | `follow_remote`                                        | `evidence`      |

`verdict` says what an entry means, `asynq_display` shows our schedules to asynq's tools. `lifecycle` knows nothing of
this folder: it settles what has a row, and returns the rest.
"""

from .adopt import claim, claim_suspect, classify, form_batches
from .evidence import follow_remote, settle_evidence

__all__ = ["claim", "claim_suspect", "classify", "follow_remote", "form_batches", "settle_evidence"]

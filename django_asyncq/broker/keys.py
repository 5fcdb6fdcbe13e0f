"""Every Redis key of a queue, in one place. Source: `asynq-wire.md` section 2; own keys are marked."""

from __future__ import annotations

from dataclasses import dataclass, field

from .. import conf


def prefix() -> str:
    """Return the first part of every key."""
    return conf.current().key_prefix


def queues_key() -> str:
    """Return the set of all queue names."""
    return f"{prefix()}:queues"


def alive_key() -> str:
    """Return the own key that is there as long as Redis has not lost its memory."""
    return f"{prefix()}:alive"


@dataclass(frozen=True, slots=True)
class QueueKeys:
    """The keys of one queue; the braces put them all into one cluster slot."""

    queue: str
    base: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", f"{prefix()}:{{{self.queue}}}:")

    def __getattr__(self, name: str) -> str:
        if name in PLAIN:
            return f"{self.base}{name}"
        raise AttributeError(name)

    @property
    def task_prefix(self) -> str:
        """What stands before a task's id in the key of its hash."""
        return f"{self.base}t:"

    @property
    def priority(self) -> str:
        """Own: zset of waiting tasks with a priority other than 0; score = -priority, member = id."""
        return f"{self.base}prio"

    @property
    def wake(self) -> str:
        """Own: channel on which a push to `priority` is told; idle workers block on `pending` only."""
        return f"{self.base}wake"

    def held(self, worker_id: str) -> str:
        """Own: hash of what one worker process has leased; id → fence."""
        return f"{self.base}held:{worker_id}"

    def group(self, name: str) -> str:
        """Return the zset of a group's waiting members."""
        return f"{self.base}g:{name}"

    def processed_on(self, day: str) -> str:
        """Return the counter of ended tasks of one UTC day."""
        return f"{self.base}processed:{day}"

    def failed_on(self, day: str) -> str:
        """Return the counter of failures of one UTC day."""
        return f"{self.base}failed:{day}"

    def unique(self, task_type: str, digest: str) -> str:
        """Return the lock of a unique task. digest: hex MD5 of the payload, "" for none."""
        return f"{self.base}unique:{task_type}:{digest}"


PLAIN = frozenset(
    {
        "pending",
        "active",
        "lease",
        "scheduled",
        "retry",
        "archived",
        "completed",
        "paused",
        "processed",
        "failed",
        "groups",
    }
)

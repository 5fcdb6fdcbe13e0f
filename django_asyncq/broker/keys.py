"""Every Redis key of a queue. Source: asynq's `internal/base/base.go`; keys that asynq lacks are marked "Own".

No other module builds a key, except those of gates and of the coordinator's locks, which belong to no queue. What an
alias in TASKS has of its own begins with the prefix of that alias; what all aliases share begins with KEY_PREFIX.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import lru_cache

from .. import conf
from ..core.aliases import DEFAULT_ALIAS, prefix_of

# What each key of a queue is, by the name of its field or method. One of another type is set aside (`lua/prelude.lua`);
# its tasks then come back from their rows, as after an eviction. Locks of unique tasks have a name of their own.
QUEUE_TYPES = {
    "pending": "list",
    "priority": "zset",
    "fair": "zset",
    "suspects": "zset",
    "unknown": "zset",
    "active": "list",
    "lease": "zset",
    "scheduled": "zset",
    "due": "zset",
    "retry": "zset",
    "archived": "zset",
    "completed": "zset",
    "paused": "string",
    "pause_mark": "string",
    "processed": "string",
    "failed": "string",
    "groups": "set",
    "aggregation_sets": "zset",
    "group_due": "zset",
    "group_rules": "hash",
    "task": "hash",
    "group": "zset",
    "processed_on": "string",
    "failed_on": "string",
    "minutes": "hash",
    "runs": "hash",
    "unique": "string",
    "held": "hash",
    "wake": "list",
    "inbox": "list",
    "inbox_taken": "hash",
    "inbox_due": "zset",
    "rejected": "list",
}
# The same for the keys of no queue, by the name of their function here; `gate` and `lock` name those that `gates` and
# `leadership` build.
OTHER_TYPES = {
    "queues_key": "set",
    "own_queues_key": "set",
    "alive_key": "string",
    "reachability_key": "hash",
    "key_check_key": "string",
    "owner_key": "string",
    "supervisors_key": "zset",
    "waiting_gates_key": "set",
    "paused_tasks_key": "set",
    "waiting_rates_key": "set",
    "changed_rates_key": "set",
    "servers_key": "zset",
    "running_key": "zset",
    "server_key": "string",
    "server_running_key": "hash",
    "worker_info_key": "string",
    "drain_key": "hash",
    "schedulers_key": "zset",
    "scheduler_key": "list",
    "scheduler_history_key": "zset",
    "gate members": "zset",
    "gate meta": "hash",
    "gate retaken": "hash",
    "gate waiters": "zset",
    "gate ours": "set",
    "rate_key": "hash",
    "rate_looks_key": "zset",
    "lock": "string",
}
# As in `TaskRecord.queue_name`, and some more for the queues of Go programs.
LONGEST_NAME = 1000
# The word after a queue's hash tag, where it is not the name of the field.
WORDS = {
    "base": "",
    "priority": "prio",
    "task_prefix": "t:",
    "group_prefix": "g:",
    "group_due": "group-due",
    "group_rules": "group-rules",
    "held_prefix": "held:",
    "pause_mark": "paused-by-row",
    "inbox_taken": "inbox-taken",
    "inbox_due": "inbox-due",
}


def prefix() -> str:
    """Return the first part of the keys that all aliases share."""
    return conf.current().key_prefix


def hour_of(moment: datetime) -> str:
    """Return an hour as the keys of its counters have it. moment: in UTC."""
    return f"{moment:%Y-%m-%dT%H}"


def is_name(text: str) -> bool:
    """Return whether a text from Redis can name a queue of ours: some characters of UTF-8, and no NUL."""
    return 0 < len(text) <= LONGEST_NAME and "\x00" not in text and text.isprintable()


def queues_key(alias: str = DEFAULT_ALIAS) -> str:
    """Return the set of all queue names of an alias."""
    return f"{prefix_of(alias)}:queues"


def own_queues_key(alias: str = DEFAULT_ALIAS) -> str:
    """Own: the set of the queues that code, rows or settings of the project have named; other programs have others."""
    return f"{prefix_of(alias)}:own-queues"


def alive_key() -> str:
    """Own: the string that exists until Redis loses its memory; holds the Unix time at which it was set."""
    return f"{prefix()}:alive"


def reachability_key() -> str:
    """Own: the hash of when Redis was last reached, and since when without a gap; in the slot of `alive_key`."""
    return f"{{{alive_key()}}}:reachability"


def key_check_key() -> str:
    """Own: the string that the leader has signed, so that other processes notice when their SECRET_KEY differs."""
    return f"{prefix()}:key-check"


def owner_key(of: str = "") -> str:
    """Own: the string with the identity of the database to which all keys of a prefix belong. of: "" for KEY_PREFIX."""
    return f"{of or prefix()}:owner"


def supervisors_key(of: str = "") -> str:
    """Own: the zset of the owner's supervisors; score = Unix milliseconds until which each counts as alive."""
    return f"{{{owner_key(of)}}}:supervisors"


def waiting_gates_key() -> str:
    """Own: the set of the names of gates at which tasks wait."""
    return f"{prefix()}:waiting-gates"


def rate_key(name: str) -> str:
    """Own: the hash of a rate, see `lua/rate_take.lua`. The braces keep its keys in one slot of a Redis Cluster."""
    return f"{{{prefix()}:rate:{name}}}"


def rate_looks_key(name: str) -> str:
    """Own: the zset of the tasks that wait for a rate; score = Unix microseconds at which each is looked at next."""
    return f"{rate_key(name)}:looks"


def waiting_rates_key() -> str:
    """Own: the set of the names of rates for which tasks wait."""
    return f"{prefix()}:waiting-rates"


def changed_rates_key() -> str:
    """Own: the set of the names of rates whose row was changed, and whose waiting tasks are to be placed anew."""
    return f"{prefix()}:changed-rates"


def paused_tasks_key() -> str:
    """Own: the set of the names of paused tasks."""
    return f"{prefix()}:paused-tasks"


def pauses_channel() -> str:
    """Own: the channel that announces that a queue was resumed, or a task paused or resumed."""
    return f"{prefix()}:pauses"


def names_channel(alias: str = DEFAULT_ALIAS) -> str:
    """Own: the channel that announces a queue of an alias registered for the first time."""
    return f"{prefix_of(alias)}:names"


def cancel_channel(alias: str = DEFAULT_ALIAS) -> str:
    """Return asynq's channel that announces a cancelled task, with the prefix of the alias; the message is its id."""
    return f"{prefix_of(alias)}:cancel"


def due_channel() -> str:
    """Own: the channel that announces a task due before all others."""
    return f"{prefix()}:due"


def free_slot_channel() -> str:
    """Own: the channel that announces a released slot of a gate at which tasks wait; the message is the gate's name."""
    return f"{prefix()}:free-slot"


def over_channel() -> str:
    """Own: the channel that announces a task that is over and was waited for; the message is its id."""
    return f"{prefix()}:over"


def odd_channel() -> str:
    """Own: the channel that announces a key that was set aside (`lua/prelude.lua`)."""
    return f"{prefix()}:odd"


def servers_key(alias: str = DEFAULT_ALIAS) -> str:
    """Return the zset of the keys of all servers; score = Unix seconds until which each counts as alive."""
    return f"{prefix_of(alias)}:servers"


def running_key(alias: str = DEFAULT_ALIAS) -> str:
    """Return asynq's zset of the keys of what all servers run, with the same scores."""
    return f"{prefix_of(alias)}:workers"


def server_key(name: str, alias: str = DEFAULT_ALIAS) -> str:
    """Return the string that describes one server. name: `<host>:<pid>:<server id>`."""
    return f"{prefix_of(alias)}:servers:{{{name}}}"


def server_running_key(name: str, alias: str = DEFAULT_ALIAS) -> str:
    """Return the hash of what one server runs: id → description. name: as of `server_key`."""
    return f"{prefix_of(alias)}:workers:{{{name}}}"


def worker_info_key(name: str, alias: str = DEFAULT_ALIAS) -> str:
    """Own: the string with what a worker process says of itself beyond asynq's words. name: as of `server_key`."""
    return f"{prefix_of(alias)}:worker-info:{{{name}}}"


def drain_key(alias: str = DEFAULT_ALIAS) -> str:
    """Own: the hash of the workers that shall take no more tasks: worker id or host → until when, in Unix seconds."""
    return f"{prefix_of(alias)}:drain"


def schedulers_key(alias: str = DEFAULT_ALIAS) -> str:
    """Return the zset of the entry lists of all schedulers."""
    return f"{prefix_of(alias)}:schedulers"


def scheduler_key(scheduler_id: str, alias: str = DEFAULT_ALIAS) -> str:
    """Return the list of one scheduler's entries. scheduler_id: `<host>:<pid>:<UUID>`."""
    return f"{prefix_of(alias)}:schedulers:{{{scheduler_id}}}"


def scheduler_history_key(entry_id: str, alias: str = DEFAULT_ALIAS) -> str:
    """Return the zset of an entry's enqueue events."""
    return f"{prefix_of(alias)}:scheduler_history:{entry_id}"


def keys_of(queue: str, alias: str = DEFAULT_ALIAS) -> QueueKeys:
    """Return the keys of a queue, cached."""
    return _keys_of(prefix_of(alias), queue, alias)


@lru_cache(maxsize=256)
def _keys_of(prefix: str, queue: str, alias: str) -> QueueKeys:
    # `prefix` is part of the cache key only: QueueKeys reads it itself.
    return QueueKeys(queue, alias)


@dataclass(frozen=True, slots=True)
class QueueKeys:
    """Hold the keys of one queue of an alias; the braces put them all into one cluster slot.

    Own: due (zset of the tasks in `scheduled` whose due time is not a whole second; score = Unix milliseconds),
    priority (zset of waiting tasks with a priority other than 0; score = -priority, member = id), fair (zset of how
    far each fair key has come, see `lua/lines.lua`), wake (list of tokens, each of which wakes an idle worker, see
    `lua/waking.lua`), suspects (zset of waiting tasks that must run alone;
    score = Unix milliseconds), unknown (zset of what waits in scheduled for code that has it, see `unknown_tasks`;
    score = 0, member = label, line break, id), group_due (zset of groups; score = Unix milliseconds at which one is
    ripe), group_rules
    (hash: group → its rules, see `lua/groups.lua`), pause_mark (which row has paused the queue), inbox (list of
    documents that any program pushes), inbox_taken and inbox_due (those that are taken and not settled, see `inbox`),
    rejected (list of what could be no task, see `rejected`), and the keys that begin with `held_prefix`.
    After task_prefix comes a task's id, after group_prefix a group's name, after the others a worker's id.
    """

    queue: str
    alias: str = DEFAULT_ALIAS
    base: str = field(init=False)
    pending: str = field(init=False)
    active: str = field(init=False)
    lease: str = field(init=False)
    scheduled: str = field(init=False)
    retry: str = field(init=False)
    archived: str = field(init=False)
    completed: str = field(init=False)
    paused: str = field(init=False)
    pause_mark: str = field(init=False)
    processed: str = field(init=False)
    failed: str = field(init=False)
    groups: str = field(init=False)
    aggregation_sets: str = field(init=False)
    group_due: str = field(init=False)
    group_rules: str = field(init=False)
    task_prefix: str = field(init=False)
    group_prefix: str = field(init=False)
    held_prefix: str = field(init=False)
    due: str = field(init=False)
    priority: str = field(init=False)
    fair: str = field(init=False)
    wake: str = field(init=False)
    suspects: str = field(init=False)
    unknown: str = field(init=False)
    inbox: str = field(init=False)
    inbox_taken: str = field(init=False)
    inbox_due: str = field(init=False)
    rejected: str = field(init=False)

    def __post_init__(self) -> None:
        base = f"{prefix_of(self.alias)}:{{{self.queue}}}:"
        for each in fields(self):
            if not each.init:
                object.__setattr__(self, each.name, base + WORDS.get(each.name, each.name))

    def task(self, id: str) -> str:
        """Return the hash of one task."""
        return f"{self.task_prefix}{id}"

    def group(self, name: str) -> str:
        """Return the zset of a group's waiting members."""
        return f"{self.group_prefix}{name}"

    def processed_on(self, day: str) -> str:
        """Return the counter of finished tasks of one UTC day. day: YYYY-MM-DD."""
        return f"{self.base}processed:{day}"

    def failed_on(self, day: str) -> str:
        """Return the counter of failures of one UTC day. day: YYYY-MM-DD."""
        return f"{self.base}failed:{day}"

    def minutes(self, hour: str) -> str:
        """Own: hash of the counters of an hour; `p<MM>` processed, `f<MM>` failed in a minute. hour: YYYY-MM-DDTHH."""
        return f"{self.base}minutes:{hour}"

    def runs(self, hour: str = "") -> str:
        """Own: hash of how the runs of each task ended. hour: YYYY-MM-DDTHH, "" for all since Redis lost its memory."""
        return f"{self.base}runs:{hour}" if hour else f"{self.base}runs"

    def unique(self, task_type: str, digest: str) -> str:
        """Return the lock of a unique task. digest: hex MD5 of the payload, "" for none."""
        return f"{self.base}unique:{task_type}:{digest}"

    def held(self, worker_id: str) -> str:
        """Own: hash of the tasks that one worker process has leased; id → fence."""
        return f"{self.held_prefix}{worker_id}"

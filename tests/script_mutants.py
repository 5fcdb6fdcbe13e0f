"""Scripts with one guard removed; the state machine and the chaos suite must find each of them.

Both take minutes. test_broker.py checks at once that each guard is still in its script.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

from django_asyncq.broker import scripts


class Cut(NamedTuple):
    """A guard to remove. script: its name; guard: the text to replace, wherever it occurs; instead: the new text."""

    script: str
    guard: str
    instead: str


def without(cut: Cut) -> Callable[[str], scripts.Script]:
    """Return a replacement for `scripts.script`: one script lacks its guard, the others are unchanged.

    Raises: LookupError when the script no longer has the guard.
    """
    known = scripts.script
    text = known(cut.script).text
    if cut.guard not in text:
        raise LookupError(f"{cut.script}.lua has no {cut.guard!r} any more: write the mutant anew")
    changed = text.replace(cut.guard, cut.instead)
    mutant = scripts.Script(changed, hashlib.sha1(changed.encode(), usedforsecurity=False).hexdigest())
    return lambda name: mutant if name == cut.script else known(name)


FENCE = "(known[1] or '0') ~= fence or "
MACHINE = {
    "done without the fence": Cut("done", FENCE, ""),
    "done without the state": Cut("done", " or is_elsewhere(known[3], 'active')", ""),
    "done that leaves the task held": Cut("done", "call('HDEL', KEYS[3], unpack(over))", ""),
    "done that counts nothing": Cut("done", "count = count + 1", ""),
    "retry without the fence": Cut("retry", FENCE, ""),
    "retry without the state": Cut("retry", " or is_elsewhere(known[2], 'active')", ""),
    "archive without the fence": Cut("archive", FENCE, ""),
    "requeue without the fence": Cut("requeue", FENCE, ""),
    "requeue that never raises the fence": Cut("requeue", "if ARGV[2] == '1' then", "if false then"),
    "postpone without the fence": Cut("postpone", FENCE, ""),
    "held that lists tasks of other workers": Cut("held", "if not known[1] or", "if true or"),
    "extend without the fence": Cut(
        "extend",
        "found[1] == held[i + 1] and ",
        "",
    ),
    "extend that renews without a lease": Cut("extend", " and call('ZSCORE', KEYS[1], id)", ""),
    "dequeue without a new fence": Cut(
        "dequeue",
        "(fence_of(known[3]) or 0) + 1",
        "fence_of(known[3]) or 0",
    ),
    "dequeue of a suspect": Cut("dequeue", "not known[4] and ", ""),
    "dequeue_suspect without a new fence": Cut(
        "dequeue_suspect", "(fence_of(known[3]) or 0) + 1", "fence_of(known[3]) or 0"
    ),
    "dequeue_suspect that is never paused": Cut("dequeue_suspect", "call('GET', KEYS[4])", "false"),
    "dequeue_suspect without a lease": Cut(
        "dequeue_suspect", "call('ZADD', KEYS[3], lease_end, id)\n    call('HSET'", "call('HSET'"
    ),
    "requeue that forgets suspicion": Cut("requeue", "if is_suspect then", "if false then"),
    "dequeue that is never paused": Cut("dequeue", "call('GET', KEYS[5])", "false"),
    "dequeue without a lease": Cut("dequeue", "call('ZADD', KEYS[4], unpack(leases))", ""),
    "dequeue of an active task": Cut("dequeue", " and not is_elsewhere(known[1], 'pending')", ""),
    "repair_orphans of a task in a list": Cut("repair_orphans", "call('LPOS', KEYS[list], id, 'RANK', -1)", "false"),
    "repair_orphans of nothing": Cut("repair_orphans", "if not stays and", "if false and"),
    "enqueue that pushes twice": Cut("enqueue", "and 'exists' or 'queued'", "and 'queued' or 'queued'"),
    "enqueue that checks no slot": Cut("enqueue", "gate and not has_slot(id, gate, ARGV[i + 6])", "false"),
    "enqueue whose fence may fall": Cut(
        "enqueue",
        "tonumber(fence) > (fence_of(call('HGET', key, 'fence')) or 0)",
        "true",
    ),
    "park of a running task": Cut("park", "state and not may_leave(place, state, key, row)", "false"),
    "reassert over an existing entry": Cut("reassert", "call('HEXISTS', key, 'msg') == 1", "false"),
    "forward that drops our retries": Cut("forward", "ARGV[4] == '1' and known[1] and", "false and"),
    "remove that leaves the lease": Cut("remove", "call('ZREM', KEYS[8], id)", ""),
    "gate without the membership test": Cut("gate_acquire", "call('ZMSCORE', gate.members, unpack(ids))", "{}"),
    "gate without a limit": Cut("gate_acquire", "math.max(gate.limit - gate.alive, 0)", "1000"),
    "gate that admits some of all": Cut("gate_acquire", "mode == 'all' and", "false and"),
    "gate that is built empty": Cut("gate_build", "for i = 6, #ARGV, 2 do", "for i = 6, 5 do"),
    "gate that keeps its slots": Cut("gate_release", "call('ZREM', KEYS[1], unpack(released))", "#released"),
    "gate that lets an earlier run release": Cut("gate_release", "tonumber(fence) > (fence_of(retaken) or 0)", "true"),
}

# Found by test_waiters.py, within a second each.
WAITERS = {
    "gate that lets new tasks come before waiters": Cut(
        "gate_acquire", "return gate.waiting + gate.behind, true", "return gate.behind, true"
    ),
    "gate whose waiters overtake each other": Cut("gate_acquire", "call('ZRANK', gate.waiters, ids[n])", "0"),
    "gate that keeps its waiters": Cut("gate_acquire", "call('ZREM', gate.waiters, unpack(gate.inside))", ""),
    "gate whose waiters lose their place": Cut("gate_acquire", "'ZADD', waiters, 'NX',", "'ZADD', waiters,"),
    "look that leaves the order to lapse": Cut("gate_next", "call('HSET', KEYS[2], 'kept', now)", ""),
    "waiters that keep their order themselves": Cut("gate_acquire", "call('ZCARD', waiters) == 0", "true"),
}

# Found by test_ownership.py, within a second each: what a fleet that shares queues with other programs depends on.
FLEET = {
    "fence kept on a rowless id": Cut("restore", "'fence', 'worker', 'cancel'", "'worker', 'cancel'"),
    "restore without the fence": Cut("restore", "fence ~= '' and (known[1] or '0') ~= fence", "false"),
    "restore that removes what nobody took": Cut("restore", "call('ZADD', KEYS[6], now, id)", "call('DEL', key)"),
    "reject that keeps nothing": Cut("reject", "call('LPUSH', KEYS[4], document)", ""),
}

# In every script of tasks: no other one finds the key later, and sets it aside.
SETTING_ASIDE = "then set_aside((...)) end"
OF_TASKS = [
    "enqueue",
    "schedule",
    "park",
    "dequeue",
    "held",
    "extend",
    "reassert",
    "done",
    "retry",
    "archive",
    "requeue",
    "postpone",
    "forward",
    "expired",
    "remove",
    "take_out",
    "ask_to_stop",
    "prune_completed",
    "entry_states",
    "misplaced",
    "remove_dangling",
    "grant_lease",
    "repair_orphans",
    "prune_held",
    "remove_waiting",
]

CHAOS = {
    "odd-keys-stay": [
        *(Cut(script, SETTING_ASIDE, "then end") for script in OF_TASKS),
        Cut("check_type", "set_aside(KEYS[1])\n", ""),
    ],
    "no-gate-rebuild": [
        Cut("gate_acquire", "not known[1] or", ""),
        Cut("gate_acquire", "now - (past(known[4], now) or 0) > tonumber(ARGV[3])", "false"),
    ],
    "no-fence": [Cut(script, FENCE, "") for script in ("done", "retry", "archive", "requeue")],
    "forgetful-rates": [Cut("rate_take", "if is_new then", "if false then")],
    "deaf-gates": [Cut("gate_acquire", "local limit = whole(known[2] or own_limit)", "local limit = whole(own_limit)")],
    "shrinking-ttl": [
        Cut(
            "gate_acquire",
            "expire_later(gate.members, gate.hold + 60)",
            "call('EXPIRE', gate.members, gate.hold)",
        )
    ],
}

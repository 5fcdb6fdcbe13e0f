"""How long a task of a gate without a row is expected to take, for the row that a person makes."""

from __future__ import annotations

import re

from .. import conf
from ..models import TaskRecord
from ..registry import every_task, load_task_modules
from ..storage.routing import rows_of
from .audit import LIVE_STATES


def expected_seconds_of(gate: str) -> float:
    """Return what the newest queued or running task of a gate says, else the tasks declared with it, else the setting.

    Redis knows it only of a gate with a row. Of several declarations the longest counts: a caller that comes back too
    early is refused again.
    """
    live = rows_of(TaskRecord).at_gate(gate).filter(state__in=LIVE_STATES, expected_seconds__isnull=False)
    found = live.order_by("-id").values_list("expected_seconds", flat=True).first()
    if found is not None:
        return float(found)
    load_task_modules()
    declared = [each for each in every_task() if each.expected_seconds and isinstance(each.gate, str)]
    exact = [each.expected_seconds for each in declared if each.gate == gate]
    formatted = [each.expected_seconds for each in declared if _may_name(str(each.gate), gate)]
    seconds = exact or formatted
    return float(max(each for each in seconds if each)) if seconds else conf.current().expected_seconds


def _may_name(template: str, gate: str) -> bool:
    """Return whether a format such as "{model}-slow" can give this name."""
    fixed = re.split(r"\{[^{}]*\}", template)
    return len(fixed) > 1 and re.fullmatch(".+".join(map(re.escape, fixed)), gate) is not None

"""Follow the tasks that only other programs run, page by page over the index of those that are not final."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from .. import conf, lifecycle
from ..aliases import through_redis
from ..broker import Broker, redis_clock
from ..models import TaskRecord
from ..storage import database_clock
from ..storage.isolation import each_alone
from ..storage.routing import rows_of, writing_database
from .sweep import GRACE_SECONDS

ROWS_PER_PAGE = 200
# In one pass; the next one goes on behind them.
PAGES_PER_PASS = 50


class RemoteTasks:
    """Have the rows of tasks that other programs run show what Redis says of them."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        # The last row that the last pass looked at, when it could not look at all of them.
        self._last: UUID | None = None

    def tick(self) -> int:
        """Follow at most PAGES_PER_PASS pages of rows; return how many changed. Raises: as `follow_remote`."""
        unfinished = rows_of(TaskRecord).filter(is_remote=True, finished_at__isnull=True, after_id=None)
        changed = 0
        for _ in range(PAGES_PER_PASS):
            rows = unfinished if self._last is None else unfinished.filter(id__gt=self._last)
            page = list(rows.order_by("id")[:ROWS_PER_PAGE])
            if page:
                changed += self._follow(through_redis(page))
            self._last = page[-1].id if len(page) == ROWS_PER_PAGE else None
            if self._last is None:
                break
        return changed

    def _follow(self, rows: Sequence[TaskRecord]) -> int:
        reachability = self.broker.reachability(conf.current().outage_seconds)
        if reachability.alive_since is None:
            # The next round knows since when.
            return 0
        # After an outage Redis may be an older copy of itself, which still has the mark.
        resumed = math.ceil(redis_clock.seconds() - reachability.reachable_seconds)
        since = max(reachability.alive_since, resumed)
        pushed_before = database_clock.now() - timedelta(seconds=GRACE_SECONDS)

        def follow(part: Sequence[TaskRecord]) -> list[int]:
            return [lifecycle.follow_remote(self.broker, part, since, pushed_before)]

        database = writing_database(TaskRecord)
        return sum(each_alone("following of tasks", rows, follow, key=lambda row: row.id, database=database))

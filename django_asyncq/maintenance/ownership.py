"""Keep two databases from sharing a Redis prefix: each would disable the other's schedules and park its tasks.

The identity of the database that owns a prefix is in Redis: of KEY_PREFIX, and of the prefix of each alias in TASKS.
Each supervisor compares all of them with that of its own database, because it may lead and then serves every alias. It
does so when it starts and then every CHECK_SECONDS; one that finds another database there stops with the remedies.

The leader takes a prefix without an owner, after it has compared all rows with Redis. So a supervisor whose database is
unreachable takes none, and an emptied Redis gets its owner back with its tasks. Of two databases that meet at such a
prefix, the first takes it and the supervisors of the other stop. A burst takes none, because it may be that of a test.
"""

from __future__ import annotations

import os
import socket
import uuid
from contextlib import suppress

from django.db import connections

from ..broker import prefix_owner, redis_clock
from ..exceptions import BrokerUnavailable, PrefixTaken
from ..faults import STORE_ERRORS, one_line
from ..guard import get_logger
from ..lifecycle.prefix_check import adopts_by_itself
from ..prefixes import owned_prefixes
from ..storage import identity

logger = get_logger("django_asyncq.maintenance.ownership")

CHECK_SECONDS = 5.0


class PrefixOwnership:
    """Compare the owners of all prefixes with this supervisor's database.

    may_take: whether it takes a prefix without owner. host: the name by which alerts know this supervisor's host.
    """

    def __init__(self, *, may_take: bool = True, host: str = "") -> None:
        self._may_take = may_take
        self._host = host or socket.gethostname()
        # Made when Redis can be asked for the time.
        self._token = ""
        # Prefixes that this database owned at some check.
        self._owned = set[str]()
        # Whether the last check has found this database at every prefix.
        self.is_owner = False
        # Why this process must stop, if it must.
        self.lost: PrefixTaken | None = None

    def tick(self, *, has_read_rows: bool = False) -> float:
        """Check, and return the seconds until the next call. has_read_rows: all rows were compared with Redis.

        Silent while a store is unreachable: the other loops report that. What is not known is checked at the next call.
        """
        try:
            database = identity.ensure()
        except STORE_ERRORS as error:
            logger.debug("the identity of the database cannot be read: %s", one_line(error))
            connections.close_all()
            found = identity.known()
            if found is None:
                return CHECK_SECONDS
            database = found
        may_take = self._may_take and has_read_rows
        with suppress(BrokerUnavailable):
            owners = {prefix: self._check(prefix, database, may_take=may_take) for prefix in owned_prefixes()}
            self.is_owner = set(owners.values()) == {database}
            taken = [
                PrefixTaken(prefix=prefix, owner=owner, database=database)
                for prefix, owner in owners.items()
                if owner not in (None, database)
            ]
            if taken or self.is_owner:
                self.lost = taken[0] if taken else None
        return CHECK_SECONDS

    def _check(self, prefix: str, database: uuid.UUID, *, may_take: bool) -> uuid.UUID | None:
        """Check one prefix; return its owner. Raises: BrokerUnavailable."""
        self._token = self._token or prefix_owner.token_of(self._host, os.getpid(), redis_clock.seconds())
        found = prefix_owner.note_supervisor(
            database,
            self._token,
            prefix=prefix,
            alive_ms=prefix_owner.ALIVE_MS,
            may_take=may_take,
            # Only at the start: one that ran before lost the prefix to a person's command.
            replaces="unused" if adopts_by_itself() and prefix not in self._owned else "never",
        )
        if found.owner == database:
            if found.former not in (None, database):
                logger.warning(
                    "the Redis prefix %s belonged to another database (%s), none of whose workers is running; because "
                    "DEBUG is on, this database has adopted it. Tasks of the other one that are left in Redis are "
                    "archived there",
                    prefix,
                    found.former,
                )
            elif found.former is None:
                logger.info("the Redis prefix %s now belongs to this database (%s)", prefix, database)
            self._owned.add(prefix)
        return found.owner

    def release(self) -> None:
        """Note that this supervisor has stopped."""
        if not self._token:
            return
        with suppress(BrokerUnavailable):
            for prefix in owned_prefixes():
                prefix_owner.forget_supervisor(self._token, prefix)

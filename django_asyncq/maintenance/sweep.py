"""A walk over all that waits, in parts: what each part of it mended, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple


class Repairs(NamedTuple):
    """What one pass mended.

    recovered: leases that ran out. pushed: rows in 0 that Redis did not know. parked: those that wait for a retry.
    unleased: rows in 1 that nobody ran. leased: active tasks without a lease. strays: ids without a hash. orphans:
    hashes in no list. ended: waiting entries whose row is final. held: what gone workers seemed to hold.
    """

    recovered: int = 0
    pushed: int = 0
    parked: int = 0
    unleased: int = 0
    leased: int = 0
    strays: int = 0
    orphans: int = 0
    ended: int = 0
    held: int = 0
    slots_added: int = 0
    slots_removed: int = 0

    def plus(self, other: Repairs) -> Repairs:
        """Return the sums."""
        return Repairs(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def __str__(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in self._asdict().items() if count) or "nothing"


class Sweep:
    """A sweep under way, which may go on at several ticks.

    begun_at: monotonic seconds. is_new: it builds Redis anew. took: the seconds it has had.
    """

    def __init__(self, pages: Iterator[Repairs], *, begun_at: float, is_new: bool) -> None:
        self.begun_at = begun_at
        self.is_new = is_new
        self.took = 0.0
        self.is_over = False
        self.repairs = Repairs()
        self._pages = pages

    def go_on(self, seconds: float) -> Repairs:
        """Mend page after page until all is seen or the seconds are over; return what was mended now."""
        begun_at = time.monotonic()
        mended = Repairs()
        for page in self._pages:
            mended = mended.plus(page)
            if time.monotonic() >= begun_at + seconds:
                break
        else:
            self.is_over = True
        self.took += time.monotonic() - begun_at
        self.repairs = self.repairs.plus(mended)
        return mended

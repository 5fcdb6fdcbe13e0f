"""Notice early that two hosts have different SECRET_KEYs, before an outcome that one signed is lost on the other.

The leader writes a signed constant to Redis. Every supervisor reads it when it starts, and now and then afterwards.
"""

from __future__ import annotations

from ..broker.key_check import MESSAGE, PURPOSE, read_key_check, write_key_check
from ..exceptions import BrokerUnavailable
from ..guard import get_logger
from ..lifecycle import signatures

logger = get_logger("django_asyncq.maintenance.key_check")

CHECK_SECONDS = 60.0
CHECK_AGAIN_SECONDS = 5.0


class KeyCheck:
    """Check whether this process can verify what the leader signs; warn once for each key that it cannot."""

    def __init__(self) -> None:
        self._warned_about = b""

    def tick(self, *, is_leader: bool) -> float:
        """Read the leader's signature, or write it as the leader; return the seconds until the next call.

        Silent while Redis is unreachable: the other loops report that.
        """
        try:
            self._check()
            if is_leader and signatures.can_sign():
                write_key_check(signatures.sign(PURPOSE, MESSAGE))
        except BrokerUnavailable:
            return CHECK_AGAIN_SECONDS
        return CHECK_SECONDS

    def _check(self) -> None:
        found = read_key_check(signatures.SIGNATURE_BYTES)
        if not found or found == self._warned_about or signatures.is_genuine(PURPOSE, MESSAGE, found):
            return
        self._warned_about = found
        logger.warning(
            "this host cannot verify what the leader has signed: its SECRET_KEY is neither the SECRET_KEY nor in the "
            "SECRET_KEY_FALLBACKS of this host; a finished task whose outcome lies in Redis may run again"
        )

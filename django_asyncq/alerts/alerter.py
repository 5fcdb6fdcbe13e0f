"""One round of alerts: look, note what was found, and send what is new and what is over by each channel."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from ..definitions.alert_settings import alert_settings
from ..faults import Outages, one_line
from ..guard import get_logger
from ..storage import database_clock
from .bounded_call import BoundedCall, NotFinished
from .decision import Decision
from .findings import Findings
from .local_notes import LocalNotes
from .looker import Looker
from .mail import Mail
from .message import Message, compose, compose_test
from .row_notes import RowNotes
from .webhook import Webhook

logger = get_logger("django_asyncq.alerts")

SECONDS_PER_LOG_LINE = 60.0


class Sender(Protocol):
    """What sends by one channel. name: for people, without secrets. seconds: how long an attempt may take."""

    channel: str
    name: str
    seconds: float

    def send(self, message: Message) -> None:
        """Send a message. Raises: anything."""

    def text_of(self, error: BaseException) -> str:
        """Return what went wrong, without secrets."""


class Alerter:
    """Looks and sends, by the settings in force when it is made. Without a channel in them, it has nothing to do.

    local: the notes that are not in the database. outages: see `Looker`. Used by one thread; `stop` may be called by
    any.
    """

    def __init__(self, *, local: LocalNotes | None = None, outages: Outages | None = None) -> None:
        self.settings = alert_settings()
        self.looker = Looker(self.settings, outages)
        self._local = local or LocalNotes()
        senders: list[Sender] = []
        if self.settings.webhook:
            senders.append(Webhook(self.settings.webhook))
        if self.settings.mail:
            senders.append(Mail(self.settings.mail))
        self.channels = [_Channel(each) for each in senders]

    def tick(self) -> float:
        """Do one round; return the seconds until the next. Raises: django.db.Error."""
        self.send(self.looker.look())
        return self.settings.every

    def send(self, findings: Findings) -> list[str]:
        """Send what is new and what is over; return why it could not be sent, if so. Raises: django.db.Error."""
        now = database_clock.now()
        found = [self._send_by(each, findings, now) for each in self.channels]
        return [text for text in found if text]

    def send_test(self) -> list[str]:
        """Send a message that only shows that messages arrive; return why it could not be sent, if so."""
        message = compose_test(database_clock.now())
        return [text for each in self.channels if (text := each.send(message))]

    def stop(self) -> None:
        """Wait for no answer any longer."""
        for each in self.channels:
            each.call.stop()

    def _send_by(self, channel: _Channel, findings: Findings, now: datetime) -> str:
        rows = RowNotes(channel.name, self.settings) if findings.is_database_reachable else None
        in_rows = rows.settle(findings, now) if rows else Decision()
        in_memory = self._local.settle(channel.name, findings, now, self.settings)
        chosen = [in_memory, in_rows]
        if not any(each.alerts or each.over for each in chosen):
            return ""
        failed = channel.send(compose(chosen, now))
        if failed:
            if rows:
                rows.release()
            return failed
        self._local.confirm(channel.name, in_memory, now)
        _log_sent(channel, chosen)
        if rows:
            rows.confirm(now)
        return ""


class _Channel:
    """A way to send, bounded in time and in log lines."""

    def __init__(self, sender: Sender) -> None:
        self.name = sender.channel
        self.sender = sender
        self.call = BoundedCall(f"asyncq alert {sender.channel}", sender.seconds)
        self._log_at = 0.0

    def send(self, message: Message) -> str:
        """Send a message; return why that failed, "" if it did not. It is logged once a minute at most."""
        error = self.call.run(lambda: self.sender.send(message))
        if error is None:
            return ""
        text = one_line(error) if isinstance(error, NotFinished) else self.sender.text_of(error)
        if time.monotonic() >= self._log_at:
            self._log_at = time.monotonic() + SECONDS_PER_LOG_LINE
            logger.warning("alerts could not be sent by %s: %s; they are sent at a later look", self.sender.name, text)
        return f"{self.sender.name}: {text}"


def _log_sent(channel: _Channel, chosen: Sequence[Decision]) -> None:
    alerts, over = (sum(len(getattr(each, name)) for each in chosen) for name in ("alerts", "over"))
    logger.info("alerts sent by %s: %d wrong, %d over", channel.sender.name, alerts, over)

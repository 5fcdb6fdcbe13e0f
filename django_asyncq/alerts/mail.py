"""Send a message by the project's mail settings."""

from __future__ import annotations

from django.conf import settings
from django.core.mail import EmailMessage

from ..faults import one_line
from ..guard import class_name
from ..models import AlertChannel
from .message import Message


class Mail:
    """Sends mail to all addresses at once, from SERVER_EMAIL. seconds: how long that may take."""

    channel = AlertChannel.MAIL.value
    name = "mail"
    seconds = 30.0

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self._addresses = addresses

    def send(self, message: Message) -> None:
        """Send it. Raises: whatever the project's mail backend raises."""
        subject = f"{settings.EMAIL_SUBJECT_PREFIX}{message.subject}"
        EmailMessage(subject, message.body, settings.SERVER_EMAIL, list(self._addresses)).send()

    def text_of(self, error: BaseException) -> str:
        """Return what went wrong, on one line."""
        return f"{class_name(error)}: {one_line(error)}"

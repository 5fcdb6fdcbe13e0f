"""Alerts: what was found wrong, and when a message about it was sent."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from ..definitions.exact_text import ExactCharField


class AlertKind(models.TextChoices):
    """What is wrong. The first four are named like their limits in ASYNCQ["ALERTS"]; the others have none."""

    FAILURE_RATIO = "failure_ratio", _("Attempts fail")
    OLDEST_WAITING = "oldest_waiting", _("Tasks wait")
    SILENT_WORKERS = "silent_workers", _("Workers are silent")
    OVERDUE_SCHEDULES = "overdue_schedules", _("Schedules are overdue")
    STORE = "store", _("A store is unreachable")
    MISMATCH = "mismatch", _("Hosts or stores do not match")


class AlertChannel(models.TextChoices):
    """How a message is sent. Each has rows of its own, so that one that fails is tried again without the other."""

    MAIL = "mail", pgettext_lazy("channel of an alert", "Mail")
    WEBHOOK = "webhook", pgettext_lazy("channel of an alert", "Webhook")


class Alert(models.Model):
    """What is wrong now, for one channel. The row is deleted when it is over, and that was said.

    backend, subject: an alias in TASKS and its queue; or the name of a schedule, a supervisor, a store.
    title: in a few words, without numbers. first_seen_at, seen_at: when a look first and last found it. sent_at: when a
    message about it was last sent; null: not yet. reserved_by, reserved_until: the sender that sends one at present,
    and until when no other may.
    """

    channel = models.CharField(_("channel"), max_length=8, choices=AlertChannel)
    kind = models.CharField(_("kind"), max_length=20, choices=AlertKind)
    backend = ExactCharField(_("backend"), max_length=64, blank=True, default="")
    subject = ExactCharField(_("subject"), max_length=200, blank=True, default="")
    title = models.TextField(_("title"), blank=True, default="")
    first_seen_at = models.DateTimeField(_("first seen at"))
    seen_at = models.DateTimeField(_("last seen at"))
    sent_at = models.DateTimeField(_("last sent at"), null=True, blank=True)
    reserved_by = ExactCharField(_("reserved by"), max_length=32, blank=True, default="")
    reserved_until = models.DateTimeField(_("reserved until"), null=True, blank=True)

    class Meta:
        verbose_name = _("alert")
        verbose_name_plural = _("alerts")
        ordering = ["id"]
        # No person changes it, so nobody needs a right to.
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(fields=["channel", "kind", "backend", "subject"], name="asyncq_one_alert")
        ]

    def __str__(self) -> str:
        return self.title

"""What the processes of a fleet share: start-up runs, leadership terms, the identity of the database."""

from __future__ import annotations

import uuid
from datetime import UTC

from django.db import models
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from ..definitions.exact_text import ExactCharField


class StartupRun(models.Model):
    """One run of a start-up task.

    finished_at: None while it runs, and when its process died. term: fencing token of its lock.
    """

    name = ExactCharField(_("name"), max_length=200, db_index=True)
    holder = models.CharField(_("lock holder"), max_length=200)
    term = models.BigIntegerField(_("fencing token"))
    begun_at = models.DateTimeField(_("started at"))
    finished_at = models.DateTimeField(_("finished at"), null=True, blank=True)
    error = models.TextField(_("error"), blank=True, default="")

    class Meta:
        verbose_name = _("start-up run")
        verbose_name_plural = _("start-up runs")
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"{self.name} {self.begun_at.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


class DatabaseIdentity(models.Model):
    """The one row by which this database differs from others that use the same Redis."""

    id = models.PositiveSmallIntegerField(_("id"), primary_key=True, default=1, editable=False)
    value = models.UUIDField(_("identity"), default=uuid.uuid4, editable=False)

    class Meta:
        verbose_name = _("identity of the database")
        verbose_name_plural = _("identities of the database")
        # No person changes it, so nobody needs a right to.
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.value)


class LockTerm(models.Model):
    """The latest leadership term of a lock.

    number: the fencing token. It rises with each new holder, so a write of an older holder can be refused.
    """

    name = ExactCharField(_("name"), max_length=200, primary_key=True)
    number = models.BigIntegerField(_("fencing token"), default=0)
    holder = models.CharField(_("lock holder"), max_length=200, default="")
    begun_at = models.DateTimeField(_("started at"), default=timezone.now)

    class Meta:
        verbose_name = _("leadership term")
        verbose_name_plural = _("leadership terms")

    def __str__(self) -> str:
        return f"{self.name} {self.number}"

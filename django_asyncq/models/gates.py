"""Gates: admission limits."""

from __future__ import annotations

from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator
from django.db import models
from django.utils.translation import gettext_lazy as _

from ..definitions.exact_text import ExactCharField
from ..definitions.names import check_gate_name
from ..exceptions import InvalidOption


class Gate(models.Model):
    """A strict admission limit: at most `limit` tasks of this gate are queued or running at once."""

    # Names the row had before its last save. Their cached limits are dropped too.
    former_names: frozenset[str] | set[str] = frozenset()

    name = ExactCharField(_("name"), max_length=200)
    limit = models.IntegerField(_("limit"), help_text=_("Maximum tasks queued or running; 0 or less means no limit."))
    expected_seconds = models.FloatField(
        _("expected seconds"),
        default=60,
        validators=[MinValueValidator(0.001)],
        help_text=_("How long a task of this gate usually takes. It is used to estimate when a slot becomes free."),
    )

    class Meta:
        verbose_name = _("gate")
        verbose_name_plural = _("gates")
        ordering = ["name"]
        permissions = [("release_slot", _("Can release a slot of a gate"))]
        # Forms check a constraint in the database that is written to, but `unique=True` in one that is read.
        constraints = [models.UniqueConstraint(fields=["name"], name="asyncq_one_gate")]

    def __str__(self) -> str:
        return self.name

    def clean(self) -> None:
        """Refuse a name that cannot be part of a Redis key."""
        try:
            check_gate_name(self.name)
        except InvalidOption as error:
            raise ValidationError({"name": str(error)}) from error

"""Which tasks wait for which."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..core.after import ALONE
from ..core.fields import ExactCharField


class TaskEdge(models.Model):
    """One task waits for another one: the child begins when the parent has finished.

    No foreign keys, as between tasks. name: the keyword argument of the child that gets the parent's return value; ""
    when it gets none. position: the place of that value in a list; ALONE: it is the value itself.
    runs_anyway: whether the child also runs when the parent has failed.
    """

    parent_id = models.UUIDField(_("task before"))
    child_id = models.UUIDField(_("task after"))
    name = ExactCharField(_("keyword argument"), max_length=200, blank=True, default="")
    position = models.IntegerField(_("place in the list"), default=ALONE)
    runs_anyway = models.BooleanField(_("runs also after a failure"), default=False)

    class Meta:
        verbose_name = _("edge between tasks")
        verbose_name_plural = _("edges between tasks")
        ordering = ["id"]
        # Nobody adds or changes one.
        default_permissions = ("view",)
        indexes = [models.Index(fields=["parent_id"], name="asyncq_edge_parent")]
        constraints = [
            models.UniqueConstraint(fields=["child_id", "parent_id", "name", "position"], name="asyncq_one_edge"),
        ]

    def __str__(self) -> str:
        return f"{self.parent_id} {self.child_id}"

"""The admin pages of pauses: what is paused, since when, by whom and why. To add one pauses, to delete one resumes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy

from ..exceptions import InvalidOption
from ..models import Pause
from ..pausing.rows import checked, pause, resume
from ..prefixes import DEFAULT_ALIAS
from ..storage.routing import rows_of
from .queries import RoutedAdmin

if TYPE_CHECKING:
    PauseAdminBase = admin.ModelAdmin[Pause]
    PauseFormBase = forms.ModelForm[Pause]
else:
    PauseAdminBase = admin.ModelAdmin
    PauseFormBase = forms.ModelForm

PERMISSION = "django_asyncq.pause_queue"


class PauseForm(PauseFormBase):
    """What to pause, and why."""

    class Meta:
        model = Pause
        fields = ("kind", "name", "backend", "note")

    def clean(self) -> dict[str, Any]:
        """Refuse what cannot be paused, with the reason."""
        found: dict[str, Any] = super().clean() or self.cleaned_data
        if "kind" in found and "name" in found:
            try:
                _, found["backend"] = checked(found["kind"], found["name"], found.get("backend") or DEFAULT_ALIAS)
            except InvalidOption as error:
                raise ValidationError(str(error)) from error
        return found


class PauseAdmin(RoutedAdmin, PauseAdminBase):
    """List what is paused. A pause is not edited: it begins and ends."""

    form = PauseForm
    list_display = ("name", "kind", "backend", "paused_at", "paused_by", "note")
    list_filter = ("kind",)
    search_fields = ("name", "note")
    search_help_text = gettext_lazy("Search for a part of the name or of the note.")
    list_per_page = 50

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Allow those who may pause."""
        return request.user.has_perm(PERMISSION)

    def has_delete_permission(self, request: HttpRequest, obj: Pause | None = None) -> bool:
        """Allow those who may pause: to delete a pause resumes."""
        return request.user.has_perm(PERMISSION)

    def has_change_permission(self, request: HttpRequest, obj: Pause | None = None) -> bool:
        """Allow nobody to edit a pause, because it says what happened."""
        return False

    def has_view_permission(self, request: HttpRequest, obj: Pause | None = None) -> bool:
        """Allow those who may pause or view."""
        return super().has_view_permission(request, obj) or request.user.has_perm(PERMISSION)

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Show the list to the same."""
        return super().has_module_permission(request) or request.user.has_perm(PERMISSION)

    def save_model(self, request: HttpRequest, obj: Pause, form: Any, change: bool) -> None:
        """Pause, in the name of the user."""
        pause(obj.kind, obj.name, backend=obj.backend or DEFAULT_ALIAS, by=request.user.get_username(), note=obj.note)
        obj.pk = rows_of(Pause).get(kind=obj.kind, backend=obj.backend, name=obj.name).pk

    def delete_model(self, request: HttpRequest, obj: Pause) -> None:
        """Resume."""
        resume(obj.kind, obj.name, backend=obj.backend or DEFAULT_ALIAS)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Pause]) -> None:
        """Resume each."""
        for row in queryset:
            self.delete_model(request, row)

"""The URLs: the studio at the root, and the admin."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

admin.site.site_header = admin.site.site_title = "Render Studio"

urlpatterns = [
    path("admin/", admin.site.urls),
    path("", include("renders.urls")),
]

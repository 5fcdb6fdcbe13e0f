"""URLs of the test project: the admin, the status of tasks, and what monitors read."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

from django_asyncq.contrib.prometheus import metrics_view
from django_asyncq.views import health_view, scale_view

urlpatterns = [
    path("admin/", admin.site.urls),
    path("tasks/", include("django_asyncq.urls")),
    path("health", health_view),
    path("metrics", metrics_view),
    path("scale", scale_view),
]

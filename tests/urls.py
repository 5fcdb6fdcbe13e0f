"""URLs of the test project: the admin, and the status of tasks."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

urlpatterns = [path("admin/", admin.site.urls), path("tasks/", include("django_asyncq.urls"))]

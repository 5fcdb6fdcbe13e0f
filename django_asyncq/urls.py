"""The address of a task's status: `path("tasks/", include("django_asyncq.urls"))`."""

from __future__ import annotations

from django.urls import path

from .views import TaskStatusView

app_name = "django_asyncq"
urlpatterns = [path("<str:token>/", TaskStatusView.as_view(), name="task_status")]

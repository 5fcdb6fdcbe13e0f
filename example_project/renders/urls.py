"""The URLs of the studio."""

from __future__ import annotations

from django.urls import path

from . import views

urlpatterns = [
    path("", views.index, name="index"),
    path("submit", views.submit, name="submit"),
    path("cancel/<uuid:id>", views.cancel, name="cancel"),
    path("api/models", views.models, name="models"),
    path("api/renders", views.render_list, name="renders"),
    path("api/renders/<uuid:id>", views.render_detail, name="render"),
    path("images/<uuid:id>.png", views.image, name="image"),
    path("film", views.order_film, name="order-film"),
    path("films/<uuid:id>.gif", views.film_image, name="film"),
]

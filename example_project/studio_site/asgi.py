"""The ASGI application of Render Studio."""

from __future__ import annotations

import os

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "studio_site.settings")

application = get_asgi_application()

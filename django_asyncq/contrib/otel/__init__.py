"""Traces of OpenTelemetry through tasks: put this app into INSTALLED_APPS (`pip install django-asyncq[otel]`)."""

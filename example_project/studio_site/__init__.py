"""The Django project of Render Studio: settings, URLs and server entry points."""

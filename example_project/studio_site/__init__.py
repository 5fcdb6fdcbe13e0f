"""The Django project of Render Studio: settings, addresses and the server entry points."""

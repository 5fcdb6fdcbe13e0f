"""Integrations with optional libraries, one module each."""

"""Measurements, started by hand; no test. Each prints what it measured, with versions."""

"""Render Studio: fractals and other pictures, painted by tasks with admission limits."""

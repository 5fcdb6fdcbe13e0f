"""Render Studio: fractals and their kin, painted by tasks behind gates."""

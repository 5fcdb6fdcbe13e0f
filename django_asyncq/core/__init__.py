"""Calls, tasks and schedules as code declares them, and the ground under all else. Knows neither Redis nor rows."""

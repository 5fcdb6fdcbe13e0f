"""Schedules become tasks: the scheduler, and what asynq's own tools list of it."""

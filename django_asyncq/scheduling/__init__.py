"""Turn schedules into tasks, and show the schedules to asynq's own tools."""

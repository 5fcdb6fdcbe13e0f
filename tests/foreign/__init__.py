"""A server of another program, as a process of its own: what Go's asynq does with a queue, by `tests.go_peer`."""

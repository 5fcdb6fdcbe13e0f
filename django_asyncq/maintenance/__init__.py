"""What runs beside the workers: due tasks, repairs, pruning, start-up tasks; most of it in the leader alone."""

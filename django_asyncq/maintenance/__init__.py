"""What runs beside the workers: due tasks, repairs, pruning and start-up tasks, most of it only in the leader."""

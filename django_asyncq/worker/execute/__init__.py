"""How a worker process runs its tasks: executors, jobs and their queue, completion in one transaction."""

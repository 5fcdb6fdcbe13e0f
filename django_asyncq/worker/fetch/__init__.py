"""How a worker process gets its tasks: the fetcher, its pacing, its capacity, the order of queues."""

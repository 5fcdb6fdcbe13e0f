"""A worker process: fetch a batch → run in slots → report a batch.

`process` fetches, `slots` run, `reporter` writes; `board` shows the supervisor what runs, `alarm` wakes the fetcher.
"""

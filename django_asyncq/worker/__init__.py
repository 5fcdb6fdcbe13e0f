"""A worker process: `fetch` a batch of tasks → `run` them in slots → `report` writes a batch of outcomes.

`process` is its main thread, which sleeps on one `wakeup`. The supervisor sees in `slot_table` what runs.
"""

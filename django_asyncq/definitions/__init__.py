"""What code declares: names, arguments, schedules, backoff, retention. Plain values; nothing here opens a store."""

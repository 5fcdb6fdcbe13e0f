"""Say whether an SQLite database takes its write lock early enough for several processes; opens no connection.

SQLite lets one process write at a time. A transaction that begins with a read and writes later is refused at once,
without waiting for `timeout`, when another process has written in between. An immediate transaction waits instead.
Source: https://sqlite.org/lang_transaction.html.
"""

from __future__ import annotations

from typing import Any

from django.db import connections

# With WAL, readers and the one writer do not block each other.
SQLITE_OPTIONS = {
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
    "transaction_mode": "IMMEDIATE",
    "timeout": 20,
}
EARLY_MODES = ("IMMEDIATE", "EXCLUSIVE")


def late_write_lock(alias: str) -> bool:
    """Return whether a database is an SQLite file whose transactions take the write lock only when they write."""
    connection: Any = connections[alias]
    if connection.vendor != "sqlite" or connection.is_in_memory_db():
        return False
    mode = connection.settings_dict.get("OPTIONS", {}).get("transaction_mode")
    return str(mode).upper() not in EARLY_MODES

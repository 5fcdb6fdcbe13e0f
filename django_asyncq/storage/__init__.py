"""The SQL of task rows: one INSERT for many, one fenced UPDATE for many, the database's own time."""

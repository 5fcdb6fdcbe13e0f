"""The SQL of task rows: the INSERT of new tasks, the fenced UPDATE of a batch, the database's own time and errors."""

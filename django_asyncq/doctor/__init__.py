"""`asyncq doctor`: read the source of a project that has another task queue, and say what each use of it becomes here.

It reads, and neither imports nor runs anything: no settings, no tables and no Redis are needed, and no Django. It may
import the words of `core`, and nothing else of the package.
"""

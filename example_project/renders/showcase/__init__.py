"""What `manage.py demo` is made of.

processes: the site and the workers, started and ended. traffic: orders over HTTP. watching: the database and
Redis looked at from outside while it runs, and the worker killed. verdict: what must have come true.
report: all of it on the terminal. sheet: the contact sheet.
"""

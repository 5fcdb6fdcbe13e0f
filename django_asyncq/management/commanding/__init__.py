"""The nouns of `manage.py asyncq`, one module each. Private.

A module has `add(parser)`, which adds its options or its verbs, and `run(printer, options)`, which does the work and
prints it. Only the module of the noun that is called is imported.
"""

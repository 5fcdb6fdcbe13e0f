"""The nouns of `manage.py asyncq`, one module each. Private.

A module has `VERBS`: a tuple of `printing.Verb`, or a single one where the noun does one thing. Only the module of the
noun that is called is imported.
"""

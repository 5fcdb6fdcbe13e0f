"""The chaos suite: faults at random, seeded moments, and a checker that trusts neither store.

`python -m tests.chaos --help` runs the long form; `test_short.py` runs a short one with every test run.
"""

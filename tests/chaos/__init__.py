"""The chaos suite: faults at random, seeded moments, and a checker that trusts neither store.

`python -m tests.chaos --help` runs cases at full scale; `test_short.py` runs them at a short one.
"""

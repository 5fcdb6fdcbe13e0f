"""Read the schedules of another queue, say what becomes of each here, and write them. Only `asyncq import` uses it.

A module for each queue reads what it left behind, as `OldSchedule`s; none imports a package of that queue. `judging`
compares each with what this package would fire, and `writing` writes what can be written.
"""

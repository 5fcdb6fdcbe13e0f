"""Layout of the file that task bodies write to and the harness reads: words of 8 bytes, locked only for new slots.

Word 0: slots given out. From SLOTS_AT: a slot for each thread of each process. From TIMES_AT: for each numbered task
when it was enqueued, begun and ended, and its attempts.
"""

SLOTS = 8192
SLOT_WORDS = 8
SLOTS_AT = 8
COUNT, FIRST, LAST, COMMANDS, ROUND_TRIPS = range(5)
TIMES = 65536
TIMES_WORDS = 4
ENQUEUED, BEGUN, ENDED, ATTEMPTS = range(4)
TIMES_AT = SLOTS_AT + SLOTS * SLOT_WORDS
SIZE_BYTES = 8 * (TIMES_AT + TIMES * TIMES_WORDS)

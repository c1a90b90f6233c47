"""What everything above a handle needs to move bytes.

To be read in this order: `threads` (blocking work that an interrupt can neither cut in half nor
lose), `owner` (the thread that alone changes some state).
"""

"""Parameters through a window of memory: for models that are streamed, swapped or mapped.

To be read in this order: `order` (what comes next, and what may go), `reader` (the thread that
keeps the drive busy), `window` (what is in memory, by whom it is held; memory that is free when
the last tensor over it is gone), `on_device` (windows there), `calls` (how a module's call is
framed, so that what it holds ends with it; what autograd keeps of such memory), `tiled_linear` (a
linear layer of whose rows some are in memory at a time).

One `OwnerThread` a residency owns the window: its methods are called there and nowhere else. What
callers hold are claims, which end with the call that they are for, however it ends.
"""

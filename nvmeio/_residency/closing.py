"""Closing what threads of ours serve, from a finalizer.

What must be closed is closed by the end of a lease (`OwnerThread.lease`): a finalizer is Python,
and can be interrupted. It is there for the end of the program, where leases live on.

Garbage is collected by whatever thread allocates next, which may be one of those threads, or one of
the engine below that they wait for. Closing waits for both, and is waited for elsewhere only.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from nvmeio._io.owner import OwnerThread
from nvmeio.errors import ClosedError


def in_owner(owner: OwnerThread, close: Callable[[], object]) -> None:
    """Close by an owner, which is closed by that; harmless if it is."""
    if owner.is_here or not _is_ours():
        with contextlib.suppress(ClosedError):
            owner.call(close)
    else:
        owner.post(close)


def finish(close: Callable[[], None]) -> None:
    """Close here, or in a thread of its own."""
    if _is_ours():
        threading.Thread(target=close, name="nvmeio-close", daemon=True).start()
    else:
        close()


def _is_ours() -> bool:
    return threading.current_thread().name.startswith("nvmeio")

"""The event loop that awaiting takes: asyncio's, which uvloop's is too; and how one is woken.

Under another library, or none, an error names the library that runs and the calls that work there.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

# The functions of libraries with their own loop that run something in a thread.
_THREADS = {"trio": "trio.to_thread.run_sync", "curio": "curio.run_in_thread"}


def running_loop() -> asyncio.AbstractEventLoop:
    """The asyncio loop that runs in this thread; RuntimeError if none does."""
    loop = asyncio._get_running_loop()
    if loop is None:
        raise not_running()
    return loop


def not_running() -> RuntimeError:
    """The error of `running_loop`; says whose loop runs instead, and what to do there."""
    library = _library()
    if library:
        in_thread = _THREADS.get(library, f"{library}'s way to run something in a thread")
        return RuntimeError(
            f"nvmeio awaits on asyncio's event loops (uvloop is one), and {library} runs here. "
            "Have a thread make the call that blocks, as in "
            f"`await {in_thread}(operation.result)`"
        )
    return RuntimeError(
        "no event loop of asyncio runs here (uvloop is one), and nvmeio awaits on those. Make the "
        "call that blocks instead, such as operation.result()"
    )


def resolve(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> bool:
    """Resolve a loop's future, from any thread; False if the loop is closed, so nobody waits."""
    if asyncio._get_running_loop() is loop:
        _resolve(future)
        return True
    try:
        loop.call_soon_threadsafe(_resolve, future)
    except RuntimeError:
        return False
    return True


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _library() -> str:
    """The library whose loop runs here, by name; "" if none is known."""
    # Not imported for that: who runs such a loop has.
    sniffio, curio = sys.modules.get("sniffio"), sys.modules.get("curio.meta")
    if sniffio is not None:
        with contextlib.suppress(RuntimeError):  # it knows of none
            return str(sniffio.current_async_library())
    return "curio" if curio is not None and curio.curio_running() else ""

"""Transfers as futures, with no event loop: result, as_completed, callbacks, wait.

    python examples/03_futures.py --dir /mnt/nvme

For scripts, threads and notebooks. The operation is the same as in coroutines; it also has the
methods of a future, and `nvmeio.as_future` makes a `concurrent.futures.Future` of it.
"""

import concurrent.futures
import threading
from pathlib import Path

import _common
import torch
from _common import say, verify

import nvmeio


def main(folder: Path) -> None:
    shards = {folder / f"shard{n}.bin": torch.randn(1 << 20, n + 1) for n in range(8)}  # 4 to 34 MB
    with nvmeio.AioHandle() as handle:
        # result: block for one. The thread sleeps in the shim, without the GIL.
        path, tensor = next(iter(shards.items()))
        operation = handle.async_pwrite(tensor, path)
        say("result", f"{operation.result(timeout=60) / 1e6:.1f} MB written; now {operation!r}")

        # wait: block for all. It counts the operations finished since the last wait.
        for path, tensor in shards.items():
            handle.async_pwrite(tensor, path)
        say("wait", f"{handle.wait(timeout=60)} operations finished")

        # as_completed: whichever is first. Small shards overtake big ones, for blocks are submitted
        # round robin.
        back = {path: torch.empty_like(tensor) for path, tensor in shards.items()}
        reads = {
            nvmeio.as_future(handle.async_pread(back[path], path)): path
            for path in reversed(shards)  # the biggest goes off first
        }
        order = [reads[each].stem[-1] for each in concurrent.futures.as_completed(reads)]
        say("as_completed", f"shards 7 to 0 started in this order, finished as {' '.join(order)}")
        verify(all(torch.equal(back[path], shards[path]) for path in shards), "shards come back")

        # add_done_callback: called once, in a thread of the handle (or of the loop, if any).
        called = threading.Event()
        callers: list[str] = []

        def report(operation: nvmeio.Operation) -> None:
            callers.append(threading.current_thread().name)
            called.set()

        handle.async_pread(back[path], path).add_done_callback(report)
        verify(called.wait(60), "the callback is called")
        say("callback", f"called in thread {callers[0]!r}")

        # cancel: asks; the operation is over once the kernel has let go.
        operation = handle.async_pread(back[path], path)
        operation.cancel()
        concurrent.futures.wait([nvmeio.as_future(operation)])
        say("cancel", f"{'cancelled' if operation.cancelled() else 'too late, it was done'}")

        # Errors wait for whoever asks first: result, exception, or at last wait and close.
        error = handle.async_pread(torch.empty(4), folder / "no-such-file").exception()
        verify(isinstance(error, FileNotFoundError), "it is an OSError, and the fitting one")
        say("exception", f"{type(error).__name__}, also a FileNotFoundError: {error}")
        for n in range(3):
            handle.async_pread(torch.empty(4), folder / f"missing{n}")
        try:
            handle.wait()
        except nvmeio.TransferError as first:
            verify(len(first.others) == 2, "wait attaches the other failures")
            say("wait", f"raised the first failure ({first.path}), {len(first.others)} in `others`")
        stats = handle.stats

    _common.verified(
        f"{len(shards)} shards, {sum(t.nbytes for t in shards.values()) / 1e6:.0f} MB, "
        f"bit for bit; {stats.operations} operations, {stats.errors} failed as they should"
    )


if __name__ == "__main__":
    options = _common.arguments(__doc__).parse_args()
    with _common.scratch(options.dir, 200 << 20) as folder:
        main(folder)

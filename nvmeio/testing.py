"""For tests of code that uses nvmeio: an engine that moves real bytes and misbehaves on order."""

from __future__ import annotations

import os
import random
import threading
from collections import deque
from collections.abc import Callable

from nvmeio.engines.base import Opcode
from nvmeio.engines.threads import Block, ThreadsEngine


class FakeEngine(ThreadsEngine):
    """The portable engine with faults: delays, reordering, short transfers, errors, full queues.

    Pass it to ``AioHandle(engine=…)``; one engine serves one handle. Every fault acts per block
    (one kernel request of `block_size` or less), as it would below a real engine. Subclass it and
    override `_move`, `_accept` or `_choose` for what is missing here.

    Args:
        delay_s: Seconds that each block takes at least, or a function (kind, file_offset, nbytes)
            that tells.
        reorder: Serve queued blocks in random order.
        short: Move only this share of a block (0 < short < 1) on the first attempt of each system
            call longer than 4096 bytes; the engine has to go on from there.
        fail: The errno that a block meets, or 0: a function (kind, file_offset, nbytes), or a
            dict from file offset to errno.
        accept: How many of n blocks the kernel's queue takes (0 is EAGAIN): a function of n.
        hold: While this event is not set, no block begins to move.
        seed: The seed of the random order.

    Attributes:
        system_calls: How many were made.
        refusals: How often the queue took fewer blocks than it was given.

    Examples:
        >>> engine = FakeEngine(fail={1 << 20: errno.EIO})
        >>> with nvmeio.AioHandle(engine=engine) as handle: ...
    """

    name = "fake"

    def __init__(
        self,
        *,
        delay_s: float | Callable[[str, int, int], float] = 0.0,
        reorder: bool = False,
        short: float | None = None,
        fail: dict[int, int] | Callable[[str, int, int], int] | None = None,
        accept: Callable[[int], int] | None = None,
        hold: threading.Event | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if short is not None and not 0 < short < 1:
            raise ValueError(f"short must lie between 0 and 1, not {short}")
        self._delay_s = delay_s
        self._reorder = reorder
        self._short = short
        self._fail = fail
        self._accept_count = accept
        self._hold = hold
        self._random = random.Random(seed)
        self._pause = threading.Event()  # never set: an interruptible sleep
        self.system_calls = 0
        self.refusals = 0

    def _accept(self, blocks: list[Block]) -> int:
        if self._accept_count is None:
            return len(blocks)
        accepted = max(0, min(len(blocks), self._accept_count(len(blocks))))
        self.refusals += accepted < len(blocks)
        return accepted

    def _choose(self, queue: deque[Block]) -> Block:
        if self._reorder:
            queue.rotate(self._random.randrange(len(queue)))
        return queue.popleft()

    def _move(self, block: Block, fd: int, memory: memoryview, offset: int) -> int:
        kind = "pread" if block.request.transfer.opcode == Opcode.READ else "pwrite"
        if self._hold is not None:
            self._hold.wait()
        delay = self._delay_s
        if callable(delay):
            delay = delay(kind, block.offset, block.nbytes)
        if delay:
            self._pause.wait(delay)
        code = self._error_of(kind, block)
        if code:
            raise OSError(code, os.strerror(code))
        with self.condition:
            self.system_calls += 1
        if self._short is not None and len(memory) > 4096:
            memory = memory[: max(4096, int(len(memory) * self._short) // 4096 * 4096)]
        return super()._move(block, fd, memory, offset)

    def _error_of(self, kind: str, block: Block) -> int:
        if callable(self._fail):
            return self._fail(kind, block.offset, block.nbytes)
        return (self._fail or {}).get(block.offset, 0)

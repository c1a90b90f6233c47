"""Page-locked memory for copies with devices, kept for the next user.

Page-locking (`cudaHostRegister`) is reported to run at 1 to 2 GB/s, a tenth of the rate of what
goes through it; beside an H100, with huge pages, it ran at 27 to 45. So nothing locks memory for
one read, one token or one load: it takes some here, and when its last tensor is gone the memory is
free for the next one, locked as it is. No copy may be under way then.

Free memory is kept for half a minute, and at most as much as was in use at once in that time, or
512 MiB.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections import deque
from queue import Empty, SimpleQueue
from typing import Any

import torch

from nvmeio._memory import system
from nvmeio._memory.mappings import Mapping
from nvmeio._pages import PAGE_BYTES, round_up

_KEPT_BYTES = 512 << 20
_KEPT_S = 30.0
_LEAST_STEP = 64 << 10

# No lock: each step on these is one of the interpreter's, and memory that an interrupt takes out of
# them is unlocked by its destructor.
_free: deque[tuple[float, Mapping]] = deque()  # the longest unused first
_out: dict[int, tuple[weakref.ref[Any], Mapping]] = {}
_most = (0.0, 0)  # in use at once: when, and how much
_ended: SimpleQueue[weakref.ref[Any]] = SimpleQueue()


def take(nbytes: int) -> torch.Tensor:
    """Page-locked memory on huge pages, with what its last user left in it.

    Up to an eighth more is charged. Raises OSError if CUDA refused the memory, or, where CUDA is
    not in use, the limit for locked memory did; MemoryError if there is not that much.
    """
    _take_back()
    mapping = _taken(nbytes)
    if mapping is None:
        mapping = _locked(_charged(nbytes))
    memory, mark = mapping.lend(0, nbytes, _ended.put)
    _out[id(mark)] = mark, mapping
    _note_use()
    return memory


def new(nbytes: int) -> torch.Tensor:
    """Do as `take`, in a mapping of its own, unlocked with its last tensor; for long uses."""
    return _locked(nbytes).tensor(0, (nbytes,), torch.uint8)


def forget() -> None:
    """Unlock what nobody uses."""
    _take_back()
    _free.clear()


def _charged(nbytes: int) -> int:
    """Round up by an eighth, so that slow growth fits into the same memory for a while."""
    step = max(_LEAST_STEP, (1 << max(nbytes, 1).bit_length()) >> 4)
    return round_up(max(nbytes, 1), step)


def _taken(nbytes: int) -> Mapping | None:
    """The smallest free mapping that fits, and is less than twice as large."""
    most = 2 * _charged(nbytes)
    fitting = [each for each in tuple(_free) if nbytes <= each[1].nbytes <= most]
    for entry in sorted(fitting, key=lambda entry: entry[1].nbytes):
        try:
            _free.remove(entry)
        except ValueError:  # another thread has it
            continue
        return entry[1]
    return None


def _take_back() -> None:
    while not _ended.empty() and not system.silent_devices:  # those may still write there
        try:
            mark = _ended.get_nowait()
        except Empty:  # another thread was first
            break
        known = _out.pop(id(mark), None)
        if known is not None:
            _free.append((time.monotonic(), known[1]))
    kept = sum(mapping.nbytes for _, mapping in tuple(_free))
    now = time.monotonic()
    for entry in tuple(_free):
        since, oldest = entry
        if now - since < _KEPT_S and kept <= max(_most[1], _KEPT_BYTES):
            return
        with contextlib.suppress(ValueError):  # another thread has it
            _free.remove(entry)
        kept -= oldest.nbytes


def _note_use() -> None:
    global _most
    in_use, now = sum(mapping.nbytes for _, mapping in list(_out.values())), time.monotonic()
    if in_use >= _most[1] or now - _most[0] > _KEPT_S:
        _most = now, in_use


def _locked(nbytes: int) -> Mapping:
    try:
        mapping = Mapping(round_up(nbytes, PAGE_BYTES))
    except MemoryError:
        _free.clear()
        mapping = Mapping(round_up(nbytes, PAGE_BYTES))
    mapping.populate()
    if not mapping.register_with_cuda():
        mapping.lock()
    return mapping


def _after_fork_in_child() -> None:
    # Locks stay with the parent.
    global _free, _out, _ended
    _free, _out, _ended = deque(), {}, SimpleQueue()


os.register_at_fork(after_in_child=_after_fork_in_child)

"""Storages in flight: kept, and neither resized nor moved meanwhile.

A tensor may lose its memory at any time (`tensor.data = other`, `set_`), so an operation keeps the
*storage*. This does not keep the memory: `untyped_storage().resize_(0)` frees it, and so does
`share_memory_()`, which puts the bytes elsewhere. Both are refused with an error while an operation
is in flight in the storage.

torch refuses to resize where ``StorageImpl::resizable_`` is false, but has no function to set
that (`tensor.numpy()` clears it for good). So the flag's place in the C++ object is found by
comparing storages that torch says are resizable with storages that it says are not: among flags,
for a byte of a pointer may have the value of a flag by chance, in one process of many. It is taken
only if setting it there changes torch's answer. If it is not found, nothing is held.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nvmeio._bindings import ffi, lib

# The bytes of a StorageImpl (c10/core/StorageImpl.h) that are searched: reference counts, the data
# pointer, the size, and the flags behind it. It is longer in every version of torch from 2.6 on.
_SEARCHED_BYTES = 80


def _is_flag(offset: int) -> bool:
    """Whether torch takes the byte for its flag."""
    storage = torch.empty(3, dtype=torch.uint8).untyped_storage()
    flag = ctypes.c_uint8.from_address(storage._cdata + offset)
    flag.value = 0
    refused = not storage.resizable()
    flag.value = 1
    return refused and storage.resizable()


def _flag_offset() -> int | None:
    """The flag's offset in a StorageImpl; None if it is not certain."""
    sizes = (5, 300, 4099, 70_001)
    resizable = [torch.empty(size, dtype=torch.uint8).untyped_storage() for size in sizes]
    buffers = [torch.frombuffer(bytearray(size), dtype=torch.uint8) for size in sizes]
    fixed = [buffer.untyped_storage() for buffer in buffers]
    if not all(s.resizable() for s in resizable) or any(s.resizable() for s in fixed):
        return None
    found = _flags_between(
        [ctypes.string_at(storage._cdata, _SEARCHED_BYTES) for storage in resizable],
        [ctypes.string_at(storage._cdata, _SEARCHED_BYTES) for storage in fixed],
    )
    return found[0] if len(found) == 1 and _is_flag(found[0]) else None


def _flags_between(ones: list[bytes], zeros: list[bytes]) -> list[int]:
    """Bits that are 1 in all of the first, 0 in all of the second, and have flags as neighbours.

    Resizable storages have an allocator, whose address is the same in all of them, others have
    none: the rest of the address tells its bytes from flags.
    """

    def all_flags(offset: int) -> bool:
        return all(b[offset] <= 1 for b in (*ones, *zeros))

    return [
        offset
        for offset in range(1, _SEARCHED_BYTES - 1)
        if all(b[offset] == 1 for b in ones)
        and all(b[offset] == 0 for b in zeros)
        and all_flags(offset - 1)
        and all_flags(offset + 1)
    ]


_HOLD = ffi.typeof("nv_hold *")
_gc, _new, _unhold = ffi.gc, ffi.new, lib.nv_unhold

try:
    FLAG_OFFSET = _flag_offset()
except (AttributeError, RuntimeError, TypeError):  # another torch than those we know
    FLAG_OFFSET = None


def hold(storage: torch.UntypedStorage) -> Any:
    """Let torch refuse to resize a storage until `end`, or until the hold is dropped; 0.4 us.

    The storage has to be kept longer than the hold. None for a storage that torch does not resize
    anyway, because its memory came from elsewhere (`torch.frombuffer`, a mapped file).
    """
    if FLAG_OFFSET is None:
        return None
    flag = storage._cdata + FLAG_OFFSET
    if not lib.nv_can_hold(flag):
        return None
    # Owned before it is held, and ended by a C function: an interrupt may come between two steps.
    held = _gc(_new(_HOLD), _unhold)
    try:
        lib.nv_hold_flag(held, flag)
        return held
    except BaseException:
        ffi.release(held)
        raise


def hold_all(storages: Sequence[torch.UntypedStorage]) -> tuple[Any, list[int]]:
    """`hold` for many: one hold, and the numbers of those storages that it does not hold."""
    if FLAG_OFFSET is None or not storages:
        return None, list(range(len(storages)))
    number = len(storages)
    flags = ffi.new("uint64_t[]", [storage._cdata + FLAG_OFFSET for storage in storages])
    holds = ffi.gc(ffi.new("nv_holds *", {"count": number, "each": number}), lib.nv_unhold_all)
    try:
        if lib.nv_hold_flags(holds, flags) == number:
            return holds, []
        return holds, [i for i in range(number) if holds.each[i].held == ffi.NULL]
    except BaseException:
        ffi.release(holds)
        raise


def end(held: Any) -> None:
    """End a hold now, even if it is still referenced; a second call does nothing."""
    if held is not None:
        ffi.release(held)


def is_torchs(storage: torch.UntypedStorage, held: Any) -> bool:
    """Whether torch's allocator made the memory; other memory may be read-only, or end early."""
    return held is not None or storage.resizable()


_users: list[Callable[[int], object | None]] = []  # of all that was told to `refuse_sharing`


def user_of(storage: torch.UntypedStorage) -> object | None:
    """The user of a storage, an operation or a save in flight; None if there is none."""
    users = (ask(storage._cdata) for ask in _users)
    return next((user for user in users if user is not None), None)


def refuse_sharing(user_of: Callable[[int], object | None]) -> None:
    """Let torch refuse to move a storage to shared memory while it is in use.

    torch has no flag for this one: `share_memory_`, and sending a tensor to another process, copy
    the bytes and free the memory, even if others refer to it. Both come by one of two methods.
    `user_of` says what is in flight in a storage, given its ``_cdata``, or None.
    """
    _users.append(user_of)
    for name in ("_share_fd_cpu_", "_share_filename_cpu_"):
        share = getattr(torch.UntypedStorage, name, None)
        if share is not None:
            setattr(torch.UntypedStorage, name, _guarded(share, user_of))


def _guarded(
    share: Callable[..., Any], user_of: Callable[[int], object | None]
) -> Callable[..., Any]:
    @functools.wraps(share)
    def guarded(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        user = user_of(storage._cdata)
        if user is not None and not storage.is_shared():
            raise RuntimeError(
                f"cannot move a storage to shared memory while {user!r} is in flight in it: "
                "await the operation first"
            )
        return share(storage, *args, **kwargs)

    return guarded
